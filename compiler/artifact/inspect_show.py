"""What ``zerolayer inspect`` prints: tables made from the data of ``inspect.py``.

In: the data of one view.  Out: rich renderables.  Next file: ``compiler/cli.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from zerolayer.runtime_stub.container import Artifact

from . import inspect

_BAR = 24  # columns of a full bar


def render(artifact: Artifact, view: str = "") -> RenderableType:
    """The view ``kernels``, ``injected``, ``memory``, ``roofline``, ``manifest``, or a summary."""
    data = inspect.view(artifact, view)
    if view == "manifest":
        return Text(inspect.manifest_text(artifact))
    if view == "kernels":
        return _kernels(data)
    if view == "injected":
        return _injected(data)
    if view == "memory":
        return _memory(data)
    if view == "roofline":
        return _roofline(data)
    return _pairs(data)


def size(value: float) -> str:
    """Bytes as people read them: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.{0 if unit == 'B' else 1}f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def bar(value: float, largest: float) -> str:
    """A bar of up to ``_BAR`` columns in eighths of a column."""
    if not largest > 0 or not value >= 0:
        return ""
    eighths = int(min(value / largest, 1.0) * _BAR * 8 + 0.5)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _kernels(rows: Sequence[inspect.Row]) -> Table:
    largest = max((r["weight_bytes"] for r in rows), default=0)
    table = _table(
        ("entry", "kernel", "operator", "calls", "weights", "flops per row", ""), right=(3, 4, 5)
    )
    for r in rows:
        _add(
            table,
            r["entry_point"], r["kernel"], r["op"], r["calls"], size(r["weight_bytes"]),
            f"{r['flops_per_row']:,}", bar(r["weight_bytes"], largest),
        )  # fmt: skip
    return table


def _injected(rows: Sequence[inspect.Row]) -> Group:
    table = _table(("kernel", "what", "name", "value", "in the binary", "from"), right=(3,))
    previous = ""
    for r in rows:
        shown = r["kernel"] if r["kernel"] != previous else ""
        previous = r["kernel"]
        binary = "same" if r["agrees"] else f"DIFFERS: {_plain(r['binary'])}"
        _add(
            table, shown, str(r["kind"]).rstrip("s"), r["name"], r["manifest"], binary, r["why"],
        )  # fmt: skip
    bad = sum(not r["agrees"] for r in rows)
    verdict = (
        f"{bad} of {len(rows)} values differ between the manifest and the code object"
        if bad
        else f"all {len(rows)} values are the same in the manifest and in the code object"
    )
    return Group(table, Text(verdict, style="bold red" if bad else ""))


def _memory(data: Mapping[str, Any]) -> Group:
    sizes = {
        "weights": size(data.get("weights_bytes", 0)),
        "workspace": size(data.get("workspace_bytes", 0)),
        "KV per token": size(data.get("kv_bytes_per_token", 0)),
        "KV block": f"{data.get('kv_block_size', 0)} tokens, {size(data.get('kv_block_bytes', 0))}",
    }
    for name, nbytes in data.get("weights_by_format", {}).items():
        sizes[f"weights in {name}"] = size(nbytes)
    contexts = _table(("memory", "largest context"), right=(0, 1))
    for row in data.get("contexts", ()):
        _add(contexts, size(row["memory_bytes"]), f"{row['tokens']:,} tokens")
    buffers = _table(("buffer", "kind", "shape", "type", "size", "offset", ""), right=(4, 5))
    rows = data.get("largest_buffers", ())
    largest = max((r["nbytes"] for r in rows), default=0)
    for r in rows:
        _add(
            buffers, r["name"], r["kind"], r["shape"], r["dtype"], size(r["nbytes"]), r["offset"],
            bar(r["nbytes"], largest),
        )  # fmt: skip
    return Group(_pairs(sizes), contexts, buffers)


def _roofline(data: Mapping[str, Any]) -> Group:
    phases = _table(
        ("phase", "tokens", "context", "us", "tokens/s", "weights"), right=(1, 2, 3, 4, 5)
    )
    for r in data["phases"]:
        weights = r["weight_bytes"]
        _add(
            phases, r["phase"], r["tokens"], r["context"],
            f"{r['ns'] / 1000:,.1f}" if isinstance(r["ns"], int | float) else None,
            r["tokens_per_second"], size(weights) if isinstance(weights, int) else None,
        )  # fmt: skip
    facts = _table(("fact", "value", "unit", "source"), right=(1,))
    for f in data["facts"]:
        _add(facts, f.get("name"), f.get("value"), f.get("unit"), f.get("source"))
    table = _table(
        ("kernel", "calls", "flops", "bytes", "us", "share", "bound by", ""), right=(1, 2, 3, 4, 5)
    )
    largest = max((r["ns"] for r in data["kernels"]), default=0.0)
    for r in data["kernels"]:
        _add(
            table, r["kernel"], r["calls"], f"{r['flops']:,}", size(r["bytes"]),
            f"{r['ns'] / 1000:.2f}", f"{r['share']:.1%}", r["bound"], bar(r["ns"], largest),
        )  # fmt: skip
    return Group(phases, facts, table)


def _table(columns: Sequence[str], right: Iterable[int] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    aligned = set(right)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i in aligned else "left", overflow="fold")
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(Text(_plain(c)) for c in cells))


def _pairs(data: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in data.items():
        in_bytes = str(name).endswith("bytes") and isinstance(value, int)
        text = f"{value:,} ({size(value)})" if in_bytes else _plain(value)
        table.add_row(Text(str(name).replace("_", " ")), Text(text))
    return table


def _plain(value: object) -> str:
    """One line of printable text: names in an artifact may come from anyone."""
    if value is None:
        text = "-"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{k}: {_plain(v)}" for k, v in value.items())
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(_plain(v) for v in value) + "]"
    else:
        text = str(value)
    return "".join(c if c.isprintable() else "?" for c in text)
