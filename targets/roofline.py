"""The predicted roofline: how long each kernel call must take on a target, and tokens per second.

In: a planned :class:`Program` and the target's facts, through an injector.  Out:
:class:`Prediction`.  Next file: a family's rows, for example ``cpu_rows.py``.

A call takes the longer of its bytes at memory bandwidth and its operations at the peak rate of its
operand type (for int8, of products whose blocks have scales, where the target states it).  Weights
are read once per call; activations of a step stay in cache unless they are larger than L3, so they
count as bytes only then; attention reads the KV of the context.  The figure is a bound for the
machine that the target's facts describe, not a promise.

Of a screened output projection a greedy step reads an int8 copy or the upper bits and computes a
small share of the outputs, any other step all (``templates/cpu/zl_screen.h``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .facts import Target
from .injection import Injector
from .program import BOUNDS, EMBEDS, SCREENED, BufferKind, EntryPoint, KernelCall, Program

#: share of a screened projection that a greedy step computes: above what text leaves (SmolLM2 0.2 %
#: of floats, 0.5 % of Q8_0) and Gaussian floats of 32,000 x 2,048 (2.5 %)
EXACT_SHARE = 1 / 32
#: what one more phase of a step costs: a barrier of the team, and the bounds
PHASE_S = 5e-6


@dataclass(frozen=True)
class CallPrediction:
    """One call at one batch shape.  ``bound`` is ``memory`` or ``compute``."""

    name: str
    row: str
    flops: int
    bytes: int
    seconds: float
    bound: str


@dataclass(frozen=True)
class Prediction:
    """A whole entry point: ``tokens`` rows with ``context`` positions behind each."""

    tokens: int
    context: int
    seconds: float
    tokens_per_second: float
    weight_bytes: int
    calls: tuple[CallPrediction, ...]
    injected: Mapping[str, object]

    def as_dict(self, calls: bool = False) -> dict[str, object]:
        """The manifest's form: times in nanoseconds, rounded, so that it is the same everywhere."""
        out: dict[str, object] = {
            "tokens": self.tokens,
            "context": self.context,
            "ns": round(self.seconds * 1e9),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "weight_bytes": self.weight_bytes,
            "injected": dict(self.injected),
        }
        if calls:
            out["calls"] = [
                {
                    "name": c.name,
                    "row": c.row,
                    "flops": c.flops,
                    "bytes": c.bytes,
                    "ns": round(c.seconds * 1e9, 1),
                    "bound": c.bound,
                }
                for c in self.calls
            ]
        return out


@dataclass(frozen=True)
class _Rates:
    """Per second: bytes, and operations by activation kind."""

    bytes: float
    ops: Mapping[str, float]
    cache: float  # bytes of the last cache level


def _rates(injector: Injector, target: Target) -> _Rates:
    bandwidth = float(injector.fact("memory_bandwidth_gbps")) * 1e9
    names = {f.name for f in target.facts}
    if target.family == "cpu":
        f32 = float(injector.fact("peak_f32_gflops")) * 1e9
        bf16 = f32
        if "bf16_ops_per_cycle" in names:
            ratio = injector.fact("bf16_ops_per_cycle") / injector.fact("f32_ops_per_cycle")
            bf16 = f32 * float(ratio)
        int8 = float(injector.fact("peak_int8_gops")) * 1e9
        if "int8_block_ops_per_cycle" in names:
            part = injector.fact("int8_block_ops_per_cycle") / injector.fact("int8_ops_per_cycle")
            int8 *= float(part)
        return _Rates(
            bandwidth,
            {"int8": int8, "bf16": bf16, "f32": f32, "": f32},
            float(injector.fact("l3_bytes")),
        )
    if target.family == "cuda":
        bf16 = float(injector.fact("dense_bf16_tflops")) * 1e12
        int8 = (
            float(injector.fact("dense_int8_tops")) * 1e12 if "dense_int8_tops" in names else bf16
        )
        return _Rates(
            bandwidth,
            {"int8": int8, "bf16": bf16, "f32": bf16, "": bf16},
            float(injector.fact("l2_bytes")),
        )
    bf16 = float(injector.fact("tensor_bf16_tflops") * injector.fact("cores")) * 1e12
    rates = dict.fromkeys(("int8", "bf16", "f32", ""), bf16)
    return _Rates(bandwidth, rates, float(injector.fact("sbuf_bytes")))


