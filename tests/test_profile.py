"""Traces of steps, read as the trace event format says; the probe of what the machine can do.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace
Event Format").  Complete events (X) of a thread have to nest; times are microseconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli_run import zerolayer
from onnx import helper, numpy_helper
from program_cases import engine, packed_weights, small, step_program, tiny_decoder, zig_cache
from zerolayer.runtime_stub import ceilings, laps, profile
from zerolayer.runtime_stub.cli import main
from zerolayer.runtime_stub.errors import ResourceError
from zerolayer.runtime_stub.step import SamplingParams, StepBatch
from zerolayer.targets import cpu
from zerolayer.targets.facts import resolve_host

GREEDY = (SamplingParams(), 0, array("i"))
WARM = (SamplingParams(temperature=1.0, seed=7), 0, array("i"))
NS = 1e-3  # a nanosecond in the trace's unit
Built = tuple[bytes, Any, Any]


@pytest.fixture(scope="module", params=["balanced", "aggressive"])
def built(request: Any) -> Built:
    """(code, weights, program) for either way of running the phases."""
    target = small(resolve_host())
    graph, program = step_program(tiny_decoder(), target, "int8", request.param)
    binaries = cpu.build(program, target, work_dir=zig_cache())
    return binaries.files[binaries.entry], packed_weights(graph, program), program


def batch_of(tokens: list[int], first: int, row: Any = GREEDY) -> StepBatch:
    batch = StepBatch()
    batch.add(array("i", tokens), first, array("i", [2, 5]), row)
    return batch


# what the code object records -------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_laps_of_every_thread_cover_the_step(built: Built, threads: int) -> None:
    code, weights, program = built
    calls = program.entry_points[0].calls
    batches = [batch_of(list(range(20)), 0), batch_of([3], 20), batch_of([4], 21, WARM)]
    batches.append(batch_of([1, 2], 22, None))  # no logits, no sampling
    with engine(code, weights, program, threads) as run:
        plain = [list(run.step(b)) for b in batches]
        recorder = laps.Recorder(run)
        recorder.start()
        for number, batch in enumerate(batches):
            tokens, step = recorder.step(batch)
            assert list(tokens) == plain[number]
            check_laps(step, calls, threads, len(batch.tokens), bool(batch.rows))
            assert step.sequences == [(batch.positions[0], len(batch.tokens))]
        recorder.stop()
        before = bytes(recorder._laps)
        assert list(run.step(batches[0])) == plain[0]
        assert bytes(recorder._laps) == before


def check_laps(step: Any, calls: Any, threads: int, tokens: int, sampled: bool) -> None:
    assert len(step.threads) == threads
    assert len({(t[0].begin, t[-1].end) for t in step.threads}) == 1  # all have the step in common
    assert step.begin <= step.threads[0][0].begin and step.threads[0][-1].end <= step.end
    runs: dict[int, int] = defaultdict(int)
    for thread in step.threads:
        for lap, following in pairwise(thread):
            assert lap.begin <= lap.end == following.begin
        order = [x.call for x in thread if x.call >= 0]
        assert order == sorted(set(order))  # each once, in the manifest's order
        assert (laps.WAIT in {x.call for x in thread}) == (threads > 1)
        assert [x.call for x in thread].count(laps.SAMPLE) == (2 if sampled else 0)
        for lap in thread:
            if lap.call >= 0:
                runs[lap.call] += 1
                wanted = calls[lap.call].rows
                assert lap.rows == {"T": tokens, "R": int(sampled)}.get(wanted, wanted)
    for number, call in enumerate(calls):
        # all threads, but for what one thread does for all: rows of one token
        alone = tokens == 1 or call.rows == "R"
        assert runs[number] in ((1, threads) if alone else (threads,)), call.name


def test_what_one_thread_does_for_all_is_on_its_track(built: Built) -> None:
    """Which thread that is depends on who comes last: over many steps it is not always the first,
    and its work lies before the others' waiting ends."""
    code, weights, program = built
    calls = program.entry_points[0].calls
    norms = [i for i, c in enumerate(calls) if "Norm" in c.op]
    with engine(code, weights, program, 2) as run:
        recorder = laps.Recorder(run)
        recorder.start()
        for position in range(20):
            _, step = recorder.step(batch_of([position], position))
            for norm in norms:
                found = [(t, x) for t in (0, 1) for x in step.threads[t] if x.call == norm]
                if program.fusion != "aggressive":
                    assert len(found) == 2
                    continue
                ((thread, lap),) = found
                around = [
                    x for x in step.threads[1 - thread] if x.begin < lap.end and x.end > lap.begin
                ]
                assert all(x.call == laps.WAIT for x in around)


