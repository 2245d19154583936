"""Weights mapped and touched ahead: the right file and place, and only where it cannot harm."""

from __future__ import annotations

import array
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import loader_fake
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerolayer.runtime_stub import ahead, cli, detect, layout
from zerolayer.runtime_stub.ahead import Ahead
from zerolayer.runtime_stub.buffer import ReadOnlyBuffer
from zerolayer.runtime_stub.container import open_artifact
from zerolayer.runtime_stub.errors import ZerolayerError
from zerolayer.runtime_stub.session import Session
from zerolayer.runtime_stub.step import SamplingParams, StepBatch

SPARE = 40 << 20


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loader_fake.build(
        tmp_path_factory.mktemp("ahead") / "fake.zla", vendor=False, spare=SPARE
    )


@pytest.fixture(autouse=True)
def as_on_a_big_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(ahead, "comfortable", lambda _nbytes: True)
    monkeypatch.setattr(ahead, "unlimited", lambda: True)


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def place_of(artifact: Path) -> tuple[int, int]:
    """(offset, bytes) of the weights, by the reader that proves everything."""
    with open_artifact(str(artifact)) as opened:
        return opened.weights_offset, opened.weights_size


def resident(path: Path) -> int:
    """Bytes of ``path`` that this process has in its page tables."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(f" {path}")
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def descriptors(path: Path) -> int:
    """Those of this process that are of ``path``."""
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):  # of the listing itself
            count += os.readlink(f"/proc/self/fd/{name}") == str(path)  # noqa: PTH115
    return count


def begun(path: Path) -> bool:
    """Whether anything was mapped."""
    return Ahead(str(path))._mapped is not None


def test_it_finds_the_weights_where_the_reader_does(artifact: Path) -> None:
    assert (ahead.HEADER_BYTES, ahead.END_BYTES) == (layout.HEADER_BYTES, layout.END_BYTES)
    with artifact.open("rb") as file:
        found = ahead.weights_bytes(file.fileno(), artifact.stat())
    assert (layout.HEADER_BYTES, found) == place_of(artifact)
    assert found > SPARE


def test_every_page_comes_and_the_mapping_is_the_file(artifact: Path) -> None:
    offset, nbytes = place_of(artifact)
    early = Ahead(str(artifact))
    assert eventually(lambda: resident(artifact) == nbytes)
    mapped = early.take(artifact.stat(), offset, nbytes)
    assert mapped is not None
    assert mapped[:] == artifact.read_bytes()[offset : offset + nbytes]
    assert early.take(artifact.stat(), offset, nbytes) is None, "it belongs to one"
    early.close()
    del mapped
    assert eventually(lambda: resident(artifact) == 0), "the threads hold nothing when they end"


@pytest.mark.parametrize("early", [True, False])
def test_pages_are_asked_for_in_huge_ones(artifact: Path, early: bool) -> None:
    """Linux shows the advice of a mapping: hg."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("a kernel without huge pages has nothing that could be asked")
    begun_ahead = Ahead(str(artifact)) if early else None
    with open_artifact(str(artifact)) as opened:
        mapped, _ = opened.map_weights(begun_ahead)
    inside, flags = False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(f" {artifact}")
        elif inside and line.startswith("VmFlags:"):
            flags.append("hg" in line.split())
    if begun_ahead is not None:
        begun_ahead.close()
    assert flags == [True]
    del mapped


