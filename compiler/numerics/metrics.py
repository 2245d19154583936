"""Comparing a kernel's numbers with the reference's.

In: float arrays of both.  Out: :class:`Accumulator`, which sums over sequences and yields the
figures of the report.  Next file: ``gate.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def log_softmax(logits: F32) -> npt.NDArray[np.float64]:
    """Log-probabilities over the last axis, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def relative_rms(reference: F32, got: F32) -> tuple[float, float]:
    """Squared error and squared reference, summed; their ratio's root is the relative RMS error.

    The reference is centred per row: adding a constant to all logits changes no probability, and a
    large common offset in a residual stream would hide an error behind its size.
    """
    r = reference.astype(np.float64)
    g = got.astype(np.float64)
    r = r - r.mean(axis=-1, keepdims=True)
    g = g - g.mean(axis=-1, keepdims=True)
    return float(((r - g) ** 2).sum()), float((r**2).sum())


def _ratio(error: float, power: float) -> float:
    if power > 0:
        return math.sqrt(error / power)
    return 0.0 if error == 0 else math.inf


#: a figure below this share of its bound is not told from it
NOISE = 0.01


def recorded(x: float, bound: float) -> float:
    """A figure as it is kept: two significant digits, and not less than NOISE of its bound.

    The report is part of the artifact, whose bytes must not depend on the build machine; the
    reference runtime's last bits do, and far below the bound they are all that there is.
    """
    return float(f"{max(x, NOISE * bound):.1e}") if math.isfinite(x) else x


@dataclass
class Accumulator:
    """Sums over rows.  ``margin`` (nats) decides which positions count as decisive."""

    margin: float
    rows: int = 0
    decisive: int = 0
    same: int = 0
    same_decisive: int = 0
    kl_sum: float = 0.0
    max_abs: float = 0.0
    error: float = 0.0
    power: float = 0.0
    finite: bool = True
    layers: list[tuple[float, float]] = field(default_factory=list)

    def add_logits(self, reference: F32, got: F32) -> None:
        """Both ``[rows, vocab]``."""
        if not (np.isfinite(got).all() and np.isfinite(reference).all()):
            self.finite = False
            return
        order = np.partition(reference, -2, axis=-1)[:, -2:]
        gap = order[:, 1] - order[:, 0]
        agree = reference.argmax(-1) == got.argmax(-1)
        decisive = gap >= self.margin
        log_r, log_g = log_softmax(reference), log_softmax(got)
        self.rows += len(reference)
        self.decisive += int(decisive.sum())
        self.same += int(agree.sum())
        self.same_decisive += int((agree & decisive).sum())
        self.kl_sum += float((np.exp(log_r) * (log_r - log_g)).sum())
        self.max_abs = max(self.max_abs, float(np.abs(reference - got).max()))
        error, power = relative_rms(reference, got)
        self.error += error
        self.power += power

    def add_taps(self, reference: list[F32], got: F32) -> None:
        """``reference``: one ``[rows, hidden]`` per tap; ``got``: ``[taps, rows, hidden]``."""
        if not self.layers:
            self.layers = [(0.0, 0.0)] * len(reference)
        for i, r in enumerate(reference):
            if not (np.isfinite(got[i]).all() and np.isfinite(r).all()):
                self.finite = False
                return
            error, power = relative_rms(r, got[i])
            self.layers[i] = (self.layers[i][0] + error, self.layers[i][1] + power)

    def layer_errors(self) -> list[float]:
        """Relative RMS error per tap."""
        return [_ratio(error, power) for error, power in self.layers]

    @property
    def top1(self) -> float:
        return self.same_decisive / self.decisive if self.decisive else 1.0

    @property
    def kl(self) -> float:
        return max(0.0, self.kl_sum / self.rows) if self.rows else 0.0

    @property
    def logit_error(self) -> float:
        return _ratio(self.error, self.power)