def test_bad_arguments_of_the_recorder(built: Built) -> None:
    code, weights, program = built
    with engine(code, weights, program, 2) as run:
        recorder = laps.Recorder(run)
        trace = recorder._trace
        buffer, counts = recorder._laps, recorder._counts
        assert trace(None, buffer, 4, counts) == 1
        assert trace(run.handle, buffer, 0, counts) == 1
        assert trace(run.handle, buffer, 4, None) == 1
        # too small: counted, not written past
        assert trace(run.handle, buffer, 4, counts) == 0
        run.step(batch_of([1], 0))
        assert min(counts) > 4 and buffer[8].end_ns == 0 and buffer[7].end_ns > 0


# the probe --------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_ceilings_are_plausible(built: Built, threads: int) -> None:
    """Between what no such machine falls below and what none reaches per thread."""
    code, weights, program = built
    with engine(code, weights, program, threads) as run:
        found = ceilings.measure(run, 256 << 20)
        for _ in range(30):  # the best of many: a busy machine only ever takes away
            peaks = found.operations
            middle = peaks["bf16"] or 1.5 * peaks["f32"]
            if found.read_memory > 0.1 and peaks["f32"] < middle < peaks["int8"]:
                break
            found.join(ceilings.measure(run, 16 << 20))
        assert run.step(batch_of([1], 0))  # and the engine still works
    assert found.buffer_bytes <= 128 << 20
    assert 0.1 < found.read_memory < 500 * threads and 0.1 < found.read_cache < 2000 * threads
    peaks = dict(found.operations)
    assert 0.5 < peaks["f32"] < 1000 * threads
    assert peaks["f32"] < peaks["int8"] < 20000 * threads
    assert bool(peaks["bf16"]) == ("avx512bf16" in resolve_host().features)
    assert not peaks["bf16"] or peaks["f32"] < peaks["bf16"] < peaks["int8"]
    again = ceilings.Ceilings(ceilings.CCeilings(1e6, 0.5, 1, 1, 1e6), 1, 1)
    lowest, cache = found.memory_range[0], found.read_cache
    found.join(again)
    assert found.read_memory == 1e6 and found.read_cache == cache
    assert found.memory_range == (lowest, 1e6) and found.operations["int8"] == 1e6
    assert found.operations["f32"] == peaks["f32"]
    shown = found.as_dict()  # of a host without the instruction: 0, joined with the 1 above
    assert shown["bf16_gop_per_second"] == round(max(peaks["bf16"], 1.0), 1)


def test_bad_arguments_of_the_probe(built: Built) -> None:
    code, weights, program = built
    import ctypes

    pointer, count = ctypes.c_void_p, ctypes.c_uint64
    memory = (ctypes.c_char * 8192)()
    address = (ctypes.addressof(memory) + 63) & -64
    out = ctypes.addressof(ceilings.CCeilings())
    with engine(code, weights, program, 2) as run:
        probe = laps.function(run, "zl_probe", [pointer, pointer, count, count, pointer])
        for bad in (
            (None, address, 4096, 1024, out), (run.handle, None, 4096, 1024, out),
            (run.handle, address + 1, 4096, 1024, out), (run.handle, address, 1023, 1023, out),
            (run.handle, address, 4096, 1023, out), (run.handle, address, 4096, 8192, out),
            (run.handle, address, 4096, 1024, None),
        ):  # fmt: skip
            assert probe(*bad) == 1
    with (
        engine(code, weights, program, 1) as run,
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ResourceError, match="measurement"),
    ):
        patch.setattr(ceilings, "_BUFFER", 1 << 40)
        patch.setattr(ceilings, "_LARGEST", 1 << 60)
        ceilings.measure(run, 1 << 62)


