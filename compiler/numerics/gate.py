"""The numerics gate: the artifact's own kernels against the float32 graph of the file's weights.

In: a runner (the real loader driver over the packed weights) and the frontend graph.  Out: a
:class:`Report` for the manifest, and the golden cases.  Next file: ``runner.py``.

The reference is the frontend's graph, before any pass, executed by onnxruntime in float32.  The
sequences are each prompt followed by the tokens that the kernels themselves chose, so the kernels
are judged on the path that users will see, position by position (teacher forced).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from zerolayer.runtime_stub.errors import NumericsError

from .bounds import Bounds
from .metrics import F32, NOISE, Accumulator, recorded


class Runner(Protocol):
    """Something that executes the compiled step."""

    def forward(self, tokens: Sequence[int]) -> tuple[F32, F32]:
        """Logits ``[T, vocab]`` and taps ``[n_taps, T, hidden]`` of one whole sequence."""

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """``count`` greedy tokens after ``prompt``, through prefill and single-token steps."""

    def together(self, sequences: Sequence[Sequence[int]]) -> list[F32]:
        """The logits ``[vocab]`` after each sequence, all computed side by side."""


#: sequences -> per sequence (logits [T, vocab], taps: n_taps arrays [T, hidden])
Reference = Callable[[Sequence[Sequence[int]]], Iterable[tuple[F32, Sequence[F32]]]]

Case = tuple["str | None", list[int], list[int]]


@dataclass(frozen=True)
class Report:
    """The figures of the gate, as they are kept (see ``metrics.recorded``)."""

    bounds: Bounds
    positions: int
    decisive: int
    top1: float
    top1_all: float
    kl: float
    logit_error: float
    max_abs: float
    layers: tuple[float, ...]
    finite: bool
    consistent: bool  # decode, token by token, gave the same tokens as one prefill of the whole
    same_bits: bool = True  # alone and beside the others a sequence has the same logits, bit by bit

    def failures(self) -> list[str]:
        """Every exceeded bound, in words; empty when the gate passes."""
        b = self.bounds
        bad = []
        if not self.finite:
            bad.append("NaN or infinity in the kernels' numbers or the reference's")
        elif not self.positions:
            bad.append("nothing was compared")
        if not self.consistent:
            bad.append("token-by-token decoding disagrees with one prefill of the same tokens")
        if not self.same_bits:
            bad.append("the logits of a sequence depend on what is computed beside it")
        if self.top1 < b.top1:
            bad.append(f"top-1 agreement {self.top1:.4f} < {b.top1} on {self.decisive} positions")
        if not self.kl <= b.kl:
            bad.append(f"KL divergence {self.kl} > {b.kl} nats")
        if not self.logit_error <= b.logits:
            bad.append(f"relative logit error {self.logit_error} > {b.logits}")
        for i, error in enumerate(self.layers):
            if not error <= b.layer:
                place = "embedding" if i == 0 else f"layer {i - 1}"
                bad.append(f"relative error {error} > {b.layer} after {place}")
                break
        return bad

    def as_dict(self) -> dict[str, object]:
        """For the manifest and ``--json``."""
        b = self.bounds
        return {
            "status": "failed" if self.failures() else "passed",
            "reference": "float32 graph of the file's weights, onnxruntime",
            "bounds": {
                "name": b.name, "top1": b.top1, "margin": b.margin, "kl": b.kl,
                "logits": b.logits, "layer": b.layer,
            },
            "positions": self.positions,
            "decisive_positions": self.decisive,
            "top1": self.top1,
            "top1_all_positions": self.top1_all,
            "kl": self.kl,
            "logit_error": self.logit_error,
            "max_abs_logit_error": self.max_abs,
            "layer_errors": list(self.layers),
        }  # fmt: skip


def run_gate(
    runner: Runner,
    reference: Reference,
    prompts: Sequence[tuple[str | None, list[int]]],
    bounds: Bounds,
    *,
    golden_tokens: int,
    batch_invariant: bool = True,
    advance: Callable[[int], None] = lambda _n: None,
) -> tuple[Report, list[Case]]:
    """Run every prompt through both sides.  Does not raise for bad numbers: see :func:`require`.

    ``batch_invariant``: the kernels promise that a sequence's bits do not depend on its company,
    and the promise is checked.
    """
    cases: list[Case] = []
    consistent = True
    outputs = []
    for text, ids in prompts:
        expect = runner.greedy(ids, golden_tokens)
        cases.append((text, ids, expect))
        logits, taps = runner.forward([*ids, *expect])
        outputs.append((logits, taps))
        predicted = logits[len(ids) - 1 : -1].argmax(-1).tolist()
        consistent &= predicted == expect
        advance(1)
    total = Accumulator(bounds.margin)
    sequences = [[*ids, *expect] for _text, ids, expect in cases]
    same = not batch_invariant or all(
        np.array_equal(beside.view(np.uint32), logits[-1].view(np.uint32))
        for beside, (logits, _taps) in zip(runner.together(sequences), outputs, strict=True)
    )
    for (logits, taps), (ref_logits, ref_taps) in zip(outputs, reference(sequences), strict=True):
        total.add_logits(ref_logits, logits)
        total.add_taps(list(ref_taps), taps)
        advance(1)
    return _report(total, bounds, consistent, same), cases


def _report(total: Accumulator, bounds: Bounds, consistent: bool, same_bits: bool) -> Report:
    return Report(
        bounds=bounds,
        positions=total.rows,
        decisive=total.decisive,
        top1=total.top1,
        top1_all=total.same / total.rows if total.rows else 1.0,
        kl=recorded(total.kl, bounds.kl),
        logit_error=recorded(total.logit_error, bounds.logits),
        # absolute, of logits some tens in size: the rounding is larger than in relative figures
        max_abs=recorded(total.max_abs, bounds.logits / NOISE),
        layers=tuple(recorded(x, bounds.layer) for x in total.layer_errors()),
        finite=total.finite,
        consistent=consistent,
        same_bits=same_bits,
    )


def require(report: Report, model: str, wider: Sequence[str] = ()) -> None:
    """Raise NumericsError when a bound is exceeded; ``wider``: options that would lose less."""
    bad = report.failures()
    if bad:
        step = "--no-verify records an artifact without the gate"
        if wider:
            step = f"compile with {' or '.join(wider)} to see what loses the precision; {step}"
        raise NumericsError("; ".join(bad), where=f"numerics gate of {model}", next_step=step)