def test_a_file_that_was_replaced_is_not_taken(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.zla"
    path.write_bytes(artifact.read_bytes())
    early = Ahead(str(path))
    other = tmp_path / "b.zla"
    other.write_bytes(artifact.read_bytes())
    other.rename(path)
    with open_artifact(str(path)) as opened:
        mapped, offset = opened.map_weights(early)
        assert mapped[offset : offset + 256] == bytes([loader_fake.WEIGHT_BYTE]) * 256
    assert early._mapped is None
    os.utime(path, ns=(1, 1))
    assert Ahead(str(path)).take(artifact.stat(), *place_of(path)) is None
    offset, nbytes = place_of(path)
    assert Ahead(str(path)).take(path.stat(), offset, nbytes - 65536) is None


def test_the_engine_runs_on_the_mapping(artifact: Path) -> None:
    _, nbytes = place_of(artifact)
    prompt = [1, 2, 3]
    with Session(str(artifact)) as session:
        assert session._ahead is not None and session._ahead._mapped is not None
        engine = session.start(2, 1)
        assert session._ahead._mapped is None
        batch = StepBatch()
        tokens = array.array("i", prompt)
        batch.add(tokens, 0, array.array("i", [0]), (SamplingParams(), 0, tokens))
        assert engine.step(batch) == loader_fake.expected(prompt, 1)
        assert eventually(lambda: resident(artifact) == nbytes)
    assert eventually(lambda: descriptors(artifact) == 0)


def test_only_commands_that_run_the_model_touch_it(
    artifact: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[str]()

    def begin(path: str) -> Ahead:
        started.append(path)
        return Ahead(path)

    monkeypatch.setattr(ahead, "Ahead", begin)
    for command in ("info", "check", "verify"):
        assert cli.main([command], str(artifact)) == 0
    assert not started
    assert cli.main(["generate", "--tokens", "1,2,3", "-n", "4"], str(artifact)) == 0
    assert started == [str(artifact)]
    out = capsys.readouterr().out.splitlines()[-1]
    assert out == ",".join(map(str, loader_fake.expected([1, 2, 3], 4)))


def test_a_refusal_ends_it(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[bool]()
    monkeypatch.setattr(ahead.Ahead, "close", lambda _self: closed.append(True))
    damaged = bytearray(artifact.read_bytes())
    damaged[5000] ^= 1  # in the header's padding
    path = tmp_path / "damaged.zla"
    path.write_bytes(damaged)
    with pytest.raises(ZerolayerError, match="header page"):
        Session(str(path))
    assert closed == [True]


def test_close_ends_the_search(artifact: Path) -> None:
    early = Ahead(str(artifact))
    assert sum(count.value for count in early._left) == place_of(artifact)[1] // ahead.STRIDE
    early.close()
    assert [count.value for count in early._left] == [0] * ahead.THREADS


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "empty", "text", "nul", "small"])
def test_what_is_no_large_artifact_is_left_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "small":
        loader_fake.build(path, vendor=False)
    elif kind != "missing":
        path.write_bytes(b"" if kind == "empty" else b"x" * SPARE)
    assert not begun(Path("a\0b") if kind == "nul" else path)


@given(st.binary(min_size=22, max_size=22), st.integers(0, 1 << 20))
def test_no_end_record_points_outside(end: bytes, before: int) -> None:
    fd = os.memfd_create("end")
    try:
        for record in (end, b"PK\x05\x06" + end[4:]):
            os.ftruncate(fd, before)
            os.pwrite(fd, record, before)
            size = ahead.weights_bytes(fd, os.fstat(fd))
            assert 0 <= size <= max(0, before - ahead.HEADER_BYTES)
            if record[:4] != b"PK\x05\x06":
                assert size == 0
    finally:
        os.close(fd)


def test_one_cpu_has_nothing_to_spare(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert begun(artifact)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3})
    assert not begun(artifact)


