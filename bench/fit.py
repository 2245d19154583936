"""A model of a step's time: weights over bandwidth, and a price for each join of the threads.

In: the sweep's points.  Out: :class:`Fit`, and where a ratio of levels would hold by it.  Next
file: ``report_fusion.py``.

``time = weights / bandwidth + joins x price``: one bandwidth for all levels, a price for joins
after which the team is forked again (conservative, balanced) and one for joins of a team that stays
together (aggressive).  Kernels that do not depend on each other have one join.  The price holds
everything that does not grow with the weights: waking and waiting, the work of norms and attention.
Bytes of activations are left out: a term for them got a share of the time in one of six fits only
(float32, one thread).  Fitted are the models that stay in the last cache, where joins are close
enough together to matter: past it the bandwidth is another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.needs import late
from bench.sweep import LEVELS, Point

if TYPE_CHECKING:
    import numpy as np
else:
    np = late("numpy")

FORKS = LEVELS[:2]
CACHED_BYTES = 16 << 20  # what ceilings.c reads from the last cache


@dataclass(frozen=True)
class Fit:
    """``bandwidth`` in GB/s (0: no part of the time grew with the bytes), prices in microseconds a
    join, ``error`` the median relative error over ``n`` points."""

    bandwidth: float
    fork_us: float
    stay_us: float
    error: float
    n: int

    def step_us(self, weights: float, joins: float, level: str) -> float:
        """The model."""
        price = self.fork_us if level in FORKS else self.stay_us
        return (weights / (1e3 * self.bandwidth) if self.bandwidth else 0.0) + joins * price

    def ratio(self, bytes_per_join: float, conservative: int, aggressive: int) -> float:
        """Of the two levels' times, for ``bytes_per_join`` of weights at ``aggressive``."""
        weights = bytes_per_join * aggressive
        slow = self.step_us(weights, conservative, LEVELS[0])
        return slow / self.step_us(weights, aggressive, LEVELS[2])

    def bytes_for(self, ratio: float, conservative: int, aggressive: int) -> float:
        """The most bytes of weights per join with at least ``ratio``; negative: there are none."""
        gain = conservative / aggressive * self.fork_us - ratio * self.stay_us
        return 1e3 * self.bandwidth * gain / (ratio - 1)


def fit(found: Sequence[Point]) -> Fit | None:
    """Least squares of the relative errors, nothing negative; None for too few points."""
    found = [p for p in found if p.weight_bytes <= CACHED_BYTES]
    if len({p.shape.hidden for p in found}) < 3:
        return None
    rows = np.array(
        [
            [p.weight_bytes / 1e3, p.joins * (p.level in FORKS), p.joins * (p.level not in FORKS)]
            for p in found
        ],
        np.float64,
    )
    times = np.array([p.step_us.median for p in found])
    scaled = rows / times[:, None]
    best, least = np.zeros(3), float("inf")
    for size in range(1, 4):  # the best of all subsets is the best without negative ones
        for chosen in itertools.combinations(range(3), size):
            x = np.zeros(3)
            x[list(chosen)] = np.linalg.lstsq(
                scaled[:, list(chosen)], np.ones(len(times)), rcond=None
            )[0]
            error = float(((scaled @ x - 1) ** 2).sum())
            if (x >= 0).all() and error < least:
                best, least = x, error
    errors = np.abs(scaled @ best - 1)
    bandwidth = 1 / best[0] if best[0] else 0.0
    return Fit(bandwidth, best[1], best[2], float(np.median(errors)), len(times))
