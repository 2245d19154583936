"""Writes the artifact: one tensor at a time, to a temporary name, renamed when it is whole.

In: the manifest (without what only the writer knows), the ZIP's members, the weights as entries
that produce their bytes when asked, the header page's text.  Out: the file, its digest, its sha256.
Next file: ``runtime_stub/container.py``, which reads it back.

Memory stays near one tensor: a second thread hashes and writes while the caller's ``produce`` packs
the next one, with a bounded number of bytes between them.  The header page is written last, so a
build that dies leaves nothing that could be taken for an artifact; its temporary file is removed by
the next build.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import queue
import secrets
import shutil
import signal
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

from zerolayer.runtime_stub import layout
from zerolayer.runtime_stub.errors import ResourceError, UsageError
from zerolayer.runtime_stub.layout import HEADER_BYTES, SECTION_ALIGN, TENSOR_ALIGN, align_up

#: anything with the buffer protocol, C-contiguous
Chunk: TypeAlias = bytes | bytearray | memoryview
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

_IN_FLIGHT = 64 << 20  # bytes between packing and writing; one larger tensor may still pass
_BLOCK = 2 << 20  # a huge page of x86-64 and of Arm with 4 KiB pages
_WRITE = 4 * _BLOCK


@dataclass(frozen=True)
class WeightEntry:
    """One packed tensor.

    ``nbytes`` is what ``produce()`` yields in all: one C-contiguous buffer or an iterator of them.
    ``shape`` and ``format`` say what the tensor means before packing, ``layout`` how it is packed,
    ``dtype`` the packed element.  ``section`` groups consecutive tensors: a section starts at a
    multiple of 64 KiB and has its own hash.  ``offset`` (bytes from the start of the weights
    region), if the program has one baked in, must be where the layout rule puts the tensor.
    """

    name: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    layout: str
    format: str
    section: str
    produce: Callable[[], Chunk | Iterator[Chunk]]
    offset: int | None = None


@dataclass(frozen=True)
class WrittenWeights:
    """The weights region as it lies in the unfinished file: open descriptor, offset and size in
    bytes, sha256 per section.  Valid during ``finish`` only."""

    fd: int
    offset: int
    size: int
    hashes: tuple[str, ...]


#: called when the weights are in the file: what they allow to say about themselves
Finish = Callable[[WrittenWeights], tuple[Mapping[str, Any], Mapping[str, bytes]]]


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int  # from the start of the weights region
    size: int  # with padding
    tensors: tuple[tuple[WeightEntry, int], ...]  # (entry, offset from the region's start)


@dataclass
class _Output:
    """The temporary file and what is known about it so far."""

    fd: int
    path: Path
    needed: int
    written: int = 0
    hashes: list[str] = field(default_factory=list)
    whole: Any = field(default_factory=hashlib.sha256)  # of the file, header page first


class Written(NamedTuple):
    """What identifies a finished artifact, 64 hexadecimal digits each.

    ``digest`` is of the manifest, which holds the hash of everything else: it is inside the file,
    and names it where only a part was read.  ``sha256`` is of the file's bytes, as ``sha256sum``
    prints it.
    """

    digest: str
    sha256: str


def canonical_json(value: object) -> bytes:
    """Sorted keys, no spaces, ASCII, a final newline; floats as Python's shortest form.

    Raises ValueError for NaN and infinities, which JSON lacks.
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii") + b"\n"


def weight_offsets(sizes: Sequence[tuple[str, int]]) -> list[int]:
    """Where the layout rule puts tensors given as (section, bytes), from the region's start.

    Raises UsageError when a section's tensors are not consecutive.
    """
    offsets: list[int] = []
    at = 0
    seen: list[str] = []
    for section, nbytes in sizes:
        if not seen or section != seen[-1]:
            if section in seen:
                raise UsageError(f"the tensors of weights section {section} are not consecutive")
            seen.append(section)
            at = align_up(at, SECTION_ALIGN)
        at = align_up(at, TENSOR_ALIGN)
        offsets.append(at)
        at += nbytes
    return offsets


def header_page(text: str) -> bytes:
    """The first 64 KiB: interpreter line, magic line, ``text``, zeros."""
    body = text.encode("utf-8")
    if b"\0" in body:
        raise UsageError("the header text holds a NUL character")
    page = layout.SHEBANG + layout.magic_line() + body.rstrip(b"\n") + b"\n"
    if len(page) > HEADER_BYTES:
        raise UsageError(f"the header text takes {len(page)} bytes, more than {HEADER_BYTES}")
    return page.ljust(HEADER_BYTES, b"\0")


