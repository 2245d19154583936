"""A buffer's address for C code, kept alive until it is closed.

In: anything with the buffer protocol, read-only too.  Out: :class:`ReadOnlyBuffer`.  ``ahead.py``
and ``driver_cpu.py`` hold the mapped weights with it.  Next file: ``ahead.py``.
"""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class ReadOnlyBuffer:
    """The address of a read-only buffer, and an export that keeps it alive until closed."""

    class _PyBuffer(ctypes.Structure):
        _fields_ = [
            ("buf", ctypes.c_void_p),
            ("obj", ctypes.c_void_p),
            ("len", ctypes.c_ssize_t),
            ("itemsize", ctypes.c_ssize_t),
            ("readonly", ctypes.c_int),
            ("ndim", ctypes.c_int),
            ("format", ctypes.c_char_p),
            ("shape", ctypes.c_void_p),
            ("strides", ctypes.c_void_p),
            ("suboffsets", ctypes.c_void_p),
            ("internal", ctypes.c_void_p),
        ]

    def __init__(self, source: Any) -> None:
        self._buffer = self._PyBuffer()
        ctypes.pythonapi.PyObject_GetBuffer(
            ctypes.py_object(source), ctypes.byref(self._buffer), ctypes.c_int(0)
        )
        self._open = True
        self.address = int(self._buffer.buf or 0)
        self.nbytes = int(self._buffer.len)

    def close(self) -> None:
        if self._open:
            self._open = False
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._buffer))
            self.address = 0
