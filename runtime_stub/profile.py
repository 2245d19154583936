"""The option ``--profile``: a trace of steps, by kernel and thread, for ui.perfetto.dev.

In: traced :class:`Step`\\ s.  Out: a file in Chrome's trace event format.  Next file:
``trace_file.py``.

Times are microseconds from the first step's begin.  One track per thread, with the loader's own
view of a step on a track above them; counters show what the calls read and compute.  A call's rates
are over the time in which at least one thread was at it; the counters add up those of calls that
overlap.
"""

from __future__ import annotations

import json
import time

from .errors import IntegrityError, ResourceError, ZerolayerError
from .laps import SAMPLE, WAIT, Recorder, sequences_of
from .trace_file import TraceFile, say
from .work import phase_of, work_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

    from .driver_cpu import CpuEngine
    from .laps import Lap, Step
    from .session import Session
    from .step import StepBatch
    from .work import Work

#: steps of one trace; what comes after them is not traced
MAX_STEPS = 32
#: and laps of all its steps, about 64 MB: many threads leave room for fewer steps
MAX_LAPS = 400_000
_PROCESS, _LOADER = 1, 1000
#: nanoseconds between two steps that were picked from many
_GAP = 1_000_000
_NAMES = {WAIT: "wait", SAMPLE: "sampling"}


class Profile:
    """A trace in the making.  The file is tried at once: nobody waits for a run in vain.

    ``taken`` are (what it is, path) of the other files that the command reads or writes.
    """

    def __init__(
        self,
        session: Session,
        path: str,
        taken: Iterable[tuple[str, str]] = (),
        entry: str = "step",
    ) -> None:
        self.session = session
        self.entry = entry
        self.path = path
        self.steps: list[tuple[str, Step]] = []
        self.left_out = 0
        self.picked = False  # the steps do not follow each other: they are drawn close together
        self._laps = 0  # of all steps, and most of one step
        self._most = 0
        self._full = False
        self._calls: list[dict[str, Any]] = []
        self._file = TraceFile(path, [("this artifact", session.path), *taken])
        session.profile = self

    def use(self, engine: CpuEngine) -> None:
        """The kernel calls of ``engine`` are those of the steps to come."""
        self._calls = self.session.calls(engine, self.entry)

    def attach(self, engine: CpuEngine) -> Profile:
        """Traces the steps that go through :meth:`step` or :meth:`run`."""
        self.use(engine)
        try:
            self._recorder = Recorder(engine)
        except MemoryError:
            raise ResourceError(
                "no memory for the trace", where=self.path, next_step="leave --profile out"
            ) from None
        self._recorder.start()
        return self

    def step(self, batch: StepBatch) -> Sequence[int]:
        """``engine.step``; the first are traced: MAX_STEPS of them, MAX_LAPS in all."""
        engine = self._recorder.engine
        if self._full:
            self.left_out += 1
            return engine.step(batch)
        begin = time.perf_counter_ns()
        tokens = engine.step(batch)
        self._collect(begin, time.perf_counter_ns(), sequences_of(batch))
        return tokens

    def run(self, inputs: Sequence[Any], outputs: Sequence[Any], dims: Sequence[int]) -> None:
        """``engine.run``, traced."""
        begin = time.perf_counter_ns()
        self._recorder.engine.run(inputs, outputs, dims)
        self._collect(begin, time.perf_counter_ns(), [])

    def _collect(self, begin: int, end: int, sequences: list[tuple[int, int]]) -> None:
        """Keeps what was recorded; without memory for it, the trace ends before."""
        try:
            self.add(self._recorder.collect(begin, end, sequences))
        except MemoryError:
            self.left_out += 1
            self._full = True
        if self._full:
            self._recorder.stop()

    def add(self, step: Step) -> None:
        """A step by what it is: decode where every sequence has one token."""
        kind = "run"
        if step.sequences:
            kind = "decode" if step.tokens == len(step.sequences) else "prefill"
        self.steps.append((kind, step))
        count = sum(map(len, step.threads))
        self._laps += count
        self._most = max(self._most, count)
        self._full = len(self.steps) == MAX_STEPS or self._laps + self._most > MAX_LAPS

    def write(self) -> None:
        """The whole file or none; IntegrityError or ResourceError say why there is none."""
        if not self.steps:
            self._file.discard()
            raise ResourceError("no trace was written: it has no step", where=self.path)
        try:
            self._file.write(self._pieces())
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
            raise IntegrityError(
                f"the trace cannot be written: the manifest's calls make no sense: "
                f"{type(e).__name__}: {e}",
                where=self.path,
                next_step="build the artifact again",
            ) from None
        count = len(self.steps)
        more = f", {self.left_out} later ones left out" if self.left_out else ""
        say(f"trace of {count} step{'s' if count > 1 else ''}{more}: {self.path}")

    def rescue(self) -> None:
        """The run ends early, nobody takes its text or it was interrupted: the steps so far, or a
        line that says why there is no trace."""
        try:
            self.write()
        except ZerolayerError as e:
            say(f"note: {e.one_line()}")
        except KeyboardInterrupt:
            say(f"note: {self.path}: no trace was written: interrupted")
            raise

    def discard(self) -> None:
        """Nothing stays of a trace that was not written."""
        self._file.discard()

    def _pieces(self) -> Iterator[str]:
        """The file's text: one event after the other, never all of them at once."""
        encode = json.JSONEncoder(allow_nan=False).encode
        before = '{"traceEvents": ['
        for event in self._events():
            yield before + encode(event)
            before = ",\n"
        yield '], "displayTimeUnit": "ns", "otherData": ' + encode(self._about()) + "}\n"

    def _places(self) -> list[int]:
        """Where each step begins in the trace, in nanoseconds."""
        if not self.picked:
            return [step.begin - self.steps[0][1].begin for _kind, step in self.steps]
        places, at = [], 0
        for _kind, step in self.steps:
            places.append(at)
            at += step.end - step.begin + _GAP
        return places

    def _events(self) -> Iterator[dict[str, Any]]:
        about = self._about()
        process = f"{about['model']} ({about['target']})"
        yield from _tracks(process, len(self.steps[0][1].threads))
        places = self._places()
        for number, (kind, step) in enumerate(self.steps):
            yield from self._step_events(number, kind, step, step.begin - places[number])

    def _about(self) -> dict[str, Any]:
        session = self.session
        return {
            "model": str(session.manifest.get("model", {}).get("name")),
            "target": str(session.target.get("name")),
            "host": session.facts.cpu_model,
            "artifact": session.manifest.get("digest"),
            "steps": len(self.steps),
            "steps_left_out": self.left_out,
        }

    def _step_events(
        self, number: int, kind: str, step: Step, origin: int
    ) -> Iterator[dict[str, Any]]:
        calls = self._calls
        rows = {lap.call: lap.rows for laps in step.threads for lap in laps if lap.call >= 0}
        work = work_of(self.session.manifest, calls, step, rows)
        spans = step.spans()
        arguments = {
            call: _arguments(calls[call], work[call], rows[call], spans[call]) for call in rows
        }
        title = kind if kind == "run" else f"{kind} step"
        whole = _slice(title, "step", step.begin - origin, step.end - step.begin, _LOADER)
        whole["args"] = {
            "number": number,
            "begin_us": (step.begin - self.steps[0][1].begin) / 1e3,
            "tokens": step.tokens,
            "sequences": len(step.sequences),
            "first_positions": [first for first, _count in step.sequences][:64],
            "kernels_us": step.kernel_ns / 1e3,
        }
        yield whole
        for thread, laps in enumerate(step.threads):
            for lap in laps:
                yield _lap_slice(lap, calls, arguments, origin, thread)
        yield from _counters(spans, arguments, origin)


