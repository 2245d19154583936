"""The comparison's arithmetic, on results made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "bench" / "runners"))

import common  # noqa: E402
from zerolayer.targets.program import SCREENED  # noqa: E402

from bench import measure, prepare, report, results, start  # noqa: E402
from bench.matrix import LINES, SUITES, Line  # noqa: E402
from bench.work import _SCREENED, Work, work  # noqa: E402

MANIFEST: dict[str, Any] = {
    "memory": {"kv_bytes_per_token": 512},
    "options": {"fusion": "balanced"},
    "quantization": [{"stored_format": "Q4_0"}],
    "entry_points": [
        {
            "name": "step",
            "calls": [
                {"name": "layers.0.attn.qkv", "layer": 0, "op": "QkvRopeCache", "rows": "T",
                 "weight_bytes": 3000, "activation_bytes_per_row": 40, "flops_per_row": 6000},
                {"name": "layers.0.attn.attention", "layer": 0, "op": "PagedAttention", "rows": "T",
                 "weight_bytes": 0, "activation_bytes_per_row": 60, "flops_per_row": 100},
                {"name": "logits", "layer": None, "op": "Linear", "rows": "R",
                 "weight_bytes": 7000, "activation_bytes_per_row": 0, "flops_per_row": 14000},
            ],
        }
    ],
}  # fmt: skip


def process(system: str, index: int, **values: float) -> dict[str, Any]:
    """What one run of the first suite (512 tokens, 128 steps) leaves behind."""
    usual = {"decode_s": 1.0, "prefill_s": 1.0, "first_token_s": 1.0, "peak_rss_bytes": 1e6}
    return {"suite": "smollm2-2", "system": system, "round": index, **usual, **values}


@pytest.fixture
def measured() -> results.Results:
    ours = [process("zerolayer Q4_1", i, decode_s=t) for i, t in enumerate((0.5, 0.4, 8.0))]
    slow = [process("llama.cpp Q4_1", i, decode_s=t) for i, t in enumerate((2.0, 1.0, 4.0))]
    fast = [process("OpenVINO int4", i, decode_s=0.8, first_token_s=4.0) for i in range(3)]
    roof = [{"suite": "smollm2-2", "system": "ceilings", "round": 0, "read_memory": 1e-2}]
    failed = [{"suite": "smollm2-2", "system": "ONNX Runtime int4", "round": 0, "error": "no"}]
    return results.Results([*ours, *slow, *fast, *roof, *failed])


def test_a_step_reads_its_weights_once_and_each_sequences_cache() -> None:
    assert work(MANIFEST).decode_bytes(10, batch=3) == 3000 + 7000 + 3 * 10 * 512


def test_a_prompt_computes_attention_over_half_of_itself_and_logits_once() -> None:
    attention = 100 * (1 + 2 + 3 + 4)  # the first token sees one position, the last all four
    assert work(MANIFEST).prefill_operations(4) == 4 * 6000 + attention + 14000


def test_medians_and_ranges(measured: results.Results) -> None:
    value = measured.stat("smollm2-2", "zerolayer Q4_1", "decode")
    assert value == results.Stat(128 / 0.5, 128 / 8.0, 128 / 0.4, 3)


def test_a_line_names_the_best_peer_and_the_part_of_the_ceiling(measured: results.Results) -> None:
    line = Line("decode", "smollm2-2", "decode", 1.5, (4,), roof="read_memory")
    works: dict[str, Work] = {"smollm2-135m-q4_1.zla": work(MANIFEST)}
    v = results.verdict(measured, line, works)
    assert v.peer is not None and v.peer[0].name == "OpenVINO int4"
    assert v.ratio == pytest.approx(0.8 / 0.5)
    # 256 tokens/s, each 10000 bytes of weights and 576 positions of cache, of 1e7 bytes a second
    assert v.roof == pytest.approx(256 * (10000 + 576 * 512) / 1e7)
    assert v.met is True


def test_of_seconds_less_is_better(measured: results.Results) -> None:
    v = results.verdict(measured, Line("start", "smollm2-2", "first_token", 3.0), {})
    assert v.peer is not None and v.peer[0].name == "llama.cpp Q4_1"
    assert (v.ratio, v.met) == (1.0, False)


def test_what_was_not_measured_is_named(measured: results.Results) -> None:
    assert measured.errors("smollm2-2") == {"ONNX Runtime int4": "no"}
    v = results.verdict(measured, Line("decode", "fusion", "decode", 1.0), {})
    assert (v.ratio, v.met, v.ours) == (None, None, None)


def test_every_line_compares_us_with_a_peer() -> None:
    for line in LINES:
        suite = next(s for s in SUITES if s.name == line.suite)
        peers = {s.peer == "zerolayer" for s in suite.systems if results.allowed(line, s)}
        assert peers == {True, False}, line.work


def test_chunks_fill_steps_and_keep_order() -> None:
    steps = list(common.chunks([[1, 2, 3], [4, 5]], 2))
    assert steps == [[(0, 0, [1, 2])], [(0, 2, [3]), (1, 0, [4])], [(1, 1, [5])]]


def test_rows_of_rotations_there_and_back() -> None:
    rows = np.arange(8)[:, None]  # two heads of four rows
    assert prepare.pairs(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert (prepare.halves(prepare.pairs(rows, 2), 2) == rows).all()


def test_the_readme_has_the_ratios_between_its_marks(
    measured: results.Results, tmp_path: Path
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- ratios -->\nold\n<!-- end of ratios -->\nz\n", encoding="utf-8")
    verdicts = [results.verdict(measured, line, {}) for line in LINES]
    for line in measured.lines:
        line |= {"date": "2026-01-02", "commit": "abc123"}
    report.write_readme(measured, verdicts, readme)
    text = readme.read_text(encoding="utf-8")
    # a round that is drawn twice of three times decides: 2 / 0.5, 1 / 0.4 or 4 / 8
    row = "SmolLM2 Q4_1, same file, 2 threads | 4.00x | 0.50-4.00 | Q4_1 | llama.cpp Q4_1 |"
    assert f"| decode, {row}" in text
    known = {v.line.work: v.ratio for v in verdicts if v.ratio is not None}
    least = min(known.values())  # peak memory and prefill are as large as the peers'
    assert least == 1.0 and "| prefill, SmolLM2, 8-bit, 2 threads | 1.00x |" not in text
    assert (
        f"Measured 2026-01-02, commit abc123. The least ratio of all {len(known)} lines measured is"
        " 1.00x; 0 of them are behind the best peer, "
    ) in text
    assert "old" not in text and text.startswith("a\n") and text.endswith("z\n")
    assert set(report.README_LINES) <= {line.work for line in LINES}
    marks = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(mark in marks for mark in report.RATIOS)


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "docs").glob("performance*.md")))
def test_a_page_on_performance_is_what_its_source_says(tmp_path: Path, name: str) -> None:
    """bench/page*.md with the measured parts of docs/performance*.md: the report was run since."""
    there = ROOT / "docs" / name
    page = tmp_path / name
    page.write_bytes(there.read_bytes())
    report.write_report(results.Results([]), [], {}, {}, page, "")
    assert page.read_text(encoding="utf-8") == there.read_text(encoding="utf-8")


def test_the_readme_hides_no_loss(measured: results.Results, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- ratios -->\n<!-- end of ratios -->\n", encoding="utf-8")
    lines = [
        *(line for line in LINES if line.work == "decode, SmolLM2, 4-bit, 2 threads"),
        Line("another", "smollm2-2", "prefill", 1.5),  # not one of README_LINES
    ]
    for process_ in measured.of("smollm2-2", "zerolayer Q4_1"):
        process_["prefill_s"] = 2.0  # the peers take 1.0
    report.write_readme(measured, [results.verdict(measured, x, {}) for x in lines], readme)
    text = readme.read_text(encoding="utf-8")
    assert "| another | 0.50x | " in text
    assert "| decode, SmolLM2, 4-bit, 2 threads | 1.60x |" in text
    assert "is 0.50x; 1 of them is behind the best peer" in text


def test_a_kernel_above_its_ceiling_is_explained() -> None:
    row = {"group": "k", "count": 1, "ns": 1000, "share": 1.0, "gbs": 40.0, "gops": 1.0}
    for nbytes, part, mark, word in (
        (100e6, 0.99, "99 % |", ""),
        (100e6, 1.5, r"150 % \*", "(30 MB) can have kept of a step: the"),
        (100e6, 1.05, "105 % +", "may have stayed in the last-level cache (30 MB)"),  # 70 of 100
        (20e6, 1.5, "150 % +", "may have stayed"),
    ):
        text = "\n".join(
            report.calls_table("t", [{**row, "bytes": nbytes, "part": part}], "read", int(30e6))
        )
        assert mark in text and word in text
        assert ("Above" in text) == (part > 1)
    small = {**row, "bytes": 20e6, "part": 1.05}  # would fit by itself, but the step does not
    whole = report.calls_table("t", [small, {**small, "bytes": 580e6}], "read", int(30e6))
    assert sum(r"105 % +" in line for line in whole) == 2
    small["part"] = 1.06
    whole = report.calls_table("t", [small, {**small, "bytes": 580e6}], "read", int(30e6))
    assert sum(r"106 % \*" in line for line in whole) == 2
    text = "\n".join(
        report.calls_table("t", [{**row, "bytes": 1.0, "part": 1.01}], "int8 peak", int(30e6))
    )
    assert "Above 100 % of the int8 peak measured in its round: the ceiling of that round" in text


SCRIPTS = (
    *("bench/footprint.py", "bench/compile_memory.py", "bench/start.py", "bench/neighbours.py"),
    "bench/streams.py",
)
NOTHING_INSTALLED = {"PATH": os.environ["PATH"]}


@pytest.mark.parametrize("what", [*SCRIPTS, "bench", "bench.prepare"])
def test_help_needs_nothing_installed(what: str) -> None:
    """``-S`` hides every package."""
    how = [what] if what in SCRIPTS else ["-m", what]
    command = [sys.executable, "-S", *how, "--help"]
    done = subprocess.run(
        command, cwd=ROOT, env=NOTHING_INSTALLED, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage:" in done.stdout
    assert what != "bench/compile_memory.py" or "--target" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["-m", "bench.prepare", "--peers", "x"], "gguf"),
        (["-m", "bench", "--peers", "x"], "matplotlib"),
        (["bench/compile_memory.py"], "zerolayer"),
        (["bench/footprint.py"], "zerolayer"),
    ],
)
def test_what_is_not_installed_is_named_in_one_line(arguments: list[str], module: str) -> None:
    command = [sys.executable, "-S", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=NOTHING_INSTALLED, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: no module {module}")
    assert done.stderr.endswith("pip install -e .[dev,bench]\n") and done.stderr.count("\n") == 1


def test_a_runners_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--model=a=b", "--new=3", "--calls"])
    usual: dict[str, Any] = {
        "prompt": 512,
        "threads": 2,
        "batch": 1,
        "kv": "",
        "state": "",
        "ids": "",
    }
    usual |= {"vocabulary": 31000, "steps": False, "drawn": False}
    assert vars(common.arguments()) == {**usual, "model": "a=b", "new": 3, "calls": True}
    suite = SUITES[0]
    monkeypatch.setattr(sys, "argv", ["x", "--model=m", *suite.arguments()])
    given = common.arguments()
    assert (given.prompt, given.new) == (suite.prompt, suite.new)
    assert (given.threads, given.batch) == (suite.threads, suite.batch)
    monkeypatch.setattr(sys, "argv", ["x", "--modle=m"])
    with pytest.raises(SystemExit):
        common.arguments()


def test_the_first_process_brings_the_file_and_makes_one_token(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(bytes(3_000_000))
    (tmp_path / "b").write_bytes(b"1234")
    assert measure.cached_share(tmp_path) == 1.0  # written a moment ago
    measure.drop_cached(tmp_path)
    assert 0.0 <= measure.cached_share(tmp_path) <= 1.0  # 1 where files are in memory anyway
    measure.drop_cached(tmp_path / "b")
    assert measure.cached_share(tmp_path / "b") in (0.0, 1.0)
    assert (tmp_path / "sub" / "a").read_bytes() == bytes(3_000_000)
    assert (tmp_path / "b").read_bytes() == b"1234"
    place = measure.Place(tmp_path, tmp_path / "results.jsonl")
    for suite in SUITES:
        for system in suite.systems:
            command = place.first_command(system, suite)
            assert {"--prompt=16", "--new=1", "--batch=1", f"--threads={suite.threads}"} <= set(
                command
            )
            assert f"--model={place.model(system)}" in command
            assert not any(a.startswith(("--state", "--steps")) for a in command)


def test_our_runner_measures_an_artifact_in_an_empty_environment(
    tiny_artifact: Path, tmp_path: Path
) -> None:
    place = measure.Place(tmp_path, tmp_path / "results.jsonl")
    measure.make_environment(place)
    python = tmp_path / "venv-zerolayer" / "bin" / "python"
    packages = subprocess.run(
        [python, "-c", "import sys; print(*[p for p in sys.path if p.endswith('-packages')])"],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert [list(Path(p).iterdir()) for p in packages] == [[]]
    model = tmp_path / "m.zla"
    model.symlink_to(tiny_artifact)
    command = [str(python), str(ROOT / "bench" / "runners" / "ours.py"), f"--model={model}"]
    out = measure.measured([*command, "--prompt=20", "--new=4", "--threads=1"], 1)
    # the prompt's ids are for models of 31,000 words; this one's kernels refuse them
    assert "zerolayer_stub/driver_cpu.py" in out["error"]
    assert "a token id is outside the model's vocabulary" in out["error"]


def test_the_phases_of_a_start_are_all_of_it(tiny_artifact: Path) -> None:
    ids = "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16"
    begin = time.monotonic()
    found = start.phases(sys.executable, tiny_artifact, ids, 1)
    wall = time.monotonic() - begin
    assert set(found) == {*start.PHASES, "same step again"}
    assert all(value >= 0 for value in found.values())
    assert 0.9 * wall < sum(found.values()) <= wall
    lines = start.table(sys.executable, [tiny_artifact], [{
        **{name: [1.0, 3.0, 2.0] for name in (*start.PHASES, start.FIRST, start.WHOLE)},
        "floor": [0.5], "same step again": [0.25],
    }])  # fmt: skip
    assert "| first step, 16 tokens | 2.0 | 0.2 |" in lines
    assert f"| {start.WHOLE} | 2.0 |  |" in lines


def test_the_start_runner_does_what_the_command_does(tiny_artifact: Path) -> None:
    """The same modules of the loader, apart from what writes text: the phases are the command's."""
    show = "import json, sys; sys.stderr.write(json.dumps(sorted(sys.modules)))"
    ids = "1,2,3"

    def modules(*command: str) -> set[str]:
        program = (
            f"import runpy, sys\nsys.argv = {list(command)!r}\ntry: "
            f"runpy.run_path({command[0]!r}, run_name='__main__')\nexcept SystemExit: pass\n{show}"
        )
        env = os.environ | {"BENCH_START": "0"}
        run = subprocess.run([sys.executable, "-I", "-c", program], check=True,
                             capture_output=True, text=True, env=env)  # fmt: skip
        return {m for m in json.loads(run.stderr) if m.startswith("zerolayer_stub")}

    product = modules(str(tiny_artifact), "generate", "--tokens", ids, "-n", "1")
    runner = modules(str(ROOT / "bench" / "runners" / "start.py"), str(tiny_artifact), ids, "1")
    assert runner == product


