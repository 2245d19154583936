"""The artifact's format in constants: limits, ZIP records, names, and bounded JSON.

In: nothing.  Out: what ``container.py`` reads by and ``compiler/artifact/writer.py`` writes by, so
that the two cannot drift apart.  The format on one page is in ``artifacts/README.md``.  Next file:
``container.py``.
"""

from __future__ import annotations

import hashlib
import struct

TYPE_CHECKING = False  # typing takes longer to import than this module
if TYPE_CHECKING:
    from typing import Any, NoReturn, Optional

FORMAT_MAJOR = 1
FORMAT_MINOR = 0
#: the first release that reads FORMAT_MAJOR
NEEDS_VERSION = "0.1"

HEADER_BYTES = 65536
SECTION_ALIGN = 65536  # the largest page size in use, so that a section can be mapped by itself
TENSOR_ALIGN = 64  # a cache line, and one vector of every supported instruction set

SHEBANG = b"#!/usr/bin/env python3\n"
#: how the second line of every artifact begins, whatever its version
ARTIFACT_LINE = b"# zerolayer artifact, format "
_MAGIC = (ARTIFACT_LINE, b", needs zerolayer ", b" or later\n")

# Limits: each has its reason in artifacts/README.md and a test that breaks it.
MAX_MEMBERS = 4096
MAX_MEMBER_BYTES = 1 << 30
MAX_ZIP_BYTES = (1 << 32) - (1 << 16)  # offsets in a plain ZIP are 32-bit
MAX_MANIFEST_BYTES = 16 << 20
MAX_JSON_DEPTH = 24
MAX_TENSORS = 1 << 20
MAX_NAME_BYTES = 200
MAX_FILE_BYTES = 1 << 50

MANIFEST = "manifest.json"
_NAME_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._+-"

# -- ZIP records -----------------------------------------------------------------------------------

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END_BYTES = END.size
LOCAL_FIELDS = (
    "signature", "version needed", "flags", "method", "time", "date", "CRC-32", "compressed size",
    "size", "name length", "extra length",
)  # fmt: skip
CENTRAL_FIELDS = (
    "signature", "version made by", "version needed", "flags", "method", "time", "date", "CRC-32",
    "compressed size", "size", "name length", "extra length", "comment length", "disk number",
    "internal attributes", "external attributes", "local header offset",
)  # fmt: skip
END_FIELDS = (
    "signature", "disk number", "directory disk number", "entries on this disk", "entries",
    "directory size", "directory offset", "comment length",
)  # fmt: skip
_DATE = 0x0021  # 1980-01-01, the first date a ZIP can hold
_MADE_BY = 0x0314  # Unix, version 2.0
_ATTRIBUTES = 0o100644 << 16


def local_fields(name: bytes, crc: int, size: int) -> tuple[Any, ...]:
    return (b"PK\x03\x04", 20, 0, 0, 0, _DATE, crc, size, size, len(name), 0)


def central_fields(name: bytes, crc: int, size: int, offset: int) -> tuple[Any, ...]:
    return (b"PK\x01\x02", _MADE_BY, 20, 0, 0, 0, _DATE, crc, size, size, len(name), 0, 0, 0, 0,
            _ATTRIBUTES, offset)  # fmt: skip


def local_record(name: str, crc: int, size: int) -> bytes:
    """The bytes in front of a member's data."""
    raw = name.encode("ascii")
    return LOCAL.pack(*local_fields(raw, crc, size)) + raw


def central_record(name: str, crc: int, size: int, offset: int) -> bytes:
    """A member's entry in the central directory; ``offset`` counts from the start of the ZIP."""
    raw = name.encode("ascii")
    return CENTRAL.pack(*central_fields(raw, crc, size, offset)) + raw


def end_record(count: int, directory_size: int, directory_offset: int) -> bytes:
    """The last 22 bytes of the file."""
    return END.pack(b"PK\x05\x06", 0, 0, count, count, directory_size, directory_offset, 0)


def magic_line() -> bytes:
    """The second line of every artifact."""
    return (
        f"# zerolayer artifact, format {FORMAT_MAJOR}.{FORMAT_MINOR}, "
        f"needs zerolayer {NEEDS_VERSION} or later\n"
    ).encode("ascii")


def read_magic(head: bytes) -> Optional[tuple[int, int, str]]:
    """(major, minor, the release that reads it) from a file's first bytes; None when it is not an
    artifact.  By hand: regular expressions take longer to import than a file to open."""
    first, middle, last = _MAGIC
    start = len(SHEBANG) + len(first)
    if head[:start] != SHEBANG + first:
        return None
    version, found, rest = head[start:].partition(middle)
    release, ended, _ = rest.partition(last)
    form, needs = _numbers(version), _numbers(release)
    if not (found and ended and len(form) == 2 and 1 <= len(needs) <= 3):
        return None
    return form[0], form[1], release.decode("ascii")


def _numbers(text: bytes) -> list[int]:
    """``1.22.333``: numbers of at most four digits; none when it is something else."""
    parts = text.split(b".")
    good = all(1 <= len(p) <= 4 and not p.strip(b"0123456789") for p in parts)
    return [int(p) for p in parts] if good else []


