"""The file of ``--profile``: what it never replaces, when it is tried, what its failure costs."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import loader_fake
import numpy as np
import pytest
from zerolayer.runtime_stub import laps
from zerolayer.runtime_stub import profile as profile_module
from zerolayer.runtime_stub.cli import main

IDS = ("generate", "--tokens", "1,2", "-n", "4", "--ignore-eos")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loader_fake.build(tmp_path_factory.mktemp("artifact") / "fake.zla")


def run(capsys: Any, artifact: Path, *args: object) -> tuple[int, str, str]:
    import tokenizers.tokenizers  # noqa: F401 (one process cannot load a second copy)

    capsys.readouterr()
    code = main([str(a) for a in args], str(artifact))
    out, err = capsys.readouterr()
    assert "Traceback" not in err and "bug" not in err, err
    return code, out, err


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def steps(path: Path) -> list[str]:
    events = json.loads(path.read_text(encoding="ascii"))["traceEvents"]
    return [e["name"] for e in events if e.get("cat") == "step"]


def refused(capsys: Any, artifact: Path, path: object, *command: object) -> None:
    code, out, err = run(capsys, artifact, *(command or IDS), "--profile", path)
    assert (code, out) == (2, ""), (path, err)
    assert "--profile" in err and "give --profile the path of a new file" in err
    assert err.startswith(f"error: {path}" if path else "error: ''")


@pytest.mark.parametrize("how", ["itself", "symlink", "hardlink"])
def test_no_file_of_the_command_is_replaced(
    artifact: Path, tmp_path: Path, capsys: Any, how: str
) -> None:
    mine = tmp_path / "mine.zla"
    mine.write_bytes(artifact.read_bytes())
    prompts = tmp_path / "prompts.txt"
    assert run(capsys, artifact, *IDS, "--profile", prompts)[0] == 0  # even if it is a trace
    x = tmp_path / "x.npy"
    np.save(x, np.arange(5, dtype=np.float32))
    out = tmp_path / "y.npy"
    out.write_bytes(prompts.read_bytes())
    graph = ("run", "--input", f"x={x}", "--output-dir", tmp_path)
    for file, command in (
        (mine, IDS),
        (prompts, ("generate", "--raw", "--prompts-file", prompts)),
        (x, graph),
        (out, graph),
    ):
        path = file
        if how != "itself":
            path = tmp_path / "link"
            (path.symlink_to if how == "symlink" else path.hardlink_to)(file)
        before = file.read_bytes()
        there = names(tmp_path)
        refused(capsys, mine, path, *command)
        assert file.read_bytes() == before and names(tmp_path) == there
        if how != "itself":
            path.unlink()
    out.unlink()
    refused(capsys, mine, out, *graph)  # also one that is not there yet
    assert not out.exists()


def test_only_a_trace_is_replaced(artifact: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "t.json"
    for other in (b"notes", b"", b'{"traceEvents": []}'):
        path.write_bytes(other)
        refused(capsys, artifact, path)
        assert path.read_bytes() == other and names(tmp_path) == ["t.json"]
    path.unlink()
    mask = os.umask(0o027)
    try:
        assert run(capsys, artifact, *IDS, "--profile", path)[0] == 0
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    assert run(capsys, artifact, *IDS, "-n", "2", "--profile", path)[0] == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert steps(path) == ["prefill step", "decode step"]
    path.chmod(0o444)
    refused(capsys, artifact, path)
    assert names(tmp_path) == ["t.json"]


def test_places_that_cannot_be_written(artifact: Path, tmp_path: Path, capsys: Any) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "loop", "folder", "new/", "folder/", "missing/t.json", "n" * 300):
        refused(capsys, artifact, f"{tmp_path}/{name}")
    for path in ("", "-", "/dev/null", "/proc/t.json", "/proc/self/mem"):
        refused(capsys, artifact, path)
    assert names(tmp_path) == ["fifo", "folder", "loop"]
    longest = tmp_path / ("n" * 255)
    assert run(capsys, artifact, *IDS, "--profile", longest)[0] == 0
    # no space is known at once, before the prompt is read
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        refused(capsys, artifact, tmp_path / "t.json", "generate", "--prompts-file", "nothing")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "t.json" not in names(tmp_path)


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), MemoryError()])
def test_the_result_outlives_the_trace(
    artifact: Path, tmp_path: Path, capsys: Any, monkeypatch: Any, failure: BaseException
) -> None:
    plain = run(capsys, artifact, *IDS)[1]
    path = tmp_path / "t.json"

    def fails(*_: object) -> Any:
        raise failure

    monkeypatch.setattr(profile_module, "_tracks", fails)
    code, out, err = run(capsys, artifact, *IDS, "--profile", path)
    assert code == 8 and out == plain
    assert err.startswith(f"error: {path}: the trace cannot be written: ") and ";" in err
    code, out, err = run(capsys, artifact, *IDS, "--profile", path, "--json")
    data = json.loads(out)
    assert code == 8 and data["tokens"] == [int(t) for t in plain.split(",")]
    assert data["profile_error"]["exit_code"] == 8 and data["profile_error"]["where"] == str(path)
    command = ("bench", "-p", 20, "-n", 2, "--repeat", 1, "--no-ceilings", "--json")
    code, out, err = run(capsys, artifact, *command, "--profile", path)
    assert code == 8 and json.loads(out)["decode_calls"]
    assert names(tmp_path) == []


def test_an_interrupt_while_the_trace_is_written(
    artifact: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    plain = run(capsys, artifact, *IDS)[1]
    monkeypatch.setattr(profile_module, "_tracks", interrupted)
    path = tmp_path / "t.json"
    code, out, err = run(capsys, artifact, *IDS, "--profile", path)
    assert (code, out) == (130, plain)
    assert err == f"error: {path}: no trace was written: interrupted\n"
    code, out, _err = run(capsys, artifact, *IDS, "--profile", path, "--json")
    data = json.loads(out)
    assert code == 130 and data["tokens"] and data["profile_error"]["exit_code"] == 130
    assert names(tmp_path) == []


def test_what_came_to_the_path_meanwhile_stays(
    artifact: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    path = tmp_path / "t.json"
    plain = profile_module._tracks

    def other(*args: Any) -> Any:
        path.write_text("somebody's")
        return plain(*args)

    monkeypatch.setattr(profile_module, "_tracks", other)
    code, _out, err = run(capsys, artifact, *IDS, "--profile", path)
    assert code == 8 and "exists and is not a trace" in err
    assert path.read_text() == "somebody's" and names(tmp_path) == ["t.json"]


def test_a_bound_on_what_is_recorded(
    artifact: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    path = tmp_path / "t.json"
    assert run(capsys, artifact, *IDS, "--profile", path)[0] == 0
    assert len(steps(path)) == 4
    monkeypatch.setattr(profile_module, "MAX_LAPS", 1)
    code, _out, err = run(capsys, artifact, *IDS, "--profile", path)
    assert code == 0 and err == f"trace of 1 step, 3 later ones left out: {path}\n"
    assert steps(path) == ["prefill step"]


def test_without_memory_for_a_step_the_tokens_stay(
    artifact: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    plain = run(capsys, artifact, *IDS)[1]
    collect = laps.Recorder.collect

    def second(self: Any, begin: int, end: int, sequences: Any) -> Any:
        if len(sequences) == 1 and sequences[0][1] == 1:
            raise MemoryError
        return collect(self, begin, end, sequences)

    monkeypatch.setattr(laps.Recorder, "collect", second)
    path = tmp_path / "t.json"
    code, out, err = run(capsys, artifact, *IDS, "--profile", path)
    assert (code, out) == (0, plain) and "1 step, 3 later ones left out" in err
    assert steps(path) == ["prefill step"]


def test_names_that_are_not_text(
    artifact: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    from zerolayer.runtime_stub.session import Session

    calls = Session.calls

    def odd(self: Any, *args: Any) -> Any:
        return [{**c, "name": "a\udc80b\u20ac", "kernel": "\ud800"} for c in calls(self, *args)]

    monkeypatch.setattr(Session, "calls", odd)
    path = tmp_path / "t.json"
    assert run(capsys, artifact, *IDS, "--profile", path)[0] == 0
    events = json.loads(path.read_text(encoding="ascii"))["traceEvents"]
    assert "a\udc80b\u20ac" in {e["name"] for e in events}


def start(artifact: Path, *args: object, **how: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", str(artifact), *map(str, args)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, **how
    )


def test_a_reader_that_goes_away(artifact: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    path = tmp_path / "t.json"
    started = start(artifact, *IDS, "--profile", path, stdout=writing)
    os.close(writing)
    _out, err = started.communicate(timeout=120)
    assert started.returncode == 0 and err.startswith(b"trace of ")
    assert steps(path)[0] == "prefill step" and names(tmp_path) == ["t.json"]


def test_nobody_reads_the_messages(artifact: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    path = tmp_path / "t.json"
    command = [sys.executable, "-I", str(artifact), *IDS, "--json", "--profile", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writing, check=False, timeout=120)
    os.close(writing)
    assert done.returncode == 0 and json.loads(done.stdout)["tokens"] and len(steps(path)) == 4


def test_an_interrupted_run(artifact: Path, tmp_path: Path) -> None:
    """Interrupted after its first token, which is written as it comes."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"tokens": [1, 2]}\n' * 20000)
    path = tmp_path / "t.json"
    many = ("generate", "--prompts-file", prompts, "-n", 100, "--ignore-eos", "--profile", path)
    started = start(artifact, *many, stdout=subprocess.DEVNULL)
    while started.poll() is None and not list(tmp_path.glob("*.part")):
        time.sleep(0.01)
    time.sleep(1.0)
    assert started.poll() is None
    os.kill(started.pid, signal.SIGINT)
    _out, err = started.communicate(timeout=120)
    assert started.returncode == 130
    if path.exists():
        assert err.startswith(b"trace of ") and steps(path)[0] == "prefill step"
    else:
        assert b"no trace was written" in err
    assert set(names(tmp_path)) <= {"p.jsonl", "t.json"}
