"""What a compile tells its user when it is done.

In: the facts of a finished compile.  Out: :class:`CompileResult` with a summary for people and a
dictionary for pipelines.  Next file: ``cli.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolayer.runtime_stub.errors import UnsupportedError
from zerolayer.targets.facts import Target
from zerolayer.targets.program import BOUNDS, BufferKind, Program
from zerolayer.targets.roofline import Prediction

from .frontends.config import LoadedModel
from .memory.plan import MemoryNeed
from .numerics.verify import Verified


@dataclass(frozen=True)
class Predictions:
    """The roofline of one decode step, of a prefill step where the model has one, and of a decode
    step that is sampled where that reads other weights than a greedy one."""

    decode: Prediction
    prefill: Prediction | None
    sampled: Prediction | None = None

    def as_dict(self, calls: bool = False) -> dict[str, object]:
        """The manifest's form: the decode step's figures, with ``prefill`` beside them."""
        out = self.decode.as_dict(calls)
        if self.prefill is not None:
            out["prefill"] = self.prefill.as_dict()
        if self.sampled is not None:
            out["sampled"] = self.sampled.as_dict()
        return out


class Warnings:
    """Collects what a build would only warn about, and tells ``say`` at once; under ``--strict``
    the first one ends it."""

    def __init__(self, strict: bool, say: Callable[[str], None]) -> None:
        self._strict = strict
        self._say = say
        self._lines: list[str] = []

    def add(self, text: str) -> None:
        """One warning.  Raises UnsupportedError when strict."""
        if self._strict:
            raise UnsupportedError(text, where="--strict", next_step="leave out --strict to accept")
        self._lines.append(text)
        self._say(f"warning: {text}")

    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)


@dataclass(frozen=True)
class CompileResult:
    """A finished compile.  Sizes are bytes; ``timings`` are (stage, seconds), in order."""

    output: Path
    digest: str
    sha256: str
    model: LoadedModel
    target: Target
    options: dict[str, str | int | bool]
    decisions: tuple[str, ...]
    program: Program
    need: MemoryNeed
    predicted: Predictions
    verified: Verified
    size: int
    code_bytes: int
    warnings: tuple[str, ...]
    timings: tuple[tuple[str, float], ...]

    def summary(self) -> list[tuple[str, str]]:
        """(label, text) rows of the closing table."""
        need, options = self.need, self.options
        calls = sum(len(e.calls) for e in self.program.entry_points)
        rows = [
            ("artifact", f"{mib(self.size)}, digest {self.digest[:16]}"),
            ("sha256", self.sha256),
            ("model", f"{self.model.name}, {self.model.parameters:,} parameters"),
            ("target", f"{self.target.name}: {self.target.description}"),
            (
                "precision",
                f"weights {self._formats()} (quantize {options['quantize']}), "
                f"activations {options['activations']}"
                + (f", KV {options['kv_dtype']}" if self.program.kv else ""),
            ),
            (
                "kernels",
                f"{calls} calls, fusion {options['fusion']}, code {self.code_bytes:,} bytes",
            ),
            ("memory", self._memory()),
        ]
        copies = [c.weight_bytes for e in self.program.entry_points for c in e.calls
                  if c.op in BOUNDS]  # fmt: skip
        if copies:
            text = f"screened: {mib(copies[0])} tell a greedy step which logits it has to compute"
            rows.append(("head", text))
        rows.append(("predicted", self._predicted()))
        rows.append(("numerics", self._numerics()))
        for label, lines in (("settings", self.decisions), ("warnings", self.warnings)):
            rows += [(label if i == 0 else "", line) for i, line in enumerate(lines)]
        rows.append(("time", ", ".join(f"{name} {s:.1f} s" for name, s in self.timings)))
        if need.contexts:
            after = next(i for i, row in enumerate(rows) if row[0] == "memory")
            rows.insert(after + 1, ("context", contexts_text(need.contexts)))
        return rows

    def _formats(self) -> str:
        """The stored formats, by bytes; what has less than a hundredth of them is left out."""
        sizes = Counter[str]()
        for b in self.program.buffers:
            if b.kind is BufferKind.WEIGHT:
                sizes[b.format] += b.nbytes
        return ", ".join(f for f, n in sizes.most_common() if 100 * n >= sizes.total()) or "none"

    def _memory(self) -> str:
        need = self.need
        text = f"weights {mib(need.weights_bytes)} + workspace {mib(need.workspace_bytes)}"
        if need.kv_bytes_per_token:
            text += f" + {need.kv_bytes_per_token:,} bytes per token of context"
        return text

    def _predicted(self) -> str:
        decode, prefill = self.predicted.decode, self.predicted.prefill
        where = f"on all of {self.target.name}, from its facts"
        if prefill is None:
            return f"at most {decode.tokens_per_second:,.0f} rows/s {where}"
        return (
            f"at most {decode.tokens_per_second:,.0f} tokens/s decode, "
            f"{prefill.tokens_per_second:,.0f} tokens/s prefill {where}"
        )

    def _numerics(self) -> str:
        report = self.verified.report or {}
        cached = ", from the cache" if self.verified.cached else ""
        if self.verified.not_run:
            return f"not run ({self.verified.not_run})"
        if "kl" not in report:
            worst = max((o["relative_error"] for o in report.get("outputs", ())), default=0.0)
            return f"{report.get('status')}: largest relative error {worst:g}{cached}"
        decisive = report["decisive_positions"]
        top1 = f"top-1 {report['top1']:.1%} of {decisive} decisive positions"
        return (
            f"{report['status']}: {top1 if decisive else 'no decisive position'}, "
            f"KL {report['kl']:g} nats, relative logit error {report['logit_error']:g}"
            f"{cached}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        need = self.need
        return {
            "output": str(self.output),
            "digest": self.digest,
            "sha256": self.sha256,
            "size": self.size,
            "code_bytes": self.code_bytes,
            "model": {"name": self.model.name, "parameters": self.model.parameters},
            "target": self.target.name,
            "options": self.options,
            "decisions": list(self.decisions),
            "calls": {e.name: len(e.calls) for e in self.program.entry_points},
            "memory": {
                "weights_bytes": need.weights_bytes,
                "workspace_bytes": need.workspace_bytes,
                "kv_bytes_per_token": need.kv_bytes_per_token,
                "kv_block_bytes": need.kv_block_bytes,
                "contexts": [{"memory_bytes": m, "tokens": t} for m, t in need.contexts],
            },
            "predicted": self.predicted.as_dict(),
            "numerics": self.verified.report or {"status": "not run"},
            "numerics_cached": self.verified.cached,
            "warnings": list(self.warnings),
            "timings": {name: round(s, 3) for name, s in self.timings},
        }


def contexts_text(contexts: Sequence[tuple[int, int]]) -> str:
    """The largest context per memory size, (bytes, tokens) rising, up to where memory is no longer
    what bounds it."""
    longest = max(tokens for _, tokens in contexts)
    enough = min(memory for memory, tokens in contexts if tokens == longest)
    parts = [f"{t:,} tokens in {m >> 30} GiB" for m, t in contexts if 0 < t < longest][-4:]
    return ", ".join([*parts, f"{longest:,} tokens in {enough >> 30} GiB of memory or more"])


def mib(nbytes: int) -> str:
    """Bytes for people."""
    if nbytes < 1 << 20:
        return f"{nbytes / 1024:,.1f} KiB"
    return f"{nbytes / (1 << 20):,.1f} MiB"
