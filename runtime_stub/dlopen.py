"""Shared libraries from bytes, without leaving a file behind.

In: the bytes of an ELF shared object (a member of the artifact).  Out: a path that ``dlopen`` can
open, valid inside a ``with`` block.  Next: ``driver_cpu.py`` (kernels), ``text.py`` (tokenizer).

First choice is ``memfd_create``; where the kernel forbids executing those, a private temporary
directory, removed as soon as the library is open.
"""

from __future__ import annotations

import os

from .errors import ResourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_opened = 0


class LoadablePath:
    """``with LoadablePath(name, data) as path: dlopen(path)``."""

    def __init__(self, name: str, data: bytes, use_memfd: bool = True) -> None:
        self._name = name
        self._data = data
        self._use_memfd = use_memfd
        self._fd = -1
        self._dir = ""

    def __enter__(self) -> str:
        if self._use_memfd:
            try:
                self._fd = os.memfd_create(self._name, os.MFD_CLOEXEC)
                _write_all(self._fd, self._data)
                return self._proc_path()
            except (OSError, AttributeError):
                self._close_fd()
        return self._temporary()

    def _proc_path(self) -> str:
        # glibc takes two libraries with the same path string for one, and descriptor numbers are
        # reused: the path must differ each time.
        global _opened  # noqa: PLW0603
        _opened += 1
        path = "/proc/self/fd/" + "./" * _opened + str(self._fd)
        if not os.path.exists(path):
            raise OSError("no /proc")
        return path

    def _temporary(self) -> str:
        import tempfile

        try:
            self._dir = tempfile.mkdtemp(prefix="zl-")
            path = os.path.join(self._dir, self._name + ".so")
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
            try:
                _write_all(fd, self._data)
            finally:
                os.close(fd)
        except OSError as e:
            self._remove()
            raise ResourceError(
                f"cannot load {self._name}: memfd_create is forbidden and no temporary "
                f"directory is writable ({e.strerror})",
                next_step="allow memfd_create, or point TMPDIR at a writable, executable directory",
            ) from None
        return path

    def __exit__(self, *_: Any) -> None:
        self._close_fd()
        self._remove()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _remove(self) -> None:
        if self._dir:
            import shutil

            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = ""


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
