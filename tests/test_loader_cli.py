"""The artifact's command line: an artifact with a stand-in engine, run as users run a real one."""

from __future__ import annotations

import array
import ast
import errno
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import loader_fake
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loader_fake import BLOCK_BYTES, EOS, USER, VOCAB, expected
from zerolayer.runtime_stub import errors, npy, options
from zerolayer.runtime_stub.cli import COMMANDS, main
from zerolayer.runtime_stub.container import Artifact
from zerolayer.runtime_stub.detect import host_facts
from zerolayer.runtime_stub.driver_cpu import CpuEngine
from zerolayer.runtime_stub.memory import RESERVE_BYTES, MemoryPlan, human
from zerolayer.runtime_stub.session import Session

STUB = Path(__file__).parent.parent / "runtime_stub"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loader_fake.build(tmp_path_factory.mktemp("artifact") / "fake.zla")


@pytest.fixture(scope="module")
def ids_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact without ``vendor/``."""
    out = tmp_path_factory.mktemp("artifact") / "ids.zla"
    return loader_fake.build(out, vendor=False)


def bare(path: Path, *args: str, **kw: Any) -> subprocess.CompletedProcess[bytes]:
    """Runs the file with a Python that has no site-packages and an empty environment."""
    env = {"PATH": "/usr/bin"}
    return subprocess.run(
        [sys.executable, "-I", "-S", str(path), *args],
        check=False,
        env=env,
        capture_output=True,
        timeout=60,
        **kw,
    )


class Run:
    """``main`` in this process: code, stdout, stderr, the JSON of the last line."""

    def __init__(
        self, capsys: pytest.CaptureFixture[str], path: Path, *args: str, **kw: Any
    ) -> None:
        import tokenizers.tokenizers  # noqa: F401 (one process cannot load a second copy)

        capsys.readouterr()
        self.code = main(args, str(path), **kw)
        self.out, self.err = capsys.readouterr()
        assert "Traceback" not in self.err

    @property
    def json(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return data


# running as users do ----------------------------------------------------------------------------


def test_runs_bare_from_a_read_only_folder(artifact: Path) -> None:
    folder = artifact.parent
    mode = folder.stat().st_mode
    folder.chmod(0o555)
    try:
        before = sorted(folder.iterdir())
        run = bare(artifact, "generate", "hi", "-n", "12", "--json", cwd=folder)
        assert run.returncode == 0, run.stderr
        data = json.loads(run.stdout.splitlines()[-1])
        assert data["prompt_tokens"] == [USER, *b"hi"]
        assert data["tokens"] == expected([USER, *b"hi"], 12, stop=[EOS])
        assert data["usage"]["completion_tokens"] == len(data["tokens"])
        assert {"open_ms", "detect_ms", "code_ms", "create_ms", "first_token_ms"} <= set(
            data["timings"]
        )
        assert sorted(folder.iterdir()) == before
    finally:
        folder.chmod(mode)


def test_runs_as_a_random_user_and_executable(artifact: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    artifact.chmod(0o755)
    for folder in artifact.parents:
        if folder.stat().st_mode & stat.S_IXOTH == 0:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
        if folder == Path("/tmp"):
            break
    run = subprocess.run(
        [str(artifact), "generate", "--tokens", "1,2,3", "-n", "6"],
        env={"PATH": "/usr/bin"}, capture_output=True, timeout=60, user=54321, group=54321,
        check=False,
    )  # fmt: skip
    assert run.stdout.decode() == ",".join(map(str, expected([1, 2, 3], 6))) + "\n", run.stderr


def test_chat_remembers(artifact: Path) -> None:
    run = bare(artifact, "chat", "-n", "4", "--json", "--system", "be", input=b"one\ntwo\n")
    assert run.returncode == 0, run.stderr
    messages = json.loads(run.stdout.splitlines()[-1])["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    first = bytes(t for t in expected([*b"[be]", USER, *b"one"], 4) if t < 256)
    assert messages[2]["content"] == first.decode("utf-8", "replace")


def test_streaming_and_prompt_from_stdin(artifact: Path) -> None:
    run = bare(artifact, "generate", "--raw", "-n", "8", "-", input="é".encode())
    tokens = expected([loader_fake.BOS, *"é".encode()], 8, stop=[EOS])
    text = bytes(t for t in tokens if t < 256).decode("utf-8", "replace")
    assert run.stdout.decode() == text + "\n"


def settle(pid: int) -> None:
    """Waits until a process has used no CPU time for half a second."""
    last, still = "", 0
    while still < 5:
        time.sleep(0.1)
        now = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]
        still = still + 1 if now == last and int(now) > 0 else 0
        last = now


def test_interrupt_is_130_and_quiet(artifact: Path) -> None:
    command = [sys.executable, "-I", "-S", str(artifact), "chat"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"a\n")
        process.stdin.flush()
        process.stdout.readline()  # the first answer: it waits for the next message now
        settle(process.pid)
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_interrupt_while_generating(artifact: Path) -> None:
    command = [sys.executable, "-I", "-S", str(artifact), "generate", "-", "--raw"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        settle(process.pid)  # it waits for the prompt
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.parametrize("command", [["generate", "-", "--raw"], ["chat"]])
def test_interrupt_with_json_is_one_object(artifact: Path, command: list[str]) -> None:
    line = [sys.executable, "-I", "-S", str(artifact), *command, "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        settle(process.pid)  # it waits for the prompt
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in err
    assert out.count(b"\n") == 1
    data = json.loads(out)
    assert (data["error"], data["exit_code"]) == ("interrupted", 130)


@pytest.mark.parametrize("command", [["info"], ["info", "--wrong"]])
def test_an_interrupt_after_the_object_does_not_add_to_it(
    ids_only: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """The same handlers before, during and after; the exit code tells of the interrupt."""
    write, heard = sys.stdout.write, list[int]()

    def custom(number: int, _frame: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    def late(text: str) -> int:
        count = write(text)
        os.kill(os.getpid(), signal.SIGINT)
        return count

    before = signal.signal(signal.SIGINT, custom)
    try:
        monkeypatch.setattr(sys.stdout, "write", late)
        code = main([*command, "--json"], str(ids_only))
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGINT) is custom
    finally:
        signal.signal(signal.SIGINT, before)
    out = capsys.readouterr().out
    assert (code, heard) == (130, [signal.SIGINT])
    assert out.count("\n") == 1
    assert ("error" in json.loads(out)) == (len(command) > 1)


def test_who_was_told_to_ignore_interrupts_does(artifact: Path) -> None:
    """As under ``nohup`` or in the background of a script."""
    command = [sys.executable, "-I", "-S", str(artifact), "chat", "--json"]
    pipe = subprocess.PIPE
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        settle(process.pid)
        process.send_signal(signal.SIGINT)
        out, _err = process.communicate(b"", timeout=30)
    assert process.returncode == 0 and json.loads(out)["turns"] == 0


def test_two_interrupts_end_what_nobody_reads(artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"tokens": [1]}\n' * 3000)  # more than a pipe holds
    command = [sys.executable, "-I", "-S", str(artifact), "generate", "--prompts-file", str(file)]
    command += ["-n", "1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        for _ in range(2):
            settle(process.pid)
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stdout is not None and process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
    assert b"Traceback" not in err
    assert out.startswith(b'{"results"') and b"interrupted" not in out


def test_closed_output_is_no_error(ids_only: Path) -> None:
    command = f"{sys.executable} -I -S {ids_only} check >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", command], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("chat <&-", 0),
        ("generate --raw - <&-", 2),
        ("generate --raw - <&- >&- 2>&-", 2),
        ("check --json >/dev/full", 8),
        ("check >/dev/full 2>/dev/full", 8),
        ("generat --json >/dev/full 2>/dev/full", 2),
    ],
)
def test_closed_and_full_streams_keep_the_exit_code(
    artifact: Path, command: str, code: int
) -> None:
    line = f"{sys.executable} -I -S {artifact} {command}"
    done = subprocess.run(["/bin/sh", "-c", line], check=False, timeout=60, capture_output=True)
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr and b"bug" not in done.stderr


def test_a_reader_that_goes_away_is_no_error(artifact: Path) -> None:
    command = f"{sys.executable} -I -S {artifact} generate --tokens 1 -n 120 | head -c 1"
    pipe = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, timeout=60, check=False
    )  # fmt: skip
    assert pipe.stderr == b""


def test_many_processes_at_once(ids_only: Path) -> None:
    command = [sys.executable, "-I", "-S", str(ids_only), "generate", "--tokens", "5", "-n", "4"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    outputs = {p.communicate(timeout=60)[0] for p in running}
    assert outputs == {(",".join(map(str, expected([5], 4))) + "\n").encode()}


# generate ---------------------------------------------------------------------------------------


def test_many_prompts_run_together(artifact: Path, tmp_path: Path, capsys: Any) -> None:
    lines = [json.dumps({"tokens": [i, 2 * i]}) for i in range(6)] + ['"xy"', '{"prompt": "z"}', ""]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(lines))
    run = Run(capsys, artifact, "generate", "--raw", "--ignore-eos", "-n", "20", "--prompts-file",
              str(file), "--json")  # fmt: skip
    assert run.code == 0
    bos = loader_fake.BOS
    prompts = [*([i, 2 * i] for i in range(6)), [bos, *b"xy"], [bos, *b"z"]]
    assert [r["tokens"] for r in run.json["results"]] == [expected(p, 20) for p in prompts]
    assert run.json["scheduler"]["steps"] < 8 * 20
    assert run.json["usage"]["completion_tokens"] == 160


def test_sampling_and_seed(artifact: Path, capsys: Any) -> None:
    args = ("generate", "--tokens", "9", "-n", "5", "--temperature", "0.7", "--json",
            "--ignore-eos")  # fmt: skip
    run = Run(capsys, artifact, *args, "--seed", "11")
    assert run.json["tokens"] == expected([9], 5, seed=11)
    assert run.json["text"] is None
    drawn = Run(capsys, artifact, *args).json
    assert drawn["tokens"] == expected([9], 5, seed=int(drawn["sampling"]["seed"]))


def test_each_prompt_of_a_file_has_its_own_seed(
    artifact: Path, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"tokens": [9]}\n' * 3)
    args = ("generate", "--prompts-file", str(file), "-n", "5", "--ignore-eos", "--json",
            "--temperature", "0.7", "--seed")  # fmt: skip
    results = Run(capsys, artifact, *args, "11").json["results"]
    assert [r["seed"] for r in results] == [11, 12, 13]
    assert [r["tokens"] for r in results] == [expected([9], 5, seed=s) for s in (11, 12, 13)]
    last = Run(capsys, artifact, *args, str((1 << 64) - 1)).json["results"]
    assert [r["seed"] for r in last] == [(1 << 64) - 1, 0, 1]
    greedy = Run(capsys, artifact, *args[:-3], "--seed", "11").json["results"]
    assert [r["seed"] for r in greedy] == [None] * 3


def test_sampling_options_without_a_temperature_get_a_note(
    ids_only: Path, tmp_path: Path, capsys: Any
) -> None:
    args = ("generate", "--tokens", "9", "-n", "2")
    run = Run(capsys, ids_only, *args, "--top-k", "3", "--seed", "0")
    assert run.code == 0 and run.err == (
        "note: --top-k, --seed have no effect: without --temperature the likeliest token is taken\n"
    )
    zero = Run(capsys, ids_only, *args, "--top-p", "0.5", "--temperature", "0").err
    assert "--top-p has no effect: at --temperature 0 " in zero
    assert Run(capsys, ids_only, *args, "--repetition-penalty", "1.5").err == ""
    assert Run(capsys, ids_only, *args, "--seed", "1", "--temperature", "1").err == ""
    warm = {**loader_fake.manifest()["tokenizer"], "generation": {"temperature": 0.5}}
    model = loader_fake.build(tmp_path / "w.zla", vendor=False, tokenizer=warm)
    assert Run(capsys, model, *args, "--seed", "1").err == ""


def test_stop_string_and_stop_token(artifact: Path, capsys: Any) -> None:
    tokens = expected([loader_fake.BOS, *b"go"], 30)
    text = bytes(t for t in tokens if t < 256).decode("utf-8", "replace")
    at = next(i for i in range(4, 30) if text[i : i + 2].isascii() and len(text[i : i + 2]) == 2)
    stop = text[at : at + 2]
    run = Run(capsys, artifact, "generate", "--raw", "go", "--ignore-eos", "-n", "30", "--stop",
              stop, "--json").json  # fmt: skip
    assert run["text"] == text[: text.index(stop)]
    assert (run["finish_reason"], run["stopped_by"]) == ("stop", "stop_string")
    # the tokens' own way to say it: a special token as a stop string stops by id
    special = Run(capsys, artifact, "generate", "--raw", "go", "--stop", "<user>", "--json").json
    assert special["tokens"] == expected([loader_fake.BOS, *b"go"], 256, stop=[EOS, USER])[:125]


def test_context_end_is_reported(artifact: Path, capsys: Any) -> None:
    run = Run(capsys, artifact, "generate", "--tokens", "1,2", "--ignore-eos", "--json").json
    assert len(run["tokens"]) == loader_fake.MAX_CONTEXT - 2
    assert (run["finish_reason"], run["stopped_by"]) == ("length", "context")
    short = Run(capsys, artifact, "generate", "--tokens", "1,2", "--ignore-eos", "--max-context",
                "10", "--json").json  # fmt: skip
    assert short["tokens"] == expected([1, 2], 8)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([], 2, ""),
        (["generat"], 2, "did you mean generate"),
        (["generate", "--temprature", "1", "x"], 2, "did you mean --temperature"),
        (["generate", "x", "-n"], 2, "-n needs a value"),
        (["generate", "x", "-n", "0"], 2, "-n '0': must be at least 1"),
        (["generate", "x", "-n", "9" * 20], 2, "not in 1.."),
        (["check", "--max-context", "0"], 2, "must be at least 1"),
        (["generate", "x", "-n", "9" * 5000], 2, "not in 1.."),
        (["generate", "x", "-n", "--1"], 2, "not an integer"),
        (["generate", "x", "--seed", str(1 << 64)], 2, f"not in 0..{(1 << 64) - 1}"),
        (["generate", "x", "--seed", "-" + "9" * 30], 2, f"not in 0..{(1 << 64) - 1}"),
        (["generate", "x", "--temperature", "nan"], 2, "not in 0..100"),
        (["generate", "x", "--kv-memory", "12Q"], 2, "not a size"),
        (["generate", "x", "--kv-memory", "3"], 2, f"use --kv-memory {BLOCK_BYTES} or more"),
        (["generate", "x", "--kv-memory", "8T"], 8, "use --kv-memory"),
        (["generate", "x", "--raw=1"], 2, "takes no value"),
        (["generate", "x", "y"], 2, "more than one prompt"),
        (["generate", "x", "--tokens", "1"], 2, "more than one prompt"),
        (["generate", ""], 2, "the prompt is empty"),
        (["generate", "--tokens", ""], 2, "the prompt is empty"),
        (["generate", "--tokens", "1,b"], 2, "'b' is not a token id"),
        (["generate", "--tokens", "1,,2"], 2, "'' is not a token id"),
        (["generate", "--tokens", f"{VOCAB}"], 2, f"outside the vocabulary of {VOCAB}"),
        (["generate", "--tokens", "1", "--stop", "a"], 2, "--stop needs text"),
        (["generate", "a\udcff"], 2, "not valid UTF-8 (character 1 of 2)"),
        (["generate", "--raw", "--system", "s", "x"], 2, "--system needs the chat template"),
        (["generate", "--raw", "x" * 200], 2, "has 201 tokens, the context holds 128"),
        (["generate", "--prompts-file", "/nonexistent"], 3, "/nonexistent: cannot read"),
        (["check", "extra"], 2, "unexpected argument 'extra'"),
        (["run", "--input", "q=x"], 2, "inputs: x"),
        (["run"], 2, "no --input for x; the inputs are x f32["),
        (["run", "--input", "x=/nonexistent"], 3, "/nonexistent: cannot be read"),
        (["bench", "--batch", "5"], 2, "at most 4 sequences"),
        (["generate", "--tokens", "1", "--threads", "101"], 8, "could not start its threads"),
        (["generate", "--tokens", "1", "--threads", "1025"], 2, "not in 1..1024"),
        (["verify", "--threads", "1025"], 2, "not in 1..1024"),
        (["run", "--threads", "1025"], 2, "not in 1..1024"),
    ],
)
def test_mistakes_are_one_line_and_a_code(
    artifact: Path, capsys: Any, args: list[str], code: int, says: str
) -> None:
    run = Run(capsys, artifact, *args)
    assert run.code == code
    assert says in (run.err or run.out)
    if args:
        assert run.err.count("\n") == 1 and run.err.startswith("error: ")


@pytest.mark.parametrize(("quota", "cpus"), [(None, 3), (1.5, 2), (0.4, 1)])
def test_more_threads_than_cpus_get_a_note(
    ids_only: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, quota: float | None, cpus: int
) -> None:
    facts = {"cpus_affinity": (0, 1, 2), "cpu_quota": quota}
    monkeypatch.setattr(
        "zerolayer.runtime_stub.detect.host_facts", lambda mask: host_facts(mask, facts)
    )
    args = ("generate", "--tokens", "1", "-n", "2", "--threads")
    assert Run(capsys, ids_only, *args, str(cpus)).err == ""
    run = Run(capsys, ids_only, *args, str(cpus + 1))
    assert run.code == 0 and run.err.count("\n") == 1
    assert f"note: {cpus + 1} threads are more than the {cpus} CPU" in run.err


@pytest.mark.parametrize(
    ("commands", "kind", "says"),
    [
        (["generate", "bench", "chat"], "run", "is a graph, not a language model"),
        (["run"], "step", "is a language model, not a graph"),
    ],
)
def test_a_command_for_another_kind_of_artifact_is_wrong_usage(
    tmp_path: Path, capsys: Any, commands: list[str], kind: str, says: str
) -> None:
    entries = [e for e in loader_fake.manifest()["entry_points"] if e["name"] == kind]
    path = loader_fake.build(tmp_path / "a.zla", vendor=False, entry_points=entries)
    for command in commands:
        run = Run(capsys, path, command)
        assert run.code == 2 and says in run.err, (command, run.err)


def test_errors_as_json(artifact: Path, capsys: Any) -> None:
    run = Run(capsys, artifact, "generate", "", "--json")
    assert run.json["error"] == "usage" and run.json["exit_code"] == run.code == 2


def test_invalid_utf8_everywhere(artifact: Path, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"good\nbad \xff\n")
    run = Run(capsys, artifact, "generate", "--prompts-file", str(file))
    assert run.code == 2 and "byte 9, line 2" in run.err
    stdin = bare(artifact, "generate", "-", input=b"\xc3")
    assert stdin.returncode == 2 and b"not valid UTF-8" in stdin.stderr
    argument = subprocess.run(
        [sys.executable, str(artifact), "generate", b"\xff\xfe"],
        check=False, capture_output=True, timeout=60,
    )  # fmt: skip
    assert argument.returncode == 2 and b"not valid UTF-8" in argument.stderr


@pytest.mark.parametrize("line", ["{", "3", '{"tokens": [1, "x"]}', '{"tokens": []}', "[" * 5000])
def test_bad_prompt_lines(artifact: Path, tmp_path: Path, capsys: Any, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('"ok"\n' + line)
    run = Run(capsys, artifact, "generate", "--prompts-file", str(file))
    assert run.code in (2, 3) and f"{file}:2" in run.err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a", "seed": 3}', "unknown key 'seed'; known: prompt, tokens"),
        ('{"tokens": [1], "max_tokens": 3}', "unknown key 'max_tokens'; known: prompt, tokens"),
        ('{"tokens": [1], "prompt": "a"}', "both prompt and tokens"),
    ],
)
def test_no_key_of_a_prompts_file_is_passed_over(
    ids_only: Path, tmp_path: Path, capsys: Any, line: str, says: str
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"tokens": [1]}\n' + line)
    run = Run(capsys, ids_only, "generate", "--prompts-file", str(file))
    assert run.code == 3 and f"error: {file}:2: {says}" in run.err


def test_a_long_prompt_of_a_file_is_named(artifact: Path, tmp_path: Path, capsys: Any) -> None:
    """Too long for the context, or for the memory that was given: the line, and what would do."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"tokens": [1, 2]}\n' + json.dumps({"tokens": [3] * 40}) + "\n")
    args = ("generate", "--prompts-file", str(file), "-n", "2")
    run = Run(capsys, artifact, *args, "--kv-memory", str(BLOCK_BYTES))
    need = -(-41 // (BLOCK_BYTES // 4)) * BLOCK_BYTES  # 40 tokens and one more, 4 bytes each
    assert run.code == 8 and f"{file}:2: the prompt has 40 tokens" in run.err
    assert f"use --kv-memory {need} or more" in run.err
    assert Run(capsys, artifact, *args, "--kv-memory", str(need)).code == 0
    run = Run(capsys, artifact, *args, "--max-context", "20")
    assert run.code == 2 and f"{file}:2: the prompt has 40 tokens" in run.err


def test_without_vendor_ids_still_work(ids_only: Path) -> None:
    run = bare(ids_only, "generate", "--tokens", "3,4", "-n", "5")
    assert run.stdout.decode() == ",".join(map(str, expected([3, 4], 5))) + "\n"
    refused = bare(ids_only, "generate", "hello")
    assert refused.returncode == 4
    assert b"token ids only" in refused.stderr and b"--tokens" in refused.stderr


# check, verify, info, bench, run ----------------------------------------------------------------


def test_check_passes_and_says_what_fits(artifact: Path, capsys: Any) -> None:
    run = Run(capsys, artifact, "check", "--json")
    assert run.code == 0 and run.json["ok"]
    memory = run.json["memory"]
    assert memory["weights_bytes"] == 256 and memory["workspace_bytes"] == 4096
    assert memory["kv_bytes_per_token"] == 4 and memory["largest_context"] == 128
    refused = Run(capsys, artifact, "check", "--max-context", "129")
    assert refused.code == 2 and "--max-context 129 is more than the artifact's 128" in refused.err
    refused = Run(capsys, artifact, "generate", "--tokens", "1", "--max-context", "129")
    assert refused.code == 2 and "--max-context 129 is more than the artifact's 128" in refused.err


def test_missing_features_are_refused_by_name_before_weights(
    artifact: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(capsys, artifact, "check", "--json", mask=["avx2", "fma"])
    assert run.code == 5 and not run.json["ok"]
    assert {m["name"] for m in run.json["mismatches"]} == {"avx2", "fma"}
    monkeypatch.setattr("zerolayer.runtime_stub.container.Artifact.map_weights", None)
    for command in (["generate", "x"], ["chat"], ["bench"]):
        refused = Run(capsys, artifact, *command, "--mask-features", "avx2")
        assert refused.code == 5
        assert "lacks avx2" in refused.err and "fake-target" in refused.err


def test_another_architecture_is_refused(tmp_path: Path, capsys: Any) -> None:
    target = {"requires": {"arch": "aarch64", "features": ["sve2"]}}
    path = loader_fake.build(tmp_path / "arm.zla", vendor=False, target=target)
    run = Run(capsys, path, "generate", "--tokens", "1")
    assert run.code == 5
    assert "compiled for aarch64" in run.err and "this host is x86_64" in run.err


def test_too_little_memory_is_refused_with_the_breakdown(
    artifact: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = 256 + 4096 + RESERVE_BYTES

    def starved(available: int) -> None:
        monkeypatch.setattr(
            "zerolayer.runtime_stub.detect.host_facts",
            lambda mask: host_facts(mask, {"memory_available": available}),
        )

    starved(fixed + 3 * 64 + 5)  # three blocks of 16 positions
    run = Run(capsys, artifact, "check", "--json")
    assert run.code == 0 and run.json["memory"]["largest_context"] == 48
    assert Run(capsys, artifact, "check", "--max-context", "49").code == 8
    assert Run(capsys, artifact, "generate", "--tokens", "1", "-n", "40").code == 0
    refused = Run(capsys, artifact, "generate", "--tokens", "1", "-n", "80")
    assert refused.code == 8
    assert "context of 81 tokens" in refused.err and "--max-context 48" in refused.err
    assert (
        f"weights 256 B + workspace 4 KiB + KV 4 B per token + loader {human(RESERVE_BYTES)}"
        in (refused.err)
    )
    starved(fixed - 1)
    run = Run(capsys, artifact, "check", "--json")
    assert run.code == 8 and not run.json["memory"]["fits"]
    monkeypatch.setattr("zerolayer.runtime_stub.text.TextCodec", None)  # not even the tokenizer
    for command in (["generate", "x"], ["chat"], ["bench"], ["verify"]):
        refused = Run(capsys, artifact, *command)
        assert refused.code == 8 and "are available" in refused.err


def test_memory_arithmetic() -> None:
    class Facts:
        memory_available = RESERVE_BYTES + 1000 + 200 + 7 * 320 + 319
        memory_total = 1 << 40
        memory_limit = None

    manifest = {
        "memory": {"weights_bytes": 1000, "workspace_bytes": 200, "kv_block_size": 32,
                   "kv_block_bytes": 320},
        "limits": {"max_context": 100_000},
    }  # fmt: skip
    plan = MemoryPlan(manifest, Facts())  # type: ignore[arg-type]
    assert (plan.largest_blocks, plan.largest_context, plan.kv_per_token) == (7, 224, 10)
    plan.require(224, "x")
    with pytest.raises(errors.ResourceError):
        plan.require(225, "x")
    for bad in (None, -1, True, "5", 1 << 63):
        broken = {**manifest, "memory": {**manifest["memory"], "weights_bytes": bad}}
        with pytest.raises(errors.IntegrityError, match="weights_bytes"):
            MemoryPlan(broken, Facts())  # type: ignore[arg-type]


def test_verify_finds_damage_and_wrong_numbers(artifact: Path, tmp_path: Path, capsys: Any) -> None:
    good = Run(capsys, artifact, "verify", "--json")
    assert good.code == 0 and good.json["golden"] == {"cases": 2, "tokens": 16, "steps": 9}
    data = bytearray(artifact.read_bytes())
    data[65536 + 100] ^= 1
    damaged = tmp_path / "damaged.zla"
    damaged.write_bytes(data)
    assert Run(capsys, damaged, "verify").code == 6
    cases = json.loads(loader_fake.golden([1, 2, 3]))
    cases["cases"][0]["expect_ids"][5] ^= 1
    wrong = loader_fake.build(
        tmp_path / "w.zla", vendor=False, members={"golden.json": json.dumps(cases).encode()}
    )
    run = Run(capsys, wrong, "verify")
    assert run.code == 7 and "at token 6" in run.err
    assert Run(capsys, wrong, "verify", "--hashes-only").code == 0
    assert Run(capsys, wrong, "verify", "--hashes-only", "--json").json["golden_why"] == (
        "--hashes-only"
    )
    odd = loader_fake.build(tmp_path / "o.zla", vendor=False, members={"golden.json": b"[1]"})
    assert Run(capsys, odd, "verify").code == 6


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"numerics": {"reason": "--no-verify"}}, "--no-verify"),
        ({"numerics": {}}, "the build did not say why"),
        ({"entry_points": loader_fake.manifest()["entry_points"][1:]},
         "only language models have them"),
    ],
)  # fmt: skip
def test_verify_says_why_no_golden_prompt_ran(
    tmp_path: Path, capsys: Any, changes: dict[str, Any], why: str
) -> None:
    path = loader_fake.build(tmp_path / "a.zla", vendor=False, golden=None, **changes)
    run = Run(capsys, path, "verify", "--json")
    assert (run.code, run.json["golden"], run.json["golden_why"]) == (0, "not run", why)
    assert run.err == f"note: no golden prompts in this artifact: {why}\n"


