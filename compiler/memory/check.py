"""The memory plan's verifier.  It shares no code with the planner and trusts nothing it computed.

In: a planned :class:`Program`.  Out: nothing, or :class:`PlanError` naming two buffers, the phase
and the bytes.  Next file: ``zerolayer/targets/cpu.py`` (code generation).

It replays the program phase by phase and keeps, for every byte range of the workspace, the buffer
whose value is in it.  A read must find the value that was written; a write may not hit a range that
another call of its phase touches; nothing may lie outside the workspace or off alignment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from zerolayer.runtime_stub.errors import ZerolayerError
from zerolayer.targets.program import BufferKind, EntryPoint, KernelCall, Program


class PlanError(ZerolayerError):
    """A memory plan that would corrupt data: a fault of the compiler, never of the user."""

    kind = "internal"


@dataclass
class _Memory:
    """Disjoint, sorted byte ranges and the buffer whose value each holds."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)

    def write(self, owner: str, start: int, end: int) -> None:
        """``owner``'s value now fills [start, end); what was there, even in part, is gone."""
        low = bisect_right(self.ends, start)
        high = bisect_left(self.starts, end)
        self.starts[low:high] = [start]
        self.ends[low:high] = [end]
        self.owners[low:high] = [owner]

    def holds(self, owner: str, start: int, end: int) -> bool:
        at = bisect_left(self.starts, start)
        return (
            at < len(self.starts)
            and self.starts[at] == start
            and self.ends[at] == end
            and self.owners[at] == owner
        )

    def at(self, start: int) -> str:
        i = bisect_right(self.starts, start) - 1
        return self.owners[i] if i >= 0 and self.ends[i] > start else "nothing"


def check_plan(program: Program) -> None:
    """Raises PlanError unless every read of every entry point sees the value that was written."""
    by_name = {b.name: b for b in program.buffers}
    if len(by_name) != len(program.buffers):
        raise PlanError("two buffers have one name")
    _check_region(
        [(b.name, b.offset, b.nbytes) for b in program.buffers if b.kind is BufferKind.WEIGHT],
        program.weights_bytes,
        "the weights region",
    )
    kv = [(b.name, b.offset, b.nbytes) for b in program.buffers if b.kind is BufferKind.KV]
    _check_region(kv, program.kv.block_bytes if program.kv else 0, "a KV block")
    for entry in program.entry_points:
        _check_entry(program, entry)


def _check_region(parts: list[tuple[str, int | None, int]], limit: int, what: str) -> None:
    """No two parts overlap, all are aligned and inside ``limit``."""
    end, last = 0, ""
    for name, offset, nbytes in sorted(parts, key=lambda p: -1 if p[1] is None else p[1]):
        if offset is None or offset < 0 or offset % 64:
            raise PlanError(f"offset {offset} of {name} in {what} is not a multiple of 64")
        if offset < end:
            raise PlanError(f"{name} at {offset} overlaps {last}, which ends at {end}, in {what}")
        end, last = offset + nbytes, name
        if end > limit:
            raise PlanError(f"{name} ends at {end}, beyond the {limit} bytes of {what}")


def _ranges(program: Program, entry: EntryPoint) -> dict[str, tuple[int, int]]:
    """The byte range of every buffer that lives in the workspace."""
    out: dict[str, tuple[int, int]] = {}
    used = {name for c in entry.calls for name in (*c.inputs, *c.outputs)}
    for b in program.buffers:
        inside = b.kind is BufferKind.ACTIVATION or (
            b.kind is BufferKind.OUTPUT and entry.name == "step"
        )
        if not inside or b.name not in used:
            continue
        if b.offset is None or b.offset < 0 or b.offset % 64:
            raise PlanError(f"offset {b.offset} of {b.name} is not a multiple of 64")
        if b.offset + b.nbytes > program.workspace_bytes:
            raise PlanError(
                f"{b.name} ends at {b.offset + b.nbytes}, beyond the workspace of "
                f"{program.workspace_bytes} bytes"
            )
        out[b.name] = (b.offset, b.offset + max(b.nbytes, 1))
    return out


def _check_entry(program: Program, entry: EntryPoint) -> None:
    ranges = _ranges(program, entry)
    memory = _Memory()
    phases: dict[int, list[KernelCall]] = {}
    last = -1
    for call in entry.calls:
        if call.phase < last:
            raise PlanError(f"{call.name}: phase {call.phase} comes after phase {last}")
        last = call.phase
        phases.setdefault(call.phase, []).append(call)
    taps = set(program.taps)
    pending: list[str] = []  # taps that the previous phase produced: read during this one
    for phase, calls in phases.items():
        for name in pending:
            _must_hold(memory, name, ranges, f"the tap after phase {phase - 1}")
        for call in calls:
            for source in call.inputs:
                if source in ranges:
                    _must_hold(memory, source, ranges, call.name)
        _check_races(calls, pending, ranges, phase)
        pending = []
        for call in calls:
            for written in call.outputs:
                if written in ranges:
                    memory.write(written, *ranges[written])
                    if written in taps:
                        pending.append(written)
    for name in (*pending, *(o for o in entry.outputs if o in ranges)):
        _must_hold(memory, name, ranges, "the end of the entry point")


def _must_hold(memory: _Memory, name: str, ranges: dict[str, tuple[int, int]], reader: str) -> None:
    if not memory.holds(name, *ranges[name]):
        raise PlanError(
            f"{reader} reads {name} at {ranges[name][0]}, but {memory.at(ranges[name][0])} is there"
        )


def _check_races(
    calls: list[KernelCall], pending: list[str], ranges: dict[str, tuple[int, int]], phase: int
) -> None:
    """Within a phase, nothing else may touch a written range, except the input that the same
    call declares to overwrite in place."""
    touched: list[tuple[int, int, str, int, bool]] = []  # start, end, buffer, call, written
    for name in pending:
        touched.append((*ranges[name], name, -1, False))
    for i, call in enumerate(calls):
        for source in call.inputs:
            if source in ranges:
                touched.append((*ranges[source], source, i, False))
        for written in call.outputs:
            if written in ranges:
                touched.append((*ranges[written], written, i, True))
    touched.sort(key=lambda t: t[:2])
    active: list[tuple[int, int, str, int, bool]] = []
    for t in touched:
        active = [a for a in active if a[1] > t[0]]
        for a in active:
            if not (a[4] or t[4]):
                continue
            pair = {a[2], t[2]}
            same_call = a[3] == t[3] and a[3] >= 0 and a[4] != t[4]
            if same_call and any(set(p) == pair for p in calls[a[3]].aliases) and a[:2] == t[:2]:
                continue
            raise PlanError(
                f"{a[2]} and {t[2]} overlap at byte {t[0]} while phase {phase} uses both"
            )
        active.append(t)