def zip_bytes(members: Mapping[str, bytes]) -> Iterator[bytes]:
    """The plain, stored, sorted ZIP of ``members`` in pieces.

    Raises UsageError for a name, count or size that the format does not allow.
    """
    if not 1 <= len(members) <= layout.MAX_MEMBERS:
        raise UsageError(f"{len(members)} members, not 1 to {layout.MAX_MEMBERS}")
    directory = bytearray()
    offset = 0
    for name in sorted(members):
        data = members[name]
        problem = layout.name_problem(name)
        if problem:
            raise UsageError(f"the member name {name[:80]!r} {problem}")
        parts = name.split("/")
        for i in range(1, len(parts)):
            if "/".join(parts[:i]) in members:
                raise UsageError(f"member {'/'.join(parts[:i])} is also a folder of {name}")
        if len(data) > layout.MAX_MEMBER_BYTES:
            raise UsageError(f"member {name} has {len(data)} bytes, over the format's limit")
        crc = zlib.crc32(data)
        directory += layout.central_record(name, crc, len(data), offset)
        local = layout.local_record(name, crc, len(data))
        yield local
        yield data
        offset += len(local) + len(data)
    if offset + len(directory) > layout.MAX_ZIP_BYTES:
        raise UsageError(f"the members take {offset} bytes, more than a plain ZIP can hold")
    yield bytes(directory)
    yield layout.end_record(len(members), len(directory), offset)


def write_artifact(
    out: Path,
    *,
    members: Mapping[str, bytes],
    weights: Iterable[WeightEntry],
    header_text: str,
    manifest: Mapping[str, Any] | None = None,
    finish: Finish | None = None,
    progress: Progress | None = None,
) -> Written:
    """Writes the artifact ``out`` and returns what identifies it.

    ``manifest`` must not have the keys ``format``, ``header``, ``files``, ``weights``, ``digest``:
    they are added here.  ``finish``, called between weights and ZIP, returns a manifest (in place
    of ``manifest``) and further members; what it raises ends the build.  ``progress`` is called
    with the bytes of weights done and in all.  An existing ``out`` is replaced in one step, or left
    as it was when anything fails.

    Raises UsageError (arguments, folder), ResourceError (disk full), and what ``produce`` raises.
    """
    sections = _plan(list(weights))
    region = sections[-1].offset + sections[-1].size if sections else 0
    header = header_page(header_text)
    needed = HEADER_BYTES + region + sum(len(m) + 512 for m in members.values()) + (1 << 20)
    with _temporary(out, needed) as output:
        os.lseek(output.fd, HEADER_BYTES, os.SEEK_SET)
        output.written = HEADER_BYTES
        output.whole.update(header)
        _write_weights(output, sections, region, progress)
        everything = dict(members)
        if finish is not None:
            written = WrittenWeights(output.fd, HEADER_BYTES, region, tuple(output.hashes))
            manifest, more = finish(written)
            everything |= more
            os.lseek(output.fd, HEADER_BYTES + region, os.SEEK_SET)  # wherever finish left it
        complete, digest = _complete_manifest(
            manifest or {}, everything, sections, output.hashes, header
        )
        for piece in zip_bytes({**everything, layout.MANIFEST: complete}):
            _write(output, piece)
        sha256 = output.whole.hexdigest()
        os.lseek(output.fd, 0, os.SEEK_SET)
        _write(output, header)
    return Written(digest, sha256)


# -- plan ------------------------------------------------------------------------------------------


def _plan(entries: list[WeightEntry]) -> list[_Section]:
    """Groups entries into sections at their offsets."""
    names = {e.name for e in entries}
    if len(names) != len(entries):
        raise UsageError("two weights have the same name")
    offsets = weight_offsets([(e.section, e.nbytes) for e in entries])
    sections: list[_Section] = []
    start = 0
    for i, (entry, offset) in enumerate(zip(entries, offsets, strict=True)):
        if entry.offset is not None and entry.offset != offset:
            raise UsageError(
                f"weight {entry.name} is baked in at {entry.offset}, but the layout rule puts it "
                f"at {offset}"
            )
        if i + 1 == len(entries) or entries[i + 1].section != entry.section:
            group = tuple(zip(entries[start : i + 1], offsets[start : i + 1], strict=True))
            size = align_up(offset + entry.nbytes, SECTION_ALIGN) - offsets[start]
            if not size:
                raise UsageError(f"weights section {entry.section} is empty")
            sections.append(_Section(entry.section, offsets[start], size, group))
            start = i + 1
    return sections


