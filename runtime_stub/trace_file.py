"""The file of ``--profile``: tried before any work, never at the cost of another file.

In: a path, the paths that a command reads and writes.  Out: the whole file, or none.  Next file:
``errors.py``.

The text goes to a part file beside the path, made at once under a name that nobody knows; it takes
the path's place when it is complete.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import suppress

from .errors import ResourceError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Optional

#: what every trace begins with: nothing else is replaced
BEGIN = '{"traceEvents": [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name"'
#: reserved at once: a full disk is told before the work, not after it
_RESERVED = 1 << 20
_NEXT = "give --profile the path of a new file in a folder that you may write to"
_UNABLE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV, errno.EBADF, errno.EPERM)


class TraceFile:
    """``taken`` are (what it is, path) of files that the command reads or writes."""

    def __init__(self, path: str, taken: Iterable[tuple[str, str]]) -> None:
        self.path = path
        self._taken = list(taken)
        self._part: Optional[str] = None
        self._descriptor = -1
        if path in ("", "-") or path.endswith("/"):
            raise UsageError("--profile is not a file", where=path or "''", next_step=_NEXT)
        try:
            self._place = os.path.realpath(path)
            self._check()
            self._open()
        except OSError as e:
            self.discard()
            raise UsageError(
                f"--profile cannot be written: {e.strerror}", where=path, next_step=_NEXT
            ) from None
        except ValueError as e:
            raise UsageError(
                f"--profile is not a path: {e}", where=repr(path), next_step=_NEXT
            ) from None

    def _check(self) -> Optional[os.stat_result]:
        """What is at the path now, None for nothing; UsageError for what must stay."""
        for what, other in self._taken:
            if os.path.realpath(other) == self._place:
                raise self._refused(f"is {what}")
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise self._refused("is not a file")
        for what, other in self._taken:
            with suppress(OSError):
                if os.path.samestat(os.stat(other), found):
                    raise self._refused(f"is {what}")
        for descriptor, what in enumerate(("standard input", "standard output", "standard error")):
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), found):
                    raise self._refused(f"is {what}")
        if not found.st_mode & 0o222 or not os.access(self._place, os.W_OK):
            raise self._refused("is read-only")
        with open(self._place, "rb") as f:
            if f.read(len(BEGIN)) != BEGIN.encode():
                raise self._refused("exists and is not a trace")
        return found

    def _refused(self, why: str) -> UsageError:
        return UsageError(f"--profile {why}", where=self.path, next_step=_NEXT)

    def _open(self) -> None:
        part = os.path.join(os.path.dirname(self._place), f"zl-{os.urandom(8).hex()}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(part, flags, 0o666)
        self._part = part
        try:
            os.posix_fallocate(self._descriptor, 0, _RESERVED)
        except AttributeError:
            return
        except OSError as e:
            if e.errno not in _UNABLE:
                raise

    def write(self, pieces: Iterable[str]) -> None:
        """Writes ``pieces`` (ASCII) one after the other, then takes the path's place."""
        assert self._part is not None
        try:
            with open(self._descriptor, "w", encoding="ascii", newline="\n", closefd=False) as f:
                f.writelines(pieces)
                f.truncate()
            before = self._check()
            if before is not None:
                os.fchmod(self._descriptor, stat.S_IMODE(before.st_mode))
            os.close(self._forget())
            os.replace(self._part, self._place)
            self._part = None
        except OSError as e:
            raise self._failed(e.strerror or str(e)) from None
        except UsageError as e:
            raise self._failed(e.what) from None
        except MemoryError:
            raise self._failed("out of memory") from None
        finally:
            self.discard()

    def _failed(self, why: str) -> ResourceError:
        return ResourceError(
            f"the trace cannot be written: {why}",
            where=self.path,
            next_step="the result is complete without it; give --profile another path",
        )

    def _forget(self) -> int:
        """The descriptor, from now on the caller's."""
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def discard(self) -> None:
        """Takes the part file away, if there is one and it is ours."""
        part, self._part = self._part, None
        if part is not None:
            with suppress(OSError):
                ours = self._descriptor < 0 or os.path.samestat(
                    os.lstat(part), os.fstat(self._descriptor)
                )
                if ours:
                    os.unlink(part)
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._forget())


def say(line: str) -> None:
    """A line on stderr; where nobody takes it, nothing more goes there."""
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
