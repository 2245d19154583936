"""Rounds of the comparison: which are kept, how they are numbered, how sure their ratio is."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from bench import __main__ as comparison  # noqa: E402
from bench import measure, report, results, rounds  # noqa: E402
from bench.matrix import SUITES, Line, Suite  # noqa: E402

SUITE = next(s for s in SUITES if s.name == "smollm2-2")
FOUR, PEER, INT4 = "zerolayer Q4_1", "llama.cpp Q4_1", "OpenVINO int4"


def suite_of(*names: str) -> Suite:
    return replace(SUITE, systems=tuple(s for s in SUITE.systems if s.name in names))


def line(system: str, index: int, suite: str = SUITE.name, **more: Any) -> dict[str, Any]:
    return {"suite": suite, "system": system, "round": index, "commit": "abc", **more}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return path


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three rounds of three systems, one of another suite."""
    names = (rounds.CEILINGS, FOUR, PEER, INT4)
    lines = [line(name, i) for i in range(3) for name in names]
    return write(tmp_path / "r.jsonl", [*lines, line(FOUR, 0, "fusion")])


def left(path: Path) -> set[tuple[str, str, int]]:
    return {(x["suite"], x["system"], x["round"]) for x in rounds.lines_of(path)}


def test_what_is_measured_again_is_dropped_and_nothing_else(three: Path) -> None:
    before = left(three)
    some = suite_of(FOUR, PEER)
    rounds.forget(three, [some])
    assert left(three) == {x for x in before if x[0] == "fusion" or x[1] not in (FOUR, PEER)}
    assert rounds.first_round(three, some) == 3  # the ceilings of 0 to 2 are the others'
    write(three, [*rounds.lines_of(three), line(rounds.CEILINGS, 3), line(FOUR, 3)])
    rounds.forget(three, [some])
    assert (SUITE.name, rounds.CEILINGS, 3) not in left(three)  # a round that nobody is in
    assert (SUITE.name, rounds.CEILINGS, 2) in left(three)
    rounds.forget(three, [SUITE])
    assert left(three) == {("fusion", FOUR, 0)}
    assert rounds.first_round(three, SUITE) == 0
    rounds.forget(three.with_name("none"), [SUITE])
    assert not three.with_name("none").exists()


def test_rounds_are_added_to_the_same_commit_only(three: Path) -> None:
    some = [suite_of(FOUR, PEER)]
    rounds.require_same_commit(three, some, "abc")
    rounds.require_same_commit(three, [suite_of("zerolayer BF16")], "def")  # it has none
    with pytest.raises(SystemExit, match=r"zerolayer Q4_1 in smollm2-2 of commit abc, this is def"):
        rounds.require_same_commit(three, some, "def")
    write(three, [line(FOUR, 0, commit="abc-dirty")])
    with pytest.raises(SystemExit, match="does not tell the sources"):
        rounds.require_same_commit(three, some, "abc-dirty")
    rounds.require_same_commit(three.with_name("none"), some, "abc-dirty")


def test_each_round_begins_with_another_system() -> None:
    suite = suite_of(FOUR, PEER, INT4)
    order = list(rounds.runs(suite, 4, 3))
    assert [i for i, _ in order] == [4] * 4 + [5] * 4 + [6] * 4
    names = [rounds.CEILINGS if s is None else s.name for _, s in order]
    assert names == [
        rounds.CEILINGS, PEER, INT4, FOUR,
        rounds.CEILINGS, INT4, FOUR, PEER,
        rounds.CEILINGS, FOUR, PEER, INT4,
    ]  # fmt: skip


def options(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["bench", "--peers", "x", *words])
    return comparison.arguments()


def test_systems_are_chosen_by_their_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def chosen(*words: str) -> dict[str, list[str]]:
        found = comparison.chosen(options(monkeypatch, *words))
        return {s.name: [x.name for x in s.systems] for s in found}

    two = chosen("--suite", "smollm2-2", "fusion", "--only", r"^zero.*Q4_1$", r"cpp Q4_1")
    assert two == {"smollm2-2": [FOUR, PEER]}  # no suite without a system
    assert set(chosen()) >= {s.name for s in SUITES}
    with pytest.raises(SystemExit, match="no suite has a system"):
        chosen("--only", "nobody")
    with pytest.raises(SystemExit) as refused:
        chosen("--only", "(")
    assert refused.value.code == 2 and "'('" in capsys.readouterr().err


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> measure.Place:
    """A comparison whose processes take no time, at commit abc."""
    monkeypatch.setattr(measure.Place, "missing", lambda _self, _system: "")
    monkeypatch.setattr(measure, "drop_cached", lambda _path: None)
    monkeypatch.setattr(measure, "cached_share", lambda _path: 1.0)
    monkeypatch.setattr(measure, "measured", lambda command, _n: {
        "read_memory": 1.0, "decode_s": 1.0, "prefill_s": 1.0, "first_token_s": 1.0,
    })  # fmt: skip
    monkeypatch.setattr(comparison, "make_environment", lambda _place: None)
    monkeypatch.setattr(comparison, "compile_all", lambda _place, _systems: None)
    monkeypatch.setattr(comparison, "build_ceilings", lambda _place: Path("ceilings"))
    for module in (measure, comparison):
        monkeypatch.setattr(module, "commit", lambda: "abc")
    return measure.Place(tmp_path, tmp_path / "r.jsonl")


