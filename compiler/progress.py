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
    TimeElapsedColumn,
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
    one line that stays.  ``timings`` is the list of finished stages with their wall time in
    seconds, in order.
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


class _SilentStage:
    def advance(self, n: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class NullProgress:
    """Shows nothing; keeps the timings."""

    def __init__(self) -> None:
        self.timings: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        start = time.perf_counter()
        yield _SilentStage()
        self.timings.append((name, time.perf_counter() - start))

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


class PlainProgress:
    """One line per finished stage, for logs and pipes."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.timings: list[tuple[str, float]] = []
        self._out = out

    def _print(self, text: str) -> None:
        print(text, file=self._out if self._out is not None else sys.stderr, flush=True)

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        start = time.perf_counter()
        stage = _NotedStage()
        yield stage
        seconds = time.perf_counter() - start
        self.timings.append((name, seconds))
        count = amount(stage.done, total, unit)
        self._print(f"{name:<12}{seconds:8.2f} s  {count or stage.last}".rstrip())

    def message(self, text: str) -> None:
        self._print(text)


class _AmountColumn(ProgressColumn):
    """What :func:`amount` says, else the stage's note."""

    def render(self, task: Task) -> Text:
        known = task.total if task.fields["counted"] else None
        shown = amount(task.completed, known, task.fields["unit"])
        return Text(shown or task.fields["note"], style="green" if shown else "dim")


class _RichStage:
    def __init__(self, bars: RichBars, name: str, total: int | None, unit: str) -> None:
        self._bars = bars
        self._id = bars.add_task(
            name, total=total or None, note="", unit=unit, counted=total is not None
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


class RichProgress:
    """A live line per stage, for terminals.  Use as a context manager around the compile."""

    def __init__(self, console: Console | None = None) -> None:
        self.timings: list[tuple[str, float]] = []
        self._bars = RichBars(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
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
        start = time.perf_counter()
        stage = _RichStage(self._bars, name, total, unit)
        yield stage
        stage.close()
        self.timings.append((name, time.perf_counter() - start))

    def message(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)
