"""NumPy's ``.npy`` files with the standard library: versions 1 and 2, C order, little endian.

In: a file.  Out: (dtype, shape, bytes), and back.  Next file: ``run_graph.py``.  The header is
parsed by a fixed pattern, nothing is evaluated; sizes are compared with the file before use.
"""

from __future__ import annotations

import os
import re
import struct

from .errors import InputFileError

#: our dtype names and NumPy's
DTYPES = {"f32": "<f4", "f16": "<f2", "f64": "<f8", "i8": "|i1", "u8": "|u1", "i32": "<i4",
          "i64": "<i8", "bool": "|b1"}  # fmt: skip
DTYPE_BYTES = {"f32": 4, "f16": 2, "f64": 8, "i8": 1, "u8": 1, "i32": 4, "i64": 8, "bool": 1}
#: and those of the module struct
_CODES = {"f32": "f", "f16": "e", "f64": "d", "i8": "b", "u8": "B", "i32": "i", "i64": "q",
          "bool": "?"}  # fmt: skip
MAX_BYTES = 1 << 40
_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    r"\{'descr': '([<|][a-z]\d)', 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), ?\}\s*\Z"
)


def read_npy(path: str) -> tuple[str, tuple[int, ...], bytearray]:
    """(dtype, shape, bytes).  InputFileError says what is wrong."""
    try:
        with open(path, "rb") as f:
            total = os.fstat(f.fileno()).st_size
            start = f.read(12)
            if not start.startswith(_MAGIC) or len(start) < 12 or start[6] not in (1, 2):
                raise InputFileError("not a .npy file of version 1 or 2", where=path)
            wide = start[6] == 2
            f.seek(8)
            size = struct.unpack("<I" if wide else "<H", f.read(4 if wide else 2))[0]
            if size > 1 << 16:
                raise InputFileError(f"the header has {size} bytes, too many", where=path)
            match = _HEADER.match(f.read(size).decode("latin-1"))
            names = {v: k for k, v in DTYPES.items()}
            if match is None or match.group(1) not in names:
                raise InputFileError(
                    f"a header or dtype that is not read here (dtypes: {', '.join(DTYPES)})",
                    where=path,
                )
            if match.group(2) == "True":
                raise InputFileError(
                    "in Fortran order", where=path, next_step="save it with numpy.ascontiguousarray"
                )
            dtype = names[match.group(1)]
            words = [w for w in match.group(3).replace(" ", "").split(",") if w]
            if len(words) > 32 or any(len(w) > 18 for w in words):
                raise InputFileError("a shape that is too large", where=path)
            shape = tuple(map(int, words))
            nbytes = DTYPE_BYTES[dtype]
            for n in shape:
                nbytes *= n
            if nbytes > MAX_BYTES or nbytes != total - f.tell():
                raise InputFileError(
                    f"the shape {shape} takes {nbytes} bytes, the file has {total - f.tell()}",
                    where=path,
                )
            data = bytearray(f.read(nbytes))
    except OSError as e:
        raise InputFileError(f"cannot be read: {e.strerror}", where=path) from None
    except struct.error:
        raise InputFileError("ends inside its header", where=path) from None
    if len(data) != nbytes:
        raise InputFileError("ends inside its data", where=path)
    return dtype, shape, data


def first_values(dtype: str, data: bytes | bytearray, most: int) -> list[float | str]:
    """The first ``most`` values of an array; what JSON has no number for (nan, inf) as text."""
    count = min(most, len(data) // DTYPE_BYTES[dtype])
    values = struct.unpack_from(f"<{count}{_CODES[dtype]}", data)
    return [v if v - v == 0 else str(v) for v in values]


def write_npy(path: str, dtype: str, shape: tuple[int, ...], data: bytes | bytearray) -> None:
    """Writes an array that was asked for with ``--output-dir``."""
    dims = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    header = f"{{'descr': '{DTYPES[dtype]}', 'fortran_order': False, 'shape': ({dims}), }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    try:
        with open(path, "wb") as f:
            f.write(
                _MAGIC + b"\x01\x00" + struct.pack("<H", len(header)) + header.encode("latin-1")
            )
            f.write(data)
    except OSError as e:
        raise InputFileError(f"cannot be written: {e.strerror}", where=path) from None