def _tracks(process: str, threads: int) -> list[dict[str, Any]]:
    """Names and order of the tracks."""
    named: list[tuple[str, int, dict[str, Any]]] = [("process_name", 0, {"name": process})]
    named += [("thread_name", _LOADER, {"name": "steps"})]
    named += [("thread_sort_index", _LOADER, {"sort_index": -1})]
    for thread in range(threads):
        named += [("thread_name", thread, {"name": f"thread {thread}"})]
        named += [("thread_sort_index", thread, {"sort_index": thread})]
    return [{"ph": "M", "pid": _PROCESS, "tid": t, "name": n, "args": a} for n, t, a in named]


def _arguments(
    call: dict[str, Any], work: Work, rows: int, spans: list[tuple[int, int]]
) -> dict[str, Any]:
    """What a slice says about its call, over all threads."""
    ns = max(sum(end - begin for begin, end in spans), 1)
    return {
        "op": call.get("op"),
        "kernel": call.get("kernel"),
        "phase": phase_of(call),
        "rows": rows,
        "weight_bytes": call.get("weight_bytes", 0),
        "memory_bytes": round(work.bytes),
        "activation_bytes": work.activation_bytes,
        "flops": round(work.flops),
        "multiplies": work.kind,
        "call_us": ns / 1e3,
        "gb_per_second": round(work.bytes / ns, 3),
        "gop_per_second": round(work.flops / ns, 3),
    }


def _lap_slice(
    lap: Lap,
    calls: list[dict[str, Any]],
    arguments: dict[int, dict[str, Any]],
    origin: int,
    thread: int,
) -> dict[str, Any]:
    name = _NAMES[lap.call] if lap.call < 0 else str(calls[lap.call].get("name"))
    category = name if lap.call < 0 else "kernel"
    out = _slice(name, category, lap.begin - origin, lap.end - lap.begin, thread)
    if lap.call >= 0:
        out["args"] = arguments[lap.call]
    return out


def _slice(name: str, category: str, begin: int, ns: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X", "pid": _PROCESS, "tid": tid, "name": name, "cat": category,
        "ts": begin / 1e3, "dur": ns / 1e3,
    }  # fmt: skip


def _counters(
    spans: dict[int, list[tuple[int, int]]], arguments: dict[int, dict[str, Any]], origin: int
) -> list[dict[str, Any]]:
    """The rates of all calls that are under way, each time that one begins or ends."""
    changes: dict[int, list[tuple[int, int]]] = {}
    for call, found in spans.items():
        for begin, end in found:
            if begin < end:
                changes.setdefault(begin, []).append((call, 1))
                changes.setdefault(end, []).append((call, -1))
    out = []
    running: set[int] = set()
    for at in sorted(changes):
        for call, change in sorted(changes[at], key=lambda c: c[1]):  # ends before begins
            (running.add if change > 0 else running.discard)(call)
        rates = [arguments[call] for call in sorted(running)]
        memory = round(sum(r["gb_per_second"] for r in rates), 3)
        arithmetic = round(sum(r["gop_per_second"] for r in rates), 3)
        out.append(
            {
                "ph": "C", "pid": _PROCESS, "name": "rate", "ts": (at - origin) / 1e3,
                "args": {"GB/s from memory": memory, "Gop/s": arithmetic},
            }
        )  # fmt: skip
    return out
