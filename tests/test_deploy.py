"""The artifact on a host: a bare Python and one file, on the right CPU and on a lesser one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from zerolayer.runtime_stub import errors

PYTHON = "/usr/bin/python3"  # the system's own: no packages of this project
QEMU = "qemu-x86_64-static"
PROMPT = ("generate", "--tokens", "3,5,8,13", "-n", "6", "--json")
STRANGER = 54321  # a user id that no account has


@pytest.fixture(scope="module")
def place(tiny_artifact: Path) -> Iterator[Path]:
    """The artifact alone in a read-only folder that everybody can read."""
    folder = Path(tempfile.mkdtemp(prefix="zerolayer-deploy-"))
    shutil.copyfile(tiny_artifact, folder / "model.zla")
    (folder / "model.zla").chmod(0o555)
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def run(
    place: Path, *arguments: str, under: tuple[str, ...] = (), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the artifact with the system's Python and an empty environment."""
    command = [*under, PYTHON, str(place / "model.zla"), *arguments]
    env = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, cwd="/", env=env, capture_output=True, text=True, check=False, **options
    )


def tokens(done: subprocess.CompletedProcess[str]) -> list[int]:
    """The generated token ids of a ``generate --json``."""
    assert done.returncode == 0, done.stderr
    generated = json.loads(done.stdout.splitlines()[-1])["tokens"]
    assert len(generated) == 6
    return [int(t) for t in generated]


@pytest.fixture(scope="module")
def native(place: Path) -> list[int]:
    return tokens(run(place, *PROMPT))


def test_a_bare_python_runs_every_command(place: Path, native: list[int]) -> None:
    for command in ("info", "check", "verify"):
        done = run(place, command, "--json")
        assert done.returncode == 0, (command, done.stderr)
        assert isinstance(json.loads(done.stdout.splitlines()[-1]), dict)
    text = run(place, "generate", "--raw", "-n", "3", "w3 w5 w8 w13")
    assert text.returncode == 0, text.stderr
    assert text.stdout.split() == [f"w{t}" for t in native[:3]]
    assert [p.name for p in place.iterdir()] == ["model.zla"]


def test_it_is_a_command(place: Path) -> None:
    done = subprocess.run(
        [place / "model.zla", "check"], env={"PATH": "/usr/bin:/bin"}, check=False, cwd="/"
    )
    assert done.returncode == 0


def test_a_stranger_runs_it(place: Path, native: list[int]) -> None:
    """A random user without a home; only root can become one, others are strangers themselves."""
    options: dict[str, Any] = {}
    if os.geteuid() == 0:
        options = {"user": STRANGER, "group": STRANGER, "extra_groups": []}
    assert tokens(run(place, *PROMPT, **options)) == native


def test_many_at_once(place: Path, native: list[int]) -> None:
    command = [PYTHON, str(place / "model.zla"), *PROMPT]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for process in started:
        out, _ = process.communicate(timeout=120)
        assert json.loads(out.splitlines()[-1])["tokens"] == native


def test_a_lesser_cpu_is_refused_by_name(place: Path) -> None:
    """Really run on a CPU without AVX: an error, never an illegal instruction."""
    for command in (("check",), PROMPT):
        done = run(place, *command, under=(QEMU, "-cpu", "Nehalem"))
        assert done.returncode == errors.EXIT_HARDWARE, done
        assert "avx2" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_an_emulated_cpu_gives_the_same_tokens(place: Path, native: list[int]) -> None:
    assert tokens(run(place, *PROMPT, under=(QEMU, "-cpu", "Haswell"))) == native


def test_standard_tools_read_it(place: Path) -> None:
    listed = subprocess.run(
        ["unzip", "-l", place / "model.zla"], capture_output=True, text=True, check=False
    )
    assert listed.returncode in {0, 1}  # 1: fine, with a note about the bytes in front
    for name in ("__main__.py", "manifest.json", "tokenizer.json"):
        assert name in listed.stdout
    tested = subprocess.run(
        ["unzip", "-qt", place / "model.zla"], capture_output=True, text=True, check=False
    )
    assert tested.returncode in {0, 1}, tested
    assert "No errors" in tested.stdout
    with (place / "model.zla").open("rb") as f:
        assert f.readline() == b"#!/usr/bin/env python3\n"
        assert b"tiny-llama for x86-64-v3" in f.read(2000)
