"""Which rounds are measured: what stays of the results, how numbers go on, whose turn it is.

In: the results file, the suites that were asked for.  Out: the file without what is measured again,
the order of processes.  Next file: ``measure.py``.

A round is one process of each system and, before them, the machine's ceilings.  Its number is never
given to another round of the suite as long as the file has a line of it, so that what was measured
side by side can be told from the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.matrix import Suite, System

CEILINGS = "ceilings"


def lines_of(results: Path) -> list[dict[str, Any]]:
    """The file's lines, none where it is not there."""
    if not results.exists():
        return []
    return [json.loads(text) for text in results.read_text(encoding="utf-8").splitlines()]


def chosen_pairs(suites: Sequence[Suite]) -> set[tuple[str, str]]:
    """(suite, system) of everything that was asked for."""
    return {(suite.name, system.name) for suite in suites for system in suite.systems}


def forget(results: Path, suites: Sequence[Suite]) -> None:
    """Drops the systems that are about to be measured again, and the ceilings of the rounds of
    which then nothing is left."""
    again, names = chosen_pairs(suites), {suite.name for suite in suites}
    kept = [x for x in lines_of(results) if (x["suite"], x["system"]) not in again]
    used = {(x["suite"], x["round"]) for x in kept if x["system"] != CEILINGS}
    kept = [
        x
        for x in kept
        if x["system"] != CEILINGS or x["suite"] not in names or (x["suite"], x["round"]) in used
    ]
    if results.exists():
        text = "".join(json.dumps(x) + "\n" for x in kept)
        results.write_text(text, encoding="utf-8")


def require_same_commit(results: Path, suites: Sequence[Suite], commit: str) -> None:
    """SystemExit when rounds of ``commit`` would be added to rounds of another one."""
    again = chosen_pairs(suites)
    for line in lines_of(results):
        if (line["suite"], line["system"]) not in again:
            continue
        what = f"{results} has rounds of {line['system']} in {line['suite']}"
        there = line.get("commit", "unknown")
        if there != commit:
            raise SystemExit(
                f"error: {what} of commit {there}, this is {commit}: --more adds to rounds of the"
                " same commit; without it they are measured anew"
            )
        if commit == "unknown" or commit.endswith("-dirty"):
            raise SystemExit(
                f"error: {what} of commit {there}, which does not tell the sources: --more adds to"
                " rounds of the same sources; commit the changes and measure without it"
            )


def first_round(results: Path, suite: Suite) -> int:
    """The number that the suite's next round gets."""
    return max((x["round"] + 1 for x in lines_of(results) if x["suite"] == suite.name), default=0)


def runs(suite: Suite, first: int, rounds: int) -> Iterator[tuple[int, System | None]]:
    """A B C, B C A, C A B: nobody always runs after the same one; ``None`` is the ceilings."""
    for index in range(first, first + rounds):
        yield index, None
        turn = index % max(len(suite.systems), 1)
        for system in (*suite.systems[turn:], *suite.systems[:turn]):
            yield index, system
