"""The option ``--profile``: a trace of steps, by kernel and thread, for ui.perfetto.dev.

In: traced :class:`Step`\\ s.  Out: a file in Chrome's trace event format.  Next file: ``work.py``.

Times are microseconds from the first step's begin.  One track per thread, with the loader's own
view of a step on a track above them; counters show what the calls read and compute.  A call's rates
are over the time in which at least one thread was at it; the counters add up those of calls that
overlap.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from .errors import ResourceError, UsageError
from .laps import SAMPLE, WAIT, Recorder
from .work import phase_of, work_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .driver_cpu import CpuEngine
    from .laps import Lap, Step
    from .session import Session
    from .step import StepBatch
    from .work import Work

#: steps of one trace; what comes after them is not traced
MAX_STEPS = 32
_PROCESS, _LOADER = 1, 1000
#: nanoseconds between two steps that were picked from many
_GAP = 1_000_000
_NAMES = {WAIT: "wait", SAMPLE: "sampling"}


class Profile:
    """A trace in the making.  The path is tried at once: nobody waits for a run in vain."""

    def __init__(self, session: Session, path: str, entry: str = "step") -> None:
        self.session = session
        self.entry = entry
        self.path = path
        self.steps: list[tuple[str, Step]] = []
        self.left_out = 0
        self.picked = False  # the steps do not follow each other: they are drawn close together
        self._calls: list[dict[str, Any]] = []
        self._place = os.path.realpath(path)
        folder = os.path.dirname(self._place)
        if not path or (os.path.exists(self._place) and not os.path.isfile(self._place)):
            raise UsageError("--profile is not a file", where=path)
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise UsageError(
                "--profile cannot be written: its folder does not exist or forbids it",
                where=path,
                next_step="give the path of a file in a folder that you may write to",
            )

    def use(self, engine: CpuEngine) -> None:
        """The kernel calls of ``engine`` are those of the steps to come."""
        self._calls = self.session.calls(engine, self.entry)

    def attach(self, engine: CpuEngine) -> Profile:
        """Traces the steps that go through :meth:`step` or :meth:`run`."""
        self.use(engine)
        self._recorder = Recorder(engine)
        self._recorder.start()
        return self

    def step(self, batch: StepBatch) -> Sequence[int]:
        """``engine.step``; the first MAX_STEPS are traced."""
        if len(self.steps) == MAX_STEPS:
            if not self.left_out:
                self._recorder.stop()
            self.left_out += 1
            return self._recorder.engine.step(batch)
        tokens, step = self._recorder.step(batch)
        self.add(step)
        return tokens

    def run(self, inputs: Sequence[Any], outputs: Sequence[Any], dims: Sequence[int]) -> None:
        """``engine.run``, traced."""
        self.add(self._recorder.run(inputs, outputs, dims))

    def add(self, step: Step) -> None:
        """A step by what it is: decode where every sequence has one token."""
        kind = "run"
        if step.sequences:
            kind = "decode" if step.tokens == len(step.sequences) else "prefill"
        self.steps.append((kind, step))

    def write(self, *steps: Step) -> None:
        """The whole file or none, with ``steps`` after those that were traced here."""
        import json

        for step in steps:
            self.add(step)
        text = json.dumps(self._trace(), ensure_ascii=False, allow_nan=False)
        part = f"{self._place}.{os.getpid()}.part"
        try:
            with open(part, "x", encoding="utf-8") as f:
                f.write(text + "\n")
            os.replace(part, self._place)
        except OSError as e:
            raise ResourceError(
                f"the trace cannot be written: {e.strerror}", where=self.path
            ) from None
        finally:
            with suppress(OSError):
                os.unlink(part)
        count = len(self.steps)
        more = f", {self.left_out} later ones left out" if self.left_out else ""
        sys.stderr.write(f"trace of {count} step{'s' if count > 1 else ''}{more}: {self.path}\n")

    def _places(self) -> list[int]:
        """Where each step begins in the trace, in nanoseconds."""
        if not self.picked:
            return [step.begin - self.steps[0][1].begin for _kind, step in self.steps]
        places, at = [], 0
        for _kind, step in self.steps:
            places.append(at)
            at += step.end - step.begin + _GAP
        return places

    def _trace(self) -> dict[str, Any]:
        session = self.session
        model = str(session.manifest.get("model", {}).get("name"))
        target = str(session.target.get("name"))
        events = _tracks(f"{model} ({target})", len(self.steps[0][1].threads) if self.steps else 0)
        places = self._places()
        for number, (kind, step) in enumerate(self.steps):
            events += self._step_events(number, kind, step, step.begin - places[number])
        return {
            "traceEvents": events,
            "displayTimeUnit": "ns",
            "otherData": {
                "model": model,
                "target": target,
                "host": session.facts.cpu_model,
                "artifact": session.manifest.get("digest"),
                "steps": len(self.steps),
                "steps_left_out": self.left_out,
            },
        }

    def _step_events(self, number: int, kind: str, step: Step, origin: int) -> list[dict[str, Any]]:
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
        out = [whole]
        for thread, laps in enumerate(step.threads):
            out += [_lap_slice(lap, calls, arguments, origin, thread) for lap in laps]
        return out + _counters(spans, arguments, origin)


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
