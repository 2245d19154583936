"""What this host can do with these kernels' instructions, measured in some hundred milliseconds.

In: an engine.  Out: :class:`Ceilings`.  The structure mirrors ``zl_ceilings`` in
``templates/cpu/zl_abi.h``.  Next file: ``phases.py``.
"""

from __future__ import annotations

import ctypes
import os

from .driver_cpu import Memory, check_status
from .errors import ResourceError
from .laps import function
from .memory import human
from .options import size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .driver_cpu import CpuEngine

_DEFAULT_CACHE = 32 << 20
#: of the last cache: the buffer that is read from memory, that which is read from the cache
_BUFFER, _IN_CACHE = 8, 0.5
_LARGEST = 1 << 30
#: how often half as much is tried where the kernel gives less than it says is free
_HALVINGS = 3


class CCeilings(ctypes.Structure):
    """``zl_ceilings``."""

    _fields_ = [(n, ctypes.c_double) for n in ("read_memory", "read_cache", "f32", "bf16", "int8")]


class Ceilings:
    """GB/s that the engine's threads read together from memory and from the last cache, and Gop/s
    by the type that is multiplied (0: the code has no such instruction).  ``cache_bytes`` is the
    size of the last cache, ``buffer_bytes`` of what was read from memory, ``memory_range`` the
    lowest and highest figure of several measurements: on a shared host they differ.  ``spread`` is
    by how much, over all figures: the largest quotient of two measurements."""

    __slots__ = (
        "buffer_bytes", "cache_bytes", "memory_range", "operations", "read_cache", "read_memory",
        "spread",
    )  # fmt: skip

    def __init__(self, found: CCeilings, cache_bytes: int, buffer_bytes: int) -> None:
        self.read_memory = float(found.read_memory)
        self.memory_range = (self.read_memory, self.read_memory)
        self.read_cache = float(found.read_cache)
        self.operations = {kind: float(getattr(found, kind)) for kind in ("int8", "bf16", "f32")}
        self.cache_bytes = cache_bytes
        self.buffer_bytes = buffer_bytes
        self.spread = 1.0

    def _figures(self) -> tuple[float, ...]:
        return (self.read_memory, self.read_cache, *self.operations.values())

    @property
    def note(self) -> str:
        """What makes the figures less than they should be; '' when nothing does."""
        if self.buffer_bytes >= 2 * self.cache_bytes:
            return ""
        return (
            f"the ceiling of memory may be too high: little is free, a buffer of "
            f"{human(self.buffer_bytes)} stays in part in the cache of {human(self.cache_bytes)}"
        )

    def join(self, other: Ceilings) -> None:
        """The best of two measurements."""
        for mine, its in zip(self._figures(), other._figures()):  # noqa: B905 (Python 3.9)
            if mine > 0 and its > 0:
                self.spread = max(self.spread, mine / its, its / mine)
        for name in ("read_memory", "read_cache"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for kind, rate in other.operations.items():
            self.operations[kind] = max(rate, self.operations[kind])
        both = self.memory_range + other.memory_range
        self.memory_range = (min(both), max(both))

    def as_dict(self) -> dict[str, object]:
        return {
            "read_memory_gb_per_second": round(self.read_memory, 2),
            "read_memory_range": [round(rate, 2) for rate in self.memory_range],
            "read_cache_gb_per_second": round(self.read_cache, 2),
            **{f"{k}_gop_per_second": round(v, 1) or None for k, v in self.operations.items()},
            "spread": round(self.spread, 2),
            "cache_bytes": self.cache_bytes,
            "buffer_bytes": self.buffer_bytes,
        }


def last_cache_bytes(root: str = "/") -> int:
    """The size of the largest cache of the first CPU; a guess where the kernel does not say."""
    folder = os.path.join(root, "sys/devices/system/cpu/cpu0/cache")
    sizes = []
    for index in range(8):
        try:
            with open(os.path.join(folder, f"index{index}", "size"), encoding="ascii") as f:
                sizes.append(size(f.read()))
        except (OSError, ValueError):
            continue
    return max(sizes, default=_DEFAULT_CACHE)


def _buffer(nbytes: int, least: int) -> Memory:
    """``nbytes``, or less where there is less; ResourceError below ``least``."""
    what = "measurement of the ceilings"
    for _ in range(_HALVINGS):
        if nbytes // 2 < least:
            break
        try:
            return Memory(nbytes, what)
        except ResourceError:
            nbytes //= 2
    if nbytes < least:
        raise ResourceError(f"{human(least)} of memory are not free for the {what}")
    return Memory(nbytes, what)


def measure(engine: CpuEngine, available: int) -> Ceilings:
    """The ceilings with the engine's threads; at most half of ``available`` bytes are used.

    Raises UnsupportedError when the code object cannot measure, ResourceError without memory.
    """
    pointer, count = ctypes.c_void_p, ctypes.c_uint64
    probe = function(engine, "zl_probe", [pointer, pointer, count, count, pointer])
    cache = last_cache_bytes()
    least = 4096 * engine.n_threads
    memory = _buffer(min(_BUFFER * cache, _LARGEST, available // 2), least)
    nbytes = memory.nbytes
    found = CCeilings()
    try:
        inside = max(least, min(int(_IN_CACHE * cache), nbytes))
        status = probe(engine.handle, memory.address, nbytes, inside, ctypes.addressof(found))
        check_status(status, "measuring the ceilings")
    finally:
        memory.close()
    return Ceilings(found, cache, nbytes)
