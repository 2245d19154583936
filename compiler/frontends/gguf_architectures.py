"""What GGUF calls things: its architectures, metadata keys and tensor names as tables.

In: a checked :class:`GgufFile`.  Out: the :class:`ModelConfig` (:func:`read_config`) and, for each
tensor name, the canonical weights it becomes (:func:`weight_parts`).  Next file: ``gguf.py``.

Every ``<architecture>.*`` key is either read here or an error: such a key changes the numbers.
Converters have already permuted llama's q and k rows for interleaved rotation, added one to gemma's
norms and transposed GPT-2's Conv1D weights, so that none of that happens here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError

from .config import Activation, Layer, ModelConfig, NormKind, Rope
from .gguf_file import FETCH_AGAIN, GgufFile
from .rope import make_rope

Windows = Literal["none", "all", "pattern"]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Architecture:
    """One row: how a GGUF architecture differs from llama.

    ``windows``: which layers ``attention.sliding_window`` applies to; with ``pattern`` every
    ``window_period``-th layer sees everything.  ``wide_scale_at``: the block count of the one size
    whose attention scale is (hidden / heads) ** -0.5, which GGUF does not record.
    """

    name: str
    interleaved_rope: bool = False
    norm: NormKind = "rms"
    activation: Activation = "silu"
    gated_mlp: bool = True
    learned_positions: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    windows: Windows = "none"
    window_period: int = 0
    default_window: int = 0
    local_rope_base: float = 0.0  # gemma3: windowed layers rotate with their own, unscaled base
    attention_softcap: float = 0.0  # defaults where the file has no key
    logit_softcap: float = 0.0
    wide_scale_at: int = 0


ARCHITECTURES: Mapping[str, Architecture] = {
    row.name: row
    for row in (
        Architecture("llama", interleaved_rope=True, windows="all"),
        Architecture("qwen2"),
        Architecture("qwen3", qk_norm=True),
        Architecture(
            "gemma2",
            activation="gelu_tanh",
            post_norms=True,
            scaled_embedding=True,
            windows="pattern",
            window_period=2,
            default_window=4096,
            attention_softcap=50.0,
            logit_softcap=30.0,
            wide_scale_at=46,
        ),
        Architecture(
            "gemma3",
            activation="gelu_tanh",
            qk_norm=True,
            post_norms=True,
            scaled_embedding=True,
            windows="pattern",
            window_period=6,
            local_rope_base=10000.0,
            wide_scale_at=62,
        ),
        Architecture("phi3", windows="all"),
        Architecture(
            "gpt2", norm="layer", activation="gelu_tanh", gated_mlp=False, learned_positions=True
        ),
    )
}

HARMLESS_PREFIXES = (
    "general.",
    "tokenizer.",
    "quantize.",
    "split.",
    "imatrix.",
    "mradermacher.",
    "unsloth.",
)
"""Keys that say where the file comes from or how text becomes tokens, never what is computed."""

# GGUF's name -> canonical name.
_GLOBAL_NAMES = {
    "token_embd.weight": "embed.weight",
    "position_embd.weight": "embed.positions",
    "output_norm.weight": "final_norm.weight",
    "output_norm.bias": "final_norm.bias",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_output": "attn.o",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "post_attention_norm": "attn_post_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
    "post_ffw_norm": "mlp_post_norm",
}
ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight", "rope_freqs.weight")
"""Tensors that are part of the configuration: divisors of the rotation frequencies."""

_EPSILON = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")

Part = tuple[str, int, int]
"""A canonical weight and the rows ``start:stop`` of the file's tensor that it is."""


