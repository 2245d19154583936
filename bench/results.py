"""Measurements as medians, and each line of the table against the best peer.

In: the results file.  Out: :class:`Results`, :class:`Verdict`.  Next file: ``report.py``.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.matrix import OURS, SUITES, Line, Suite, System
from bench.rounds import CEILINGS
from bench.work import Work

SUITE = {s.name: s for s in SUITES}
LESS_IS_BETTER = {"first_token", "memory"}
LEAST_ROUNDS = 3  # of each side, for an interval
DRAWS = 4000
OUTSIDE = 0.05  # on each side of an interval


@dataclass(frozen=True)
class Stat:
    """Median, least and largest of ``n`` processes."""

    median: float
    low: float
    high: float
    n: int


def stat(values: list[float]) -> Stat | None:
    """None of nothing."""
    if not values:
        return None
    return Stat(statistics.median(values), min(values), max(values), len(values))


def metric(suite: Suite, line: Mapping[str, Any], name: str) -> float | None:
    """Tokens per second, seconds or bytes of one process."""
    if name == "decode":
        return suite.batch * suite.new / float(line["decode_s"])
    if name == "prefill":
        seconds = line["prefill_s"]
        return None if seconds is None else suite.batch * suite.prompt / float(seconds)
    return float(line["first_token_s" if name == "first_token" else "peak_rss_bytes"])


class Results:
    """All measured processes."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.lines = lines

    @classmethod
    def read(cls, path: Path) -> Results:
        """A file of JSON lines; the latest run of a suite and round counts."""
        latest: dict[tuple[str, str, int], dict[str, Any]] = {}
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            latest[line["suite"], line["system"], line["round"]] = line
        return cls(list(latest.values()))

    def of(self, suite: str, system: str) -> list[dict[str, Any]]:
        """Processes that ended well."""
        return [
            x
            for x in self.lines
            if x["suite"] == suite and x["system"] == system and "error" not in x
        ]

    def rounds(self, suite: str, system: str, name: str) -> dict[int, float]:
        """A system's metric in each round of a suite."""
        values = {x["round"]: metric(SUITE[suite], x, name) for x in self.of(suite, system)}
        return {k: v for k, v in values.items() if v is not None}

    def stat(self, suite: str, system: str, name: str) -> Stat | None:
        """A system's metric in a suite."""
        return stat(list(self.rounds(suite, system, name).values()))

    def ceiling(self, suite: str, key: str, system: str = "") -> Stat | None:
        """A measured limit of the machine, while the suite ran, or in a system's rounds of it."""
        among = {x["round"] for x in self.of(suite, system or CEILINGS)}
        found = (x for x in self.of(suite, CEILINGS) if key in x and x["round"] in among)
        return stat([float(x[key]) for x in found])

    def errors(self, suite: str) -> dict[str, str]:
        """System -> why it has no measurement."""
        failed = {x["system"]: str(x["error"]) for x in self.lines
                  if x["suite"] == suite and "error" in x}  # fmt: skip
        return {k: v for k, v in failed.items() if not self.of(suite, k)}

    def versions(self) -> dict[str, str]:
        """Peer -> version, as it says itself."""
        known = {}
        for suite in SUITES:
            for system in suite.systems:
                for line in self.of(suite.name, system.name):
                    if line.get("version"):
                        known[system.peer] = str(line["version"])
        return known


@dataclass(frozen=True)
class Verdict:
    """One line's outcome; ``ratio`` is how many times better than the best peer ours is."""

    line: Line
    ours: tuple[System, Stat] | None
    peer: tuple[System, Stat] | None
    ratio: float | None
    roof: float | None  # part of the measured ceiling
    interval: tuple[float, float] | None = None  # of the ratio, 90 %

    @property
    def met(self) -> bool | None:
        """None when there is nothing to compare."""
        if self.ratio is None or self.ours is None:
            return None
        ok = self.ratio >= self.line.at_least
        if self.line.roof_at_least:
            ok = ok and self.roof is not None and self.roof >= self.line.roof_at_least
        if self.line.below:
            ok = ok and self.ours[1].median < self.line.below
        return ok


def allowed(line: Line, system: System) -> bool:
    """Whether the line compares this system: a peer as it comes, with its own kind of cache."""
    if system.kv:
        return False
    if line.only:
        return system.label == line.only
    return not line.bits or system.bits in line.bits


def best(results: Results, line: Line, ours: bool) -> tuple[System, Stat] | None:
    """The best system of one side."""
    found = []
    for system in SUITE[line.suite].systems:
        if (system.peer == OURS) == ours and allowed(line, system):
            value = results.stat(line.suite, system.name, line.metric)
            if value is not None:
                found.append((system, value))
    if not found:
        return None
    pick = min if line.metric in LESS_IS_BETTER else max
    return pick(found, key=lambda pair: pair[1].median)


def roof_part(
    results: Results,
    suite: str,
    system: System,
    name: str,
    work: Work | None,
    speed: float,
    key: str,
) -> float | None:
    """Achieved part of the ceiling ``key``, for ``speed`` tokens a second of metric ``name``; the
    ceiling is of the rounds that the system was in."""
    limit = results.ceiling(suite, key, system.name)
    if limit is None or work is None:
        return None
    s = SUITE[suite]
    if name == "decode":
        amount = work.decode_bytes(s.prompt + s.new / 2, s.batch) * speed / s.batch
    else:
        amount = work.prefill_operations(s.prompt) * speed / s.prompt
    return amount / 1e9 / limit.median


def interval(above: Mapping[int, float], below: Mapping[int, float]) -> tuple[float, float] | None:
    """90 % interval of the ratio of two medians; None where a side has less than three rounds.

    The percentile method of the bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap,
    1993, section 13.3).  Drawn are rounds, with what both sides measured in them: a machine that is
    slow for a minute is slow for both, so the sides of a round belong together.
    """
    if min(len(above), len(below)) < LEAST_ROUNDS:
        return None
    known, chance = sorted({*above, *below}), random.Random(1)
    ratios: list[float] = []
    while len(ratios) < DRAWS:
        drawn = chance.choices(known, k=len(known))
        a, b = ([side[i] for i in drawn if i in side] for side in (above, below))
        if a and b:
            ratios.append(statistics.median(a) / statistics.median(b))
    ratios.sort()
    least = math.floor(OUTSIDE * DRAWS)
    return ratios[least], ratios[DRAWS - 1 - least]


def verdict(results: Results, line: Line, works: Mapping[str, Work]) -> Verdict:
    """The line's outcome; ``works`` is by artifact."""
    ours, peer = best(results, line, True), best(results, line, False)
    ratio = roof = between = None
    if ours and peer:
        pair = [ours, peer] if line.metric not in LESS_IS_BETTER else [peer, ours]
        ratio = pair[0][1].median / pair[1][1].median
        between = interval(*(results.rounds(line.suite, s.name, line.metric) for s, _ in pair))
    if ours and line.roof:
        work = works.get(ours[0].artifact)
        speed = ours[1].median
        roof = roof_part(results, line.suite, ours[0], line.metric, work, speed, line.roof)
    return Verdict(line, ours, peer, ratio, roof, between)
