"""What a kernel call has to read and to compute in one step, from the manifest.

In: the manifest, a traced :class:`Step`.  Out: :class:`Work` for each call.  Next file:
``phases.py``.

As in the compiler's roofline: weights are read once per call, keys and values once per sequence,
attention computes with every position that a token sees.  Activations are counted apart, because
they stay in the caches.  Of a screened output projection (its bounds and what follows
them) a step has read what the bounds are told from and what it computed, or the projection alone.
Attention over a q8_0 cache, pairs of 16-bit integers, is held against float32's peak: theirs, as
high or (AVX2) twice as high, is not measured.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .laps import Step

#: the table's rows, in its order
EMBEDDING, NORMS, PROJECTIONS, ATTENTION = "embedding", "norms", "projections", "attention"
MLP, LM_HEAD, OTHER = "mlp", "lm head", "other"


def phase_of(call: dict[str, Any]) -> str:
    """The part of the model that a call belongs to."""
    op, name = str(call.get("op")), str(call.get("name"))
    parts = name.split(".")
    if op.startswith("PagedAttention") or op == "CacheWrite":
        return ATTENTION
    if "embed" in parts[0]:
        return EMBEDDING
    if "Norm" in op or op.startswith("QuantizeInt8"):
        return NORMS
    if "mlp" in parts:
        return MLP
    if "Linear" in op or op.startswith("Qkv"):
        return PROJECTIONS if "attn" in parts else LM_HEAD if call.get("rows") == "R" else OTHER
    return LM_HEAD if call.get("rows") == "R" and call.get("layer") is None else OTHER


def group_of(call: dict[str, Any]) -> str:
    """The call's place, the same in every layer."""
    layer, name = call.get("layer"), str(call.get("name"))
    return name if layer is None else name.replace(f"layers.{layer}.", "layers.*.", 1)


class Work:
    """One call in one step.  ``bytes`` come from memory: weights, keys and values; ``kind`` is the
    type that the call multiplies: int8, bf16 or f32."""

    __slots__ = ("activation_bytes", "bytes", "flops", "kind")

    def __init__(self, nbytes: float, activation_bytes: int, flops: float, kind: str) -> None:
        self.bytes = nbytes
        self.activation_bytes = activation_bytes
        self.flops = flops
        self.kind = kind


def _kind(call: dict[str, Any]) -> str:
    kernel, constants = str(call.get("kernel")), call.get("constants") or {}
    if ".bf16.avx512bf16" in kernel or (  # elsewhere a bf16 product is two of float32
        constants.get("kv_dtype") == "bf16" and str(call.get("op")).startswith("PagedAttention")
    ):
        return "bf16"
    return "int8" if ".int8." in kernel else "f32"


def _seen(sequences: list[tuple[int, int]], window: int) -> tuple[int, int]:
    """(positions that the tokens attend to, added up; positions whose KV is read, each once)."""
    attended = read = 0
    for first, count in sequences:
        ends = range(first + 1, first + count + 1)
        attended += sum(min(end, window) for end in ends) if window > 0 else sum(ends)
        read += min(first + count, window + count - 1) if window > 0 else first + count
    return attended, read


def _screened(call: dict[str, Any], step: Step) -> float:
    """The share of a call's weights and operations that the step had: 1 for most calls."""
    op, outputs = call.get("op"), (call.get("constants") or {}).get("N")
    if (
        op in ("ScreenedLinear", "ScreenedSplitLinear")
        and step.exact_groups is not None
        and isinstance(outputs, int)
    ):
        return min(1.0, 16 * step.exact_groups / max(outputs, 1))
    return 1.0


def work_of(
    manifest: dict[str, Any], calls: list[dict[str, Any]], step: Step, rows: dict[int, int]
) -> list[Work]:
    """Each call's work in ``step``; ``rows`` are those of each call, by its number."""
    block = (manifest.get("memory") or {}).get("kv_block_size") or 1
    caches = {
        b["name"]: (b.get("nbytes") or 0) / block
        for b in manifest.get("buffers") or ()
        if b.get("kind") == "kv"
    }
    out = []
    for number, call in enumerate(calls):
        n = rows.get(number, 0)
        share = _screened(call, step)
        flops = call.get("flops_per_row", 0) * n * share
        moved: float = call.get("weight_bytes", 0) * share if n else 0
        activations = call.get("activation_bytes_per_row", 0) * n
        if str(call.get("op")).startswith("PagedAttention"):
            window = (call.get("constants") or {}).get("window")
            attended, read = _seen(step.sequences, window if isinstance(window, int) else 0)
            flops = call.get("flops_per_row", 0) * attended
            inputs = [name for name in call.get("inputs") or () if isinstance(name, str)]
            moved += read * sum(caches.get(name, 0) for name in inputs)
        elif call.get("op") in ("Embed", "SplitEmbed"):
            moved, activations = moved + activations, 0
        out.append(Work(moved, activations, flops, _kind(call)))
    return out
