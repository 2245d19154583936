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


def render(artifact: Artifact, view: str = "", columns: int = 120) -> RenderableType:
    """The view ``kernels``, ``injected``, ``memory``, ``roofline``, ``manifest``, or a summary.

    Bars, and columns that repeat others, are left out where ``columns`` is less than 100.
    """
    data = inspect.view(artifact, view)
    if view == "manifest":
        return Text(inspect.manifest_text(artifact))
    if view == "kernels":
        return _kernels(data, columns >= 100)
    if view == "injected":
        return _injected(data)
    if view == "memory":
        return _memory(data, columns >= 100)
    if view == "roofline":
        return _roofline(data, columns >= 100)
    return _pairs(_summary(data))


def _options(data: Mapping[str, Any]) -> object:
    """The options, and what the context is where none was asked for (0)."""
    options, most = data.get("options"), data.get("max_context")
    if not isinstance(options, Mapping) or options.get("max_context") != 0:
        return options
    if not isinstance(most, int):  # a graph that is not a language model has no context
        return {name: value for name, value in options.items() if name != "max_context"}
    return {**options, "max_context": f"the model's ({most:,})"}


def _summary(data: Mapping[str, Any]) -> dict[str, str]:
    """The summary's data as (label, text)."""
    requires, numerics = data.get("requires") or {}, data.get("numerics") or {}
    other = {k: v for k, v in requires.items() if k not in ("arch", "system", "features")}
    host = f"{_plain(requires.get('system'))} on {_plain(requires.get('arch'))}"
    features = requires.get("features")
    members = data.get("member_bytes") or {}
    sizes = {"weights": data["weights_bytes"], **members}
    formats = data.get("stored_formats") or {}
    parameters, promise = data.get("parameters"), numerics.get("batch_invariant")
    unchecked = " (promised, not checked: the numerics gate did not run)"
    said = "yes" if promise is True else "no"
    if promise is True and numerics.get("status", "not run") == "not run":
        said += unchecked
    count = f"{parameters:,}" if isinstance(parameters, int) else _plain(parameters)
    rows = {
        "model": f"{_plain(data.get('model'))} ({_plain(data.get('architecture'))}, "
        f"{count} parameters)",
        "target": _plain(data.get("target")),
        "requires": ", ".join([host, *(f"{k} {_plain(v)}" for k, v in other.items())]),
        "features": " ".join(map(_plain, features)) if isinstance(features, list) else "-",
        "digest": _plain(data.get("digest")),
        "size": f"{data['bytes']:,} bytes ({size(data['bytes'])})",
        "": ", ".join(f"{name} {size(n)}" for name, n in sizes.items()),
        "kernels": f"{data.get('kernel_calls')} calls",
        "tensors": ", ".join(f"{n} {_plain(name)}" for name, n in formats.items()) or "none",
        **_projection(data.get("screening_bytes")),
        "numerics": _plain(numerics.get("status", "not run")),
        **({"batch-invariant": said} if promise is not None else {}),
        "options": _items(_options(data)),
        "built with": _items(data.get("tools")),
    }
    if "kl" in numerics:
        bounds = numerics.get("bounds")
        limit = bounds if isinstance(bounds, Mapping) else {}
        layers = numerics.get("layer_errors")
        found = {
            "top1": numerics.get("top1"),
            "kl": numerics.get("kl"),
            "logits": numerics.get("logit_error"),
            "layer": max(layers) if isinstance(layers, list) and layers else None,
        }
        rows["numerics"] += ": " + ", ".join(
            f"{name} {_plain(value)} ({'at least' if name == 'top1' else 'at most'} "
            f"{_plain(limit.get(name))})"
            for name, value in found.items()
        )
    return rows


def _projection(read: object) -> dict[str, str]:
    """The row about a screened output projection, where there is one."""
    if not isinstance(read, int) or read == 0:
        return {}
    return {"head": f"screened: {size(read)} tell a greedy step which logits it has to compute"}


def _items(data: object) -> str:
    """``a 1, b 2``."""
    items = data.items() if isinstance(data, Mapping) else ()
    return ", ".join(f"{_plain(k)} {_plain(v)}" for k, v in items) or "-"


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