def _complete_manifest(
    manifest: Mapping[str, Any],
    members: Mapping[str, bytes],
    sections: Sequence[_Section],
    hashes: Sequence[str],
    header: bytes,
) -> tuple[bytes, str]:
    """Adds what only the writer knows; returns the canonical bytes and the digest."""
    if layout.MANIFEST in members:
        raise UsageError(f"the members must not hold {layout.MANIFEST}")
    for key in ("format", "header", "files", "weights", "digest"):
        if key in manifest:
            raise UsageError(f"the manifest must not have the key {key!r}: the writer adds it")
    complete: dict[str, Any] = dict(manifest)
    complete["format"] = {
        "name": "zerolayer-artifact",
        "major": layout.FORMAT_MAJOR,
        "minor": layout.FORMAT_MINOR,
    }
    complete["header"] = {"size": HEADER_BYTES, "sha256": hashlib.sha256(header).hexdigest()}
    complete["files"] = [
        {"name": n, "size": len(members[n]), "sha256": hashlib.sha256(members[n]).hexdigest()}
        for n in sorted(members)
    ]
    complete["weights"] = {
        "offset": HEADER_BYTES,
        "size": sections[-1].offset + sections[-1].size if sections else 0,
        "sections": [
            {"name": s.name, "offset": s.offset, "size": s.size, "sha256": h}
            for s, h in zip(sections, hashes, strict=True)
        ],
        "tensors": [
            {
                "name": e.name,
                "section": s.name,
                "offset": offset,
                "nbytes": e.nbytes,
                "dtype": e.dtype,
                "shape": list(e.shape),
                "layout": e.layout,
                "format": e.format,
            }
            for s in sections
            for e, offset in s.tensors
        ],
    }
    zeros = "0" * 64
    complete["digest"] = zeros
    raw = canonical_json(complete)
    digest = layout.digest_of(raw, zeros)
    if digest is None:
        raise UsageError("the manifest holds another object with an all-zero digest")
    complete["digest"] = digest
    final = canonical_json(complete)
    if len(final) > layout.MAX_MANIFEST_BYTES:
        raise UsageError(
            f"the manifest takes {len(final)} bytes, more than {layout.MAX_MANIFEST_BYTES}"
        )
    return final, digest


# -- weights ---------------------------------------------------------------------------------------


class _Pipe:
    """Chunks on their way from the packing thread to the hashing and writing thread."""

    def __init__(self) -> None:
        self._queue: queue.Queue[memoryview | None] = queue.Queue()
        self._room = threading.Condition()
        self._bytes = 0
        self.failure: BaseException | None = None

    def put(self, chunk: memoryview) -> None:
        """Waits until there is room; raises what the other thread failed with."""
        with self._room:
            while self._bytes and self._bytes + chunk.nbytes > _IN_FLIGHT and self.failure is None:
                self._room.wait()
            if self.failure is not None:
                raise self.failure
            self._bytes += chunk.nbytes
        self._queue.put(chunk)

    def end(self) -> None:
        self._queue.put(None)

    def chunks(self) -> Iterator[memoryview]:
        while (chunk := self._queue.get()) is not None:
            yield chunk
            with self._room:
                self._bytes -= chunk.nbytes
                self._room.notify()

    def fail(self, error: BaseException) -> None:
        with self._room:
            self.failure = error
            self._room.notify()


def _write_weights(
    output: _Output, sections: Sequence[_Section], region: int, progress: Progress | None
) -> None:
    pipe = _Pipe()

    def drain() -> None:
        chunks = pipe.chunks()
        blocks = _Blocks(output)
        try:
            for section in sections:
                hasher = hashlib.sha256()
                left = section.size
                while left:
                    chunk = next(chunks)
                    hasher.update(chunk)
                    blocks.write(chunk)
                    left -= chunk.nbytes
                output.hashes.append(hasher.hexdigest())
            blocks.flush()
        except StopIteration:
            pass  # the packing side failed and has its own error
        except BaseException as e:
            pipe.fail(e)

    thread = threading.Thread(target=drain, name="artifact-writer", daemon=True)
    thread.start()
    done = 0
    try:
        for section in sections:
            end = section.offset
            for entry, offset in section.tensors:
                _pad(pipe, offset - end)
                for chunk in _produced(entry):
                    pipe.put(chunk)
                    done += chunk.nbytes
                    if progress is not None:
                        progress(done, region)
                end = offset + entry.nbytes
            _pad(pipe, section.offset + section.size - end)
    finally:
        pipe.end()
        thread.join()
    if pipe.failure is not None:
        raise pipe.failure


def _pad(pipe: _Pipe, count: int) -> None:
    if count:
        pipe.put(memoryview(bytes(count)))


