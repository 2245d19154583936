"""``compile``, ``inspect`` and ``verify`` as commands: the whole pipeline on a tiny model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_model
from zerolayer.runtime_stub import errors

ZEROLAYER = str(Path(sys.executable).with_name("zerolayer"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    folder.mkdir()
    make_model("llama", folder)
    return folder


def zerolayer(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [ZEROLAYER, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def one_error(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """``done`` failed with ``code``, printed nothing, and one error line that has ``words``."""
    assert done.returncode == code, done
    (line,) = [x for x in done.stderr.splitlines() if x.startswith(("error:", "internal"))]
    assert line.startswith("error: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in line
    assert done.stdout == ""


@pytest.fixture(scope="module")
def artifact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, compiled for a target that any x86-64 machine of the last decade can be."""
    out = tmp_path_factory.mktemp("out") / "tiny.zla"
    done = zerolayer("compile", model, "--target", "x86-64-v3", "--no-verify", "-o", out)
    assert done.returncode == 0, done.stderr
    return out


def test_summary_and_progress(model: Path, tmp_path: Path) -> None:
    arguments = ("compile", model, "--target", "x86-64-v3", "--no-verify", "--max-context", "64")
    done = zerolayer(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "artifacts" / "tiny-llama.x86-64-v3.zla"  # the default name
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [out]
    assert os.access(out, os.X_OK)
    for word in ("tiny-llama", "x86-64-v3", "memory", "tokens/s", "not run (--no-verify)"):
        assert word in done.stdout
    for stage in ("read model", "passes", "lower", "kernels", "write"):
        assert stage in done.stderr
    assert "\x1b" not in done.stdout + done.stderr  # no colours outside a terminal


def test_json_is_all_there_is_on_stdout(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zla"
    config = tmp_path / "system_config.toml"
    config.write_text(
        '[kernel]\nfusion_level = "conservative"\n[hardware]\nnvlink_enabled = false\n'
    )
    options = ("--config", config, "--activations", "f32", "-o", out, "--json")
    done = zerolayer("compile", model, "--target", "x86-64-v3", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result["output"] == str(out)
    assert result["size"] == out.stat().st_size
    assert result["options"]["fusion"] == "conservative"
    assert result["options"]["activations"] == "f32"
    assert result["numerics"]["status"] == "passed"
    assert result["decisions"] == [
        "target = x86-64-v3 (command line)",
        "model = tiny-llama (command line)",
        "quantize = keep (default)",
        "fusion = conservative (system_config.toml:2)",
        "hardware.nvlink_enabled = false (system_config.toml:4)",
    ]


def test_the_same_bytes_from_another_place(model: Path, artifact: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "tiny-llama"
    shutil.copytree(model, elsewhere)
    (tmp_path / "cache").mkdir()
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),  # empty: kernels are built again
        "TZ": "Asia/Tokyo",
        "LC_ALL": "C",
        "PYTHONHASHSEED": "7",
    }
    options = ("--target", "x86-64-v3", "--no-verify", "-o", "other-name.zla")
    done = zerolayer("compile", "elsewhere/tiny-llama", *options, cwd=tmp_path, env=env, umask=0o77)
    assert done.returncode == 0, done.stderr
    digests = [hashlib.sha256(p.read_bytes()).digest() for p in (artifact, tmp_path / options[-1])]
    assert digests[0] == digests[1]


def test_inspect(artifact: Path) -> None:
    summary = zerolayer("inspect", artifact)
    assert (summary.returncode, summary.stderr) == (0, "")
    assert "x86-64-v3" in summary.stdout
    as_json = json.loads(zerolayer("inspect", artifact, "--json").stdout)
    assert as_json["target"] == "x86-64-v3"
    assert as_json["bytes"] == artifact.stat().st_size
    for view in ("kernels", "injected", "memory", "roofline", "manifest"):
        shown = zerolayer("inspect", artifact, f"--{view}")
        assert (shown.returncode, shown.stderr) == (0, ""), view
        assert shown.stdout.strip()
        done = zerolayer("inspect", artifact, f"--{view}", "--json")
        assert done.stdout.count("\n") == 1
        assert list(json.loads(done.stdout)) == [view]
    one_error(zerolayer("inspect", artifact, "--kernels", "--memory"), 2, "--kernels, --memory")


def test_verify(artifact: Path, tmp_path: Path) -> None:
    assert "ok" in zerolayer("verify", artifact).stdout
    assert json.loads(zerolayer("verify", artifact, "--json").stdout)["status"] == "ok"
    raw = bytearray(artifact.read_bytes())
    raw[70_000] ^= 1  # in the weights
    damaged = tmp_path / "damaged.zla"
    damaged.write_bytes(raw)
    one_error(zerolayer("verify", damaged), errors.EXIT_INTEGRITY, "damaged.zla")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_artifact(command: str, artifact: Path, tmp_path: Path) -> None:
    raw = artifact.read_bytes()
    cases = {
        "empty": b"",
        "text": b"hello\n" * 20_000,
        "cut": raw[: len(raw) // 2],
        "long": raw + b"\0",
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
    for path in (*cases, ".", "absent"):
        done = zerolayer(command, tmp_path / path)
        assert done.returncode in {errors.EXIT_INPUT, errors.EXIT_INTEGRITY}, (path, done)
        one_error(done, done.returncode)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("absent.gguf", None),
        ("empty.gguf", b""),
        ("text.gguf", b"not a model\n"),
        ("cut.gguf", b"GGUF\x03\0\0\0"),
        ("folder", "folder"),
        ("some.onnx", b"\x08"),
        ("what.pt", b"PK\x03\x04"),
    ],
)
def test_what_is_no_model(path: str, content: bytes | str | None, tmp_path: Path) -> None:
    if content == "folder":
        (tmp_path / path).mkdir()
    elif isinstance(content, bytes):
        (tmp_path / path).write_bytes(content)
    out = tmp_path / "out.zla"
    out.write_bytes(b"what was there before")
    done = zerolayer("compile", tmp_path / path, "--target", "x86-64-v3", "-o", out)
    assert done.returncode in {errors.EXIT_INPUT, errors.EXIT_UNSUPPORTED}, done
    one_error(done, done.returncode, path)
    assert out.read_bytes() == b"what was there before"
    assert {p.name for p in tmp_path.iterdir()} <= {path, "out.zla"}


@pytest.mark.parametrize("stage", ["read model", "kernels"])
def test_interrupted(stage: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zla"
    command = [ZEROLAYER, "compile", str(model), "--target", "x86-64-v3", "-o", str(out), "--json"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stderr:
            if line.startswith(stage):
                break
        process.send_signal(signal.SIGINT)
        said, notes = process.communicate(timeout=60)
    assert process.returncode == errors.EXIT_INTERRUPTED, notes
    assert said == ""
    assert notes.splitlines()[-1] == "interrupted"
    assert "Traceback" not in notes
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == []


def test_two_compiles_at_once(model: Path, tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    started = []
    for name in ("a.zla", "b.zla"):
        command = [ZEROLAYER, "compile", str(model), "--target", "x86-64-v3", "--no-verify"]
        command += ["-o", str(tmp_path / name)]
        started.append(
            subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        )
        time.sleep(0.1)
    for process in started:
        _, notes = process.communicate(timeout=120)
        assert process.returncode == 0, notes
    assert (tmp_path / "a.zla").read_bytes() == (tmp_path / "b.zla").read_bytes()
