"""What the commands print on a terminal: tables made from the same data that ``--json`` gives.

In: facts, decisions, summaries.  Out: text on stdout.  Next file: ``cli.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from zerolayer.targets.facts import Target

_PIPE_WIDTH = 200  # columns where stdout is not a terminal: nothing wraps in logs


def console() -> Console:
    """Stdout; never coloured and hardly ever wrapped where it is not a terminal."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def show(what: RenderableType) -> None:
    """Prints ``what``; no blanks at the ends of lines where stdout is not a terminal."""
    out = console()
    if out.is_terminal:
        out.print(what)
        return
    with out.capture() as captured:
        out.print(what)
    for line in captured.get().splitlines():
        print(line.rstrip())


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", wrap: str = ""
) -> Table:
    """A plain table; only the column called ``wrap`` may be broken over lines."""
    out = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for name in columns:
        out.add_column(name, no_wrap=name != wrap, overflow="fold")
    for row in rows:
        out.add_row(*(Text(cell) for cell in row))
    return out


def pairs(rows: Iterable[tuple[str, str]], *, title: str = "") -> Table:
    """Two columns without a heading."""
    out = Table.grid(padding=(0, 2, 0, 0))
    out.title, out.title_justify, out.title_style = title or None, "left", "bold"
    out.add_column(no_wrap=True, style="cyan")
    out.add_column(overflow="fold")
    for name, value in rows:
        out.add_row(Text(name), Text(value))
    return out


def quantity(value: float) -> str:
    """A number as people write it: no exponent, no trailing zeros."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"


def show_targets(targets: Sequence[Target], host: str | None) -> None:
    """One line per target; the one that ``--target host`` means is marked."""
    rows = [
        (
            f"{t.name} *" if t.name == host else t.name,
            t.family,
            t.requires.arch,
            t.description,
        )
        for t in targets
    ]
    show(table(("target", "family", "arch", "description"), rows, wrap="description"))
    print(f"* this machine: --target host is {host}" if host else "this machine fits no target")


def show_target(target: Target) -> None:
    """Everything about one target."""
    requires = target.requires
    rows = [
        ("target", target.name),
        ("family", target.family),
        ("description", target.description),
        ("requires", f"{requires.os} on {requires.arch}"),
        ("features", " ".join(requires.features) or "none"),
    ]
    rows += [("at least", f"{name} = {quantity(value)}") for name, value in requires.limits]
    if target.mcpu:
        rows.append(("code generation", target.mcpu))
    for name, value in target.defaults:
        shown = value if isinstance(value, str) else quantity(value)
        if name == "max_context":
            shown = f"the model's; {shown} where a model names none"
        rows.append((f"default {name}", shown))
    show(pairs(rows))
    facts = [(f.name, quantity(f.value), f.unit, f.source) for f in target.facts]
    show(table(("fact", "value", "unit", "source"), facts, wrap="source"))
