"""``docs/performance*.md``: the table, what it was measured on, how to measure it again.

In: results, the artifacts' work, the plot's name.  Out: the page.  Next file: ``plot.py``.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.matrix import OURS, SUITES, Line, Suite, System
from bench.measure import commit, today
from bench.report_fusion import sweep_parts
from bench.results import SUITE, Results, Stat, Verdict, roof_part
from bench.work import Work

PAGES = Path(__file__).parent  # page.md and, of other machines, page-NAME.md
LINES_HEAD = (
    "| work | ratio | 90 % interval | required | met | achieved | ours | best peer |",
    "|---|---|---|---|---|---|---|---|",
)
CEILINGS_HEAD = (
    "| suite | memory read GB/s | 16 MiB read GB/s | int8 GOP/s | bf16 GFLOP/s | fp32 GFLOP/s "
    "| clock GHz |",
    "|---|---|---|---|---|---|---|",
)
SUITE_HEAD = (
    "| system | n | decode tokens/s | % of read | prefill tokens/s | % of int8 peak "
    "| start to first token s | peak MB |",
    "|---|---|---|---|---|---|---|---|",
)
FUSION_HEAD = (
    "| fusion | kernel calls a step | decode tokens/s | against conservative "
    "| activation bytes a token | fewer |",
    "|---|---|---|---|---|---|",
)
UNITS = {"decode": "tokens/s", "prefill": "tokens/s", "first_token": "s", "memory": "MB"}


def number(name: str, value: float) -> str:
    """A metric's value in its unit."""
    if name == "memory":
        return f"{value / 1e6:,.0f}"
    if name == "first_token":
        return f"{value:.3f}"
    return f"{value:,.0f}" if value >= 200 else f"{value:.1f}"


def cell(name: str, value: Stat | None) -> str:
    """Median and range."""
    if value is None:
        return "-"
    if value.n == 1:
        return number(name, value.median)
    low, high = number(name, value.low), number(name, value.high)
    return f"{number(name, value.median)} ({low}-{high})"


def percent(part: float | None) -> str:
    """``87 %``."""
    return "-" if part is None else f"{100 * part:.0f} %"


def wanted(line: Line) -> str:
    """What the line must reach."""
    out = f"{line.at_least:g}x"
    if line.roof_at_least:
        out += f", {100 * line.roof_at_least:.0f} % of {ROOFS[line.roof]}"
    if line.below:
        out += f", < {line.below:g} s"
    return out


ROOFS = {"read_memory": "read", "int8": "int8 peak"}


def spread(v: Verdict) -> str:
    """The interval of a ratio, as the tables have it."""
    return "-" if v.interval is None else f"{v.interval[0]:.2f}-{v.interval[1]:.2f}"


def verdict_row(v: Verdict) -> str:
    """One line of the first table."""
    line, unit = v.line, UNITS[v.line.metric]
    sides = []
    for side in (v.ours, v.peer):
        if side is None:
            sides.append("not measured")
            continue
        system, value = side
        label = system.label if system.peer == OURS else system.name
        sides.append(f"{cell(line.metric, value)} {unit}, {label}")
    ratio = "-" if v.ratio is None else f"**{v.ratio:.2f}x**"
    roof = "-" if v.roof is None else f"{percent(v.roof)} of {ROOFS[line.roof]}"
    met = {None: "-", True: "yes", False: "no"}[v.met]
    cells = [line.work, ratio, spread(v), wanted(line), met, roof, *sides]
    return "| " + " | ".join(cells) + " |"


def versions(results: Results) -> str:
    """Peers and what built ours."""
    known = [f"{peer}: {text}" for peer, text in sorted(results.versions().items())]
    return "; ".join(known) or "no peer measured"


def when(results: Results) -> str:
    """Dates and commits of the measurement, as its lines tell; of now where they do not."""
    told = {(x["date"], x["commit"]) for x in results.lines if "date" in x and "commit" in x}
    known = sorted(told) or [(today(), commit())]
    dates = sorted({date for date, _ in known})
    commits = list(dict.fromkeys(which for _, which in known))
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Measured {span}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


def data_caches() -> list[tuple[int, str]]:
    """(level, size like ``32768K``) of the caches for data."""
    out = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / n).read_text().strip() for n in ("level", "type", "size"))
        if kind != "Instruction":
            out.append((int(level), size))
    return out


def last_cache() -> int:
    """Bytes of the last-level cache; 0 when the system does not tell."""
    known = [(level, size) for level, size in data_caches() if size[:-1].isdigit()]
    if not known:
        return 0
    size = max(known)[1]
    return int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[size[-1]]