def test_verify_on_a_host_of_another_kind(artifact: Path, capsys: Any) -> None:
    run = Run(capsys, artifact, "verify", mask=["avx2"])
    assert run.code == 5 and "avx2" in run.err and "hashes ok" in run.out
    assert Run(capsys, artifact, "verify", "--json", mask=["avx2"]).json["exit_code"] == 5
    assert Run(capsys, artifact, "verify", "--hashes-only", mask=["avx2"]).code == 0


def test_manifest_and_code_must_agree(tmp_path: Path, capsys: Any) -> None:
    path = loader_fake.build(tmp_path / "a.zla", vendor=False, memory={"kv_block_bytes": 128})
    run = Run(capsys, path, "generate", "--tokens", "1")
    assert run.code == 6 and "kv_block_bytes = 128, the code object 64" in run.err


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    out: list[tuple[Any, ...]] = []
    for key, item in items:
        out.append((*path, key))
        if isinstance(item, (dict, list)):
            out += places(item, (*path, key))
    return out


PLACES = places(loader_fake.manifest())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(place=st.sampled_from(PLACES), value=ODD, drop=st.booleans(), which=st.integers(0, 4))
def test_odd_manifests_are_errors(
    artifact: Path, capsys: Any, place: tuple[Any, ...], value: Any, drop: bool, which: int
) -> None:
    """A manifest with one value replaced or removed, behind a digest that is right."""
    manifest = loader_fake.manifest()
    parent: Any = manifest
    for key in place[:-1]:
        parent = parent[key]
    if drop:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    commands = (
        ["info"], ["check"], ["generate", "--tokens", "1", "-n", "2"],
        ["generate", "x", "-n", "2", "--max-context", "100"], ["bench", "-n", "2", "-p", "3"],
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Artifact, "check", lambda self: good_check(self, manifest))
        run = Run(capsys, artifact, *commands[which])
    assert run.code in (0, 2, 3, 4, 5, 6, 8), (place, run.err)
    assert "unexpected" not in run.err


