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

import hashlib
import json
import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zerolayer.runtime_stub import layout
from zerolayer.runtime_stub.errors import UsageError
from zerolayer.runtime_stub.layout import HEADER_BYTES, SECTION_ALIGN, TENSOR_ALIGN, align_up

from .output import Blocks, Chunk, Output, temporary, write

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

_IN_FLIGHT = 64 << 20  # bytes between packing and writing; one larger tensor may still pass


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
    with temporary(out, needed) as output:
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
            write(output, piece)
        sha256 = output.whole.hexdigest()
        os.lseek(output.fd, 0, os.SEEK_SET)
        write(output, header)
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
    output: Output, sections: Sequence[_Section], region: int, progress: Progress | None
) -> None:
    pipe = _Pipe()

    def drain() -> None:
        chunks = pipe.chunks()
        blocks = Blocks(output)
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
