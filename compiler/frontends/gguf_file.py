"""GGUF files, versions 2 and 3: metadata and where each tensor lies.

In: a path.  Out: :class:`GgufFile`, whose every count, length, offset, size and name has been
checked against the file.  Next file: ``gguf.py``, which maps the names onto the model.

Why not the ``gguf`` package's reader: it trusts the file.  A string's length, an array's count or a
tensor's offset goes into numpy unchecked, so that hostile bytes cost memory, time or a traceback,
and a truncated file is found when (or never) a tensor is touched.  The format is two pages; this
reader proves everything before use, needs time and memory proportional to the file at most, and
names the byte, key or tensor in each error.  Tests compare it with that package on files that
package wrote.

The header is read with ordinary reads, not mapped: a file cut short meanwhile is then an error and
not a bus error.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError
from zerolayer.targets import formats

MAGIC = b"GGUF"
MAX_KEY_BYTES = 65535  # the specification's limits
MAX_NAME_BYTES = 255  # the specification says 64; some writers go a little beyond
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4  # arrays of arrays; nothing in use nests at all
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MIN_PAIR_BYTES = 8 + 1 + 4 + 1  # key length, a key byte, type, the smallest value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, a name byte, dims, one dim, type, offset

STRING, ARRAY, BOOL = 8, 9, 7
_SCALARS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    BOOL: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

_TENSOR_TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    4: "Q4_2",
    5: "Q4_3",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    39: "MXFP4",
    40: "NVFP4",
}
"""ggml's numbering, with the types that have no decoder here so that an error can name them."""

FETCH_AGAIN = "fetch or convert the file again"

Numbers = npt.NDArray[np.generic]
Scalar = bool | int | float | str
Value = Scalar | Numbers | list["Value"]
"""A metadata value: a scalar, a numeric array (numpy), or a list (strings, or nested arrays)."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: ``shape`` slowest dimension first (``[N, K]``), ``offset`` from the start of the
    file and ``size``, both in bytes."""

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def rows(self) -> int:
        """How many rows of ``shape[-1]`` elements the tensor has."""
        rows = 1
        for dim in self.shape[:-1]:
            rows *= dim
        return rows

    @property
    def row_bytes(self) -> int:
        return self.size // self.rows


@dataclass(frozen=True)
class GgufFile:
    """A checked GGUF file: nothing below has to look at sizes or offsets again."""

    path: Path
    version: int
    size: int
    alignment: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    @property
    def name(self) -> str:
        """The file's base name, as used in messages."""
        return self.path.name


