"""The weights mapped and their pages touched before anyone needs them.

In: the path of an artifact.  Out: :class:`Ahead`, whose mapping ``container.py`` takes.  Next file:
``session.py``.

While Python compiles this loader and reads the manifest on one CPU, threads do on another what the
first step would have to wait for: read from the disk what the page cache has lost, and take a fault
for each 64 KiB that is not there in huge pages.  What it cannot do it leaves, and what is wrong
with the file is for the reader to put into words.  One thing it cannot leave: where the file is cut
short or its disk fails while a page is touched, the system ends the process by SIGBUS, as it does
while the engine runs; here that may come before the reader has refused the file.
"""

from __future__ import annotations

import _thread
import ctypes
import mmap
import os
import stat
from contextlib import suppress

from .buffer import ReadOnlyBuffer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

#: what Linux maps around a fault, unless it is told otherwise
STRIDE = 64 << 10
#: two places at once keep a disk busier; four gain nothing when everything is in the page cache
THREADS = 2
#: two frames of Python and two of C; 8 MiB each would count against a limit of data
STACK_BYTES = 256 << 10
#: a limit of processes below which two threads more may be too many
FEW_PROCESSES = 1024
#: fewer bytes of weights are not worth it
LEAST_BYTES = 32 << 20
#: as in ``layout.py``, which takes longer to compile than this to start
HEADER_BYTES, END_BYTES = 64 << 10, 22
_KEY = b"no weights begin with these bytes"


class Ahead:
    """The weights of the artifact at ``path``, if they are many, mapped and being touched."""

    def __init__(self, path: str) -> None:
        self._mapped: Optional[mmap.mmap] = None
        self._file: tuple[int, ...] = ()
        self._left: list[ctypes.c_size_t] = []
        with suppress(Exception):  # whatever it is, a start without this says it in words
            self._map(path)
            self._start()

    def _map(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            nbytes = weights_bytes(fd, status) if another_cpu() else 0
            if nbytes < LEAST_BYTES or not comfortable(nbytes) or not unlimited():
                return
            # the reader waits for these before any weights
            os.posix_fadvise(fd, HEADER_BYTES + nbytes, 0, os.POSIX_FADV_WILLNEED)
            self._mapped = mmap.mmap(
                fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=HEADER_BYTES
            )
            in_huge_pages(self._mapped)
            self._file = _identity(status)
        finally:
            os.close(fd)

    def _start(self) -> None:
        if self._mapped is None:
            return
        libc = ctypes.CDLL(None)
        size_t, pointer = ctypes.c_size_t, ctypes.c_void_p
        libc.lfind.argtypes = [ctypes.c_char_p, pointer, ctypes.POINTER(size_t), size_t, pointer]
        compare = ctypes.cast(libc.strcmp, pointer)
        pages = len(self._mapped) // STRIDE
        usual = _thread.stack_size(STACK_BYTES)
        try:
            self._start_threads(libc.lfind, compare, pages)
        finally:
            _thread.stack_size(usual)

    def _start_threads(self, search: Any, compare: Any, pages: int) -> None:
        for i in range(THREADS):
            first, end = pages * i // THREADS, pages * (i + 1) // THREADS
            self._left.append(ctypes.c_size_t(end - first))
            export = ReadOnlyBuffer(self._mapped)
            place = (_KEY, export.address + first * STRIDE, self._left[i], STRIDE, compare)
            try:
                _thread.start_new_thread(_touch, (search, place, export))
            except RuntimeError:  # no more threads
                export.close()

    def take(self, status: os.stat_result, start: int, nbytes: int) -> Optional[mmap.mmap]:
        """The mapping, if it is of that very file and place; it belongs to the caller then."""
        mapped, self._mapped = self._mapped, None
        place = (_identity(status), start, nbytes)
        if mapped is None or place != (self._file, HEADER_BYTES, len(mapped)):
            return None
        return mapped

    def close(self) -> None:
        """Ends early what is still going on, where the C library reads the count at each step:
        glibc does, musl copies it once and goes on to the end."""
        for count in self._left:
            count.value = 0
        self._mapped = None


def in_huge_pages(mapped: mmap.mmap) -> None:
    """What a fault reads from the disk shall lie in the page cache in huge pages: for this process
    and for all that start later.  What lies there already stays as it is.

    It takes effect where the kernel and the file system keep large folios; elsewhere the advice
    changes nothing.
    """
    with suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)


