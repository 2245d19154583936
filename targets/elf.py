"""A bounded reader of the ELF shared objects that the CPU family builds.

In: the bytes of a 64-bit little-endian shared object.  Out: :class:`SharedObject`.  Next file:
``injection.py`` (the record in its note), ``cpu.py`` (what is checked after a build).

The bytes may come from a hostile artifact: every offset, size and count is checked against the file
before it is used, and counts are capped.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from zerolayer.runtime_stub.errors import IntegrityError

MAX_SECTIONS = 4096
MAX_SYMBOLS = 1 << 20
MAX_NAME = 512

EM_X86_64 = 62
EM_AARCH64 = 183
_ET_DYN = 3
_SHT_DYNAMIC, _SHT_NOTE, _SHT_NOBITS, _SHT_DYNSYM = 6, 7, 8, 11
_SHT_GNU_VERNEED = 0x6FFFFFFE
_DT_NEEDED = 1
_SHN_UNDEF = 0


@dataclass(frozen=True)
class Note:
    """One record of a note section."""

    name: str
    type: int
    desc: bytes


@dataclass(frozen=True)
class SharedObject:
    """``machine`` is the EM_ number; ``versions`` the symbol versions it wants, such as
    GLIBC_2.17."""

    machine: int
    needed: tuple[str, ...]
    versions: tuple[str, ...]
    exports: tuple[str, ...]
    imports: tuple[str, ...]
    notes: tuple[Note, ...]
    sections: tuple[str, ...]


@dataclass(frozen=True)
class _Section:
    name_at: int
    type: int
    offset: int
    size: int
    link: int
    entry_size: int


class _Reader:
    def __init__(self, data: bytes, name: str) -> None:
        self.data = data
        self.name = name

    def fail(self, what: str) -> IntegrityError:
        return IntegrityError(what, where=self.name)

    def unpack(self, layout: str, offset: int) -> tuple[int, ...]:
        size = struct.calcsize(layout)
        if offset < 0 or offset + size > len(self.data):
            raise self.fail(f"{size} bytes at {offset} lie outside the object")
        return struct.unpack_from(layout, self.data, offset)

    def slice(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > len(self.data):
            raise self.fail(f"{size} bytes at {offset} lie outside the object")
        return self.data[offset : offset + size]

    def string(self, table: bytes, at: int) -> str:
        end = table.find(b"\0", at, at + MAX_NAME) if 0 <= at < len(table) else -1
        if end < 0:
            raise self.fail("a name that does not end")
        return table[at:end].decode("ascii", "replace")


def read_shared_object(data: bytes, name: str = "shared object") -> SharedObject:
    """What ``data`` declares.  Raises IntegrityError when it is not a sound 64-bit ELF object."""
    r = _Reader(data, name)
    if r.slice(0, min(6, len(data))) != b"\x7fELF\x02\x01":
        raise r.fail("not a 64-bit little-endian ELF object")
    kind, machine = r.unpack("<HH", 16)
    if kind != _ET_DYN:
        raise r.fail("not a shared object")
    sections = _sections(r)
    names = tuple(_names(r, sections))
    needed: list[str] = []
    versions: list[str] = []
    exports: list[str] = []
    imports: list[str] = []
    notes: list[Note] = []
    for s in sections:
        if s.type == _SHT_DYNAMIC:
            needed += _needed(r, s, _linked(r, sections, s))
        elif s.type == _SHT_GNU_VERNEED:
            versions += _versions(r, s, _linked(r, sections, s))
        elif s.type == _SHT_DYNSYM:
            for symbol, defined in _symbols(r, s, _linked(r, sections, s)):
                (exports if defined else imports).append(symbol)
        elif s.type == _SHT_NOTE:
            notes += _notes(r, r.slice(s.offset, s.size))
    return SharedObject(
        machine,
        tuple(sorted(needed)),
        tuple(sorted(set(versions))),
        tuple(sorted(exports)),
        tuple(sorted(imports)),
        tuple(notes),
        names,
    )


def _sections(r: _Reader) -> list[_Section]:
    (table,) = r.unpack("<Q", 40)
    entry, count, _ = r.unpack("<HHH", 58)
    if entry != 64 or not 0 < count <= MAX_SECTIONS:
        raise r.fail(f"{count} sections of {entry} bytes")
    out = []
    for i in range(count):
        name_at, kind, _flags, _addr, offset, size, link, _info, _align, entry_size = r.unpack(
            "<IIQQQQIIQQ", table + 64 * i
        )
        if kind != _SHT_NOBITS and i and offset + size > len(r.data):
            raise r.fail(f"section {i} lies outside the object")
        out.append(_Section(name_at, kind, offset, size, link, entry_size))
    return out


def _names(r: _Reader, sections: list[_Section]) -> list[str]:
    (index,) = r.unpack("<H", 62)
    if index >= len(sections):
        raise r.fail("no section names")
    table = r.slice(sections[index].offset, sections[index].size)
    return [r.string(table, s.name_at) for s in sections]


def _linked(r: _Reader, sections: list[_Section], s: _Section) -> bytes:
    if s.link >= len(sections):
        raise r.fail("a section links to one that is not there")
    return r.slice(sections[s.link].offset, sections[s.link].size)


def _needed(r: _Reader, s: _Section, strings: bytes) -> list[str]:
    out = []
    for at in range(s.offset, s.offset + s.size // 16 * 16, 16):
        tag, value = r.unpack("<QQ", at)
        if tag == 0:
            break
        if tag == _DT_NEEDED:
            out.append(r.string(strings, value))
    return out


def _symbols(r: _Reader, s: _Section, strings: bytes) -> list[tuple[str, bool]]:
    """(name, whether the object defines it) of every global symbol."""
    if s.entry_size != 24 or s.size // 24 > MAX_SYMBOLS:
        raise r.fail(f"{s.size} bytes of symbols of {s.entry_size} bytes each")
    out = []
    for at in range(s.offset + 24, s.offset + s.size // 24 * 24, 24):
        name_at, info, _other, section = r.unpack("<IBBH", at)
        if info >> 4 != 0:  # local symbols do not leave the object
            out.append((r.string(strings, name_at), section != _SHN_UNDEF))
    return out


def _versions(r: _Reader, s: _Section, strings: bytes) -> list[str]:
    out: list[str] = []
    at, end = s.offset, s.offset + s.size
    for _ in range(MAX_SECTIONS):
        if not s.offset <= at < end:
            break
        _version, count, _file, first, following = r.unpack("<HHIII", at)
        each = at + first
        for _ in range(count):
            _hash, _flags, _other, name_at, step = r.unpack("<IHHII", each)
            out.append(r.string(strings, name_at))
            each += step
            if step == 0:
                break
        if following == 0:
            break
        at += following
    return out


def _notes(r: _Reader, data: bytes) -> list[Note]:
    out: list[Note] = []
    at = 0
    while at + 12 <= len(data):
        name_size, desc_size, kind = struct.unpack_from("<III", data, at)
        desc_at = at + 12 + -(-name_size // 4) * 4
        if name_size > MAX_NAME or desc_at + desc_size > len(data):
            raise r.fail("a note that lies outside its section")
        name = data[at + 12 : at + 12 + name_size].rstrip(b"\0").decode("ascii", "replace")
        out.append(Note(name, kind, data[desc_at : desc_at + desc_size]))
        at = desc_at + -(-desc_size // 4) * 4
    return out
