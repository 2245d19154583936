"""Time, bytes and operations of each kernel of a step, against the measured ceilings.

In: the nanoseconds of each call (``runners/ours.py --calls``), the artifact's work, the results.
Out: rows for the report and the plot.  Next file: ``plot.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.matrix import Suite
from bench.results import Results
from bench.work import Work


def kernel_rows(
    results: Results, suite: Suite, work: Work, times: Sequence[int], prefill: bool
) -> list[dict[str, Any]]:
    """One row for each place in a layer; a prefill step is the prompt's first 512 tokens."""
    rows = min(suite.prompt, 512) if prefill else 1
    context = (rows + 1) / 2 if prefill else suite.prompt + 1.0
    groups: dict[str, dict[str, Any]] = {}
    for call, ns in zip(work.calls, times, strict=True):
        n = 1 if call.last_only else rows
        g = groups.setdefault(
            call.group, {"group": call.group, "count": 0, "ns": 0, "bytes": 0.0, "ops": 0.0}
        )
        g["count"] += 1
        g["ns"] += ns
        g["bytes"] += call.bytes_read(n, context, work.kv_bytes_per_layer)
        g["ops"] += call.total(n, context)
    total = sum(g["ns"] for g in groups.values()) or 1
    limit = results.ceiling(suite.name, "int8" if prefill else "read_memory")
    for g in groups.values():
        ns = max(g["ns"], 1)
        g["share"] = g["ns"] / total
        g["gbs"], g["gops"] = g["bytes"] / ns, g["ops"] / ns
        achieved = g["gops"] if prefill else g["gbs"]
        g["part"] = achieved / limit.median if limit else None
    return list(groups.values())


def all_kernels(
    results: Results,
    works: Mapping[str, Work],
    profiles: Mapping[str, tuple[Suite, str, dict[str, Any]]],
) -> dict[str, list[dict[str, Any]]]:
    """Title -> rows, for each profiled system (suite, artifact, what its runner printed)."""
    out = {}
    for title, (suite, artifact, printed) in profiles.items():
        for phase in ("decode", "prefill"):
            times = printed.get(f"{phase}_ns")
            work = works.get(artifact)
            if times and work and len(times) == len(work.calls):
                rows = kernel_rows(results, suite, work, times, phase == "prefill")
                out[f"{title}, {phase} step"] = rows
    return out