def test_the_last_cache_comes_from_the_kernel(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "32K", "2048K", "107520K")):
        folder = tmp_path / "sys/devices/system/cpu/cpu0/cache" / f"index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
    assert ceilings.last_cache_bytes(str(tmp_path)) == 105 << 20
    assert ceilings.last_cache_bytes(str(tmp_path / "nothing")) == 32 << 20


# the file ---------------------------------------------------------------------------------------


def read_trace(path: Path) -> dict[str, Any]:
    """The file, every event checked for what its kind must have; ``slices`` by thread."""
    data = json.loads(path.read_text(encoding="utf-8"))
    assert set(data) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert data["displayTimeUnit"] in ("ms", "ns")
    threads: dict[int, str] = {}
    slices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    counters = []
    for event in data["traceEvents"]:
        assert isinstance(event["name"], str) and event["pid"] == 1
        if event["ph"] == "M":
            wanted = {"process_name": "name", "thread_name": "name"}.get(
                event["name"], "sort_index"
            )
            assert list(event["args"]) == [wanted]
            if event["name"] == "thread_name":
                threads[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "C":
            assert all(isinstance(v, (int, float)) and v >= 0 for v in event["args"].values())
            counters.append(event)
        else:
            assert event["ph"] == "X" and event["dur"] >= 0 and event["ts"] >= 0
            slices[event["tid"]].append(event)
    assert set(slices) == set(threads) and counters
    for track in slices.values():
        nests(track)
    return {**data, "threads": threads, "slices": slices}


def nests(track: list[dict[str, Any]]) -> None:
    """A slice lies within the one that is open when it begins, or after it."""
    open_ends: list[float] = []
    for event in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
        while open_ends and open_ends[-1] <= event["ts"] + NS / 2:
            open_ends.pop()
        end = event["ts"] + event["dur"]
        assert not open_ends or end <= open_ends[-1] + NS / 2, event
        open_ends.append(end)


def check_steps(trace: dict[str, Any], calls: list[dict[str, Any]], threads: int) -> list[str]:
    """Every step has all calls on the threads, and their slices add up to it; the steps' names."""
    (loader,) = [t for t, name in trace["threads"].items() if name == "steps"]
    steps = trace["slices"].pop(loader)
    assert len(trace["slices"]) == threads
    for step in steps:
        begin, end = step["ts"] - NS, step["ts"] + step["dur"] + NS
        found: dict[str, int] = defaultdict(int)
        for track in trace["slices"].values():
            inside = [e for e in track if begin <= e["ts"] and e["ts"] + e["dur"] <= end]
            assert sum(e["dur"] for e in inside) == pytest.approx(step["args"]["kernels_us"])
            assert {e["name"] for e in inside if "args" not in e} <= {"wait", "sampling"}
            for event in inside:
                if "args" in event:
                    found[event["name"]] += 1
                    check_arguments(event, calls)
        assert set(found) == {c["name"] for c in calls}
        assert step["args"]["kernels_us"] <= step["dur"] + NS
        if step["args"]["tokens"] > 1:
            few = {c["name"] for c in calls if c["rows"] == "R"}
            assert all(n == threads for name, n in found.items() if name not in few)
    return [s["name"] for s in steps]


def check_arguments(event: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    call = next(c for c in calls if c["name"] == event["name"])
    args = event["args"]
    assert (args["op"], args["kernel"]) == (call["op"], call["kernel"])
    assert args["weight_bytes"] == call["weight_bytes"] <= args["memory_bytes"]
    if not call["op"].startswith("PagedAttention"):
        assert args["flops"] == call["flops_per_row"] * args["rows"]
    # figures are of the call over all threads, which lasts at least as long as on one
    assert args["call_us"] >= event["dur"] - NS
    assert args["gb_per_second"] == pytest.approx(
        args["memory_bytes"] / 1e3 / args["call_us"], abs=1e-3
    )


def artifact_run(artifact: Path, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(artifact), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def manifest_calls(artifact: Path, entry: str) -> list[dict[str, Any]]:
    import zipfile

    with zipfile.ZipFile(artifact) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    (found,) = [e for e in manifest["entry_points"] if e["name"] == entry]
    calls: list[dict[str, Any]] = found["calls"]
    return calls


@pytest.fixture(scope="module", params=["conservative", "aggressive"])
def artifact(request: Any, tiny_llama: Path, tmp_path_factory: Any) -> Path:
    out: Path = tmp_path_factory.mktemp("trace") / f"{request.param}.zla"
    done = zerolayer(
        "compile", tiny_llama, "--target", "x86-64-v3", "--no-verify", "--fusion", request.param,
        "-o", out,
    )  # fmt: skip
    assert done.code == 0, done.err
    return out


@pytest.mark.parametrize("threads", [1, 2])
def test_a_profile_of_bench(artifact: Path, tmp_path: Path, threads: int) -> None:
    out = tmp_path / "trace.json"
    done = artifact_run(
        artifact, "bench", "-p", 30, "-n", 3, "--repeat", 1, "--threads", threads, "--profile",
        out, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trace = read_trace(out)
    calls = manifest_calls(artifact, "step")
    assert check_steps(trace, calls, threads) == ["prefill step", "decode step"]
    assert trace["otherData"]["target"] == "x86-64-v3" and trace["otherData"]["steps"] == 2
    # the table is of the same steps
    data = json.loads(done.stdout.splitlines()[-1])
    for kind in ("prefill", "decode"):
        table = data[f"{kind}_phases"]
        assert sum(r["ns"] for r in table["rows"]) == pytest.approx(table["step_ns"], abs=2)
        phases = {r["phase"]: r for r in table["rows"]}
        assert {"embedding", "norms", "projections", "attention", "mlp", "lm head"} <= set(phases)
        assert list(phases)[-3:] == ["sampling", "waiting", "loader"]
        assert all(
            r["bound"] in ("memory", "cache", "arithmetic") and r["percent_of_ceiling"] > 0
            for r in table["rows"]
            if r["bytes"]
        )
        assert sum(r["ns"] for r in data[f"{kind}_calls"]) == pytest.approx(
            sum(r["ns"] for r in list(phases.values())[:-3]), abs=len(calls)
        )
    weights = sum(c["weight_bytes"] for c in calls)
    decode = data["decode_phases"]["rows"]
    kv = sum(r["bytes"] for r in decode if r["phase"] == "attention")
    assert sum(r["bytes"] for r in decode if r["phase"] != "embedding") == weights + kv
    step = next(e for e in trace["traceEvents"] if e["name"] == "decode step")
    assert step["dur"] * 1e3 == pytest.approx(data["decode_phases"]["step_ns"], abs=1)


def test_a_profile_of_generate(artifact: Path, tmp_path: Path) -> None:
    """The first steps of many: the rest is counted, and the tokens are the same."""
    out = tmp_path / "trace.json"
    command = ("generate", "--tokens", "3,5,8,13", "-n", 40, "--ignore-eos", "--threads", 2)
    plain = artifact_run(artifact, *command)
    done = artifact_run(artifact, *command, "--profile", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    trace = read_trace(out)
    names = check_steps(trace, manifest_calls(artifact, "step"), 2)
    assert names == ["prefill step"] + ["decode step"] * 31
    assert trace["otherData"]["steps_left_out"] == 8
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_no_ceilings(artifact: Path) -> None:
    done = artifact_run(
        artifact, "bench", "-p", 5, "-n", 1, "--repeat", 1, "--no-ceilings", "--json"
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout.splitlines()[-1])
    assert data["ceilings"] is None
    rows = data["decode_phases"]["rows"]
    assert all(r["percent_of_ceiling"] is None and r["bound"] is None for r in rows)


@pytest.mark.parametrize("fusion", ["balanced", "aggressive"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_profile_of_a_graph(tmp_path: Path, fusion: str, threads: int) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((24, 40)).astype(np.float32)
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="first"),
        helper.make_node("MatMul", ["r", "w"], ["m"], name="second"),
        helper.make_node("Tanh", ["m"], ["y"], name="third"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 24])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 40])],
        [numpy_helper.from_array(weight, "w")],
    )
    model, out = tmp_path / "m.onnx", tmp_path / "m.zla"
    opset = [helper.make_opsetid("", 22)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), model)
    done = zerolayer(
        "compile", model, "--target", "x86-64-v3", "--no-verify", "--fusion", fusion, "-o", out,
        "--activations", "f32",
    )  # fmt: skip
    assert done.code == 0, done.err
    x = rng.standard_normal((7, 24)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    ran = artifact_run(
        out, "run", "--input", f"x={tmp_path}/x.npy", "--output-dir", tmp_path, "--threads",
        threads, "--profile", tmp_path / "trace.json",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    expected = np.tanh(np.maximum(x, 0) @ weight)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-4, atol=1e-5)
    trace = read_trace(tmp_path / "trace.json")
    calls = manifest_calls(out, "run")
    assert check_steps(trace, calls, threads) == ["run"]
    rows = {e["args"]["rows"] for t in trace["slices"].values() for e in t if "args" in e}
    assert rows == {7}
    # and when the trace fails, the arrays have been written before
    (tmp_path / "y.npy").unlink()
    before = (tmp_path / "trace.json").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "_tracks", lambda *_: 1 / 0)
        command = ["run", "--input", f"x={tmp_path}/x.npy", "--output-dir", str(tmp_path)]
        code = main([*command, "--profile", f"{tmp_path}/trace.json"], str(out))
    assert code == 6 and (tmp_path / "trace.json").read_bytes() == before
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-4, atol=1e-5)