def read_gguf(path: Path) -> GgufFile:
    """Reads and checks the header of the GGUF file at ``path``; tensors' bytes are not touched.

    Raises :class:`InputFileError` for a file that is missing, damaged, truncated or extended, and
    :class:`UnsupportedError` for a big-endian file, another version or a tensor type without an
    exact decoder.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening: a FIFO would block
            raise InputFileError("not a regular file", where=path.name, next_step="check the path")
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            return _read(path, _Cursor(stream, size, path.name))
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        raise InputFileError(
            f"cannot read the file: {error}", where=path.name, next_step="check the path"
        ) from error


class _Cursor:
    """Reads forward through the header; nothing is allocated before its bound is checked."""

    def __init__(self, stream: BinaryIO, size: int, file: str) -> None:
        self._stream = stream
        self.size = size
        self.file = file
        self.at = 0

    @property
    def left(self) -> int:
        return self.size - self.at

    def fail(self, what: str, subject: str = "") -> InputFileError:
        """An error at the current byte."""
        where = f"{self.file}: byte {self.at}" + (f", {subject}" if subject else "")
        return InputFileError(what, where=where, next_step=FETCH_AGAIN)

    def take(self, n: int, subject: str) -> bytes:
        if n > self.left:
            raise self.fail(f"needs {n} bytes, {self.left} are left in the file", subject)
        data = self._stream.read(n)
        if len(data) != n:
            raise self.fail("the file became shorter while it was read", subject)
        self.at += n
        return data

    def u32(self, subject: str) -> int:
        return int.from_bytes(self.take(4, subject), "little")

    def u64(self, subject: str) -> int:
        return int.from_bytes(self.take(8, subject), "little")

    def count(self, unit: int, subject: str) -> int:
        """A 64-bit count of things of at least ``unit`` bytes each."""
        n = self.u64(subject)
        if n > self.left // unit:
            raise self.fail(
                f"claims {n} entries of at least {unit} bytes, {self.left} bytes are left", subject
            )
        return n

    def text(self, limit: int, subject: str) -> str:
        n = self.u64(subject)
        if n > min(limit, self.left):
            raise self.fail(
                f"claims a text of {n} bytes; at most {min(limit, self.left)} can be here", subject
            )
        return self.decode(self.take(n, subject), subject)

    def decode(self, data: bytes, subject: str) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"text is not valid UTF-8 ({error.reason})", subject) from error


def _read(path: Path, cursor: _Cursor) -> GgufFile:
    version = _read_version(cursor)
    n_tensors = cursor.count(MIN_TENSOR_BYTES, "tensor count")
    n_pairs = cursor.count(MIN_PAIR_BYTES, "metadata count")
    metadata: dict[str, Value] = {}
    for i in range(n_pairs):
        key = cursor.text(MAX_KEY_BYTES, f"key {i}")
        if not key:
            raise cursor.fail("an empty key", f"key {i}")
        if key in metadata:
            raise cursor.fail("the key appears twice", f"key {key!r}")
        metadata[key] = _read_value(cursor, cursor.u32(f"key {key!r}"), f"key {key!r}", 0)
    alignment = _alignment(cursor, metadata)
    infos = [_read_tensor(cursor, i) for i in range(n_tensors)]
    data_start = _align(cursor.at, alignment)
    tensors = _place(cursor, infos, data_start, alignment)
    return GgufFile(path, version, cursor.size, alignment, metadata, tensors)


def _read_version(cursor: _Cursor) -> int:
    magic = cursor.take(4, "magic") if cursor.size >= 4 else b""
    if magic != MAGIC:
        raise cursor.fail(f"not a GGUF file (it starts with {magic!r})")
    version = cursor.u32("version")
    if version in (2, 3):
        return version
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(
            "a big-endian GGUF file",
            where=cursor.file,
            next_step="convert it with gguf-convert-endian, or fetch the little-endian file",
        )
    raise UnsupportedError(
        f"GGUF version {version}",
        where=cursor.file,
        next_step="versions 2 and 3 are read; convert the model with a current converter",
    )


def _read_value(cursor: _Cursor, kind: int, subject: str, depth: int) -> Value:
    if kind in _SCALARS:
        dtype = np.dtype(_SCALARS[kind])
        value = np.frombuffer(cursor.take(dtype.itemsize, subject), dtype)
        _check_bools(cursor, kind, value, subject)
        return bool(value[0]) if kind == BOOL else _python_scalar(value[0])
    if kind == STRING:
        return cursor.text(cursor.left, subject)
    if kind == ARRAY:
        return _read_array(cursor, subject, depth)
    raise cursor.fail(f"unknown value type {kind}", subject)


def _python_scalar(value: np.generic) -> int | float:
    scalar = value.item()
    assert isinstance(scalar, (int, float))
    return scalar


def _check_bools(cursor: _Cursor, kind: int, values: Numbers, subject: str) -> None:
    if kind == BOOL and values.size and int(values.max()) > 1:
        raise cursor.fail("a boolean that is neither 0 nor 1", subject)


def _read_array(cursor: _Cursor, subject: str, depth: int) -> Value:
    kind = cursor.u32(subject)
    if kind in _SCALARS:
        dtype = np.dtype(_SCALARS[kind])
        n = cursor.count(dtype.itemsize, subject)
        values = np.frombuffer(cursor.take(n * dtype.itemsize, subject), dtype)
        _check_bools(cursor, kind, values, subject)
        return values.astype(bool) if kind == BOOL else values
    if kind == STRING:
        return _read_strings(cursor, subject)
    if kind != ARRAY:
        raise cursor.fail(f"unknown array element type {kind}", subject)
    if depth + 1 >= MAX_ARRAY_DEPTH:
        raise cursor.fail(f"arrays nested deeper than {MAX_ARRAY_DEPTH}", subject)
    n = cursor.count(4 + 8, subject)
    return [_read_array(cursor, f"{subject}[{i}]", depth + 1) for i in range(n)]


def _read_strings(cursor: _Cursor, subject: str) -> Value:
    """The hot path: a vocabulary is some 100,000 to 800,000 short strings."""
    n = cursor.count(8, subject)
    take, size = cursor.take, cursor.size
    strings: list[Value] = []
    for i in range(n):
        length = int.from_bytes(take(8, subject), "little")
        if length > size - cursor.at:
            raise cursor.fail(
                f"claims a text of {length} bytes, {cursor.left} are left", f"{subject}[{i}]"
            )
        try:
            strings.append(take(length, subject).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise cursor.fail(
                f"text is not valid UTF-8 ({error.reason})", f"{subject}[{i}]"
            ) from error
    return strings


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not 8 <= value <= MAX_ALIGNMENT
        or value & (value - 1)
    ):
        raise cursor.fail(
            f"alignment {value!r} is not a power of two from 8 to {MAX_ALIGNMENT}",
            "key 'general.alignment'",
        )
    return value


def _align(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment


def _read_tensor(cursor: _Cursor, index: int) -> TensorInfo:
    """One entry of the tensor table; ``offset`` is still relative to the data section."""
    name = cursor.text(MAX_NAME_BYTES, f"tensor {index}")
    if not name or not name.isprintable():
        raise cursor.fail(f"a tensor may not be called {name!r}", f"tensor {index}")
    subject = f"tensor {name!r}"
    n_dims = cursor.u32(subject)
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fail(f"{n_dims} dimensions; 1 to {MAX_DIMS} are possible", subject)
    fastest_first = [cursor.u64(subject) for _ in range(n_dims)]
    elements = 1
    for dim in fastest_first:
        elements *= dim
        # no format has less than 2 bits per element, so more elements cannot be in the file
        if dim == 0 or elements > cursor.size * 4:
            raise cursor.fail(f"impossible dimensions {fastest_first}", subject)
    kind = cursor.u32(subject)
    format = _TENSOR_TYPES.get(kind)
    if format is None:
        raise cursor.fail(f"unknown tensor type {kind}", subject)
    if not formats.is_format(format):
        supported = ", ".join([*formats.PLAIN_FILE_FORMATS, *formats.FILE_FORMATS])
        raise UnsupportedError(
            f"tensor type {format} has no exact decoder here",
            where=f"{cursor.file}: {subject}",
            next_step=f"requantize the model to one of {supported}",
        )
    offset = cursor.u64(subject)
    try:
        row = formats.row_bytes(format, fastest_first[0])
    except InputFileError as error:
        raise cursor.fail(f"{format}: {error.what}", subject) from error
    size = elements // fastest_first[0] * row
    return TensorInfo(name, format, tuple(reversed(fastest_first)), offset, size)


def _place(
    cursor: _Cursor, infos: list[TensorInfo], data_start: int, alignment: int
) -> dict[str, TensorInfo]:
    """Absolute offsets, with the data section proven to be the tensors, back to back, padded only
    to the alignment, from the end of the header to the end of the file."""
    where = f"{cursor.file}: tensor "
    end = data_start
    last = "the header"
    placed: dict[str, TensorInfo] = {}
    for info in sorted(infos, key=lambda t: t.offset):
        if info.name in placed:
            raise InputFileError(
                "the tensor appears twice", where=f"{where}{info.name!r}", next_step=FETCH_AGAIN
            )
        start = data_start + info.offset
        expected = _align(end, alignment)
        if start != expected:
            relation = "overlaps" if start < end else "does not follow"
            raise InputFileError(
                f"its data at byte {start} {relation} {last}, which needs it at byte {expected}",
                where=f"{where}{info.name!r}",
                next_step=FETCH_AGAIN,
            )
        end = start + info.size
        if end > cursor.size:
            raise InputFileError(
                f"its data ends at byte {end}, the file at byte {cursor.size}",
                where=f"{where}{info.name!r}",
                next_step="the file is truncated; fetch it again",
            )
        last = repr(info.name)
        placed[info.name] = TensorInfo(info.name, info.format, info.shape, start, info.size)
    if cursor.size > _align(end, alignment):
        raise InputFileError(
            f"{cursor.size - end} bytes after {last}, which ends at byte {end}",
            where=cursor.file,
            next_step=FETCH_AGAIN,
        )
    return {info.name: placed[info.name] for info in infos}