def _kind(call: KernelCall) -> str:
    """Type that the call multiplies, from its row."""
    return next((k for k in ("int8", "bf16") if f".{k}." in call.row), "")


def reads_memory(target: Target, nbytes: int) -> bool:
    """Whether a step reads so many bytes of weights from memory, and not from the last cache."""
    return nbytes > _rates(Injector(target, "roofline"), target).cache


def screening_saves(target: Target, whole: int, read: int, flops: int, kind: str) -> float:
    """Seconds of a greedy step for one sequence that screening an output projection saves, from the
    bytes of all of it and of what says which outputs can win, and the operations of either; below
    0: it costs."""
    rates = _rates(Injector(target, "roofline"), target)
    exact = max(whole / rates.bytes, flops / rates.ops[kind])
    bounds = max(read / rates.bytes, flops / rates.ops["int8"])
    return exact - bounds - EXACT_SHARE * exact - PHASE_S


def _screened(call: KernelCall, flops: int, moved: int, greedy: bool) -> tuple[int, int]:
    """(operations, bytes of weights) of the calls that depend on whether a step is greedy."""
    if call.op in BOUNDS and not greedy:
        return 0, 0
    if call.op in SCREENED and greedy:
        return round(flops * EXACT_SHARE), round(moved * EXACT_SHARE)
    return flops, moved


def _rows(program: Program, call: KernelCall, tokens: int, sequences: int) -> int:
    if isinstance(call.rows, int):
        return call.rows
    if call.rows == "T":
        return tokens
    if call.rows in ("R", "S"):
        return min(sequences, program.bound(call.rows))
    return program.bound(call.rows)


def _positions(call: KernelCall, context: int) -> int:
    """Positions that one row attends to."""
    window = dict(call.constants).get("window", 0)
    return max(min(context, window) if isinstance(window, int) and window else context, 1)


def _kv_bytes(program: Program, call: KernelCall) -> int:
    """Bytes of keys and values that one position of context costs an attention call."""
    if program.kv is None:
        return 0
    caches = (b for b in program.buffers if b.kind is BufferKind.KV and b.name in call.inputs)
    return sum(b.nbytes // program.kv.block_size for b in caches)


def predict(
    program: Program, target: Target, *, tokens: int = 1, context: int = 0, sequences: int = 1,
    greedy: bool = True,
) -> Prediction:  # fmt: skip
    """Time of one step of ``tokens`` tokens in ``sequences`` sequences whose tokens see ``context``
    positions on average, one logit row per sequence, their largest logit wanted (``greedy``) or all
    of them.  A ``run`` is predicted at its bounds."""
    injector = Injector(target, "roofline")
    rates = _rates(injector, target)
    entry: EntryPoint = program.entry_points[0]
    calls: list[CallPrediction] = []
    weights = 0
    for call in entry.calls:
        rows = _rows(program, call, tokens, sequences)
        flops, moved = _screened(call, call.flops * rows, call.weight_bytes, greedy)
        weights += moved
        activations = call.activation_bytes * rows
        if call.op.startswith("PagedAttention"):
            seen = _positions(call, context)
            flops *= seen
            # a sequence's keys and values are read once for all its tokens of the step
            moved += _kv_bytes(program, call) * seen * sequences
        elif call.op in EMBEDS or activations > rates.cache:
            moved += activations
        by_memory, by_compute = moved / rates.bytes, flops / rates.ops[_kind(call)]
        seconds = max(by_memory, by_compute)
        bound = "memory" if by_memory >= by_compute else "compute"
        calls.append(CallPrediction(call.name, call.row, flops, moved, seconds, bound))
    total = sum(c.seconds for c in calls)
    return Prediction(
        tokens,
        context,
        total,
        tokens / total if total else 0.0,
        weights,
        tuple(calls),
        injector.record(),
    )