REAL_CHECK = Artifact.check


def good_check(artifact: Artifact, manifest: dict[str, Any]) -> None:
    REAL_CHECK(artifact)
    artifact.manifest = {**artifact.manifest, **dict.fromkeys(loader_fake.manifest()), **manifest}


@pytest.mark.parametrize(
    "changes",
    [
        {"dims": [1]},
        {"calls": [{"op": {}}]},
        {"calls": [{"op": "Gather"}]},
        {"calls": [{"op": "Gather", "inputs": []}]},
        {"calls": [{"op": "Gather", "name": "g", "inputs": ["none", "x"], "constants": {"C": 1}}]},
        {"calls": [{"op": "Gather", "name": "g", "inputs": ["y", "x"], "constants": {"C": 0}}]},
        {"calls": [{"op": "Gather", "name": "g", "inputs": ["y", "x"]}]},
    ],
)
def test_odd_graphs_are_errors(
    artifact: Path, tmp_path: Path, capsys: Any, monkeypatch: Any, changes: dict[str, Any]
) -> None:
    import numpy as np

    manifest = loader_fake.manifest()
    manifest["entry_points"][1].update(changes)
    monkeypatch.setattr(Artifact, "check", lambda self: good_check(self, manifest))
    np.save(tmp_path / "x.npy", np.arange(5, dtype=np.float32))
    run = Run(capsys, artifact, "run", "--input", f"x={tmp_path}/x.npy")
    assert run.code == 6 and "unexpected" not in run.err


