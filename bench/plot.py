"""The plot: achieved against the machine's measured limits, per kernel and per model.

In: results, kernel rows, verdicts.  Out: ``docs/roofline.png`` and ``.svg``.  Last file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.needs import need
from bench.results import Results, Verdict

NAME = "roofline"
PHASES = {"decode": "#0b6e99", "prefill": "#c8553d"}
OURS, PEER, INK, FAINT = "#0b6e99", "#9a9a9a", "#222222", "#b8b8b8"
SMALLEST_SHARE = 0.02  # of a step's time, below which a kernel is not drawn
ROOFS = (("int8", "int8 peak"), ("bf16", "bf16 peak"), ("fp32", "fp32 peak"))
SUITE = "smollm2-2"  # whose rounds' ceilings are drawn; every line's own part uses its own


def canvas(name: str) -> Any:
    """matplotlib's pyplot with the pages' look; ``name`` makes a file's ids the same every time."""
    need("matplotlib")
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.edgecolor": FAINT,
        "text.color": INK,
        "axes.labelcolor": INK,
    }
    from matplotlib import pyplot

    return pyplot


def draw(
    results: Results,
    verdicts: Sequence[Verdict],
    kernels: Mapping[str, list[dict[str, Any]]],
    folder: Path,
    ending: str = "",
) -> str:
    """The files' name, which has ``ending``; "" when there is nothing to draw."""
    lines = [v for v in verdicts if v.roof is not None]
    if not lines and not kernels:
        return ""
    name = NAME + ending
    pyplot = canvas(name)
    height = max(6.2, 0.34 * len(lines) + 2.2)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(15, height), width_ratios=(1.15, 1), layout="constrained"
    )
    _kernels(left, results, kernels)
    _models(right, lines)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        figure.savefig(folder / f"{name}.{kind}", dpi=130, metadata=metadata)
    pyplot.close(figure)
    return name


def _kernels(axes: Any, results: Results, kernels: Mapping[str, list[dict[str, Any]]]) -> None:
    """Roofline: operations per byte against operations per second."""
    rows = [
        (title, row)
        for title, group in kernels.items()
        for row in group
        if row["share"] >= SMALLEST_SHARE and row["ops"] > row["bytes"] > 0 and row["gops"] > 1
    ]  # matrix products and attention
    xs = [row["ops"] / row["bytes"] for _t, row in rows] or [1.0]
    low, high = min(*xs, 1.0) / 2, max(*xs, 100.0) * 5
    ys = [row["gops"] for _t, row in rows] or [1.0]
    read = results.ceiling(SUITE, "read_memory")
    cache = results.ceiling(SUITE, "read_cache")
    peaks = [(label, results.ceiling(SUITE, key)) for key, label in ROOFS]
    bottom = min(ys) / 6
    tops = [p.median for _l, p in peaks if p]
    top = max(tops, default=max(ys))
    for limit, label, style in ((read, "memory read", "-"), (cache, "last cache read", "--")):
        if limit:
            axes.plot(
                [low, top / limit.median],
                [low * limit.median, top],
                style,
                color=INK,
                lw=1.2,
                zorder=1,
            )
            axes.annotate(
                f"{label} {limit.median:.0f} GB/s",
                (
                    max(low * 1.2, 2 * bottom / limit.median),
                    max(low * 1.2 * limit.median, 2 * bottom),
                ),
                xytext=(8, -9),
                textcoords="offset points",
                fontsize=8,
                va="top",
            )
    for label, peak in peaks:
        if peak:
            start = peak.median / read.median if read else low
            axes.plot([start, high], [peak.median] * 2, color=INK, lw=1.2, zorder=1)
            axes.annotate(
                f"{label} {peak.median:.0f}",
                (high, peak.median),
                xytext=(-2, 3),
                textcoords="offset points",
                ha="right",
                fontsize=8,
            )
    for title, row in rows:
        phase = "prefill" if "prefill" in title else "decode"
        small = "SmolLM2" in title
        axes.scatter(
            row["ops"] / row["bytes"],
            row["gops"],
            s=30 + 500 * row["share"],
            marker="o" if small else "s",
            facecolor=PHASES[phase] if small else "none",
            edgecolor=PHASES[phase],
            lw=1.4,
            alpha=0.85,
            zorder=3,
        )
        ceiling = max(top, *ys) * 1.7
    _labels(axes, rows, (ceiling / bottom) ** 0.027)
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_ylim(bottom, ceiling)
    axes.set_xlabel("operations per byte fetched")
    axes.set_ylabel("GOP/s achieved")
    axes.set_title("Kernels against the roofline (area: share of the step's time)", loc="left")
    axes.grid(True, which="major", color="#eeeeee", zorder=0)
    _kernel_legend(axes)