def weight_parts(name: str, rows: int, config: ModelConfig) -> list[Part] | None:
    """The canonical weights that the tensor ``name`` of ``rows`` rows becomes; ``None`` = unknown.

    One part, except for the fused ``attn_qkv``, and ``ffn_up`` where it holds gate and up.
    """
    if name in _GLOBAL_NAMES:
        return [(_GLOBAL_NAMES[name], 0, rows)]
    match = _LAYER.fullmatch(name)
    if match is None or int(match[1]) >= len(config.layers):
        return None
    prefix, part, kind = f"layers.{match[1]}", match[2], match[3]
    sizes: tuple[tuple[str, int], ...]
    if part == "attn_qkv":
        q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        sizes = (("attn.q", q), ("attn.k", kv), ("attn.v", kv))
    elif part == "ffn_up" and config.gated_mlp and rows == 2 * config.intermediate_size:
        sizes = (("mlp.gate", rows // 2), ("mlp.up", rows // 2))
    elif part in _LAYER_NAMES:
        sizes = ((_LAYER_NAMES[part], rows),)
    else:
        return None
    parts: list[Part] = []
    start = 0
    for target, size in sizes:
        parts.append((f"{prefix}.{target}.{kind}", start, start + size))
        start += size
    return parts if start == rows else None


class Keys:
    """Metadata of one architecture, checked by type, remembering which keys were read."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.file = file
        self.prefix = prefix
        self.read: set[str] = set()

    def fail(self, key: str, what: str) -> InputFileError:
        return InputFileError(
            what, where=f"{self.file.name}: key {self.prefix}.{key}", next_step=FETCH_AGAIN
        )

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.file.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        """A count below 2**31.  A per-layer array is one if all of its entries are equal."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.size and bool((value == value[0]).all()):
            value = value[0].item()
        elif isinstance(value, np.ndarray):
            raise UnsupportedError(
                "the value differs from layer to layer",
                where=f"{self.file.name}: key {self.prefix}.{key}",
                next_step="models with layers of different sizes are not supported",
            )
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise self.fail(key, f"{value!r} is not a count")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"{value!r} is not a number")
        if not math.isfinite(value):
            raise self.fail(key, f"{value!r} is not finite")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if not 1e-30 < value < 1e30:
            raise self.fail(key, f"{value!r} is not a positive number in a sensible range")
        return value

    def softcap(self, key: str, default: float) -> float:
        """A positive number, or 0 for none."""
        return self.positive(key, default) if self.number(key, default) else 0.0

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"{value!r} is not a text")
        return value

    def must_be(self, key: str, allowed: Sequence[object], why: str) -> None:
        """Reads a key that has one exact implementation only (absent is fine)."""
        if self.has(key):
            value = self._get(key, None)
            if isinstance(value, np.ndarray) or value not in allowed:
                raise UnsupportedError(
                    f"{value!r}: {why}", where=f"{self.file.name}: key {self.prefix}.{key}"
                )

    def finish(self) -> None:
        """Raises :class:`UnsupportedError` for a key that nobody has read."""
        for key in self.file.metadata:
            if key not in self.read and not key.startswith(HARMLESS_PREFIXES):
                raise UnsupportedError(
                    "the key is not understood, and ignoring it could change the results",
                    where=f"{self.file.name}: key {key!r}",
                    next_step=f"supported architectures: {', '.join(ARCHITECTURES)}",
                )

    def _get(self, key: str, default: object) -> object:
        full = f"{self.prefix}.{key}"
        self.read.add(full)
        value = self.file.metadata.get(full, default)
        if value is None:
            raise self.fail(key, "the key is missing")
        return value