def test_no_more_threads_is_no_error(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", full)
    offset, nbytes = place_of(artifact)
    mapped = Ahead(str(artifact)).take(artifact.stat(), offset, nbytes)
    assert mapped is not None and len(mapped) == nbytes
    mapped.close()


def test_little_memory_keeps_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable")) * 1024
    assert ahead.comfortable(available // 4)
    assert not ahead.comfortable(available)


@pytest.mark.parametrize(
    ("limit", "value"),
    [(resource.RLIMIT_AS, 8 << 30), (resource.RLIMIT_DATA, 1 << 30), (resource.RLIMIT_NPROC, 500)],
)
def test_limits_are_left_to_the_run(artifact: Path, limit: int, value: int) -> None:
    """The memory plan counts the weights against what is left of it, the engine needs threads."""
    program = (
        "import sys\n"
        "from zerolayer.runtime_stub.ahead import Ahead\n"
        "print(Ahead(sys.argv[1])._mapped is None)"
    )

    def limited() -> None:
        resource.setrlimit(limit, (value, value))

    done = subprocess.run(
        [sys.executable, "-c", program, str(artifact)],
        check=True, capture_output=True, text=True, preexec_fn=limited,
    )  # fmt: skip
    assert done.stdout.strip() == "True"


V2 = {"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
      "sys/fs/cgroup/cgroup.procs": "", "sys/fs/cgroup/pod/box/memory.max": "max\n",
      "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n"}  # fmt: skip
UNIFIED = {"proc/self/cgroup": "1:name=systemd:/x\n0::/box\n",
           "sys/fs/cgroup/unified/cgroup.controllers": "cpu memory\n",
           "sys/fs/cgroup/unified/cgroup.procs": ""}  # fmt: skip
V1 = {"proc/self/cgroup": "4:cpu,cpuacct:/docker/ab\n5:memory:/docker/ab\n0::/\n",
      "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
      "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
      "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}  # fmt: skip
V1_CPU = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "unlimited"),
    [
        ({}, True),  # no cgroups
        (V2, True),
        ({**V2, "sys/fs/cgroup/pod/box/memory.max": "68719476736\n"}, False),
        ({**V2, "sys/fs/cgroup/pod/memory.max": "68719476736\n"}, False),  # an ancestor's
        ({**V2, "sys/fs/cgroup/memory.max": "68719476736\n"}, False),  # as a container sees its own
        ({**V2, "sys/fs/cgroup/other/memory.max": "1\n"}, True),
        ({**V2, "sys/fs/cgroup/pod/box/cpu.max": "100000 100000\n"}, False),
        ({**V2, "sys/fs/cgroup/pod/cpu.max": "199999 100000\n"}, False),
        ({**V2, "sys/fs/cgroup/pod/box/cpu.max": "200000 100000\n"}, True),
        ({**V2, "proc/self/cgroup": "0::/../../pod\n",
          "sys/fs/cgroup/pod/cpu.max": "100000 100000\n"}, False),  # a namespace's view upwards
        (UNIFIED, True),
        ({**UNIFIED, "sys/fs/cgroup/unified/box/memory.max": "1073741824\n"}, False),
        (V1, True),
        ({**V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n"}, False),
        ({**V1, "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "1073741824\n"}, False),
        ({**V1, f"{V1_CPU}/docker/ab/cpu.cfs_quota_us": "50000\n",
          f"{V1_CPU}/docker/ab/cpu.cfs_period_us": "50000\n"}, False),
        ({**V1, f"{V1_CPU}/cpu.cfs_quota_us": "250000\n"}, True),
    ],
)  # fmt: skip
def test_a_cgroup_with_a_limit_is_left_to_the_run(
    files: dict[str, str], unlimited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ``detect.py`` takes for a limit is one here."""
    monkeypatch.undo()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    root = str(tmp_path)
    assert ahead.unlimited(root) is unlimited
    quota = detect.cpu_quota(root)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert (detect.memory_facts(root)[2] is None and (quota is None or quota >= 2)) is unlimited


def test_nothing_starts_under_a_limit(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither there nor where the files say what nobody can read."""
    monkeypatch.setattr(ahead, "unlimited", lambda: False)
    assert not begun(artifact)
    monkeypatch.setattr(ahead, "unlimited", lambda: int("many") > 0)
    assert not begun(artifact)


def test_a_process_that_ends_meanwhile_ends_quietly(artifact: Path) -> None:
    program = (
        "import os, sys\n"
        "os.sched_getaffinity = lambda _pid: {0, 1}\n"
        "from zerolayer.runtime_stub.ahead import Ahead\n"
        "early = Ahead(sys.argv[1])\n"
    )
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", program, str(artifact)],
            check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_buffer_stays_while_it_is_exported(artifact: Path) -> None:
    mapped = Ahead(str(artifact)).take(artifact.stat(), *place_of(artifact))
    assert mapped is not None
    export = ReadOnlyBuffer(mapped)
    with pytest.raises(BufferError):
        mapped.close()
    export.close()
    assert eventually(lambda: not _refuses(mapped.close))


def _refuses(close: Callable[[], None]) -> bool:
    try:
        close()
    except BufferError:
        return True
    return False
