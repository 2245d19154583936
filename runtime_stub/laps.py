"""What each thread of an engine did, and when: the laps of one step.

In: a :class:`CpuEngine`.  Out: a :class:`Step` for each step or run that is traced.  The structure
mirrors ``zl_lap`` in ``templates/cpu/zl_abi.h``.  Next file: ``profile.py`` (the trace file).
"""

from __future__ import annotations

import ctypes
import time

from .driver_cpu import check_status
from .errors import UnsupportedError, ZerolayerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Optional

    from .driver_cpu import CpuEngine
    from .step import StepBatch

WAIT, SAMPLE = -1, -2


class CLap(ctypes.Structure):
    """``zl_lap``."""

    _fields_ = [
        ("begin_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),
        ("call", ctypes.c_int64),
        ("rows", ctypes.c_int64),
    ]


class Lap:
    """From ``begin`` to ``end`` (nanoseconds of ``time.perf_counter_ns``) a thread did ``call``:
    the number of a kernel call, WAIT or SAMPLE.  ``rows`` are the call's, over all threads."""

    __slots__ = ("begin", "call", "end", "rows")

    def __init__(self, begin: int, end: int, call: int, rows: int) -> None:
        self.begin = begin
        self.end = end
        self.call = call
        self.rows = rows


class Step:
    """One traced step: the laps of each thread; ``begin`` and ``end`` as the loader saw them.

    ``sequences`` are (first position, tokens) of each sequence, empty for a graph's run.
    ``exact_groups``: groups of 16 logits that were computed from the floats, None where the code
    does not say.
    """

    __slots__ = ("begin", "end", "exact_groups", "sequences", "threads")

    def __init__(
        self,
        begin: int,
        end: int,
        threads: list[list[Lap]],
        sequences: list[tuple[int, int]],
        exact_groups: Optional[int] = None,
    ) -> None:
        self.begin = begin
        self.end = end
        self.threads = threads
        self.sequences = sequences
        self.exact_groups = exact_groups

    @property
    def tokens(self) -> int:
        return sum(count for _first, count in self.sequences)

    @property
    def kernel_ns(self) -> int:
        """The time inside the code object."""
        return self.threads[0][-1].end - self.threads[0][0].begin

    def spans(self) -> dict[int, list[tuple[int, int]]]:
        """When at least one thread was at a call, by call: its time is the length of these spans.

        Its work cannot have been done in less, whichever threads did it; a rate over this time is
        one that the machine had."""
        laps: dict[int, list[tuple[int, int]]] = {}
        for thread in self.threads:
            for lap in thread:
                if lap.call >= 0:
                    laps.setdefault(lap.call, []).append((lap.begin, lap.end))
        return {call: _union(found) for call, found in laps.items()}


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same times without overlaps, in order."""
    out: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def sequences_of(batch: StepBatch) -> list[tuple[int, int]]:
    """(first position, tokens) of each sequence."""
    starts = batch.seq_starts
    return [(batch.positions[starts[i]], starts[i + 1] - starts[i]) for i in range(len(starts) - 1)]


def function(engine: CpuEngine, name: str, types: list[Any]) -> Callable[..., int]:
    """A function of the code object that not every one has; UnsupportedError without it."""
    try:
        found: Any = getattr(engine.code.lib, name)
    except AttributeError:
        raise UnsupportedError(
            f"this artifact's code has no {name}",
            where="the code object",
            next_step="compile the model again with this version of zerolayer",
        ) from None
    found.argtypes = types
    return found  # type: ignore[no-any-return]


class Recorder:
    """Traces the steps of ``engine`` between :meth:`start` and :meth:`stop`."""

    def __init__(self, engine: CpuEngine) -> None:
        pointer = ctypes.c_void_p
        self.engine = engine
        self._trace = function(engine, "zl_trace", [pointer, pointer, ctypes.c_int64, pointer])
        # a phase has at least one call; each may begin and end with a wait; then the sampling
        self._capacity = 3 * engine.code.info.n_calls + 16
        self._laps = (CLap * (self._capacity * engine.n_threads))()
        self._counts = (ctypes.c_int64 * engine.n_threads)()

    def start(self) -> None:
        status = self._trace(self.engine.handle, self._laps, self._capacity, self._counts)
        check_status(status, "tracing")

    def stop(self) -> None:
        check_status(self._trace(self.engine.handle, None, 0, None), "tracing")

    def step(self, batch: StepBatch) -> tuple[Sequence[int], Step]:
        """``engine.step``, traced."""
        begin = time.perf_counter_ns()
        tokens = self.engine.step(batch)
        return tokens, self.collect(begin, time.perf_counter_ns(), sequences_of(batch))

    def collect(self, begin: int, end: int, sequences: list[tuple[int, int]]) -> Step:
        """What the engine's last step recorded."""
        threads = []
        for thread, count in enumerate(self._counts):
            if count > self._capacity:
                raise ZerolayerError(
                    f"thread {thread} did {count} things in a step, {self._capacity} were expected",
                    next_step="report this as a bug",
                )
            first = thread * self._capacity
            threads.append(
                [
                    Lap(c.begin_ns, c.end_ns, c.call, c.rows)
                    for c in self._laps[first : first + count]
                ]
            )
        return Step(begin, end, threads, sequences, self._exact_groups())

    def _exact_groups(self) -> Optional[int]:
        found: Any = getattr(self.engine.code.lib, "zl_exact_groups", None)  # later than zl_trace
        if found is None:
            return None
        found.argtypes, found.restype = [ctypes.c_void_p], ctypes.c_int64
        return int(found(self.engine.handle))