def read_config(file: GgufFile) -> ModelConfig:
    """The model that the metadata (and the presence of tensors) describe.

    Raises :class:`UnsupportedError` for an architecture or key without an exact implementation and
    :class:`InputFileError` for a key that is missing or impossible.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise InputFileError(
            "no architecture named", where=f"{file.name}: key general.architecture",
            next_step=FETCH_AGAIN,
        )  # fmt: skip
    row = ARCHITECTURES.get(name)
    if row is None:
        raise UnsupportedError(
            f"architecture {name!r}", where=file.name,
            next_step=f"supported: {', '.join(ARCHITECTURES)}",
        )  # fmt: skip
    keys = Keys(file, name)
    _refuse_variants(file, keys)
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    blocks = keys.integer("block_count")
    if not 0 < heads <= hidden:
        raise keys.fail("attention.head_count", f"{heads} heads in {hidden} elements")
    if not 0 < blocks <= len(file.tensors):  # each block has several tensors
        raise keys.fail("block_count", f"{blocks} blocks, {len(file.tensors)} tensors")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(
            "keys and values of different sizes", where=f"{file.name}: key {name}.attention"
        )
    context, ropes = _ropes(file, keys, row, head_dim)
    wide = row.wide_scale_at == blocks
    config = ModelConfig(
        architecture=name,
        vocab_size=_vocab_size(file, keys),
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        n_heads=heads,
        n_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=context,
        layers=_layers(keys, row, blocks, context),
        ropes=ropes,
        norm=row.norm,
        norm_eps=keys.positive(_EPSILON[row.norm]),
        attention_scale=(hidden / heads) ** -0.5 if wide else 0.0,
        attention_softcap=keys.softcap("attn_logit_softcapping", row.attention_softcap),
        logit_softcap=keys.softcap("final_logit_softcapping", row.logit_softcap),
        embedding_scale=math.sqrt(hidden) if row.scaled_embedding else 1.0,
        qkv_bias=_any_tensor(file, ".attn_q.bias", ".attn_qkv.bias"),
        attention_out_bias=_any_tensor(file, ".attn_output.bias"),
        mlp_bias=_any_tensor(file, ".ffn_up.bias"),
        qk_norm=row.qk_norm,
        post_norms=row.post_norms,
        gated_mlp=row.gated_mlp,
        activation=row.activation,
        learned_positions=row.learned_positions,
        tied_embeddings="output.weight" not in file.tensors,
    )
    keys.finish()
    return config


def _refuse_variants(file: GgufFile, keys: Keys) -> None:
    """Reads the keys whose only supported value changes nothing."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedError(f"a GGUF file of type {kind!r}, not a model", where=file.name)
    count = file.metadata.get("split.count", 1)
    if count not in (0, 1):
        raise UnsupportedError(
            f"one of {count!r} parts of a split model",
            where=file.name,
            next_step="merge them first: llama-gguf-split --merge FIRST_PART OUTPUT",
        )
    if file.metadata.get("general.quantization_version", 2) != 2:
        raise UnsupportedError(
            "a quantization version other than 2", where=file.name, next_step="convert it again"
        )
    keys.must_be("expert_count", [0], "mixtures of experts are not supported")
    keys.must_be("expert_used_count", [0], "mixtures of experts are not supported")
    keys.must_be("attention.causal", [True], "only causal attention is supported")
    keys.must_be("use_parallel_residual", [False], "parallel residuals are not supported")
    keys.must_be("attention.clamp_kqv", [0.0], "clamped projections are not supported")
    keys.must_be("attention.max_alibi_bias", [0.0], "ALiBi is not supported")
    keys.must_be("logit_scale", [1.0], "a logit scale is not part of this architecture")
    keys.must_be("residual_scale", [1.0], "a residual scale is not part of this architecture")
    keys.must_be("embedding_scale", [1.0], "an embedding scale is not part of this architecture")
    keys.must_be("pooling_type", [0], "pooled (embedding) models are not supported")
    keys.must_be(
        "tensor_data_layout", ["Meta AI original pth", "reference"], "an unknown tensor layout"
    )


def _any_tensor(file: GgufFile, *suffixes: str) -> bool:
    return any(name.endswith(suffixes) for name in file.tensors)


def _vocab_size(file: GgufFile, keys: Keys) -> int:
    """The rows of the embedding table; the key and the token list must agree with it."""
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise InputFileError(
            "no tensor 'token_embd.weight'", where=file.name, next_step=FETCH_AGAIN
        )
    rows = table.rows
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if keys.integer("vocab_size", rows) != rows:
        raise keys.fail("vocab_size", f"it disagrees with the embedding table of {rows} rows")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise InputFileError(
            f"{len(tokens)} tokens for an embedding table of {rows} rows",
            where=f"{file.name}: key tokenizer.ggml.tokens",
            next_step=FETCH_AGAIN,
        )
    return rows


def _layers(keys: Keys, row: Architecture, blocks: int, context: int) -> tuple[Layer, ...]:
    rope = None if row.learned_positions else 0
    window = keys.integer("attention.sliding_window", row.default_window)
    if not 0 < window < context:  # 0 or everything: no window
        window = 0
    if row.windows == "none" and window:
        raise UnsupportedError(
            f"a sliding window of {window} positions is not part of {row.name}",
            where=f"{keys.file.name}: key {row.name}.attention.sliding_window",
        )
    if row.windows != "pattern":
        return (Layer(window or None, rope),) * blocks
    pattern = _window_pattern(keys, row, blocks)
    local_rope = 1 if row.local_rope_base else rope
    return tuple(
        Layer(window or None, local_rope) if windowed else Layer(None, rope) for windowed in pattern
    )


def _window_pattern(keys: Keys, row: Architecture, blocks: int) -> list[bool]:
    """For each block whether it is windowed: a period or a list in the file, or the family's."""
    key = "attention.sliding_window_pattern"
    value = keys.file.metadata.get(f"{row.name}.{key}")
    if isinstance(value, np.ndarray) and value.dtype == bool:
        keys.read.add(f"{row.name}.{key}")
        if len(value) != blocks:
            raise keys.fail(key, f"{len(value)} entries for {blocks} blocks")
        return [bool(windowed) for windowed in value]
    period = keys.integer(key, row.window_period)
    if period < 1:
        raise keys.fail(key, f"{period} is not a period")
    return [i % period < period - 1 for i in range(blocks)]


