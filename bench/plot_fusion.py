"""The plot of the fusion sweep: ratio of the levels' times against weights a join.

In: points, fits.  Out: ``docs/fusion.png`` and ``.svg``.  Next file: ``report_fusion.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.fit import CACHED_BYTES, Fit
from bench.plot import FAINT, INK, canvas
from bench.sweep import LEVELS, Point, ratios

NAME = "fusion"
WANTED = 2.3
COLORS = {1: "#0b6e99", 2: "#c8553d", 4: "#6a8d3f"}
KINDS = {"Q4_0": ("4-bit", "o", "-"), "F32": ("float32", "s", "--")}


def draw(found: list[Point], fits: Mapping[tuple[int, str], Fit], folder: Path) -> None:
    """Both files."""
    pyplot = canvas(NAME)
    figure, axes = pyplot.subplots(figsize=(9, 5.4), layout="constrained")
    measured = ratios(found)
    for threads, color in COLORS.items():
        for kind, look in KINDS.items():
            some = [p for p in found if (p.threads, p.kind, p.batch) == (threads, kind, 1)]
            _series(axes, some, measured, fits.get((threads, kind)), color, look)
    axes.axhline(WANTED, color=INK, lw=1)
    axes.annotate(
        f"required: {WANTED}x", (1, WANTED), xycoords=("axes fraction", "data"),
        xytext=(-4, 4), textcoords="offset points", ha="right", fontsize=8,
    )  # fmt: skip
    axes.axhline(1, color=FAINT, lw=1)
    axes.set(xscale="log", ylim=(0.8, None))
    axes.set_xlabel(
        "bytes of weights between two joins of the threads at aggressive (decode, batch 1)"
    )
    axes.set_ylabel("time of a step, conservative / aggressive")
    axes.set_title("Where fusion pays (points: measured; lines: fitted)", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#eeeeee", zorder=0)
    axes.legend(frameon=False, fontsize=8)
    for ending, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        figure.savefig(folder / f"{NAME}.{ending}", dpi=130, metadata=metadata)
    pyplot.close(figure)


def _series(
    axes: Any,
    some: Sequence[Point],
    measured: Mapping[tuple[int, str, int, int], float],
    fitted: Fit | None,
    color: str,
    look: tuple[str, str, str],
) -> None:
    """One thread count and format: its points and its line."""
    name, marker, style = look
    ends = sorted((p for p in some if p.level == LEVELS[2]), key=lambda p: p.shape.hidden)
    known = [p for p in ends if p.key in measured]
    if not known:
        return
    xs = [p.weight_bytes / p.joins for p in known]
    threads = known[0].threads
    axes.scatter(
        xs, [measured[p.key] for p in known], s=42, marker=marker, zorder=3, color=color,
        facecolor=color if marker == "o" else "none",
        label=f"{name}, {threads} thread{'s' * (threads > 1)}",
    )  # fmt: skip
    if fitted is None:
        return
    joins = {(p.key, p.level): p.joins for p in some}
    cached = [p for p in known if p.weight_bytes <= CACHED_BYTES]
    ys = [fitted.ratio(p.weight_bytes / p.joins, joins[p.key, LEVELS[0]], p.joins) for p in cached]
    axes.plot(xs[: len(ys)], ys, style, color=color, lw=1.1, alpha=0.7, zorder=2)
