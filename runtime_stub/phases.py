"""Where a step's time goes, by part of the model and by kernel, against what this host can do.

In: a traced :class:`Step`, the manifest, :class:`Ceilings`.  Out: the tables of ``bench``.  Next
file: ``bench.py``.

A row's time is the mean over the threads of what they spent on it, so the rows add up to the step:
each thread's time is cut into laps without a gap (``laps.py``), and what none of them covers, from
the loader's call into the code object and back, is the row ``loader``.  Two rows are no work:
``waiting``, threads at a barrier for the others, and ``loader``.

Rates and ceilings are of another time, ``wall_ns``: while at least one thread was at the call
(:meth:`Step.spans`, the same in a trace).  One thread may do all of a call's work while the others
wait or are kept from running; over the mean of their times its rate would come out too high.

A row's ceiling is the least time its calls can take: the longest of what must come from memory, of
the activations from the last cache and of the multiplications at the peak of their type.  Weights,
keys and values that fit together in the last cache may stay there between steps; then they too
count against the cache.
"""

from __future__ import annotations

from .laps import SAMPLE, WAIT
from .work import (
    ATTENTION,
    EMBEDDING,
    LM_HEAD,
    MLP,
    NORMS,
    OTHER,
    PROJECTIONS,
    group_of,
    phase_of,
    work_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional

    from .ceilings import Ceilings
    from .laps import Step
    from .work import Work

SAMPLING, WAITING, LOADER = "sampling", "waiting", "loader"
_ORDER = (EMBEDDING, NORMS, PROJECTIONS, ATTENTION, MLP, LM_HEAD, OTHER)
_LAST = (SAMPLING, WAITING, LOADER)


class Row:
    """A line of a table: ``ns`` is the mean over threads, ``wall_ns`` while at least one was at its
    calls, ``least`` the least time by bound."""

    __slots__ = ("bytes", "count", "flops", "least", "name", "ns", "op", "wall_ns")

    def __init__(self, name: str, op: Optional[str] = None) -> None:
        self.name = name
        self.op = op
        self.count = 0
        self.ns = 0.0
        self.wall_ns = 0.0
        self.bytes = 0.0
        self.flops = 0.0
        self.least = {"memory": 0.0, "cache": 0.0, "arithmetic": 0.0}

    def add(
        self, ns: float, wall_ns: float, work: Work, ceilings: Optional[Ceilings], in_cache: bool
    ) -> None:
        self.count += 1
        self.ns += ns
        self.wall_ns += wall_ns
        self.bytes += work.bytes
        self.flops += work.flops
        for bound, least in _least(work, ceilings, in_cache).items():
            self.least[bound] += least

    @property
    def bound(self) -> Optional[str]:
        """What bounds the row: of its least times the longest."""
        best = max(self.least, key=lambda b: self.least[b])
        return best if self.least[best] > 0 else None

    @property
    def least_ns(self) -> float:
        return max(self.least.values())

    def as_dict(self, total: float, label: str) -> dict[str, Any]:
        bound, ns = self.bound, max(self.wall_ns, 1.0)
        percent = None if bound is None else round(100 * self.least_ns / ns, 1)
        return {
            label: self.name,
            "op": self.op,
            "count": self.count,
            "ns": round(self.ns, 1),
            "wall_ns": round(self.wall_ns, 1) if self.count else None,
            "share": round(self.ns / total, 4),
            "bytes": round(self.bytes),
            "flops": round(self.flops),
            "gb_per_second": round(self.bytes / ns, 3),
            "gop_per_second": round(self.flops / ns, 3),
            "bound": bound,
            "percent_of_ceiling": percent,
        }


def _least(work: Work, ceilings: Optional[Ceilings], in_cache: bool) -> dict[str, float]:
    """Nanoseconds that a call takes at least, by what bounds it."""
    if ceilings is None:
        return {}
    memory = 0.0 if in_cache else work.bytes
    cached = work.activation_bytes + (work.bytes if in_cache else 0.0)
    if work.activation_bytes > ceilings.cache_bytes:
        memory, cached = memory + work.activation_bytes, cached - work.activation_bytes
    peak = ceilings.operations.get(work.kind) or 0.0
    return {
        "memory": memory / ceilings.read_memory if ceilings.read_memory else 0.0,
        "cache": cached / ceilings.read_cache if ceilings.read_cache else 0.0,
        "arithmetic": work.flops / peak if peak else 0.0,
    }


class Table:
    """One step's time by phase (``phases``) and by call (``calls``)."""

    def __init__(
        self,
        manifest: dict[str, Any],
        calls: list[dict[str, Any]],
        step: Step,
        ceilings: Optional[Ceilings],
    ) -> None:
        busy: dict[int, float] = {}
        rows: dict[int, int] = {}
        threads = len(step.threads)
        for laps in step.threads:
            for lap in laps:
                busy[lap.call] = busy.get(lap.call, 0.0) + (lap.end - lap.begin) / threads
                if lap.call >= 0:
                    rows[lap.call] = lap.rows
        work = work_of(manifest, calls, step, rows)
        moved = sum(w.bytes for w in work)
        in_cache = ceilings is not None and moved <= ceilings.cache_bytes
        self.step_ns = step.end - step.begin
        self.tokens = step.tokens
        wall = {c: sum(e - b for b, e in spans) for c, spans in step.spans().items()}
        self.phases = _rows(calls, work, (busy, wall), phase_of, ceilings, in_cache)
        self.calls = _rows(calls, work, (busy, wall), group_of, ceilings, in_cache)
        for name, ns in (
            (SAMPLING, busy.get(SAMPLE, 0.0)),
            (WAITING, busy.get(WAIT, 0.0)),
            (LOADER, float(self.step_ns - step.kernel_ns)),
        ):
            row = Row(name)
            row.ns = ns
            self.phases[name] = row

    def as_dict(self) -> dict[str, Any]:
        names = [n for n in (*_ORDER, *_LAST) if n in self.phases]
        names += [n for n in self.phases if n not in names]
        total = max(self.step_ns, 1)
        rows = list(self.phases.values())
        moved, least = sum(r.bytes for r in rows), sum(r.least_ns for r in rows)
        return {
            "tokens": self.tokens,
            "step_ns": self.step_ns,
            "bytes": round(moved),
            "gb_per_second": round(moved / total, 3),
            "percent_of_ceiling": round(100 * least / total, 1) if least else None,
            "rows": [self.phases[n].as_dict(total, "phase") for n in names],
        }

    def calls_as_dicts(self) -> list[dict[str, Any]]:
        """Calls grouped over layers, the longest first."""
        total = max(self.step_ns, 1)
        ordered = sorted(self.calls.values(), key=lambda row: -row.ns)
        return [row.as_dict(total, "call") for row in ordered]


def _rows(
    calls: list[dict[str, Any]],
    work: list[Work],
    times: tuple[dict[int, float], dict[int, int]],
    name_of: Callable[[dict[str, Any]], str],
    ceilings: Optional[Ceilings],
    in_cache: bool,
) -> dict[str, Row]:
    """``times``: each call's mean over threads and its wall time."""
    busy, wall = times
    out: dict[str, Row] = {}
    for number, call in enumerate(calls):
        name = name_of(call)
        row = out.setdefault(name, Row(name, call.get("op") if name_of is group_of else None))
        mean, whole = busy.get(number, 0.0), wall.get(number, 0)
        row.add(mean, whole, work[number], ceilings, in_cache)
    return out
