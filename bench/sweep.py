"""Fusion levels over model sizes, threads and batches: where one kernel per step pays.

In: nothing.  Out: :data:`SHAPES`, :data:`SWEEP` (suites), :func:`points` (what was measured, joined
with what the manifests say was moved).  Next file: ``fit.py``.

The models are Llama shapes from a tiny one to 1.1B with random weights, as 4-bit and as float32;
each is compiled at the three levels.  The time of a step is taken around the call into the kernels,
so that the loader's Python, the same at every level, does not hide the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.matrix import OURS, Suite, System
from bench.results import Results, Stat, stat
from bench.work import Work

PREFIX = "fusion-sweep"
LEVELS = ("conservative", "balanced", "aggressive")


@dataclass(frozen=True)
class Shape:
    """A Llama decoder; ``files`` is GGUF files by format, of the comparison where it has them."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    files: tuple[tuple[str, str], ...]  # (format, file)
    new: int = 128  # decode steps of a measurement


def _made(hidden: int) -> tuple[tuple[str, str], ...]:
    return tuple((kind, f"sweep-{hidden}-{kind.lower()}.gguf") for kind in ("Q4_0", "F32"))


SHAPES = (
    Shape("32 x 4", 32, 4, 2, 1, 96, 2048, _made(32)),
    Shape("64 x 5", 64, 5, 4, 2, 192, 4096, _made(64)),
    Shape("128 x 8", 128, 8, 4, 2, 384, 4096, _made(128)),
    Shape("256 x 10", 256, 10, 4, 2, 768, 8192, _made(256)),
    Shape("576 x 30 (SmolLM2)", 576, 30, 9, 3, 1536, 49152,
          (("Q4_0", "smollm2-135m-q4_0.gguf"), _made(576)[1]), 64),
    Shape("2048 x 22 (1.1B)", 2048, 22, 32, 4, 5632, 32000,
          (("Q4_0", "tinyllama-q4_0.gguf"),), 24),
)  # fmt: skip
"""Hidden size x layers.  Heads, feed-forward and vocabulary grow with it as in real models."""

#: (threads, batch) of the suites; more threads than CPUs is the crowded case
RUNS = ((1, 1), (2, 1), (4, 1), (1, 8), (2, 8))
PROMPT = 64


def system(kind: str, file: str, level: str) -> System:
    """One model at one level."""
    options = ("--fusion", level, *(("--activations", "f32") if kind == "F32" else ()))
    return System(OURS, f"{kind} {level}", file, 4 if kind == "Q4_0" else 32, options)


def _suite(shape: Shape, threads: int, batch: int) -> Suite:
    systems = tuple(system(kind, file, level) for kind, file in shape.files for level in LEVELS)
    name = f"{PREFIX}-{shape.hidden}-t{threads}-b{batch}"
    title = f"fusion, {shape.name}, {threads} threads, batch {batch}"
    return Suite(name, title, threads, PROMPT, shape.new, batch, systems,
                 vocabulary=shape.vocabulary, steps=True)  # fmt: skip


SWEEP = tuple(_suite(shape, *run) for run in RUNS for shape in SHAPES)


@dataclass(frozen=True)
class Point:
    """A shape and format at one level, threads and batch."""

    shape: Shape
    kind: str
    level: str
    threads: int
    batch: int
    step_us: Stat  # inside the kernels, median step of each process
    prefill_us: Stat  # inside the kernels, all prompts
    decode: Stat  # tokens per second, as a user waits for them
    calls: int
    joins: int  # of the threads: calls that do not depend on each other have one
    weight_bytes: int
    activation_bytes: int  # of one token, read and written between kernels

    @property
    def key(self) -> tuple[int, str, int, int]:
        """What the three levels of a model have in common."""
        return self.shape.hidden, self.kind, self.threads, self.batch


def points(results: Results, works: Mapping[str, Work]) -> list[Point]:
    """Everything of the sweep that was measured; ``works`` is by artifact."""
    out = []
    for suite in SWEEP:
        hidden = int(suite.name.removeprefix(f"{PREFIX}-").partition("-")[0])
        shape = next(s for s in SHAPES if s.hidden == hidden)
        for one in suite.systems:
            lines, work = results.of(suite.name, one.name), works.get(one.artifact)
            step = stat([float(x["step_us"]) for x in lines if "step_us" in x])
            prefill = stat([float(x["prefill_us"]) for x in lines if "prefill_us" in x])
            decode = stat([suite.batch * suite.new / float(x["decode_s"]) for x in lines])
            if work is None or step is None or prefill is None or decode is None:
                continue
            kind, level = one.label.split()
            out.append(
                Point(
                    shape, kind, level, suite.threads, suite.batch, step, prefill, decode,
                    len(work.calls), work.phases, sum(c.weight_bytes for c in work.calls),
                    work.activation_bytes(),
                )
            )  # fmt: skip
    return out


def ratios(found: list[Point], value: str = "step_us") -> dict[tuple[int, str, int, int], float]:
    """How many times less ``value`` is at ``aggressive`` than at ``conservative``."""
    by = {(p.key, p.level): getattr(p, value).median for p in found}
    keys = dict.fromkeys(p.key for p in found)
    return {
        k: by[k, LEVELS[0]] / by[k, LEVELS[2]]
        for k in keys
        if (k, LEVELS[0]) in by and (k, LEVELS[2]) in by
    }