def refused(script: str, *arguments: object) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "bench" / script), *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_what_the_scripts_refuse(tiny_artifact: Path, tmp_path: Path) -> None:
    """In a line of their own or of the artifact's, with its exit code."""
    missing, other = tmp_path / "no.zla", tmp_path / "other.py"
    other.write_text("print('{}')\n")
    for script in ("neighbours.py", "start.py"):
        assert "no.zla" in refused(script, missing)[1]
        assert "other.py" in refused(script, other)[1]
    for option in ("--rounds", "--steps"):
        code, text = refused("neighbours.py", tiny_artifact, option, 0)
        assert code == 2 and option in text
    for option in ("-n", "--threads"):
        code, text = refused("start.py", tiny_artifact, option, 0)
        assert code == 2 and option in text
    code, text = refused("start.py", tiny_artifact, "-n", 1, "--threads", 10**6)
    assert code == 2 and "--threads" in text
    assert "nowhere" in refused("start.py", tiny_artifact, "--python", tmp_path / "nowhere")[1]
    code, text = refused("neighbours.py", tiny_artifact, "--steps", 10**6)
    assert code == 2 and "context" in text


def test_the_scripts_measure_a_small_model(tiny_artifact: Path) -> None:
    def run(script: str, *arguments: object) -> str:
        command = [sys.executable, str(ROOT / "bench" / script), *map(str, arguments)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "first step, 16 tokens" in run("start.py", tiny_artifact, "-n", 1, "--threads", 1)
    found = json.loads(run("neighbours.py", tiny_artifact, "--rounds", 1, "--steps", 4, "--json"))
    assert found["alone"] > 0 and found["two models, together"] > 0


def test_prompts_stay_in_a_small_vocabulary() -> None:
    for words in (1, 7, 300, 301, 512):
        assert all(0 <= i < words for i in common.prompt_ids(64, 3, words))
    assert min(common.prompt_ids(64)) >= 300


def test_the_operators_of_a_screened_projection_are_the_targets() -> None:
    assert set(_SCREENED) == SCREENED


def test_streams_are_measured() -> None:
    """Every way has a rate for each round; a thread more than there are CPUs is refused."""
    command = [sys.executable, "bench/streams.py", "--threads", "1", "--rounds", "2", "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)
    ways = {(r["format"], r["streams"], r["ahead"]) for r in rows}
    assert len(ways) == len(rows) and {r["streams"] for r in rows} == {1, 2, 4}
    assert {r["format"] for r in rows} == {"Q4_0", "Q8_0"}
    assert {"only reads", "not asked", "1536"} <= {r["ahead"] for r in rows}
    assert all(len(r["gb_per_second"]) == 2 and min(r["gb_per_second"]) > 0 for r in rows)
    command[3] = "9999"
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "--threads in 1.." in done.stderr
