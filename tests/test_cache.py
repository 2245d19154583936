"""The compile cache: right bytes under concurrency, damage, and folders that cannot be used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerolayer.compiler.cache import CompileCache, cache_home, tool_versions

PARTS: dict[str, str | bytes] = {"source": b"int main;", "target": "x86-64-v3"}


def unused() -> bytes:
    raise AssertionError("built although it was cached")


def entries(root: Path) -> list[Path]:
    return [p for p in root.glob("??/*") if p.suffix != ".lock" and not p.name.startswith(".")]


def test_builds_once(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    assert cache.get(PARTS) is None
    assert cache.get_or_build(PARTS, lambda: b"code") == (b"code", False)
    assert cache.get_or_build(PARTS, unused) == (b"code", True)
    assert CompileCache(tmp_path).get(dict(reversed(PARTS.items()))) == b"code"
    assert (cache.hits, cache.misses) == (1, 1)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)

    def fail() -> bytes:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.get_or_build(PARTS, fail)
    assert entries(tmp_path) == []
    assert cache.get_or_build(PARTS, lambda: b"code") == (b"code", False)


@given(st.dictionaries(st.text(), st.binary(), min_size=1), st.data())
def test_every_part_is_in_the_key(parts: dict[str, str | bytes], data: st.DataObject) -> None:
    key = CompileCache.key(parts)
    name = data.draw(st.sampled_from(sorted(parts)))
    value = parts[name]
    assert isinstance(value, bytes)
    assert CompileCache.key({**parts, name: value + b"x"}) != key
    assert CompileCache.key({k: v for k, v in parts.items() if k != name}) != key


def test_parts_do_not_run_together() -> None:
    assert CompileCache.key({"a": "bc"}) != CompileCache.key({"ab": "c"})
    assert CompileCache.key({"a": "1", "b": "2"}) != CompileCache.key({"a": "12", "b": ""})


def test_the_key_holds_tool_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompileCache(tmp_path)
    cache.put(PARTS, b"old compiler's")
    assert set(tool_versions()) == {"cache-format", "zerolayer", "ziglang"}
    for name in tool_versions():
        changed = {**tool_versions(), name: "next"}
        with monkeypatch.context() as m:
            m.setattr("zerolayer.compiler.cache.tool_versions", lambda changed=changed: changed)
            assert cache.get(PARTS) is None
    assert cache.get(PARTS) == b"old compiler's"


def test_damaged_entries_are_built_again(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    cache.put(PARTS, b"some code")
    (entry,) = entries(tmp_path)
    good = entry.read_bytes()
    damaged = [good[:n] for n in range(len(good))] + [good + b"\0"]
    for i in range(len(good)):
        damaged.append(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
    for bad in damaged:
        entry.write_bytes(bad)
        assert cache.get(PARTS) is None
        assert cache.get_or_build(PARTS, lambda: b"some code") == (b"some code", False)
        assert entry.read_bytes() == good


def test_pruning_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, max_bytes=3 * 1048)
    for i in range(3):
        cache.put({"i": str(i)}, bytes(1000))
        key = cache.key({"i": str(i)})
        os.utime(tmp_path / key[:2] / key, (1000 + i, 1000 + i))
    assert cache.get({"i": "0"}) is not None  # used: now the newest
    cache.put({"i": "3"}, bytes(1000))
    present = [i for i in range(4) if cache.get({"i": str(i)}) is not None]
    assert present == [0, 2, 3]


def test_pruning_removes_what_killed_writers_left(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    cache.get_or_build(PARTS, lambda: b"code")
    (entry,) = entries(tmp_path)
    old = entry.parent / ".tmp-old"
    new = entry.parent / ".tmp-new"
    lock = entry.with_suffix(".lock")
    for path in (old, new):
        path.write_bytes(b"half")
    for path in (old, lock):
        os.utime(path, (1000, 1000))
    cache.prune()
    assert sorted(entry.parent.iterdir()) == sorted([entry, new])


BUILD = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from zerolayer.compiler.cache import CompileCache
    root, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    def build():
        with log.open("a") as f:
            f.write("built\\n")
        time.sleep(seconds)
        return b"x" * 100_000
    data, cached = CompileCache(root).get_or_build({"k": "v"}, build)
    assert data == b"x" * 100_000
    print("cached" if cached else "built", flush=True)
    """
)