def _produced(entry: WeightEntry) -> Iterator[memoryview]:
    """The entry's bytes in pieces, counted."""
    produced = entry.produce()
    pieces: Iterable[Chunk]
    try:
        pieces = (memoryview(produced),)  # type: ignore[arg-type]
    except TypeError:
        pieces = produced  # type: ignore[assignment]
    count = 0
    for piece in pieces:
        view = memoryview(piece)
        if not view.nbytes:
            continue
        count += view.nbytes
        if count > entry.nbytes:
            break
        yield view.cast("B")
    if count != entry.nbytes:
        raise UsageError(
            f"weight {entry.name}: packing gave {count} bytes, but {entry.nbytes} were planned"
        )


# -- the file --------------------------------------------------------------------------------------


class _Blocks:
    """Writes in whole blocks of the file, aligned, whatever the pieces that come in.

    Linux keeps what one such write brings as one huge page where the file system can.  A process
    that maps the artifact takes one page fault for it then, instead of 32 or more: at 630 MB of
    weights they were a fifth of the time from process start to first token.
    """

    def __init__(self, output: _Output) -> None:
        self._output = output
        self._held = bytearray()  # less than a block, behind what is in the file

    def write(self, data: memoryview) -> None:
        """Takes ``data`` behind all that came before."""
        at = self._output.written + len(self._held)
        whole = (at + data.nbytes) // _BLOCK * _BLOCK - at  # bytes of ``data`` that end a block
        if whole <= 0:
            self._held += data
            return
        if self._held:
            first = -at % _BLOCK
            self._held += data[:first]
            self.flush()
            data, whole = data[first:], whole - first
        _write(self._output, data[:whole])
        self._held += data[whole:]

    def flush(self) -> None:
        """Writes what is held, whole block or not."""
        held, self._held = self._held, bytearray()
        _write(self._output, held)


def _write(output: _Output, data: Chunk) -> None:
    """Writes all of ``data`` at the current position, in pieces that end with a block."""
    view = memoryview(data)
    output.whole.update(view)
    while view:
        try:
            count = os.write(output.fd, view[: _WRITE - output.written % _BLOCK])
        except OSError as e:
            raise _disk_error(e, output) from None
        output.written += count
        view = view[count:]


def _disk_error(error: OSError, output: _Output) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            free = shutil.disk_usage(output.path.parent).free
        except OSError:
            free = 0
        return ResourceError(
            f"cannot write the artifact: {error.strerror} after {output.written} of about "
            f"{output.needed} bytes ({free} bytes are free)",
            where=str(output.path.parent),
            next_step="free disk space or write to another folder with -o",
        )
    return ResourceError(
        f"cannot write the artifact: {error.strerror or error}", where=str(output.path.parent)
    )


@contextlib.contextmanager
def _temporary(out: Path, needed: int) -> Iterator[_Output]:
    """A locked temporary file beside ``out`` that becomes ``out`` when the block succeeds."""
    folder = out.parent
    if not folder.is_dir():
        raise UsageError(
            f"the folder {folder} does not exist", where=str(out), next_step="create it first"
        )
    if out.exists() and not out.is_file():
        raise UsageError(
            "the output exists and is not a file", where=str(out), next_step="name a file with -o"
        )
    remove_stale(out)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"the artifact needs about {needed} bytes on disk, but {free} are free",
            where=str(folder),
            next_step="free disk space or write to another folder with -o",
        )
    output = _create(out, needed)
    try:
        with _terminable():
            yield output
            try:
                os.fsync(output.fd)
                output.path.replace(out)
                _sync_folder(folder)
            except OSError as e:
                raise _disk_error(e, output) from None
    except BaseException:
        output.path.unlink(missing_ok=True)
        raise
    finally:
        os.close(output.fd)


def _create(out: Path, needed: int) -> _Output:
    """Creates and locks the temporary file.

    Another build's :func:`remove_stale` may delete it between creation and locking; then try again.
    """
    while True:
        path = out.with_name(f".{out.name}.{secrets.token_hex(6)}.partial")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o755)
        except OSError as e:
            raise UsageError(
                f"cannot create a file there: {e.strerror}",
                where=str(out),
                next_step="choose another place with -o",
            ) from None
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            if path.stat().st_ino == os.fstat(fd).st_ino:
                return _Output(fd, path, needed)
        except FileNotFoundError:
            pass
        os.close(fd)


def remove_stale(out: Path) -> list[Path]:
    """Removes temporary files of builds of ``out`` that died; returns them.

    A living build holds a lock on its own, so it is left alone.
    """
    removed: list[Path] = []
    prefix, suffix = f".{out.name}.", ".partial"
    for path in sorted(out.parent.iterdir()):
        name = path.name
        if not (name.startswith(prefix) and name.endswith(suffix)):
            continue
        if len(name) != len(prefix) + 12 + len(suffix) or path.is_symlink():
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
            finally:
                os.close(fd)
    return removed


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turns SIGTERM into an exception so that the temporary file is removed."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
