"""What the artifact's commands say about what they measured, and about themselves.

Steps are written by hand or by the stand-in engine, whose calls take 1, 2 and 3 microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import loader_fake
import pytest
from loader_fake import expected
from zerolayer.runtime_stub import bench
from zerolayer.runtime_stub.ceilings import CCeilings, Ceilings
from zerolayer.runtime_stub.cli import main
from zerolayer.runtime_stub.laps import SAMPLE, WAIT, Lap, Step
from zerolayer.runtime_stub.phases import Table
from zerolayer.runtime_stub.profile import Profile


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loader_fake.build(tmp_path_factory.mktemp("artifact") / "fake.zla", vendor=False)


def run(capsys: Any, path: Path, *args: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    capsys.readouterr()
    code = main([str(a) for a in args], str(path))
    return (code, *capsys.readouterr())


def notes(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("note: ")]


# the time of a call -----------------------------------------------------------------------------

CALLS = [
    {"name": "layers.0.mlp.up", "op": "Linear", "kernel": "Linear.int8.x", "rows": "T", "layer": 0,
     "weight_bytes": 8000, "activation_bytes_per_row": 0, "flops_per_row": 40000},
    {"name": "layers.0.mlp.down", "op": "Linear", "kernel": "Linear.int8.x", "rows": "T",
     "layer": 0, "weight_bytes": 4000, "activation_bytes_per_row": 0, "flops_per_row": 2000},
]  # fmt: skip
#: the first thread does all of the first call while the other is late; then the second call, in
#: which the late one comes 500 ns before the other ends, and ends 500 ns after it
UNEQUAL = Step(
    10_000,
    14_500,
    [
        [Lap(10_000, 12_000, 0, 1), Lap(12_000, 13_000, 1, 1), Lap(13_000, 14_000, WAIT, 0)],
        [Lap(10_000, 12_500, WAIT, 0), Lap(12_500, 13_500, 1, 1), Lap(13_500, 14_000, SAMPLE, 0)],
    ],
    [(0, 1)],
)


def test_rates_are_over_the_time_in_which_a_thread_was_at_the_call() -> None:
    """Alone, one thread reads 8000 bytes in 2 us: 4 GB/s, whatever the other did meanwhile."""
    assert UNEQUAL.spans() == {0: [(10_000, 12_000)], 1: [(12_000, 13_500)]}
    ceilings = Ceilings(CCeilings(8.0, 100.0, 10.0, 0.0, 25.0), 1000, 1)
    table = Table({}, CALLS, UNEQUAL, ceilings)
    up, down = sorted(table.calls_as_dicts(), key=lambda r: -r["bytes"])
    assert (up["ns"], up["wall_ns"], up["gb_per_second"]) == (1000, 2000, 4.0)
    assert (down["ns"], down["wall_ns"]) == (1000, 1500)
    assert down["gb_per_second"] == round(4000 / 1500, 3)
    # 40000 operations at 25 a nanosecond take 1600 of the 2000
    assert (up["bound"], up["percent_of_ceiling"]) == ("arithmetic", 80.0)
    phases = table.as_dict()
    rows = {r["phase"]: r for r in phases["rows"]}
    assert sum(r["ns"] for r in phases["rows"]) == phases["step_ns"] == 4500
    assert rows["mlp"]["wall_ns"] == 3500
    assert rows["mlp"]["gb_per_second"] == round(12000 / 3500, 3)
    assert rows["waiting"]["wall_ns"] is None and rows["waiting"]["ns"] == 1750


def test_spans_of_a_call_with_a_pause() -> None:
    """A time in which nobody was at the call is none of its time."""
    laps = [[Lap(0, 10, 0, 1), Lap(10, 90, WAIT, 0)], [Lap(0, 40, WAIT, 0), Lap(40, 90, 0, 1)]]
    assert Step(0, 90, laps, []).spans() == {0: [(0, 10), (40, 90)]}


def traced(session: Any, path: Path, *steps: Step, picked: bool) -> list[dict[str, Any]]:
    profile = Profile(session, str(path))
    profile._calls = CALLS
    profile.picked = picked
    for step in steps:
        profile.add(step)
    profile.write()
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def moved(step: Step, by: int) -> Step:
    threads = [[Lap(x.begin + by, x.end + by, x.call, x.rows) for x in t] for t in step.threads]
    return Step(step.begin + by, step.end + by, threads, step.sequences)


def test_the_trace_has_the_same_rates_and_no_gap(
    artifact: Path, tmp_path: Path, capsys: Any
) -> None:
    from zerolayer.runtime_stub.session import Session

    later = moved(UNEQUAL, 300_000_000)
    with Session(str(artifact)) as session:
        events = traced(session, tmp_path / "t.json", UNEQUAL, later, picked=True)
        assert capsys.readouterr().err == f"trace of 2 steps: {tmp_path}/t.json\n"
        apart = traced(session, tmp_path / "u.json", UNEQUAL, later, picked=False)
    up = next(e for e in events if e["name"] == "layers.0.mlp.up")
    assert (up["args"]["call_us"], up["args"]["gb_per_second"]) == (2.0, 4.0)
    steps = [e for e in events if e["name"] == "decode step"]
    assert [e["ts"] for e in steps] == [0.0, 4.5 + 1000]
    assert [e["args"]["begin_us"] for e in steps] == [0.0, 300_000.0]
    assert [e["ts"] for e in apart if e["name"] == "decode step"] == [0.0, 300_000.0]


def test_counters_are_in_order_and_add_up(artifact: Path, tmp_path: Path) -> None:
    """Two calls at once, 1 and 2 GB/s: 3 while both run."""
    from zerolayer.runtime_stub.session import Session

    both = Step(
        0,
        9000,
        [
            [Lap(0, 8000, 0, 1), Lap(8000, 9000, WAIT, 0)],
            [Lap(0, 3000, WAIT, 0), Lap(3000, 5000, 1, 1), Lap(5000, 9000, WAIT, 0)],
        ],
        [(0, 1)],
    )
    with Session(str(artifact)) as session:
        events = traced(session, tmp_path / "t.json", both, picked=False)
    seen = [(e["ts"], e["args"]["GB/s from memory"]) for e in events if e["ph"] == "C"]
    assert seen == [(0.0, 1.0), (3.0, 3.0), (5.0, 1.0), (8.0, 0.0)]


# bench ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "percent", "spread", "slowest", "says"),
    [
        (0.2, 110, 1.3, (13, 2.6), None),
        (0.21, 100, 1.0, (10, 2), "threads waited for 21% of the decode step"),
        (0.1, 111, 1.0, (10, 2), "decode reached 111% of the arithmetic that was measured"),
        (0.1, 100, 1.31, (10, 2), "a ceiling measured twice differed by 1.3x"),
        (0.1, 100, 1.0, (25, 2), "the slowest prefill took 2.5 times as long as the fastest"),
        (0.1, 100, 1.0, (10, 2.8), "the slowest decode took 1.4 times as long as the fastest"),
    ],
)
def test_signs_of_a_busy_host(
    capsys: Any,
    waiting: float,
    percent: float,
    spread: float,
    slowest: tuple[float, float],
    says: str | None,
) -> None:
    def phases(waiting: float, percent: float) -> dict[str, Any]:
        work = {"phase": "mlp", "share": 0.1, "bound": "arithmetic", "percent_of_ceiling": percent}
        cached = {**work, "bound": "memory", "percent_of_ceiling": 300}  # a cache explains that
        wait = {"phase": "waiting", "share": waiting, "bound": None, "percent_of_ceiling": None}
        return {"rows": [work, cached, wait]}

    data = {
        "notes": ["first"], "ceilings": {"spread": spread},
        "prefill": {"ms": 10, "slowest_ms": slowest[0]},
        "decode": {"ms_per_step": 2, "slowest_ms_per_step": slowest[1]},
        "decode_phases": phases(waiting, percent), "prefill_phases": phases(0.0, 90),
    }  # fmt: skip
    found = bench._noted(data)
    busy = [f"host busy, rates are not comparable: {says}"] if says else []
    assert found == ["first", *busy]
    assert capsys.readouterr().err == "".join(f"note: {text}\n" for text in found)


def test_a_ceiling_that_moves_is_noted(artifact: Path, capsys: Any, monkeypatch: Any) -> None:
    speeds = iter((10.0, 20.0, 10.0, 12.9))

    def measure(*_: object) -> Ceilings:
        return Ceilings(CCeilings(next(speeds), 100.0, 5.0, 0.0, 20.0), 1000, 8000)

    monkeypatch.setattr("zerolayer.runtime_stub.ceilings.measure", measure)
    monkeypatch.setattr(bench, "_WAITED", 100.0)  # the stand-in's times are longer than its step
    args = ("bench", "-p", 20, "-n", 2, "--repeat", 1)
    code, out, err = run(capsys, artifact, *args)
    assert code == 0 and "memory 10.0 to 20.0 GB/s" in out
    assert notes(err) == [
        "note: host busy, rates are not comparable: a ceiling measured twice differed by 2.0x"
    ]
    code, out, err = run(capsys, artifact, *args, "--json")
    assert (code, notes(err), json.loads(out)["ceilings"]["spread"]) == (0, [], 1.29)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-p", 124, "-n", 4], "-p 124 with -n 4 is more than the context of 128; use -p 123 or"),
        (["-p", 9, "-n", 4, "--max-context", 12], "more than the context of 12; use -p 7 or less"),
        (["-n", 127], "-n 127 does not fit: with a prompt it is more than the context of 128"),
        (["--max-context", 129], "--max-context 129 is more than the artifact's 128"),
    ],
)
def test_a_bench_longer_than_the_context_is_refused(
    artifact: Path, capsys: Any, args: list[object], says: str
) -> None:
    code, out, err = run(capsys, artifact, "bench", *args)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1


def test_the_slowest_run_is_told(artifact: Path, capsys: Any, monkeypatch: Any) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def takes(name: str, *seconds: float) -> None:
        real, left = getattr(bench._Runner, name), iter(seconds)

        def run(*args: Any) -> Any:
            clock[0] += next(left, 0.03)
            return real(*args)

        monkeypatch.setattr(bench._Runner, name, run)

    takes("prefill", 0.0, 0.5, 0.02, 0.04)  # the first is the first token's
    takes("decode", 0.4, 0.04, 0.08)
    args = ("bench", "-p", 20, "-n", 4, "--repeat", 3, "--no-ceilings")
    code, out, err = run(capsys, artifact, *args)
    assert code == 0
    assert "prefill 20 tokens: 1000.0 tokens/s (20.0 ms, the slowest of 3 500.0)\n" in out
    assert "100.0 tokens/s (10.00 ms per step, the slowest of 3 100.00)\n" in out
    assert "the slowest decode took 10.0 times as long as the fastest" in err
    data = json.loads(run(capsys, artifact, *args, "--json")[1])
    assert (data["repeat"], data["prefill"]["ms"], data["prefill"]["slowest_ms"]) == (3, 30, 30)
    assert (data["decode"]["ms_per_step"], data["decode"]["slowest_ms_per_step"]) == (7.5, 7.5)


def test_the_default_prompt_is_shortened_aloud(artifact: Path, capsys: Any) -> None:
    args = ("bench", "-n", 4, "--repeat", 1, "--no-ceilings", "--json")
    code, out, err = run(capsys, artifact, *args)
    data = json.loads(out)
    assert code == 0 and data["prefill"]["tokens"] == 123
    short = "the prompt has 123 tokens, not 512: the context is 128"
    assert f"note: {short}\n" in err and short in data["notes"]
    code, out, err = run(capsys, artifact, *args, "-p", 123)
    assert code == 0 and "the prompt has" not in err


def test_the_path_of_the_trace_is_said(artifact: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "t.json"
    args = ("bench", "-p", 20, "-n", 2, "--repeat", 1, "--no-ceilings", "--json")
    _code, out, err = run(capsys, artifact, *args, "--profile", path)
    assert json.loads(out)["profile"] == str(path) and f"trace of 2 steps: {path}\n" in err
    _code, out, _err = run(capsys, artifact, *args)
    assert json.loads(out)["profile"] is None
    generate = ("generate", "--tokens", "1", "-n", 40, "--ignore-eos", "--profile", path)
    _code, out, err = run(capsys, artifact, *generate)
    assert err == f"trace of 32 steps, 8 later ones left out: {path}\n"
    _code, out, _err = run(capsys, artifact, *generate, "--json")
    assert json.loads(out)["profile"] == str(path)


# generate ---------------------------------------------------------------------------------------


def test_an_answer_cut_by_the_context_is_noted(artifact: Path, tmp_path: Path, capsys: Any) -> None:
    args = ["generate", "--ignore-eos", "--max-context", 10]
    code, out, err = run(capsys, artifact, *args, "--tokens", "1,2")
    assert code == 0 and out == ",".join(map(str, expected([1, 2], 8))) + "\n"
    assert err == "note: the context of 10 tokens ended the answer\n"
    assert run(capsys, artifact, *args, "--tokens", "1,2", "--json")[2] == ""
    assert run(capsys, artifact, *args, "--tokens", "1,2", "-n", 8)[2] == ""
    file = tmp_path / "p.jsonl"
    file.write_text('{"tokens": [1]}\n{"tokens": [1, 2, 3, 4]}\n')
    err = run(capsys, artifact, *args, "--prompts-file", file, "-n", 7)[2]
    assert err == "note: the context of 10 tokens ended 1 of 2 answers\n"


# about itself -----------------------------------------------------------------------------------


def entry_points(*names: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = loader_fake.manifest()["entry_points"]
    return [e for e in found if e["name"] in names]


@pytest.mark.parametrize(
    ("entries", "commands"),
    [
        (["step"], ["info", "check", "generate", "chat", "verify", "bench", "--version"]),
        (["run"], ["info", "check", "verify", "run", "--version"]),
    ],
)
def test_help_lists_what_the_artifact_has(
    tmp_path: Path, capsys: Any, entries: list[str], commands: list[str]
) -> None:
    path = loader_fake.build(tmp_path / "a.zla", vendor=False, entry_points=entry_points(*entries))
    code, out, _err = run(capsys, path, "--help")
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert code == 0 and listed == commands
    unknown = run(capsys, path, "qqqqqq")
    assert unknown[0] == 2 and f"use {', '.join(commands[:-1])}\n" in unknown[2]


def test_help_without_an_artifact_lists_all(tmp_path: Path, capsys: Any) -> None:
    code, out, _err = run(capsys, tmp_path / "none.zla", "--help")
    assert code == 0 and "  generate" in out and "  run" in out


def test_version(artifact: Path, capsys: Any) -> None:
    code, out, err = run(capsys, artifact, "--version", "--json")
    data = json.loads(out)
    info = json.loads(run(capsys, artifact, "info", "--json")[1])
    assert (code, err) == (0, "")
    assert data == {
        "model": info["model"]["name"], "target": info["target"]["name"],
        "format": info["format"], "digest": info["digest"], "tools": info["tools"],
    }  # fmt: skip
    code, out, _err = run(capsys, artifact, "--version")
    assert out == f"fake for fake-target, digest {info['digest'][:16]}, zerolayer ?\n"
    assert run(capsys, artifact, "--version", "x")[0] == 2