def test_not_an_artifact(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "x.zla"
    file.write_text("hello")
    assert Run(capsys, file, "check").code == 3
    assert Run(capsys, tmp_path / "none.zla", "info").code == 3


def test_info_and_help(artifact: Path, capsys: Any) -> None:
    run = Run(capsys, artifact, "info", "--json")
    assert run.json["model"]["name"] == "fake" and run.json["members"] > 20
    for command in COMMANDS:
        shown = Run(capsys, artifact, command, "--help")
        assert shown.code == 0 and "--json" in shown.out and "mask" not in shown.out


def test_bench_prefills_every_sequence(
    artifact: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a decode step reads a position of a sequence, a step has written it."""
    written: set[tuple[int, int]] = set()
    step = CpuEngine.step

    def watched(engine: CpuEngine, batch: Any, *args: Any, **more: Any) -> Any:
        bounds = pairwise(batch.seq_starts)
        for (begin, end), blocks in zip(bounds, batch.block_tables, strict=True):
            slots = [(blocks[p // 16], p % 16) for p in range(batch.positions[end - 1] + 1)]
            first = batch.positions[begin]
            assert written.issuperset(slots[:first])
            written.update(slots[first:])
        return step(engine, batch, *args, **more)

    monkeypatch.setattr(CpuEngine, "step", watched)
    run = Run(capsys, artifact, "bench", "-p", "20", "-n", "3", "--batch", "2", "--json")
    assert run.code == 0, run.err
    assert {block for block, _ in written} == {0, 1, 2, 3}


@pytest.mark.parametrize(("threads", "said"), [("1", ", 1 thread (as"), ("2", ", 2 threads (as")])
def test_bench_counts_threads(artifact: Path, capsys: Any, threads: str, said: str) -> None:
    assert said in Run(capsys, artifact, "bench", "-n", "2", "--threads", threads).out


def test_bench_reports_every_part(artifact: Path, capsys: Any) -> None:
    """The fake engine's calls take 1, 2 and 3 us, then 4 us of waiting; it reads 10 GB/s."""
    run = Run(capsys, artifact, "bench", "-p", "40", "-n", "8", "--batch", "2", "--json")
    assert run.code == 0
    data = run.json
    assert data["prefill"]["tokens"] == 40 and data["decode"]["sequences"] == 2
    assert data["process_start_to_first_token_ms"] > 0
    calls = {c["call"]: c for c in data["decode_calls"]}
    assert calls["layers.*.c"]["ns"] == 3000
    assert calls["layers.*.c"]["bytes"] == 64 and calls["layers.*.c"]["flops"] == 2 * 16
    assert calls["layers.*.c"]["gb_per_second"] == round(64 / 3000, 3)
    phases = data["decode_phases"]
    assert phases["tokens"] == 2 and data["prefill_phases"]["tokens"] == 32
    rows = {r["phase"]: r for r in phases["rows"]}
    assert phases["bytes"] == 3 * 64  # in the cache; 32 operations of float32 take 6.4 ns
    assert phases["percent_of_ceiling"] == round(100 * 3 * 6.4 / phases["step_ns"], 1)
    assert rows["other"]["ns"] == 6000 and rows["waiting"]["ns"] == 4000
    assert sum(r["ns"] for r in phases["rows"]) == pytest.approx(phases["step_ns"])
    assert sum(r["share"] for r in phases["rows"]) == pytest.approx(1, abs=1e-3)
    assert data["ceilings"]["read_memory_gb_per_second"] == 10
    assert data["ceilings"]["bf16_gop_per_second"] is None
    one = Run(capsys, artifact, "bench", "-n", "4", "--json").json
    percent = {c["call"]: c["percent_of_roofline"] for c in one["decode_calls"]}
    assert percent == {"layers.*.c": 25.0, "layers.*.b": None, "layers.*.a": None}


def test_bench_says_what_bounds_a_row(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """By hand: 10 GB/s from memory, 100 from the cache, 20 Gop/s of int8, 5 of float32."""
    manifest = loader_fake.manifest()
    manifest["entry_points"][0]["calls"] = [
        {"name": "embed", "op": "Embed", "kernel": "Embed.x", "rows": "T", "weight_bytes": 0,
         "activation_bytes_per_row": 2000, "flops_per_row": 0},
        {"name": "layers.0.mlp.up", "op": "Linear", "kernel": "Linear.int8.x", "rows": "T",
         "layer": 0, "weight_bytes": 10000, "activation_bytes_per_row": 40, "flops_per_row": 30000},
        {"name": "layers.0.attn.attention", "op": "PagedAttention", "kernel": "PagedAttention.x",
         "rows": "T", "layer": 0, "weight_bytes": 0, "activation_bytes_per_row": 40,
         "flops_per_row": 50, "inputs": ["q", "k_cache.0", None],
         "constants": {"window": 12, "kv_dtype": "f32"}},
    ]  # fmt: skip
    manifest["buffers"].append(
        {"name": "k_cache.0", "kind": "kv", "dtype": "f32", "shape": [16], "nbytes": 16 * 300}
    )
    artifact = loader_fake.build(tmp_path / "a.zla", vendor=False, **{
        k: manifest[k] for k in ("entry_points", "buffers")
    })  # fmt: skip

    def bench(cache_bytes: int) -> dict[str, Any]:
        monkeypatch.setattr("zerolayer.runtime_stub.ceilings.last_cache_bytes", lambda: cache_bytes)
        run = Run(capsys, artifact, "bench", "-p", "20", "-n", "2", "--threads", "1", "--json")
        assert run.code == 0, run.err
        return {r["phase"]: r for r in run.json["decode_phases"]["rows"]}

    rows = bench(1000)
    assert list(rows) == ["embedding", "attention", "mlp", "sampling", "waiting", "loader"]
    # 2000 bytes of one row in 1 us
    assert rows["embedding"]["bound"] == "memory"
    assert rows["embedding"]["percent_of_ceiling"] == pytest.approx(100 * 200 / 1000)
    # 10000 bytes take 1000 ns, 30000 operations 1500
    assert rows["mlp"]["bound"] == "arithmetic"
    assert rows["mlp"]["percent_of_ceiling"] == pytest.approx(100 * 1500 / 2000)
    # position 20 attends to 12, itself among them: 600 operations take 120 ns, 3600 bytes 360
    assert rows["attention"]["bytes"] == 3600 and rows["attention"]["flops"] == 600
    assert rows["attention"]["bound"] == "memory"
    assert rows["attention"]["percent_of_ceiling"] == pytest.approx(100 * 360 / 3000)
    # 15600 bytes stay in a cache of 20000
    rows = bench(20000)
    assert rows["embedding"]["bound"] == "cache" and rows["attention"]["bound"] == "arithmetic"
    assert rows["embedding"]["percent_of_ceiling"] == pytest.approx(100 * 20 / 1000)
    shown = Run(capsys, artifact, "bench", "-p", "20", "-n", "2", "--threads", "1")
    assert shown.code == 0 and "75.0% arithmetic" in shown.out and "memory 10.0 GB/s" in shown.out
    assert "waiting" in shown.out and "loader" in shown.out


def test_code_that_cannot_measure_is_refused(tmp_path: Path, capsys: Any) -> None:
    old = {"kernels/fake.so": loader_fake.engine_code("WITHOUT_TRACE")}
    artifact = loader_fake.build(tmp_path / "old.zla", members=old, vendor=False)
    out = tmp_path / "trace.json"
    command = ["generate", "--tokens", "1,2", "-n", "2"]
    assert Run(capsys, artifact, *command).code == 0
    run = Run(capsys, artifact, *command, "--profile", str(out))
    assert run.code == 4 and "no zl_trace" in run.err and "compile" in run.err
    run = Run(capsys, artifact, "bench", "-n", "2")
    assert run.code == 4 and "no zl_probe" in run.err
    assert [p.name for p in tmp_path.iterdir()] == ["old.zla"]


def test_what_profile_may_not_write(
    artifact: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    (tmp_path / "folder").mkdir()
    command = ["generate", "--tokens", "1,2", "-n", "2", "--profile"]
    for bad in ("", "missing/x.json", "folder", "/dev/null", f"{artifact}/x.json"):
        place = bad if bad.startswith("/") or not bad else str(tmp_path / bad)
        run = Run(capsys, artifact, *command, place)
        assert run.code == 2 and "--profile" in run.err, bad
        assert run.out == ""  # before anything was generated
    (tmp_path / "link.json").symlink_to(tmp_path / "folder" / "real.json")
    assert Run(capsys, artifact, *command, str(tmp_path / "link.json")).code == 0
    good = (tmp_path / "folder" / "real.json").read_text()
    assert json.loads(good)["traceEvents"] and (tmp_path / "link.json").is_symlink()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    run = Run(capsys, artifact, *command, str(tmp_path / "link.json"))
    assert run.code == 8 and "No space left" in run.err
    assert (tmp_path / "folder" / "real.json").read_text() == good
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["real.json"]


def test_run_reads_and_writes_arrays(artifact: Path, tmp_path: Path, capsys: Any) -> None:
    import numpy as np

    np.save(tmp_path / "x.npy", np.arange(5, dtype=np.float32))
    args = ["run", "--output-dir", str(tmp_path), "--json", "--input"]
    run = Run(capsys, artifact, *args, f"x={tmp_path}/x.npy")
    assert run.json["outputs"][0]["shape"] == [5]
    assert np.load(tmp_path / "y.npy").tolist() == [0, 2, 4, 6, 8]
    np.save(tmp_path / "long.npy", np.zeros(17, np.float32))
    assert Run(capsys, artifact, *args, f"x={tmp_path}/long.npy").code == 8
    np.save(tmp_path / "int.npy", np.zeros(3, np.int32))
    assert "must be f32" in Run(capsys, artifact, *args, f"x={tmp_path}/int.npy").err


def test_run_shows_first_values_and_makes_the_folder(
    artifact: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    np.save(tmp_path / "x.npy", np.array([0.25, -1, np.nan, *range(7)], dtype=np.float32))
    given = ("run", "--input", f"x={tmp_path}/x.npy")
    assert Run(capsys, artifact, *given).out == "y  f32[10]  0.5, -2, nan, 0, 2, 4, 6, 8, ...\n"
    first = Run(capsys, artifact, *given, "--json").json["outputs"][0]["first"]
    assert first == [0.5, -2, "nan", 0, 2, 4, 6, 8]
    new = tmp_path / "a" / "b"
    assert str(new / "y.npy") in Run(capsys, artifact, *given, "--output-dir", str(new)).out
    assert np.load(new / "y.npy").shape == (10,)
    for bad in (str(tmp_path / "x.npy"), "", "/proc/none"):
        refused = Run(capsys, artifact, *given, "--output-dir", bad)
        assert refused.code == 2 and "cannot make --output-dir: " in refused.err
    unused = tmp_path / "unused"
    assert Run(capsys, artifact, "run", "--output-dir", str(unused)).code == 2
    assert not unused.exists()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "makedirs", full)
    refused = Run(capsys, artifact, *given, "--output-dir", str(unused))
    assert refused.code == 8 and "cannot make --output-dir: No space left" in refused.err


# .npy and options -------------------------------------------------------------------------------


def test_npy_is_numpys(tmp_path: Path) -> None:
    import numpy as np

    for dtype in npy.DTYPES.values():
        for shape in ((), (3,), (2, 0), (2, 3, 1)):
            values = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
            np.save(tmp_path / "a.npy", values)
            kind, have, data = npy.read_npy(str(tmp_path / "a.npy"))
            assert npy.first_values(kind, data, 4) == values.reshape(-1)[:4].tolist()
            assert (npy.DTYPES[kind], have, bytes(data)) == (dtype, shape, values.tobytes())
            npy.write_npy(str(tmp_path / "b.npy"), kind, have, data)
            again = np.load(tmp_path / "b.npy")
            assert again.dtype == values.dtype and (again == values).all()


@given(st.data())
def test_npy_damage_is_an_error(data: Any) -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }".ljust(117) + "\n"
    good = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header.encode() + bytes(8)
    raw = bytearray(good)
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    path = f"/proc/self/fd/{(fd := os.memfd_create('npy'))}"
    try:
        os.write(fd, raw)
        npy.read_npy(path)
    except errors.InputFileError:
        pass
    finally:
        os.close(fd)


def test_sizes() -> None:
    assert [options.size(t) for t in ("5", "2k", "1.5G", "3MiB", "7b")] == [
        5, 2048, 3 << 29, 3 << 20, 7]  # fmt: skip
    for bad in ("", "G", "-1", "1e400", "nan", "0", "inf"):
        with pytest.raises(ValueError):
            options.size(bad)


# the loader's own rules -------------------------------------------------------------------------


def sources() -> list[Path]:
    return sorted(STUB.glob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.name)
def test_sources_are_python_3_9_and_standard_library(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    future = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)
    standard = sys.stdlib_module_names | {"jinja2"}  # vendored, imported when a template is used
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Match)
        if isinstance(node, ast.Import):
            assert all(a.name.partition(".")[0] in standard for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module is not None and node.module.partition(".")[0] in standard
        elif isinstance(node, ast.Call):
            strict = any(k.arg == "strict" for k in node.keywords)
            assert not (isinstance(node.func, ast.Name) and node.func.id == "zip" and strict)
    assert future or not tree.body, "annotations must not be evaluated in Python 3.9"


def test_imports_work_without_site_and_leave_heavy_modules_alone(ids_only: Path) -> None:
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['x', 'check']\n"
        f"try: runpy.run_path({str(ids_only)!r}, run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "bad = {'argparse', 'dataclasses', 'inspect', 'jinja2', 'tempfile', 'subprocess'}\n"
        "print(sorted(bad & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.stdout.splitlines()[-1] == "[]", run.stderr


def test_a_start_imports_only_what_the_first_token_needs(ids_only: Path) -> None:
    """Each of these takes a millisecond or more to import."""
    program = (
        "import runpy, sys\n"
        "before = set(sys.modules) | {'json'}\n"
        "sys.argv = ['x', 'generate', '--tokens', '1,2', '-n', '1']\n"
        f"try: runpy.run_path({str(ids_only)!r}, run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.splitlines())
    assert {"zerolayer_stub.driver_cpu", "zerolayer_stub.scheduler", "ctypes"} <= loaded
    unneeded = {"about", "bench", "bytelevel", "chat", "npy", "progress", "run_graph", "stream"}
    unneeded = {f"zerolayer_stub.{m}" for m in (*unneeded, "template", "text", "verify")}
    unneeded |= {"__future__", "argparse", "dataclasses", "inspect", "json.decoder", "logging"}
    assert not loaded & {*unneeded, "jinja2", "random", "subprocess", "tempfile", "threading"}


def test_under_another_name_main_makes_only_the_loader_importable(ids_only: Path) -> None:
    program = (
        "import sys, zipimport\n"
        f"archive = zipimport.zipimporter({str(ids_only)!r})\n"
        "spec = type(zipimport.__spec__)('artifact', archive)\n"
        "exec(archive.get_code('__main__'),\n"
        "     {'__name__': 'artifact', '__loader__': archive, '__spec__': spec})\n"
        "assert 'zerolayer_stub' not in sys.modules\n"
        "from zerolayer_stub.session import Session\n"
        "with Session(archive.archive) as s: print(s.vocab_size, type(s).__module__)"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.stdout.split() == [str(VOCAB), "zerolayer_stub.session"], run.stderr


def test_session_is_closed_after_use(artifact: Path) -> None:
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with Session(str(artifact)) as session:
        session.start(2, 1)
        assert array.array("i", [1]).itemsize == 4
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_the_compiler_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "zerolayer.compiler.cli", "--version"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("zerolayer ")
