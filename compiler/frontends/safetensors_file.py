"""Checked, lazy reading of safetensors files.

In: a path.  Out: :class:`SafetensorsFile`: the tensors' dtypes, shapes and byte ranges, all checked
against each other and against the file's length; data stays in the file.  Next file: ``hf.py``.

The format: 8 bytes little-endian header length n, n bytes of JSON (padded with spaces), the data.
Each entry has ``dtype``, ``shape`` and ``data_offsets`` [begin, end) relative to the data.  The
ranges must cover the data exactly: no hole, no overlap, nothing after the last.

Our own reader instead of the ``safetensors`` package's, because that one hands out loaded arrays of
a framework, not byte ranges, and because hostile headers must become errors that name the tensor.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError

from .json_file import parse_json_object
from .weights import PLAIN_FORMATS, Weight, mapped_tensor

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_RANK = 8
_MAX_NAME = 512
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: ``offset`` is from the start of the file, sizes are in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """A checked header.  ``metadata`` is the free-text ``__metadata__``."""

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]

    def weight(self, name: str, canonical: str) -> Weight:
        """Tensor ``name`` as a lazily mapped weight called ``canonical``.

        Raises UnsupportedError for a dtype that is not F32, F16 or BF16.
        """
        entry = self.entries[name]
        if entry.dtype not in PLAIN_FORMATS:
            raise UnsupportedError(
                f"tensor {name} has dtype {entry.dtype}; weights must be F32, F16 or BF16",
                where=str(self.path),
                next_step="use the unquantized checkpoint of this model",
            )
        dtype = PLAIN_FORMATS[entry.dtype]
        tensor = mapped_tensor(self.path, entry.offset, dtype, entry.shape, canonical)
        return Weight(canonical, entry.dtype, entry.shape, tensor, name)

    def tensor(self, name: str) -> ir.TensorProtocol:
        """Tensor ``name`` under its own name, lazily mapped."""
        return self.weight(name, name).tensor


def open_safetensors(path: Path) -> SafetensorsFile:
    """Read and check the header of ``path``.  Raises InputFileError naming file and tensor."""
    try:
        if not path.is_file():
            raise InputFileError(
                "is missing or not a regular file",
                where=str(path),
                next_step="fetch the model again; every shard must be present",
            )
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise _damaged(path, f"has a header of {length} bytes in a file of {size} bytes")
            header = file.read(length)
    except (OSError, ValueError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error
    if len(header) != length or not header.startswith(b"{"):
        raise _damaged(path, "has a header that is cut off or not a JSON object")
    raw = parse_json_object(header.rstrip(b" "), str(path))
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, "has a __metadata__ that is not a table of strings")
    data_start = 8 + length
    entries = {name: _entry(path, name, value, data_start) for name, value in raw.items()}
    _check_cover(path, entries, data_start, size)
    return SafetensorsFile(path, entries, metadata)


def _damaged(path: Path, what: str) -> InputFileError:
    return InputFileError(
        what, where=str(path), next_step="the safetensors file is damaged; fetch it again"
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    """One checked header entry."""
    if len(name) > _MAX_NAME or not name.isprintable() or not name:
        raise _damaged(path, f"has a tensor with the unusable name {name[:80]!r}")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"tensor {name} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _damaged(path, f"tensor {name} has the unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_size, shape)):
        raise _damaged(path, f"tensor {name} has an unusable shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise _damaged(path, f"tensor {name} has unusable data_offsets")
    begin, end = offsets
    nbytes = math.prod(shape) * _BITS[dtype] // 8
    if end - begin != nbytes:
        raise _damaged(
            path, f"tensor {name} ({dtype} {shape}) needs {nbytes} bytes but has {end - begin}"
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + begin, nbytes)


def _check_cover(
    path: Path, entries: dict[str, TensorEntry], data_start: int, file_size: int
) -> None:
    """The entries must cover the file from ``data_start`` to its end exactly."""
    at = data_start
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != at:
            kind = "a hole before" if entry.offset > at else "an overlap at"
            raise _damaged(path, f"has {kind} tensor {entry.name}")
        at += entry.nbytes
    if at != file_size:
        raise _damaged(path, f"ends at byte {file_size}, its tensors at {at}")