def test_ceilings_without_memory(artifact: Path, tmp_path: Path) -> None:
    """Less is measured with where there is less; nothing, with a note, where there is none."""
    program = (
        "import resource, runpy, sys\n"
        "limit = int(sys.argv.pop(1)) * 1024\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "250000", str(artifact), "bench", "-p", "5", "-n", "2",
         "--threads", "1", "--json"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["prefill"]["tokens_per_second"] > 0 and data["decode"]["tokens_per_second"] > 0
    assert data["ceilings"] is None or data["ceilings"]["buffer_bytes"] < 125000 * 1024


def test_the_buffer_of_the_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    class Scarce:
        """Memory of a host that gives at most 2 MiB at once."""

        def __init__(self, nbytes: int, what: str) -> None:
            given.append(nbytes)
            if nbytes > 2 << 20:
                raise ResourceError(f"no {what}")
            self.nbytes = nbytes

    monkeypatch.setattr(ceilings, "Memory", Scarce)
    assert ceilings._buffer(8 << 20, 4096).nbytes == 2 << 20
    assert given == [8 << 20, 4 << 20, 2 << 20]
    for asked in (64 << 20, 100):
        with pytest.raises(ResourceError, match="measurement of the ceilings"):
            ceilings._buffer(asked, 4096)
    small = ceilings.Ceilings(ceilings.CCeilings(), 32 << 20, 63 << 20)
    assert "63 MiB" in small.note and "32 MiB" in small.note
    assert ceilings.Ceilings(ceilings.CCeilings(), 32 << 20, 64 << 20).note == ""
