"""The artifact writer: what it writes reads back, is deterministic, and appears whole or not."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerolayer.compiler.artifact import output, writer
from zerolayer.compiler.artifact.writer import WeightEntry, Written, write_artifact
from zerolayer.runtime_stub.container import open_artifact
from zerolayer.runtime_stub.errors import IntegrityError, ResourceError, UsageError
from zerolayer.runtime_stub.layout import HEADER_BYTES

MAIN = b"import sys\nprint('ran', sys.argv[1:])\n"


def entry(name: str, data: bytes, section: str = "s", pieces: int = 1) -> WeightEntry:
    def produce() -> Iterator[bytes]:
        step = -(-len(data) // pieces) or 1
        for i in range(0, len(data), step):
            yield data[i : i + step]

    return WeightEntry(
        name, len(data), "u8", (len(data),), "row_major", "F32", section,
        produce if pieces > 1 else lambda: data,
    )  # fmt: skip


def write(
    out: Path,
    weights: list[WeightEntry] | None = None,
    members: Mapping[str, bytes] | None = None,
) -> Written:
    if weights is None:
        weights = [entry("a", b"\1" * 100), entry("b", b"\2" * 70_000), entry("c", b"\3", "t")]
    return write_artifact(
        out,
        manifest={"model": {"name": "m"}},
        members={"__main__.py": MAIN, **(members or {})},
        weights=weights,
        header_text="A test.\n",
    )


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


def test_round_trip_and_layout(tmp_path: Path) -> None:
    out = tmp_path / "x.zla"
    digest, sha256 = write(out)
    assert sha256 == hashlib.sha256(out.read_bytes()).hexdigest() != digest
    raw = out.read_bytes()
    assert raw.startswith(b"#!/usr/bin/env python3\n# zerolayer artifact, format 1.0")
    # computed by hand: a at 0, b at 128 (64-byte aligned), t at the next 64 KiB
    weights = (b"\1" * 100).ljust(128, b"\0") + b"\2" * 70_000
    weights = weights.ljust(131072, b"\0") + b"\3".ljust(65536, b"\0")
    assert raw[HEADER_BYTES : HEADER_BYTES + 196608] == weights
    with open_artifact(str(out)) as artifact:
        artifact.verify_all()
        assert artifact.digest == digest
        assert artifact.manifest["model"] == {"name": "m"}
        table = artifact.manifest["weights"]
        assert [t["offset"] for t in table["tensors"]] == [0, 128, 131072]
        assert [s["sha256"] for s in table["sections"]] == [
            hashlib.sha256(weights[:131072]).hexdigest(),
            hashlib.sha256(weights[131072:]).hexdigest(),
        ]
    assert out.stat().st_mode & 0o111
    assert leftovers(tmp_path) == []


def test_zip_is_what_the_standard_library_writes() -> None:
    members = {"b/c.txt": b"hello", "a": b"", "__main__.py": MAIN}
    expected = io.BytesIO()
    with zipfile.ZipFile(expected, "w", zipfile.ZIP_STORED) as z:
        for name in sorted(members):
            info = zipfile.ZipInfo(name)  # 1980-01-01
            info.external_attr = 0o100644 << 16
            info.create_system = 3
            z.writestr(info, members[name])
    assert b"".join(writer.zip_bytes(members)) == expected.getvalue()


def test_it_runs(tmp_path: Path) -> None:
    out = tmp_path / "x.zla"
    write(out)
    for command in ([sys.executable, "-I", str(out)], [str(out)]):
        result = subprocess.run([*command, "y"], capture_output=True, text=True, check=True)
        assert result.stdout == "ran ['y']\n"


def test_same_bytes_from_other_folder_umask_time_and_environment(tmp_path: Path) -> None:
    one, two = tmp_path / "one" / "x.zla", tmp_path / "two" / "deeper" / "y.zla"
    one.parent.mkdir()
    two.parent.mkdir(parents=True)
    script = textwrap.dedent(
        f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_artifact_writer import write
        os.umask(0o077)
        write(Path({str(two)!r}))
        """
    )
    write(one)
    env = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "USER": "other", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", script], check=True, env=env, cwd=two.parent)
    assert one.read_bytes() == two.read_bytes()


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300), st.integers(1, 4)), max_size=9)
)
def test_any_sections_read_back(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int, int]]
) -> None:
    out = tmp_path_factory.getbasetemp() / "any.zla"
    sizes.sort(key=lambda s: s[0])
    entries = [
        entry(f"w{i}", bytes([i + 1]) * n, f"s{section}", pieces)
        for i, (section, n, pieces) in enumerate(sizes)
    ]
    write(out, entries)
    with open_artifact(str(out)) as artifact:
        artifact.verify_all()
        raw = out.read_bytes()
        for i, tensor in enumerate(artifact.manifest["weights"]["tensors"]):
            at = HEADER_BYTES + tensor["offset"]
            assert at % 64 == 0
            assert raw[at : at + tensor["nbytes"]] == bytes([i + 1]) * sizes[i][1]