def test_more_rounds_of_a_few_systems(
    quick: measure.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str) -> dict[str, list[int]]:
        comparison.run(options(monkeypatch, "--suite", "smollm2-2", *words), quick)
        found: dict[str, list[int]] = {}
        for x in rounds.lines_of(quick.results):
            found.setdefault(x["system"], []).append(x["round"])
        return found

    everyone = {rounds.CEILINGS, *(s.name for s in SUITE.systems)}
    assert run("-n", "2") == {key: [0, 1] for key in everyone}
    more = run("-n", "3", "--more", "--only", "(zerolayer|cpp) Q4_1")
    few = {rounds.CEILINGS, FOUR, PEER}
    assert more == {x: [0, 1, 2, 3, 4] if x in few else [0, 1] for x in everyone}
    again = run("-n", "1", "--only", "^zerolayer Q4_1$")
    assert (again[FOUR], again[PEER], again[INT4]) == ([5], [0, 1, 2, 3, 4], [0, 1])
    before = quick.results.read_bytes()
    monkeypatch.setattr(comparison, "commit", lambda: "def")
    with pytest.raises(SystemExit, match="this is def"):
        run("-n", "1", "--more")
    assert quick.results.read_bytes() == before
    assert run("-n", "1") == {key: [0] for key in everyone}


def test_a_ceiling_is_of_the_systems_rounds() -> None:
    roofs = [line(rounds.CEILINGS, i, read_memory=v) for i, v in enumerate((10.0, 30.0, 50.0))]
    found = results.Results([*roofs, line(FOUR, 1), line(FOUR, 2), line(PEER, 0)])
    for system, median in ((FOUR, 40.0), (PEER, 10.0), ("", 30.0)):
        value = found.ceiling(SUITE.name, "read_memory", system)
        assert value is not None and value.median == median
    assert found.ceiling(SUITE.name, "read_memory", INT4) is None


@pytest.mark.parametrize(
    ("count", "least", "most"),
    [
        # P(median of n draws of n is the k-th least or less) = P(Binomial(n, k / n) > n / 2):
        (3, 0, 2),  # k = 1: 7/27
        (5, 0, 4),  # k = 1: 0.058
        (9, 2, 6),  # k = 2: 0.026, k = 3: 0.145
        (15, 4, 10),  # k = 4: 0.017, k = 5: 0.088
    ],
)
def test_the_interval_of_a_median(count: int, least: int, most: int) -> None:
    """Where the other side never moves, the exact distribution is known."""
    values = [10.0 + i * i for i in range(count)]
    above = {i: values[j] for i, j in enumerate(sorted(range(count), key=lambda j: j * 7 % count))}
    found = results.interval(above, dict.fromkeys(range(count), 2.0))
    assert found == (values[least] / 2, values[most] / 2)


def test_the_interval_is_of_all_draws() -> None:
    """Against every one of the 3,125 ways to draw five rounds of five, both sides moving."""
    a, b = (3.0, 3.6, 2.7, 3.3, 5.1), (1.1, 1.7, 1.0, 1.5, 1.3)
    every = sorted(
        statistics.median(a[i] for i in drawn) / statistics.median(b[i] for i in drawn)
        for drawn in itertools.product(range(5), repeat=5)
    )
    found = results.interval(dict(enumerate(a)), dict(enumerate(b)))
    assert found is not None
    for value, share in zip(found, (0.05, 0.95), strict=True):
        below = sum(x < value for x in every) / 3125
        upto = sum(x <= value for x in every) / 3125
        assert below - 0.012 <= share <= upto + 0.012  # 3.5 standard errors of 4,000 draws


def test_rounds_are_drawn_with_both_sides() -> None:
    """A machine that is slow for a round is slow for both: the ratio does not move."""
    below = dict(enumerate((1.0, 8.0, 3.0, 20.0, 5.0)))
    assert results.interval({i: 2 * v for i, v in below.items()}, below) == (2.0, 2.0)
    few = dict(enumerate((1.0, 8.0)))
    assert results.interval(below, few) is None and results.interval(few, below) is None
    apart = {i + 10: v for i, v in below.items()}  # nothing in common: what there is of each
    assert results.interval(apart, below) is not None
    assert results.interval(apart, below) == results.interval(apart, below)


def test_the_table_tells_the_interval() -> None:
    """Of seconds the ratio is the peer's to ours; ``met`` goes by the ratio of medians."""
    ours = [line(FOUR, i, first_token_s=v) for i, v in enumerate((1.0, 1.0, 2.0))]
    peer = [line(PEER, i, first_token_s=v) for i, v in enumerate((3.0, 3.0, 3.0))]
    found = results.verdict(
        results.Results([*ours, *peer]), Line("start", SUITE.name, "first_token", 2.5), {}
    )
    assert (found.ratio, found.interval, found.met) == (3.0, (1.5, 3.0), True)
    row = [x.strip() for x in report.verdict_row(found).split("|")]
    assert row[1:6] == ["start", "**3.00x**", "1.50-3.00", "2.5x", "yes"]
    assert len({x.count("|") for x in (*report.LINES_HEAD, report.verdict_row(found))}) == 1
    found = results.verdict(
        results.Results([*ours[:2], *peer]), Line("start", SUITE.name, "first_token", 2.5), {}
    )
    assert found.interval is None and " | - | 2.5x | yes |" in report.verdict_row(found)