def machine() -> str:
    """Processor, cores, caches, memory, kernel."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields = {
        k.strip(): v.strip() for k, _, v in (line.partition(":") for line in info.splitlines())
    }
    caches = [f"L{level} {size}" for level, size in data_caches()]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    family, model = fields.get("cpu family"), fields.get("model")
    name = f"{fields.get('model name')} (family {family}, model {model})"
    virtual = ", virtual machine" if "hypervisor" in fields.get("flags", "") else ""
    system = f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    return (
        f"{name}, {os.cpu_count()} CPUs{virtual}, {', '.join(caches)}, "
        f"{pages / 2**30:.0f} GiB; {system}"
    )


def ceilings(results: Results) -> list[str]:
    """The measured limits by suite."""
    keys = ("read_memory", "read_cache", "int8", "bf16", "fp32", "clock_ghz")
    out = list(CEILINGS_HEAD)
    for suite in SUITES:
        values = [results.ceiling(suite.name, k) for k in keys]
        if any(values):
            cells = [
                "-" if v is None else f"{v.median:.1f} ({v.low:.1f}-{v.high:.1f})" for v in values
            ]
            out.append(f"| {suite.title} | " + " | ".join(cells) + " |")
    return out


def suite_table(results: Results, suite: Suite, works: Mapping[str, Work]) -> list[str]:
    """Every system of a suite."""
    shape = f"prompt {suite.prompt}, {suite.new} decode steps, batch {suite.batch}"
    out = [f"### {suite.title}", "", f"{shape}. Suite `{suite.name}`.", ""]
    out += SUITE_HEAD
    for system in suite.systems:
        decode = results.stat(suite.name, system.name, "decode")
        if decode is None:
            continue
        out.append(system_row(results, suite, system, decode, works.get(system.artifact)))
    left_out = results.errors(suite.name)
    if left_out:
        why = "; ".join(f"{k}: {' '.join(v.split())[:120]}" for k, v in left_out.items())
        out += ["", f"Not measured: {why}."]
    return [*out, ""]


def system_row(
    results: Results, suite: Suite, system: System, decode: Stat, work: Work | None
) -> str:
    """One system of a suite."""
    stats = {k: results.stat(suite.name, system.name, k) for k in UNITS}
    mine = work if system.peer == OURS else None
    roofs = []
    for name, key in (("decode", "read_memory"), ("prefill", "int8")):
        value = stats[name]
        part = None
        if value is not None:
            part = roof_part(results, suite.name, system, name, mine, value.median, key)
        roofs.append(percent(part))
    cells = [cell(k, stats[k]) for k in UNITS]
    row = [system.name, str(decode.n), cells[0], roofs[0], cells[1], roofs[1], *cells[2:]]
    return "| " + " | ".join(row) + " |"


def fusion_table(results: Results, works: Mapping[str, Work]) -> list[str]:
    """Levels against conservative: time and activation bytes."""
    suite = SUITE["fusion"]
    base = suite.systems[0]
    first = results.stat(suite.name, base.name, "decode")
    base_work = works.get(base.artifact)
    if first is None or base_work is None:
        return []
    out = list(FUSION_HEAD)
    for system in suite.systems:
        value, work = results.stat(suite.name, system.name, "decode"), works.get(system.artifact)
        if value is None or work is None:
            continue
        moved = work.activation_bytes()
        fewer = 1 - moved / base_work.activation_bytes()
        out.append(
            f"| {work.fusion} | {len(work.calls)} | {cell('decode', value)} | "
            f"{value.median / first.median:.2f}x | {moved:,} | {percent(fewer)} |"
        )
    return out


def calls_table(title: str, rows: list[dict[str, Any]], roof: str, cache: int) -> list[str]:
    """Kernels of one step; ``cache`` is the bytes of the last-level cache."""
    notes: dict[str, None] = {}
    step = sum(row["bytes"] for row in rows)
    out = [
        f"### {title}",
        "",
        f"| kernel | calls | us | share | GB/s | GOP/s | % of {roof} |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: -float(r["ns"])):
        us, share = row["ns"] / 1e3, 100 * row["share"]
        mark, note = over(row, roof, cache, step)
        notes |= {note: None} if note else {}
        rates = f"{row['gbs']:.1f} | {row['gops']:.1f} | {percent(row['part'])}{mark}"
        out.append(f"| {row['group']} | {row['count']} | {us:.0f} | {share:.1f} % | {rates} |")
    return [*out, "", *(line for note in notes for line in (note, ""))]


def over(row: Mapping[str, Any], roof: str, cache: int, step: float) -> tuple[str, str]:
    """A mark for more than 100 % of the ceiling, and what it means.

    Steps read the same ``step`` bytes again and again, of which the last-level cache holds
    ``cache`` at most: taken as equally much of every kernel's.  Where the rest alone came faster
    than the measured read, the ceiling was too low.  Otherwise the cache may explain it.
    """
    part = row["part"]
    if part is None or part <= 1:
        return "", ""
    cached = roof == "read"  # operations are not
    fetched = max(1 - cache / max(step, 1), 0) if cached else 1.0
    above = f"Above 100 % of the {roof} measured in its round"
    if part * fetched > 1:
        why = f", also without what the last-level cache ({mb(cache)}) can have kept of a step"
        why = why if cached else ""
        return " \\*", (
            f"\\* {above}{why}: the ceiling of that round was lower than the machine can do."
        )
    return " +", (
        f"\\+ {above}: part of its bytes may have stayed in the last-level cache ({mb(cache)})."
    )


def mb(nbytes: int) -> str:
    """``34 MB``."""
    return f"{nbytes / 1e6:.0f} MB"


def measured(results: Results) -> str:
    """When, what, on what."""
    rounds = max(Counter((x["suite"], x["system"]) for x in results.lines).values(), default=0)
    facts = (
        f"{when(results)}, at most {rounds} processes of each system.",
        f"Machine: {machine()}.",
        f"Versions: {versions(results)}.",
    )
    return " ".join(facts)


README_LINES = (
    "decode, SmolLM2 Q4_1, same file, 2 threads",
    "decode, SmolLM2, 4-bit, 2 threads",
    "decode, SmolLM2, 4-bit, 1 thread",
    "decode, SmolLM2, 16-bit, 2 threads",
    "decode, 1.1B, 4-bit, 2 threads",
    "decode, 1.1B, 4-bit, 1 thread",
    "decode, 1.1B, 16-bit, 2 threads",
    "prefill, SmolLM2, 4-bit, 2 threads",
    "prefill, SmolLM2, 4-bit, 1 thread",
    "prefill, 1.1B, 4-bit, 2 threads",
    "prefill, 1.1B, 4-bit, 1 thread",
    "decode, batch 8, SmolLM2",
    "start to first token, SmolLM2",
    "peak memory, SmolLM2 Q4_1",
)
RATIOS = ("<!-- ratios -->\n", "<!-- end of ratios -->\n")


def write_readme(results: Results, verdicts: Sequence[Verdict], path: Path) -> None:
    """The ratios between the README's two marks; as they were when nothing was measured.

    The least of all ratios is among them, whatever line it is of; below the table, how many lines
    met their goal.
    """
    measured = [
        (v, v.ratio, f"{spread(v)} | {v.ours[0].label} | {v.peer[0].name}")
        for v in verdicts
        if v.ratio is not None and v.ours and v.peer
    ]
    least = min((ratio for _, ratio, _ in measured), default=0.0)
    rows = [
        f"| {v.line.work} | {ratio:.2f}x | {systems} |"
        for v, ratio, systems in measured
        if v.line.work in README_LINES or ratio == least
    ]
    met, slower = sum(v.met is True for v, _, _ in measured), sum(r < 1 for _, r, _ in measured)
    tail = (
        f"{when(results)}. The least ratio of all {len(measured)} lines measured is {least:.2f}x;"
        f" {slower} of them {'is' if slower == 1 else 'are'} behind the best peer, {met} reach the"
        " goal that the project set itself before measuring."
    )
    before, found, rest = path.read_text(encoding="utf-8").partition(RATIOS[0])
    _old, ended, after = rest.partition(RATIOS[1])
    if rows and found and ended:
        table = "\n".join(
            [
                "| work | ratio | 90 % interval | ours | best peer |",
                "|---|---|---|---|---|",
                *rows,
                "",
                tail,
            ]
        )
        path.write_text(f"{before}{RATIOS[0]}{table}\n{RATIOS[1]}{after}", encoding="utf-8")


def write_report(
    results: Results,
    verdicts: Sequence[Verdict],
    works: Mapping[str, Work],
    kernels: Mapping[str, list[dict[str, Any]]],
    path: Path,
    plot: str,
) -> None:
    """The page ``performance*.md``, whose text is the ``page*.md`` of the same ending; ``kernels``
    is title -> rows (:func:`bench.kernels.all_kernels`)."""
    source = PAGES / path.name.replace("performance", "page", 1)
    page = source.read_text(encoding="utf-8")
    suites = [s for s in SUITES if any(x["suite"] == s.name for x in results.lines)]
    times = [
        row
        for title, rows in kernels.items()
        for row in calls_table(
            title, rows, "int8 peak" if "prefill" in title else "read", last_cache()
        )
    ]
    picture = "![Achieved against the machine's limits, per kernel and per model]"
    mark = "<!-- insert: fusion-sweep -->"  # its plot is one file, whoever asks for it
    parts = {
        "measured": [measured(results)],
        "lines": [*LINES_HEAD, *(verdict_row(v) for v in verdicts)],
        "plot": [f"{picture}({plot}.png)", "", f"[The same as SVG]({plot}.svg)."] if plot else [],
        "fusion": fusion_table(results, works),
        "fusion-sweep": sweep_parts(results, works, path.parent) if mark in page else [],
        "ceilings": ceilings(results),
        "suites": [row for suite in suites for row in suite_table(results, suite, works)],
        "kernels": times,
    }
    if not results.lines:
        parts = {name: [] for name in parts}
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    for name, rows in parts.items():
        text = "\n".join(rows).strip() or _kept(before, name) or "Not measured."
        page = page.replace(
            f"<!-- insert: {name} -->", f"<!-- {name} -->\n{text}\n{_END.format(name)}"
        )
    path.write_text(page, encoding="utf-8")


_END = "<!-- end of {} -->"


def _kept(page: str, name: str) -> str:
    """What the page says of a part that was not measured this time; empty if nothing."""
    begin, end = f"<!-- {name} -->\n", _END.format(name)
    return page.partition(begin)[2].partition(end)[0].strip() if end in page else ""