def test_wrong_arguments_leave_nothing(tmp_path: Path) -> None:
    out = tmp_path / "x.zla"
    short = WeightEntry("w", 10, "u8", (10,), "row_major", "F32", "s", lambda: b"123")
    long = WeightEntry("w", 2, "u8", (2,), "row_major", "F32", "s", lambda: b"123")
    moved = WeightEntry("w", 3, "u8", (3,), "row_major", "F32", "s", lambda: b"123", offset=64)
    split = [entry("a", b"1", "s"), entry("b", b"1", "t"), entry("c", b"1", "s")]
    cases = [
        ([short], "3 bytes, but 10 were planned"),
        ([long], "bytes, but 2 were planned"),
        ([moved], "baked in at 64"),
        (split, "not consecutive"),
        ([entry("a", b"1"), entry("a", b"2")], "same name"),
    ]
    for weights, message in cases:
        with pytest.raises(UsageError, match=message):
            write(out, weights)
    for name in ("../x", "manifest.json", "a/../b", "/etc/passwd", "__main__.py/x"):
        with pytest.raises(UsageError):
            write(out, members={name: b""})
    with pytest.raises(UsageError, match="does not exist"):
        write(tmp_path / "no" / "x.zla")
    with pytest.raises(UsageError, match="not a file"):
        write(Path("/dev/null"))
    with pytest.raises(UsageError, match="not a file"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_producer_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "x.zla"
    write(out)
    before = out.read_bytes()

    def produce() -> Iterator[bytes]:
        yield b"12345"
        raise IntegrityError("the model file changed while it was read")

    bad = WeightEntry("w", 10, "u8", (10,), "row_major", "F32", "s", produce)
    with pytest.raises(IntegrityError, match="changed while"):
        write(out, [entry("a", b"1" * 1000), bad])
    assert out.read_bytes() == before
    assert leftovers(tmp_path) == []
    assert threading.active_count() == 1 or "artifact-writer" not in {
        t.name for t in threading.enumerate()
    }


SLOW = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_artifact_writer import MAIN
from zerolayer.compiler.artifact.writer import WeightEntry, write_artifact
def produce():
    yield b"1" * 100_000
    print("half", flush=True)
    time.sleep(30)
    yield b"1" * 100_000
weight = WeightEntry("w", 200_000, "u8", (1,), "row_major", "F32", "s", produce)
write_artifact(Path({out!r}), manifest={{}}, members={{"__main__.py": MAIN}}, weights=[weight],
               header_text="x")
"""


def _start_slow(out: Path) -> subprocess.Popen[str]:
    code = SLOW.format(tests=str(Path(__file__).parent), out=str(out))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_build_leaves_nothing_usable(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "x.zla"
    process = _start_slow(out)
    assert len(leftovers(tmp_path)) == 1
    write(tmp_path / "y.zla")  # another output's build does not touch it
    assert output.remove_stale(out) == []  # nor does anyone while its build lives
    process.send_signal(number)
    assert process.wait(20) != 0
    assert process.stdout is not None
    process.stdout.close()
    assert not out.exists()
    for name in leftovers(tmp_path):
        assert number == signal.SIGKILL
        # without its header page it is not an artifact
        assert (tmp_path / name).read_bytes()[:2] in (b"", b"\0\0")
    write(out)
    assert leftovers(tmp_path) == []


def test_concurrent_writers_of_one_file(tmp_path: Path) -> None:
    out = tmp_path / "x.zla"
    errors: list[BaseException] = []

    def build(value: int) -> None:
        try:
            for _ in range(8):
                write(out, [entry("w", bytes([value]) * 50_000)])
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=build, args=(v,)) for v in (1, 2, 3)]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        if out.exists():
            with open_artifact(str(out)) as artifact:
                artifact.verify_all()
        time.sleep(0.005)
    for t in threads:
        t.join()
    assert errors == []
    assert leftovers(tmp_path) == []


def test_too_little_disk_is_said_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 12345})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    weight = WeightEntry("w", 10, "u8", (10,), "row_major", "F32", "s", lambda: pytest.fail("ran"))
    with pytest.raises(ResourceError, match=r"needs about .* bytes on disk, but 12345 are free"):
        write(tmp_path / "x.zla", [weight])


def test_weights_are_written_in_whole_aligned_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small and large pieces alike: no write crosses the weights in bits, so that the page cache
    can hold huge pages."""
    block, page = 2 << 20, 65536
    sizes = [100_000, 3_000_001, 64, 5 * block, 700_000, 900_000, block, 1]
    data = [bytes([i + 1]) * n for i, n in enumerate(sizes)]
    writes: list[tuple[int, int]] = []
    real = os.write

    def record(fd: int, piece: memoryview) -> int:
        writes.append((os.lseek(fd, 0, os.SEEK_CUR), len(piece)))
        return real(fd, piece)

    monkeypatch.setattr(os, "write", record)
    out = tmp_path / "x.zla"
    weights = [entry(f"w{i}", d, pieces=1 + i % 3) for i, d in enumerate(data)]
    write(out, weights)
    end = page + -(-writer.weight_offsets([("s", len(d)) for d in [*data, b""]])[-1] // page) * page
    of_weights = [(at, n) for at, n in writes if page <= at < end]
    assert [at for at, _ in of_weights][1:] == [at + n for at, n in of_weights][:-1]
    assert all((at + n) % block == 0 for at, n in of_weights[:-1])
    assert len(of_weights) <= -(-end // block)
    with open_artifact(str(out)) as artifact:
        artifact.verify_all()
        mapped, first = artifact.map_weights()
        at = writer.weight_offsets([("s", len(d)) for d in data])
        assert all(
            mapped[first + a : first + a + len(d)] == d for a, d in zip(at, data, strict=True)
        )


def test_disk_full_while_writing(tmp_path: Path) -> None:
    """A file-size limit stands in for a full disk: the same path through os.write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(ResourceError, match=r"after 200000 of about \d+ bytes"):
            write(tmp_path / "x.zla", [entry("w", bytes(1_000_000), pieces=20)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert list(tmp_path.iterdir()) == []


def test_memory_stays_near_one_tensor(tmp_path: Path) -> None:
    """60 tensors of 4 MB: their sum is never in memory."""
    import tracemalloc

    weights = [
        WeightEntry(f"w{i}", 4_000_000, "u8", (1,), "row_major", "F32", "s",
                    lambda i=i: bytes([i % 251]) * 4_000_000)  # type: ignore[misc]
        for i in range(60)
    ]  # fmt: skip
    tracemalloc.start()
    write(tmp_path / "x.zla", weights)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < writer._IN_FLIGHT + 16_000_000


def test_finish_sees_the_weights_and_completes_the_manifest(tmp_path: Path) -> None:
    """The numerics gate runs between weights and ZIP, on the weights as they are in the file."""
    out = tmp_path / "x.zla"

    def finish(written: writer.WrittenWeights) -> tuple[dict[str, object], dict[str, bytes]]:
        raw = os.pread(written.fd, written.size, written.offset)
        assert raw == (b"\7" * 1000).ljust(65536, b"\0")
        assert written.hashes == (hashlib.sha256(raw).hexdigest(),)
        os.lseek(written.fd, 5, os.SEEK_SET)  # must not matter
        return {"numerics": {"status": "passed"}}, {"golden.json": b"[]"}

    arguments = {"members": {"__main__.py": MAIN}, "weights": [entry("w", b"\7" * 1000)]}
    write_artifact(out, **arguments, header_text="x", finish=finish)  # type: ignore[arg-type]
    with open_artifact(str(out)) as artifact:
        artifact.verify_all()
        assert artifact.manifest["numerics"] == {"status": "passed"}
        assert artifact.member("golden.json") == b"[]"

    def refuse(_written: writer.WrittenWeights) -> tuple[dict[str, object], dict[str, bytes]]:
        raise IntegrityError("outside the bounds")

    before = out.read_bytes()
    with pytest.raises(IntegrityError, match="outside the bounds"):
        write_artifact(out, **arguments, header_text="x", finish=refuse)  # type: ignore[arg-type]
    assert out.read_bytes() == before and leftovers(tmp_path) == []