def name_problem(name: str) -> Optional[str]:
    """Why ``name`` cannot be a member's name; None when it can."""
    if len(name) > MAX_NAME_BYTES:
        return f"is longer than {MAX_NAME_BYTES} bytes"
    parts = name.split("/")
    if any(p in ("", ".", "..") or p.strip(_NAME_CHARACTERS) for p in parts):
        return "is not a relative path of letters, digits and . _ + - without '.' or '..' parts"
    return None


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` (a power of two) that is not below ``value``."""
    return (value + alignment - 1) & -alignment


# -- manifest --------------------------------------------------------------------------------------

_DIGITS = bytes(48 if c in b"0123456789" else 32 for c in range(256))
_NOT_BRACKETS = bytes(c for c in range(256) if c not in b'[]{}"')
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def digest_of(raw: bytes, digest: str) -> Optional[str]:
    """The digest that the manifest ``raw`` should carry: its SHA-256 with its own digest zeroed.

    None when ``digest`` is not there exactly once.  The manifest holds the hash of every other byte
    of the file, so this is the digest of everything.
    """
    token = b'"digest":"' + digest.encode("ascii", "replace") + b'"'
    if raw.count(token) != 1:
        return None
    return hashlib.sha256(raw.replace(token, b'"digest":"' + b"0" * 64 + b'"')).hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:60]!r} occurs twice in one object")
            seen.add(key)
    return found


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:  # the parser has read 1e999 as infinity
        raise ValueError(f"{text[:60]} is more than a number can be")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _long_number(bare: bytes) -> bool:
    """Whether more than 20 digits in a row stand outside strings (a hash may have them inside)."""
    digits = b"0" * 21
    plain = bare.translate(_DIGITS)
    last = quotes = 0
    at = plain.find(digits)
    while at >= 0:
        quotes += bare.count(b'"', last, at)
        if quotes % 2 == 0:
            return True
        last, end = at, bare.find(b'"', at)
        at = plain.find(digits, end) if end >= 0 else -1
    return False


def parse_json(raw: bytes, limit: int = MAX_MANIFEST_BYTES) -> Any:
    """JSON, bounded in size and depth, without duplicate keys, NaN, infinity or oversized
    numbers.

    Raises ValueError saying what is wrong; never RecursionError.
    """
    if len(raw) > limit:
        raise ValueError(f"{len(raw)} bytes of JSON, more than the limit of {limit}")
    bare = raw
    if b"\\" in bare:  # escaped backslashes first, so that what is left before a quote escapes it
        bare = bare.replace(b"\\\\", b"").replace(b'\\"', b"")
    if _long_number(bare):
        raise ValueError("a number of more than 20 digits")
    brackets = bare.translate(_ONE_KIND, _NOT_BRACKETS)  # which kind is for the parser to match
    # neighbouring quotes enclose nothing that counts; without them few are left to split at
    brackets = b"".join(brackets.replace(b'""', b"").split(b'"')[::2])  # without strings
    too_deep = b"[" * (MAX_JSON_DEPTH + 1) in brackets
    for _ in range(
        0 if too_deep else MAX_JSON_DEPTH
    ):  # each round removes the innermost level, and no other
        before = len(brackets)
        brackets = brackets.replace(b"[]", b"")
        if len(brackets) == before:
            break
    if brackets:
        raise ValueError(f"brackets that do not match or are nested deeper than {MAX_JSON_DEPTH}")
    return _loads(raw.decode("utf-8"))


class _Settings:
    """What the scanner behind ``json`` wants to know."""

    strict = True
    object_hook = None
    object_pairs_hook = staticmethod(_unique)
    parse_float = staticmethod(_finite)
    parse_int = int
    parse_constant = staticmethod(_no_constant)


def _loads(text: str) -> Any:
    """``json.loads`` with unique keys and without constants.  Its scanner is asked directly: the
    package around it imports regular expressions."""
    try:
        import _json

        scanner: Any = _json.make_scanner
        scan = scanner(_Settings)
    except (ImportError, AttributeError):  # a Python whose scanner is another
        import json

        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    blanks = " \t\n\r"
    start = len(text) - len(text.lstrip(blanks))
    try:
        value, end = scan(text, start)
    except StopIteration as e:
        raise ValueError(f"not JSON at character {e.value}") from None
    if text[end:].strip(blanks):
        raise ValueError(f"more than one value, the second at character {end}")
    return value


#: what a key of the manifest holds when it is there: the loader reads these without asking again
_KINDS: dict[str, tuple[type, ...]] = {
    "model": (dict,),
    "model.vocab_size": (int,),
    "target": (dict,),
    "target.name": (str,),
    "target.requires": (dict,),
    "target.requires.features": (list,),
    "code": (dict,),
    "limits": (dict,),
    "memory": (dict,),
    "entry_points": (list,),
    "buffers": (list,),
    "kernels": (list,),
    "numerics": (dict,),
    "roofline": (dict,),
    "tokenizer": (dict, type(None)),
    "golden": (str, type(None)),
    "tools": (dict,),
}
_ELEMENTS = {
    "entry_points": dict,
    "buffers": dict,
    "kernels": dict,
    "target.requires.features": str,
}


def shape_problem(manifest: dict[str, Any]) -> Optional[str]:
    """What is wrong with the types in ``manifest``; None when nothing is."""
    for path, kinds in _KINDS.items():
        value: Any = manifest
        for key in path.split("."):
            value = value.get(key, _KINDS) if isinstance(value, dict) else _KINDS
        if value is _KINDS:
            continue  # not there
        if type(value) not in kinds:
            return f"{path} is not of type {kinds[0].__name__}"
        element = _ELEMENTS.get(path)
        if element is not None and not all(type(item) is element for item in value):
            return f"{path} holds something that is not of type {element.__name__}"
    least = int(any(e.get("name") == "step" for e in manifest.get("entry_points", ())))
    words = manifest.get("model", {}).get("vocab_size", least)
    if not least <= words < 1 << 31:  # a graph has none
        return f"model.vocab_size is {str(words)[:30]}, not from {least} to {(1 << 31) - 1}"
    return None