# --- rotary embeddings ---------------------------------------------------------------------------

_SHORT, _LONG, _FREQS = ROPE_FACTORS


def _ropes(
    file: GgufFile, keys: Keys, row: Architecture, head_dim: int
) -> tuple[int, tuple[Rope, ...]]:
    """The usable context length and the model's rotary embeddings (the second one is local)."""
    context = keys.integer("context_length")
    if row.learned_positions:
        keys.must_be("rope.dimension_count", [0, head_dim], "this architecture has no rotary part")
        return context, ()
    dims = keys.integer("rope.dimension_count", head_dim)
    if dims > head_dim:
        raise keys.fail("rope.dimension_count", f"{dims} of the {head_dim} elements of a head")
    factors = _read_factors(file, dims // 2)
    scaled = make_rope(_rope_parameters(keys, factors), dims, max(context, 1), file.name)
    rope = replace(scaled.rope, interleaved=row.interleaved_rope)
    if _FREQS in factors:
        frequencies = np.array(rope.inv_freq, np.float32) / factors[_FREQS]
        rope = replace(rope, inv_freq=tuple(float(f) for f in frequencies))
    ropes = [rope]
    if row.local_rope_base:
        base = keys.positive("rope.freq_base_swa", row.local_rope_base)
        local = make_rope({"rope_theta": base}, dims, max(context, 1), file.name).rope
        ropes.append(replace(local, interleaved=row.interleaved_rope))
    return min(context, scaled.max_context), tuple(ropes)


def _rope_parameters(keys: Keys, factors: Mapping[str, F32]) -> dict[str, object]:
    """``rope.*`` in the vocabulary of :func:`make_rope`."""
    linear = keys.number("rope.scale_linear", 0.0) or 1.0  # the key's former name; 0 is "none"
    factor = keys.number("rope.scaling.factor", linear) or 1.0
    kind = keys.text("rope.scaling.type", "linear" if factor != 1.0 else "none")
    attention_factor = keys.positive("rope.scaling.attn_factor", 1.0)
    keys.must_be("rope.scaling.finetuned", [True, False], "not a boolean")
    parameters: dict[str, object] = {"rope_theta": keys.positive("rope.freq_base", 10000.0)}
    original = keys.integer("rope.scaling.original_context_length", 0)
    if original:
        parameters["original_max_position_embeddings"] = original
    if _SHORT in factors:  # whatever the type key says, these are applied
        return parameters | {
            "rope_type": "longrope",
            "attention_factor": attention_factor,
            "short_factor": factors[_SHORT].tolist(),
            "long_factor": factors[_LONG].tolist(),
        }
    if kind == "yarn":
        keys.must_be("rope.scaling.yarn_ext_factor", [1.0], "only an extrapolation factor of 1")
        return parameters | {
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": attention_factor * (1.0 + 0.1 * math.log(max(factor, 1.0))),
            "beta_fast": keys.positive("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.positive("rope.scaling.yarn_beta_slow", 1.0),
        }
    if kind not in ("none", "linear") or attention_factor != 1.0:
        raise UnsupportedError(
            f"rope scaling {kind!r} with an attention factor of {attention_factor}",
            where=f"{keys.file.name}: key {keys.prefix}.rope.scaling.type",
            next_step="none, linear, yarn and (with its factor tensors) longrope are supported",
        )
    return parameters if kind == "none" else parameters | {"rope_type": "linear", "factor": factor}


def _read_factors(file: GgufFile, pairs: int) -> dict[str, F32]:
    """The frequency divisors in the file, [pairs] each, all positive."""
    found: dict[str, F32] = {}
    for name in ROPE_FACTORS:
        info = file.tensors.get(name)
        if info is None:
            continue
        where = f"{file.name}: tensor {name!r}"
        if info.format != "F32" or info.shape != (pairs,):
            raise InputFileError(
                f"expected F32 [{pairs}], found {info.format} {list(info.shape)}",
                where=where, next_step=FETCH_AGAIN,
            )  # fmt: skip
        values = np.fromfile(file.path, "<f4", count=pairs, offset=info.offset)
        if len(values) != pairs or not (np.isfinite(values).all() and (values > 1e-6).all()):
            raise InputFileError(
                "factors that are not all positive", where=where, next_step=FETCH_AGAIN
            )
        found[name] = values
    if (_SHORT in found) != (_LONG in found):
        raise InputFileError(
            "one of the tensors rope_factors_short and rope_factors_long is missing",
            where=file.name, next_step=FETCH_AGAIN,
        )  # fmt: skip
    return found
