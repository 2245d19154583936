"""The artifact as a file: opens it, proves its structure, hands out its parts.

In: the path of a ``.zla`` file.  Out: :class:`Artifact`, with the manifest, the members of the ZIP
at the file's end and the mapped weights.  Next file: ``cli.py``.  The format on one page is in
``artifacts/README.md``, its constants are in ``layout.py``.

Every field of every record has exactly one legal value, so one changed byte in the header, a ZIP
record or the manifest is found when the file is opened.  Members are hashed when read, weights only
by :meth:`Artifact.verify_all`.  ``InputFileError`` (exit 3): no file, not an artifact, or an
artifact of another format version.  ``IntegrityError`` (exit 6): its bytes were changed.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import zlib

from .errors import InputFileError, IntegrityError, ResourceError
from .layout import (
    CENTRAL,
    CENTRAL_FIELDS,
    END,
    END_BYTES,
    END_FIELDS,
    FORMAT_MAJOR,
    HEADER_BYTES,
    LOCAL,
    LOCAL_FIELDS,
    MANIFEST,
    MAX_FILE_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_MEMBER_BYTES,
    MAX_MEMBERS,
    MAX_NAME_BYTES,
    MAX_TENSORS,
    MAX_ZIP_BYTES,
    SECTION_ALIGN,
    TENSOR_ALIGN,
    align_up,
    central_fields,
    digest_of,
    local_fields,
    name_problem,
    parse_json,
    read_magic,
    shape_problem,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn, Optional

    from .ahead import Ahead


# -- the open artifact -----------------------------------------------------------------------------


class Artifact:
    """An open artifact whose structure has been proved.

    ``manifest`` is the parsed manifest; ``digest`` identifies the file's whole content;
    ``weights_offset`` is in bytes from the start of the file, ``weights_size`` in bytes.  Offsets
    inside the manifest's ``weights`` count from ``weights_offset``.  Close it, or use it in a
    ``with`` statement; a mapping from :meth:`map_weights` stays valid after that.
    """

    def __init__(self, path: str, fd: int, size: int) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        self.weights_offset = HEADER_BYTES
        self.weights_size = 0
        self.manifest: dict[str, Any] = {}
        self.digest = ""
        self._members: dict[str, tuple[int, int, int]] = {}  # name -> data offset, size, CRC-32
        self._hashes: dict[str, str] = {}  # name -> SHA-256, of every member but the manifest

    def check(self) -> None:
        """Proves the structure and loads the manifest; :func:`open_artifact` has called it."""
        version = self._check_header()
        self.weights_size = self._check_zip() - HEADER_BYTES
        self.manifest = self._check_manifest(version)
        self.digest = self.manifest["digest"]
        self._hashes = {f["name"]: f["sha256"] for f in self.manifest["files"]}

    # public -------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Every member's name, sorted."""
        return tuple(self._members)

    def member_range(self, name: str) -> tuple[int, int]:
        """(offset from the start of the file, bytes) of a member's data.

        Raises InputFileError when there is no such member.
        """
        try:
            offset, size, _ = self._members[name]
        except KeyError:
            raise InputFileError(
                f"the artifact has no member {name!r}",
                where=self.path,
                next_step="list the members with: unzip -l FILE",
            ) from None
        return offset, size

    def member(self, name: str, limit: int = MAX_MEMBER_BYTES, verify: bool = True) -> bytes:
        """The bytes of a member, checked against its hash unless ``verify`` is False.

        Raises IntegrityError when the hash differs, ResourceError above ``limit`` bytes.
        """
        offset, size = self.member_range(name)
        if size > limit:
            raise ResourceError(
                f"member {name} has {size} bytes, more than the limit of {limit}", where=self.path
            )
        data = self._read(offset, size, f"member {name}")
        if verify and name != MANIFEST and hashlib.sha256(data).hexdigest() != self._hashes[name]:
            self._damaged(f"member {name} does not match its SHA-256 in the manifest")
        return data

    def map_weights(self, ahead: Optional[Ahead] = None) -> tuple[mmap.mmap, int]:
        """The weights region mapped read-only and shared: (mapping, offset of its first byte).
        The mapping of ``ahead`` where that is of this file: its pages are there already.

        Raises ResourceError when the host cannot map it, InputFileError when there are no weights.
        """
        if not self.weights_size:
            raise InputFileError("the artifact has no weights", where=self.path)
        start = self.weights_offset - self.weights_offset % mmap.ALLOCATIONGRANULARITY
        length = self.weights_offset - start + self.weights_size
        mapped = None if ahead is None else ahead.take(os.fstat(self._fd), start, length)
        if mapped is not None:
            return mapped, self.weights_offset - start
        try:
            mapped = mmap.mmap(
                self._fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start
            )
        except (OSError, OverflowError, ValueError) as e:
            raise ResourceError(
                f"cannot map {length} bytes of weights: {e}",
                where=self.path,
                next_step="check the address space limit (ulimit -v)",
            ) from None
        from .ahead import in_huge_pages

        in_huge_pages(mapped)
        return mapped, self.weights_offset - start

    def verify_member(self, name: str) -> None:
        """Checks a member's SHA-256 and CRC-32.  Raises IntegrityError naming it."""
        crc = zlib.crc32(self.member(name))
        if crc != self._members[name][2]:
            self._damaged(f"member {name} does not match the CRC-32 of its ZIP entry")

    def verify_section(
        self, section: dict[str, Any], progress: Optional[Callable[[int], None]] = None
    ) -> None:
        """Checks one section of the weights against its SHA-256; IntegrityError names it."""
        hasher = hashlib.sha256()
        at = self.weights_offset + section["offset"]
        left = section["size"]
        while left:
            data = self._read(at, min(left, 4 << 20), f"weights section {section['name']}")
            hasher.update(data)
            at += len(data)
            left -= len(data)
            if progress is not None:
                progress(len(data))
        if hasher.hexdigest() != section["sha256"]:
            self._damaged(
                f"weights section {section['name']} ({section['size']} bytes at "
                f"{self.weights_offset + section['offset']}) does not match its SHA-256"
            )

    def verify_all(self, progress: Optional[Callable[[int, int], None]] = None) -> None:
        """Checks every hash in the file, calling ``progress(bytes done, bytes in all)`` meanwhile.

        Raises IntegrityError naming the first member or section that was changed.
        """
        done = 0
        total = self.size

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(min(done, total), total)

        for name in self._members:
            self.verify_member(name)
            advance(self._members[name][1])
        for section in self.manifest["weights"]["sections"]:
            self.verify_section(section, advance)
        advance(total)

    def close(self) -> None:
        """Closes the file.  Mappings stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    # structure ----------------------------------------------------------------------------------

    def _damaged(self, what: str) -> NoReturn:
        raise IntegrityError(
            what, where=self.path, next_step="the file was changed or cut; copy or build it again"
        )

    def _read(self, offset: int, size: int, what: str) -> bytes:
        """Exactly ``size`` bytes at ``offset``, both already known to lie inside the file."""
        parts = []
        while size:
            try:
                data = os.pread(self._fd, min(size, 1 << 30), offset)
            except OSError as e:
                raise InputFileError(f"cannot read {what}: {e.strerror}", where=self.path) from None
            if not data:
                self._damaged(f"the file ends inside {what}")
            parts.append(data)
            offset += len(data)
            size -= len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check_header(self) -> tuple[int, int]:
        """Checks the first lines; returns the format version (major, minor)."""
        head = self._read(0, min(self.size, 256), "the header")
        magic = read_magic(head)
        if magic is None:
            raise InputFileError(
                "not a zerolayer artifact (its first lines are not those of one)",
                where=self.path,
                next_step="make one with: zerolayer compile MODEL --target TARGET",
            )
        major, minor, needs = magic
        if major != FORMAT_MAJOR:
            raise InputFileError(
                f"an artifact of format version {major}.{minor}; this program reads format "
                f"{FORMAT_MAJOR}",
                where=self.path,
                next_step=f"use zerolayer {needs} or later, or run the file: it carries its loader",
            )
        if self.size < HEADER_BYTES + END_BYTES:
            self._damaged(f"the file has {self.size} bytes and ends inside the header")
        if self.size > MAX_FILE_BYTES:
            self._damaged(f"the file has {self.size} bytes, more than an artifact can have")
        return major, minor

    def _check_zip(self) -> int:
        """Checks the end record, the directory, every local header; returns the ZIP's start."""
        end_at = self.size - END_BYTES
        end = END.unpack(self._read(end_at, END_BYTES, "the ZIP end record"))
        count, directory_size, directory_offset = end[4], end[5], end[6]
        expected = (b"PK\x05\x06", 0, 0, count, count, directory_size, directory_offset, 0)
        self._same(end, expected, END_FIELDS, "ZIP end record")
        if not 1 <= count <= MAX_MEMBERS:
            self._damaged(f"ZIP end record: entries is {count}, not 1 to {MAX_MEMBERS}")
        zip_start: int = end_at - directory_size - directory_offset
        if zip_start < HEADER_BYTES or directory_offset + directory_size > MAX_ZIP_BYTES:
            self._damaged("ZIP end record: directory size or offset points outside the file")
        if zip_start % SECTION_ALIGN:
            self._damaged(
                f"the ZIP starts at {zip_start}, not at a multiple of {SECTION_ALIGN}: bytes were "
                "added or removed"
            )
        if directory_size > count * (CENTRAL.size + MAX_NAME_BYTES):
            self._damaged("ZIP end record: directory size is more than its entries can take")
        directory = self._read(zip_start + directory_offset, directory_size, "the ZIP directory")
        self._check_directory(directory, count, zip_start, directory_offset)
        return zip_start

    def _check_directory(self, directory: bytes, count: int, zip_start: int, end: int) -> None:
        """Every entry in order; the members must fill the ZIP up to ``end`` without holes."""
        at = offset = 0
        previous = ""
        for index in range(count):
            place = f"ZIP directory entry {index}"
            if at + CENTRAL.size > len(directory):
                self._damaged(f"{place}: the directory ends inside it")
            fields = CENTRAL.unpack_from(directory, at)
            crc, size, name_bytes = fields[7], fields[9], fields[10]
            raw = directory[at + CENTRAL.size : at + CENTRAL.size + name_bytes]
            name = raw.decode("ascii", "replace")
            expected = central_fields(raw, crc, size, offset)
            self._same(fields, expected, CENTRAL_FIELDS, f"{place} ({name[:80]!r})")
            problem = name_problem(name)
            if problem:
                self._damaged(f"{place}: the name {name[:80]!r} {problem}")
            if name <= previous:
                self._damaged(f"{place}: {name!r} is a duplicate or not in sorted order")
            data_at = offset + LOCAL.size + name_bytes
            if size > MAX_MEMBER_BYTES or data_at + size > end:
                self._damaged(f"{place} ({name}): its {size} bytes reach beyond the members")
            local = self._read(zip_start + offset, LOCAL.size + name_bytes, f"{name}'s header")
            local_place = f"ZIP local header of {name}"
            self._same(
                LOCAL.unpack_from(local), local_fields(raw, crc, size), LOCAL_FIELDS, local_place
            )
            if local[LOCAL.size :] != raw:
                self._damaged(f"{local_place}: its name differs from the directory's")
            self._members[name] = (zip_start + data_at, size, crc)
            previous = name
            offset = data_at + size
            at += CENTRAL.size + name_bytes
        if at != len(directory):
            self._damaged(f"the ZIP directory has {len(directory) - at} bytes after its last entry")
        if offset != end:
            self._damaged(f"the ZIP has {end - offset} bytes between its members and its directory")
        for name in self._members:
            parts = name.split("/")
            for i in range(1, len(parts)):
                if "/".join(parts[:i]) in self._members:
                    self._damaged(f"the ZIP member {'/'.join(parts[:i])} is also a folder")

    def _same(
        self, got: tuple[Any, ...], want: tuple[Any, ...], fields: tuple[str, ...], place: str
    ) -> None:
        if got != want:
            for field, g, w in zip(fields, got, want):  # noqa: B905 (Python 3.9)
                if g != w:
                    self._damaged(f"{place}: {field} is {g!r}, not {w!r}")

    def _check_manifest(self, version: tuple[int, int]) -> dict[str, Any]:
        """Parses the manifest and compares it with the file.  Returns it."""
        if MANIFEST not in self._members:
            self._damaged(f"the ZIP has no {MANIFEST}")
        size = self._members[MANIFEST][1]
        if size > MAX_MANIFEST_BYTES:
            self._damaged(f"{MANIFEST} has {size} bytes, more than {MAX_MANIFEST_BYTES}")
        raw = self.member(MANIFEST)
        try:
            manifest = parse_json(raw)
        except (ValueError, RecursionError) as e:
            self._damaged(f"{MANIFEST}: {e}")
        if not isinstance(manifest, dict):
            self._damaged(f"{MANIFEST}: not an object")
        digest = self._text(manifest, "digest", MANIFEST)
        if digest_of(raw, digest) != digest:
            self._damaged(f"{MANIFEST}: its digest does not match its content")
        if zlib.crc32(raw) != self._members[MANIFEST][2]:
            self._damaged(f"member {MANIFEST} does not match the CRC-32 of its ZIP entry")
        form = self._object(manifest, "format", MANIFEST)
        if (form.get("major"), form.get("minor")) != version:
            self._damaged(f"{MANIFEST}: format differs from the header's {version[0]}.{version[1]}")
        header = self._object(manifest, "header", MANIFEST)
        text = self._read(0, HEADER_BYTES, "the header")
        if hashlib.sha256(text).hexdigest() != self._text(header, "sha256", "manifest header"):
            self._damaged("the header page does not match its SHA-256 in the manifest")
        if b"\0" in text.rstrip(b"\0"):
            self._damaged("the header page has bytes behind its zero padding")
        problem = shape_problem(manifest)
        if problem:
            self._damaged(f"{MANIFEST}: {problem}")
        self._check_files(manifest)
        self._check_weights(self._object(manifest, "weights", MANIFEST))
        return manifest

    def _check_files(self, manifest: dict[str, Any]) -> None:
        listed = []
        for i, entry in enumerate(self._array(manifest, "files", MANIFEST, MAX_MEMBERS)):
            place = f"manifest files[{i}]"
            name = self._text(entry, "name", place)
            size = self._integer(entry, "size", place, MAX_MEMBER_BYTES)
            self._hash(entry, place)
            if name not in self._members or name == MANIFEST:
                self._damaged(f"{place}: {name[:80]!r} is not in the ZIP")
            if self._members[name][1] != size:
                self._damaged(f"{place}: {name} has {self._members[name][1]} bytes, not {size}")
            listed.append(name)
        if listed != [name for name in self._members if name != MANIFEST]:
            self._damaged("the manifest's files are not the ZIP's members in order")

    def _check_weights(self, weights: dict[str, Any]) -> None:
        """The sections must fill the weights region, the tensors the sections, up to alignment."""
        if self._integer(weights, "offset", "manifest weights", MAX_FILE_BYTES) != HEADER_BYTES:
            self._damaged(f"manifest weights: offset is not {HEADER_BYTES}")
        if self._integer(weights, "size", "manifest weights", MAX_FILE_BYTES) != self.weights_size:
            self._damaged(f"manifest weights: size is not the file's {self.weights_size} bytes")
        ends: dict[str, int] = {}
        order: list[str] = []
        at = 0
        for i, s in enumerate(self._array(weights, "sections", "manifest weights", MAX_TENSORS)):
            place = f"manifest weights section {i}"
            name = self._text(s, "name", place)
            if self._integer(s, "offset", place, MAX_FILE_BYTES) != at or name in ends:
                self._damaged(f"{place} ({name[:80]!r}) does not follow the one before it")
            size = self._integer(s, "size", place, MAX_FILE_BYTES)
            self._hash(s, place)
            if not size or size % SECTION_ALIGN:
                self._damaged(f"{place}: size {size} is not a multiple of {SECTION_ALIGN}")
            at += size
            ends[name] = at
            order.append(name)
        if at != self.weights_size:
            self._damaged(f"the weights sections end at {at}, not at {self.weights_size}")
        at = 0
        current = 0
        tensors = self._array(weights, "tensors", "manifest weights", MAX_TENSORS)
        names: set[str] = set()
        for i, t in enumerate(tensors):
            place = f"manifest tensor {i}"
            name = self._text(t, "name", place)
            section = self._text(t, "section", place)
            if current < len(order) and section != order[current]:
                if align_up(at, SECTION_ALIGN) != ends[order[current]]:
                    self._damaged(f"{place}: a hole at the end of section {order[current]}")
                at = ends[order[current]]
                current += 1
            if current >= len(order) or section != order[current] or name in names:
                self._damaged(f"{place} ({name[:80]!r}) is a duplicate or not in section order")
            names.add(name)
            at = align_up(at, TENSOR_ALIGN)
            if self._integer(t, "offset", place, MAX_FILE_BYTES) != at:
                self._damaged(f"{place} ({name[:80]}) does not start at {at}: a hole or an overlap")
            at += self._integer(t, "nbytes", place, MAX_FILE_BYTES)
            if at > ends[section]:
                self._damaged(f"{place} ({name[:80]}) reaches beyond section {section}")
        if order and (current != len(order) - 1 or align_up(at, SECTION_ALIGN) != ends[order[-1]]):
            self._damaged("manifest weights: the tensors do not fill the sections")

    def _value(self, where: Any, key: str, place: str, kind: type) -> Any:
        value = where.get(key) if isinstance(where, dict) else None
        if type(value) is not kind:
            self._damaged(f"{place}: {key} is missing or not {kind.__name__}")
        return value

    def _object(self, where: Any, key: str, place: str) -> dict[str, Any]:
        return self._value(where, key, place, dict)  # type: ignore[no-any-return]

    def _text(self, where: Any, key: str, place: str) -> str:
        return self._value(where, key, place, str)  # type: ignore[no-any-return]

    def _array(self, where: Any, key: str, place: str, limit: int) -> list[Any]:
        value = self._value(where, key, place, list)
        if len(value) > limit:
            self._damaged(f"{place}: {key} has {len(value)} entries, more than {limit}")
        return value  # type: ignore[no-any-return]

    def _integer(self, where: Any, key: str, place: str, limit: int) -> int:
        value = self._value(where, key, place, int)
        if not 0 <= value <= limit:
            self._damaged(f"{place}: {key} is {value}, not 0 to {limit}")
        return value  # type: ignore[no-any-return]

    def _hash(self, where: Any, place: str) -> None:
        value = self._text(where, "sha256", place)
        if len(value) != 64 or value.strip("0123456789abcdef"):
            self._damaged(f"{place}: sha256 is not 64 hexadecimal digits")


def open_artifact(path: str) -> Artifact:
    """Opens the artifact at ``path`` and proves its structure (not the weights' hashes).

    Raises InputFileError (no such file, not an artifact, another format version) or IntegrityError.
    """
    path = os.fspath(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        raise InputFileError(f"cannot open the file: {reason}", where=path) from None
    artifact = Artifact(path, fd, os.fstat(fd).st_size)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InputFileError("not a regular file", where=path)
        artifact.check()
    except BaseException:
        artifact.close()
        raise
    return artifact


def running_artifact_path() -> Optional[str]:
    """The artifact that this module was imported from; None when it was not imported from one."""
    archive = getattr(globals().get("__loader__"), "archive", None)
    return archive if isinstance(archive, str) else None