def _touch(search: Any, place: tuple[Any, ...], export: ReadOnlyBuffer) -> None:
    """Looks for a key that is not there: one access to each 64 KiB.

    Two functions of the C library, because nothing of ours may run before the host has been
    compared, Python would hold its lock, and ``MADV_POPULATE_READ`` holds the lock under which
    other threads get memory.
    """
    try:
        search(*place)
    finally:
        export.close()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def weights_bytes(fd: int, status: os.stat_result) -> int:
    """The bytes between the header and the ZIP by the ZIP's end record; 0 for what is none."""
    end_at = status.st_size - END_BYTES
    if not stat.S_ISREG(status.st_mode) or end_at < HEADER_BYTES:
        return 0
    end = os.pread(fd, END_BYTES, end_at)
    directory = int.from_bytes(end[12:16], "little") + int.from_bytes(end[16:20], "little")
    if end[:4] != b"PK\x05\x06":
        return 0
    return max(0, end_at - directory - HEADER_BYTES)


def another_cpu() -> bool:
    """Whether this process may use a second CPU."""
    return len(os.sched_getaffinity(0)) > 1


def comfortable(nbytes: int) -> bool:
    """Whether pages for ``nbytes`` push nothing out, and a mapping takes nothing from a limit."""
    import resource

    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        if resource.getrlimit(limit)[0] != resource.RLIM_INFINITY:
            return False
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if processes != resource.RLIM_INFINITY and processes < FEW_PROCESSES:
        return False  # the engine's threads shall have them
    with open("/proc/meminfo", "rb") as f:
        for line in f:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024 >= 2 * nbytes
    return False


def unlimited(root: str = "/") -> bool:
    """Whether no cgroup of this process that can be seen limits its memory, of which the plan
    counts what is left while pages come, or leaves it fewer than two CPUs.

    ``detect.py`` reads the same files for what they say exactly; here a few lines have to do,
    because its modules are compiled while the threads run.
    """
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        names, _, path = line.partition(":")[2].partition(":")
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for controller in {"", "memory", "cpu"}.intersection(names.split(",")):
            # version 2 has one tree, beside those of version 1 in "unified"; version 1 one for each
            for tree in {names, controller} if controller else {"", "unified"}:
                for i in range(len(parts) + 1):
                    group = os.path.join(root, "sys/fs/cgroup", tree, *parts[:i])
                    if _limited(group, controller):
                        return False
    return True


def _limited(group: str, controller: str) -> bool:
    """By the files of version 1's ``controller``; without one, of version 2."""

    def words(*names: str) -> list[str]:
        return " ".join([_read(os.path.join(group, name)) for name in names]).split()

    if controller != "cpu":
        memory = words("memory.limit_in_bytes" if controller else "memory.max")
        # version 1 has no word for what is not limited, but a huge number
        if memory and memory[0] != "max" and int(memory[0]) < 1 << 60:
            return True
        if controller:
            return False
    cpu = words("cpu.cfs_quota_us", "cpu.cfs_period_us") if controller else words("cpu.max")
    return len(cpu) == 2 and cpu[0] not in ("max", "-1") and int(cpu[0]) < 2 * int(cpu[1])


def _read(path: str) -> str:
    """The text of a small file; none if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.fsdecode(os.read(fd, 1 << 16))
    finally:
        os.close(fd)
