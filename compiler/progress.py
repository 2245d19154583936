"""How a compile tells its user what it is doing.

In: stage names and counts from ``driver.py``.  Out: a live display, plain lines, or nothing; always
on stderr, because stdout belongs to results.  Next file: ``driver.py``.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
)
from rich.progress import Progress as RichBars
from rich.text import Text


class Stage(Protocol):
    """A running stage.  ``advance`` counts units done; ``note`` shows a short word on the stage."""

    def advance(self, n: int = 1) -> None: ...

    def note(self, text: str) -> None: ...


class Progress(Protocol):
    """Where a compile reports to.

    ``with progress.stage("kernels", total=12) as s: s.advance(1)``; ``total`` is None where the
    amount of work is unknown, ``unit`` is ``bytes`` where it is shown in MiB.  ``message`` shows
    one line that stays.  ``timings`` is the list of finished stages, in order, each with its own
    wall time in seconds: without that of stages that ran within it (the gate within the write).
    """

    @property
    def timings(self) -> list[tuple[str, float]]: ...

    def stage(
        self, name: str, total: int | None = None, unit: str = ""
    ) -> contextlib.AbstractContextManager[Stage]: ...

    def message(self, text: str) -> None: ...


def amount(done: float, total: float | None, unit: str) -> str:
    """``3/16``, or ``12.0/92.1 MiB``; nothing where the amount of work is unknown."""
    if total is None:
        return ""
    if unit == "bytes":
        return f"{done / (1 << 20):.1f}/{total / (1 << 20):.1f} MiB"
    return f"{done:.0f}/{total:.0f}"


class _Watch:
    """The seconds of one stage; stands still while a stage within it runs."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._since: float | None = time.perf_counter()

    def stop(self) -> None:
        self._spent, self._since = self.seconds(), None

    def go_on(self) -> None:
        self._since = time.perf_counter()

    def seconds(self) -> float:
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._spent + running


class _Timed:
    """The times of stages, one within another or one after another."""

    def __init__(self) -> None:
        self.timings: list[tuple[str, float]] = []
        self._running: list[_Watch] = []

    @contextlib.contextmanager
    def _time(self, name: str) -> Iterator[_Watch]:
        """Runs a stage's watch; a stage that fails leaves no time."""
        if self._running:
            self._running[-1].stop()
        watch = _Watch()
        self._running.append(watch)
        try:
            yield watch
            watch.stop()
            self.timings.append((name, watch.seconds()))
        finally:
            self._running.pop()
            if self._running:
                self._running[-1].go_on()


class _SilentStage:
    def advance(self, n: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class NullProgress(_Timed):
    """Shows nothing; keeps the timings."""

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        with self._time(name):
            yield _SilentStage()

    def message(self, text: str) -> None:
        pass


class _NotedStage:
    """Remembers the last note, for the line that closes a plain stage."""

    def __init__(self) -> None:
        self.last = ""
        self.done = 0

    def advance(self, n: int = 1) -> None:
        self.done += n

    def note(self, text: str) -> None:
        self.last = text


class PlainProgress(_Timed):
    """One line per finished stage, for logs and pipes."""

    def __init__(self, out: TextIO | None = None) -> None:
        super().__init__()
        self._out = out

    def _print(self, text: str) -> None:
        print(text, file=self._out if self._out is not None else sys.stderr, flush=True)

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        stage = _NotedStage()
        with self._time(name) as watch:
            yield stage
        said = "  ".join(x for x in (amount(stage.done, total, unit), stage.last) if x)
        self._print(f"{name:<12}{watch.seconds():8.2f} s  {said}".rstrip())

    def message(self, text: str) -> None:
        self._print(text)


class _AmountColumn(ProgressColumn):
    """What :func:`amount` says, and the stage's note."""

    def render(self, task: Task) -> Text:
        known = task.total if task.fields["counted"] else None
        shown = amount(task.completed, known, task.fields["unit"])
        said = "  ".join(x for x in (shown, task.fields["note"]) if x)
        return Text(said, style="green" if shown else "dim")


class _SecondsColumn(ProgressColumn):
    """The stage's own seconds so far."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['watch'].seconds():8.2f} s", style="progress.elapsed")


class _RichStage:
    def __init__(
        self, bars: RichBars, name: str, total: int | None, unit: str, watch: _Watch
    ) -> None:
        self._bars = bars
        counted = total is not None
        self._id = bars.add_task(
            name, total=total or None, note="", unit=unit, counted=counted, watch=watch
        )

    def advance(self, n: int = 1) -> None:
        self._bars.advance(self._id, n)

    def note(self, text: str) -> None:
        self._bars.update(self._id, note=text)

    def close(self) -> None:
        task = self._bars.tasks[self._bars.task_ids.index(self._id)]
        total = task.total if task.total is not None else max(task.completed, 1)
        self._bars.update(self._id, total=total, completed=total)
        self._bars.stop_task(self._id)


class RichProgress(_Timed):
    """A live line per stage, for terminals.  Use as a context manager around the compile."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._bars = RichBars(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            _SecondsColumn(),
            _AmountColumn(),
            console=console if console is not None else Console(stderr=True),
        )

    def __enter__(self) -> RichProgress:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        with self._time(name) as watch:
            stage = _RichStage(self._bars, name, total, unit, watch)
            yield stage
            stage.close()

    def message(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)
