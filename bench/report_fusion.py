"""The page's part on fusion levels: the sweep's tables, what the fitted model says, the plot.

In: results, the artifacts' work.  Out: lines of Markdown, ``docs/fusion.png`` and ``.svg``.  Next
file: ``report.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.fit import Fit, fit
from bench.plot_fusion import NAME, draw
from bench.results import Results, stat
from bench.sweep import LEVELS, RUNS, SHAPES, SWEEP, Point, points, ratios
from bench.work import Work

WANTED = 2.3
FORMAT = {"Q4_0": "4-bit", "F32": "float32"}
STEPS_HEAD = (
    "| hidden x layers | weights | MB a step | calls | joins | activation bytes fewer | 1 thread "
    "| 2 threads | 4 threads | batch 8, 1 thread | batch 8, 2 threads | prefill, 2 threads |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)
TIMES_HEAD = (
    "| hidden x layers | weights | conservative us | balanced us | aggressive us "
    "| tokens/s with the loader, conservative to aggressive |",
    "|---|---|---|---|---|---|",
)
FITS_HEAD = (
    "| threads | weights | GB/s | us a join, forked again | us a join, staying | median error "
    f"| {WANTED}x up to, weights a join: fitted | measured |",
    "|---|---|---|---|---|---|---|---|",
)


def sweep_parts(results: Results, works: Mapping[str, Work], docs: Path) -> list[str]:
    """All of it; nothing when the sweep was not measured."""
    found = points(results, works)
    if not found:
        return []
    fits = fits_of(found)
    draw(found, fits, docs)
    picture = "Time of a decode step, conservative to aggressive, against weights a join"
    return [
        "How many times faster `aggressive` is than `conservative`, inside the kernels "
        f"({processes(found)}; {ceiling(results)}).",
        "",
        *ratio_table(found),
        "",
        f"![{picture}]({NAME}.png)",
        "",
        f"[The same as SVG]({NAME}.svg).",
        "",
        "A decode step at 2 threads, batch 1: the median in microseconds, inside the kernels; then "
        "the loader's tokens per second, a mean over all steps and what disturbed them.",
        "",
        *times_table(found),
        "",
        "Fitted to the models of at most 16 MiB, which stay in the last cache: "
        "time = weights / bandwidth + joins x price.",
        "",
        *fits_table(found, fits),
    ]


def processes(found: Sequence[Point]) -> str:
    """How often each cell was measured."""
    counts = [p.step_us.n for p in found]
    return f"medians of {min(counts)} to {max(counts)} processes"


def ceiling(results: Results) -> str:
    """The machine while the sweep ran."""
    read = [
        float(x["read_memory"])
        for suite in SWEEP
        if suite.threads == 2
        for x in results.of(suite.name, "ceilings")
    ]
    value = stat(read)
    if value is None:
        return "the machine's read was not measured"
    return f"memory read {value.median:.1f} GB/s ({value.low:.1f}-{value.high:.1f}) in these rounds"


def fits_of(found: Sequence[Point]) -> dict[tuple[int, str], Fit]:
    """(threads, format) -> the fit of batch 1."""
    out = {}
    for threads in sorted({t for t, batch in RUNS if batch == 1}):
        for kind in FORMAT:
            one = [p for p in found if (p.threads, p.kind, p.batch) == (threads, kind, 1)]
            fitted = fit(one)
            if fitted is not None:
                out[threads, kind] = fitted
    return out


def by_model(found: Sequence[Point]) -> Iterator[dict[str, Point]]:
    """Level -> point of each model at 2 threads and batch 1, where all three were measured."""
    for shape in SHAPES:
        for kind in FORMAT:
            row = {
                p.level: p
                for p in found
                if (p.shape, p.kind, p.threads, p.batch) == (shape, kind, 2, 1)
            }
            if set(row) == set(LEVELS):
                yield row


def ratio_table(found: list[Point]) -> list[str]:
    """One row for a shape and format."""
    steps, prefills = ratios(found), ratios(found, "prefill_us")
    out = list(STEPS_HEAD)
    for row in by_model(found):
        first, last = row[LEVELS[0]], row[LEVELS[2]]
        fewer = 1 - last.activation_bytes / first.activation_bytes
        key = last.key[:2]
        cells = [cell(steps.get((*key, *run))) for run in RUNS]
        out.append(
            f"| {last.shape.name} | {FORMAT[last.kind]} | {last.weight_bytes / 1e6:.2f} "
            f"| {first.calls} to {last.calls} | {first.joins} to {last.joins} "
            f"| {100 * fewer:.0f} % | {' | '.join(cells)} "
            f"| {cell(prefills.get((*key, 2, 1)))} |"
        )
    return out


def cell(ratio: float | None) -> str:
    """A ratio; bold where it reaches what is required."""
    if ratio is None:
        return "-"
    return f"**{ratio:.2f}x**" if ratio >= WANTED else f"{ratio:.2f}x"


def times_table(found: Sequence[Point]) -> list[str]:
    """Microseconds of a step."""
    out = list(TIMES_HEAD)
    for row in by_model(found):
        times = [
            f"{s.median:,.0f} ({s.low:,.0f}-{s.high:,.0f})"
            for s in (row[level].step_us for level in LEVELS)
        ]
        first, last = row[LEVELS[0]], row[LEVELS[2]]
        ends = first.decode.median, last.decode.median
        whole = f"{ends[0]:,.0f} to {ends[1]:,.0f} ({ends[1] / ends[0]:.2f}x)"
        out.append(f"| {last.shape.name} | {FORMAT[last.kind]} | {' | '.join(times)} | {whole} |")
    return out


def joins_of(found: Sequence[Point]) -> tuple[int, int]:
    """Joins of the largest model at both ends: the share of the layers in them is the largest."""
    by = {p.level: p.joins for p in sorted(found, key=lambda p: p.shape.hidden)}
    return by[LEVELS[0]], by[LEVELS[2]]


def crossing(found: Sequence[Point]) -> float | None:
    """Bytes of weights a join where the measured ratio falls below what is required, between two
    models on a logarithmic scale; 0 when it never was above, None when it never fell."""
    measured = ratios(list(found))
    ends = sorted((p for p in found if p.level == LEVELS[2]), key=lambda p: p.shape.hidden)
    known = [(p.weight_bytes / p.joins, measured[p.key]) for p in ends if p.key in measured]
    if not known or known[0][1] < WANTED:
        return 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(known):
        if y1 < WANTED <= y0:
            part = math.log(y0 / WANTED) / math.log(y0 / y1)
            return x0 * math.exp(part * math.log(x1 / x0))
    return None


def kilobytes(value: float | None) -> str:
    """A limit."""
    if value is None:
        return "everywhere"
    return f"{value / 1e3:,.1f} KB" if value > 0 else "nowhere"


def fits_table(found: Sequence[Point], fits: Mapping[tuple[int, str], Fit]) -> list[str]:
    """What the model says."""
    out = list(FITS_HEAD)
    for (threads, kind), f in fits.items():
        some = [p for p in found if (p.threads, p.kind, p.batch) == (threads, kind, 1)]
        most = f.bytes_for(WANTED, *joins_of(some))
        out.append(
            f"| {threads} | {FORMAT[kind]} | {f.bandwidth:.1f} | {f.fork_us:.2f} | {f.stay_us:.2f} "
            f"| {100 * f.error:.0f} % | {kilobytes(most)} | {kilobytes(crossing(some))} |"
        )
    return out