def start(root: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(root), str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_processes_build_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start(tmp_path / "cache", log, 1.0) for _ in range(2)]
    said = sorted(p.communicate(timeout=60)[0].strip() for p in processes)
    assert said == ["built", "cached"]
    assert log.read_text() == "built\n"


def test_a_killed_builder_does_not_block(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = start(tmp_path / "cache", log, 600)
    wait_for(log)
    second = start(tmp_path / "cache", log, 0)
    time.sleep(0.3)
    assert second.poll() is None  # waits for the first
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert second.communicate(timeout=60)[0].strip() == "built"
    assert second.returncode == 0


def test_a_stopped_builder_delays_but_does_not_block(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = start(tmp_path / "cache", log, 600)
    try:
        wait_for(log)
        cache = CompileCache(tmp_path / "cache", lock_timeout_s=0.1)
        assert cache.get_or_build({"k": "v"}, lambda: b"mine") == (b"mine", False)
    finally:
        first.kill()
        first.communicate()


def test_unusable_folders_turn_it_off_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    notes: list[str] = []
    cache = CompileCache(file / "below", notify=notes.append)
    assert not cache.enabled
    assert cache.get_or_build(PARTS, lambda: b"1") == (b"1", False)
    assert cache.get_or_build(PARTS, lambda: b"2") == (b"2", False)
    cache.put(PARTS, b"3")
    assert cache.get(PARTS) is None
    (note,) = notes
    assert "no compile cache" in note
    assert str(file) in note
    assert "XDG_CACHE_HOME" in note


def test_a_full_disk_turns_it_off_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk lets files be made, but not filled; tools are given no folder there either."""
    notes: list[str] = []

    def on_a_full_disk(**_where: object) -> IO[bytes]:
        return Path("/dev/full").open("r+b", buffering=0)

    monkeypatch.setattr("tempfile.TemporaryFile", on_a_full_disk)
    cache = CompileCache(tmp_path / "kernels", notify=notes.append)
    assert not cache.enabled and cache.directory is None
    (note,) = notes
    assert "no compile cache" in note and "No space left on device" in note


def test_a_folder_lost_midway_is_noted_and_survived(tmp_path: Path) -> None:
    notes: list[str] = []
    root = tmp_path / "cache"
    cache = CompileCache(root, notify=notes.append)
    root.rmdir()
    root.write_bytes(b"")
    assert cache.get_or_build(PARTS, lambda: b"1") == (b"1", False)
    assert not cache.enabled
    assert len(notes) == 1


READ_ONLY = textwrap.dedent(
    """
    import os, sys
    from zerolayer.compiler.cache import CompileCache, tool_versions
    tool_versions()
    if os.geteuid() == 0:  # root may write anywhere
        os.setgid(54321); os.setuid(54321)
    cache = CompileCache()
    print(cache.get_or_build({"k": "v"}, lambda: b"built"), cache.enabled)
    """
)


def test_a_read_only_home(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    for parent in tmp_path.parents:  # so that the user without rights gets as far as the folder
        if parent.owner() != "root" or "pytest" in parent.name:
            parent.chmod(parent.stat().st_mode | 0o055)
    try:
        env = {k: v for k, v in os.environ.items() if k != "XDG_CACHE_HOME"}
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY],
            env={**env, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        tmp_path.chmod(0o755)
    assert done.stdout.strip() == "(b'built', False) False"
    assert "note: no compile cache" in done.stderr
    assert str(tmp_path) in done.stderr


def test_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_home() == Path("/caches/zerolayer")
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_home() == Path("/home/somebody/.cache/zerolayer")