def _labels(axes: Any, rows: Sequence[tuple[str, dict[str, Any]]], gap: float) -> None:
    """Names beside the points, a factor ``gap`` apart at least in each column of points."""
    columns: dict[str, list[dict[str, Any]]] = {}
    for title, row in rows:
        phase = "prefill" if "prefill" in title else "decode"
        near = round(2 * math.log10(row["ops"] / row["bytes"]))
        columns.setdefault(f"{phase} {near}", []).append(row)
    for name, column in columns.items():
        left = max(row["ops"] / row["bytes"] for row in column) * 1.35
        color = PHASES[name.split()[0]]
        last = math.inf
        for row in sorted(column, key=lambda r: -float(r["gops"])):
            at = min(float(row["gops"]), last / gap)
            last = at
            point = (row["ops"] / row["bytes"], row["gops"])
            behind = {"pad": 0.5, "color": "white", "alpha": 0.75}
            line = {"arrowstyle": "-", "color": color, "lw": 0.5, "alpha": 0.6}
            axes.annotate(
                row["group"], point, bbox=behind, xytext=(left, at), fontsize=7, color=color,
                va="center", zorder=4, arrowprops=line,
            )  # fmt: skip


def _kernel_legend(axes: Any) -> None:
    """Colour is the phase, shape the model."""
    for phase, color in PHASES.items():
        axes.scatter([], [], s=60, color=color, label=f"SmolLM2-135M Q4_1, {phase}")
        axes.scatter(
            [], [], s=60, marker="s", facecolor="white", edgecolor=color,
            label=f"1.1B Q4_0, {phase}",
        )  # fmt: skip
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def _models(axes: Any, lines: Sequence[Verdict]) -> None:
    """Part of the limit that ours and the best peer reach, a line of the table each."""
    for i, v in enumerate(lines):
        assert v.roof is not None
        ours = 100 * v.roof
        if v.ratio:
            peer = ours / v.ratio
            axes.plot([peer, ours], [i, i], color=FAINT, lw=2, zorder=1)
            axes.scatter(peer, i, s=46, color=PEER, zorder=2)
            axes.annotate(
                f"{v.ratio:.2f}x", (max(ours, peer), i), xytext=(9, 0),
                textcoords="offset points", va="center", fontsize=8,
            )  # fmt: skip
        axes.scatter(ours, i, s=64, color=OURS, zorder=3)
        if v.line.roof_at_least:
            axes.plot([100 * v.line.roof_at_least] * 2, [i - 0.32, i + 0.32], color="#c8553d", lw=2)
    axes.axvline(100, color=INK, lw=1.2)
    axes.set_yticks(range(len(lines)), [v.line.work for v in lines])
    axes.set_ylim(len(lines) - 0.4, -1.1)
    axes.set_xlim(0, max([118.0, *(100 * (v.roof or 0) + 14 for v in lines)]))
    axes.annotate(
        "limit", (100, -0.75), xytext=(4, 0), textcoords="offset points", va="top", fontsize=8
    )
    axes.scatter([], [], s=64, color=OURS, label="zerolayer")
    axes.scatter([], [], s=46, color=PEER, label="best peer (same work per token)")
    axes.plot([], [], color="#c8553d", lw=2, label="required part of the limit")
    axes.legend(loc="upper center", frameon=False, fontsize=8, ncols=3, bbox_to_anchor=(0.4, -0.08))
    axes.set_xlabel("% of the measured limit (decode: memory read; prefill: int8 peak)")
    axes.set_title("Models against the limit", loc="left")
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x", color="#eeeeee", zorder=0)
