"""The artifact's file while it is written: a temporary name, whole blocks, one rename.

In: where the file shall be, bytes in order.  Out: the file under its name, or nothing; the hash of
what was written.  Next file: ``writer.py``, which knows what the bytes are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from zerolayer.runtime_stub.errors import ResourceError, UsageError

#: anything with the buffer protocol, C-contiguous
Chunk: TypeAlias = bytes | bytearray | memoryview

_BLOCK = 2 << 20  # a huge page of x86-64 and of Arm with 4 KiB pages
_WRITE = 4 * _BLOCK


@dataclass
class Output:
    """The temporary file and what is known about it so far."""

    fd: int
    path: Path
    needed: int
    written: int = 0
    hashes: list[str] = field(default_factory=list)  # of the weights, section by section
    whole: Any = field(default_factory=hashlib.sha256)  # of the file, header page first


class Blocks:
    """Writes in whole blocks of the file, aligned, whatever the pieces that come in.

    Linux keeps what one such write brings as one huge page where the file system can.  A process
    that maps the artifact takes one page fault for it then, instead of 32 or more: at 630 MB of
    weights they were a fifth of the time from process start to first token.
    """

    def __init__(self, output: Output) -> None:
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
        write(self._output, data[:whole])
        self._held += data[whole:]

    def flush(self) -> None:
        """Writes what is held, whole block or not."""
        held, self._held = self._held, bytearray()
        write(self._output, held)


def write(output: Output, data: Chunk) -> None:
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


def _disk_error(error: OSError, output: Output) -> Exception:
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
def temporary(out: Path, needed: int) -> Iterator[Output]:
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


def _create(out: Path, needed: int) -> Output:
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
                return Output(fd, path, needed)
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