def _kernels(rows: Sequence[inspect.Row], wide: bool) -> RenderableType:
    largest = max((r["weight_bytes"] for r in rows), default=0)
    ending = _ending([r["kernel"] for r in rows])
    columns = ("entry", "kernel", "calls", "weights", "flops per row", *([""] if wide else []))
    table = _table(columns, right=(2, 3, 4))
    for r in rows:
        kernel, op = r["kernel"], r["op"]
        named = str(kernel).split(".")[0] == op
        cells = [
            r["entry_point"], kernel[: len(kernel) - len(ending)] + ("" if named else f" ({op})"),
            r["calls"], size(r["weight_bytes"]), f"{r['flops_per_row']:,}",
        ]  # fmt: skip
        _add(table, *cells, *([bar(r["weight_bytes"], largest)] if wide else []))
    return _with_ending(table, ending)


def _ending(kernels: Sequence[str]) -> str:
    """The part behind the last point, when all names have the same: it is said once."""
    ends = {("." + k.rpartition(".")[2]) if "." in k else "" for k in kernels}
    return ends.pop() if len(ends) == 1 else ""


def _with_ending(table: Table, ending: str) -> RenderableType:
    return Group(table, Text(f"all kernels: {ending[1:]}")) if ending else table


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


def _memory(data: Mapping[str, Any], wide: bool) -> Group:
    sizes = {
        "weights": size(data.get("weights_bytes", 0)),
        "workspace": size(data.get("workspace_bytes", 0)),
        "KV per token": f"{size(data.get('kv_bytes_per_token', 0))}, {data.get('kv_dtype')}",
        "KV block": f"{data.get('kv_block_size', 0)} tokens, {size(data.get('kv_block_bytes', 0))}",
    }
    for name, nbytes in data.get("weights_by_format", {}).items():
        sizes[f"weights in {name}"] = size(nbytes)
    contexts = _table(("memory", "largest context"), right=(0, 1))
    full = max((row["tokens"] for row in data.get("contexts", ())), default=0)
    for row in data.get("contexts", ()):
        tokens = row["tokens"]
        more = " or more" if tokens == full else ""
        _add(contexts, size(row["memory_bytes"]) + more, f"{tokens:,} tokens")
        if more:
            break  # from here on the context is what the model bounds
    bars = [""] if wide else []
    buffers = _table(("buffer", "kind", "shape", "type", "size", "offset", *bars), right=(4, 5))
    rows = data.get("largest_buffers", ())
    largest = max((r["nbytes"] for r in rows), default=0)
    for r in rows:
        _add(
            buffers, r["name"], r["kind"], r["shape"], r["dtype"], size(r["nbytes"]), r["offset"],
            *([bar(r["nbytes"], largest)] if wide else []),
        )  # fmt: skip
    return Group(_pairs(sizes), contexts, buffers)


def _roofline(data: Mapping[str, Any], wide: bool) -> Group:
    phases = _table(
        ("phase", "tokens", "context", "us", "tokens/s", "weights"), right=(1, 2, 3, 4, 5)
    )
    for r in data["phases"]:
        weights, ns, rate = r["weight_bytes"], r["ns"], r["tokens_per_second"]
        _add(
            phases, r["phase"], r["tokens"], r["context"],
            f"{ns / 1000:,.1f}" if isinstance(ns, int | float) else None,
            f"{rate:,.{0 if rate >= 1000 else 1}f}" if isinstance(rate, int | float) else None,
            size(weights) if isinstance(weights, int) else None,
        )  # fmt: skip
    facts = _table(("fact", "value", "unit", "source"), right=(1,))
    for f in data["facts"]:
        value = f.get("value")
        shown = f"{value:,.10g}" if isinstance(value, int | float) else value
        _add(facts, f.get("name"), shown, f.get("unit"), f.get("source"))
    flops, bars = (["flops"], [""]) if wide else ([], [])
    table = _table(
        ("kernel", "calls", *flops, "bytes", "us", "share", "bound by", *bars),
        right=range(1, 5 + len(flops)),
    )
    largest = max((r["ns"] for r in data["kernels"]), default=0.0)
    ending = _ending([r["kernel"] for r in data["kernels"]])
    for r in data["kernels"]:
        _add(
            table, r["kernel"][: len(r["kernel"]) - len(ending)], r["calls"],
            *([f"{r['flops']:,}"] if wide else []), size(r["bytes"]), f"{r['ns'] / 1000:.2f}",
            f"{r['share']:.1%}", r["bound"], *([bar(r["ns"], largest)] if wide else []),
        )  # fmt: skip
    return Group(phases, facts, _with_ending(table, ending))


def _table(columns: Sequence[str], right: Iterable[int] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    aligned = set(right)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i in aligned else "left", overflow="fold")
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(Text(_plain(c)) for c in cells))


def _pairs(data: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    for name, value in data.items():
        table.add_row(Text(_plain(name)), Text(value))
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
