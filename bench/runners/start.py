"""One process start, phase by phase; ``bench/start.py`` runs it and adds what only it can see.

In: an artifact, token ids, threads; ``BENCH_START`` as in ``common.py``, which is not imported: it
would be measured.  Out: one JSON object on stdout, seconds by phase in order.  Does what
``python3 FILE generate --tokens IDS -n 1`` does, by the artifact's own loader.
"""

from __future__ import annotations

import time

MARKS = [("", time.monotonic())]


def mark(name: str) -> None:
    """The time since the mark before belongs to ``name``."""
    MARKS.append((name, time.monotonic()))


import runpy  # noqa: E402, F401  # Python imports it to run a file that ends with a ZIP

mark("interpreter")
import array  # noqa: E402
import ctypes  # noqa: E402, F401
import hashlib  # noqa: E402, F401
import heapq  # noqa: E402, F401
import mmap  # noqa: E402, F401
import resource  # noqa: E402, F401
import struct  # noqa: E402, F401
import sys  # noqa: E402
import zipimport  # noqa: E402
import zlib  # noqa: E402, F401

mark("library")


def main() -> None:
    archive = zipimport.zipimporter(sys.argv[1])
    spec = type(zipimport.__spec__)("artifact", archive)  # type: ignore[arg-type, unused-ignore]
    code = archive.get_code("__main__")
    exec(code, {"__name__": spec.name, "__loader__": archive, "__spec__": spec})
    from zerolayer_stub import cli, generate  # type: ignore[import-not-found] # noqa: F401
    from zerolayer_stub.session import Session  # type: ignore[import-not-found]
    from zerolayer_stub.step import SamplingParams, StepBatch  # type: ignore[import-not-found]

    mark("loader")
    session = Session(sys.argv[1])
    session.require_host()
    mark("open")
    from zerolayer_stub import driver_cpu, scheduler  # noqa: F401

    mark("loader")
    tokens = array.array("i", map(int, sys.argv[2].split(",")))
    blocks = session.memory.blocks_for(len(tokens) + 1)
    engine = session.start(blocks, int(sys.argv[3]))
    mark("engine")
    for name in ("first step", "same step again"):
        batch = StepBatch()
        row = (SamplingParams(), 0, array.array("i"))
        batch.add(tokens, 0, array.array("i", range(blocks)), row)
        engine.step(batch)
        mark(name)
    phases = session.timings.phases
    session.close()
    mark("close")
    import json
    import os

    started = float(os.environ["BENCH_START"])
    times = [started, *(at for _, at in MARKS[1:])]
    out = dict.fromkeys((name for name, _ in MARKS[1:]), 0.0)
    for (name, _), a, b in zip(MARKS[1:], times, times[1:]):  # noqa: B905
        out[name] += b - a
    early = phases.get("loader", 0.0) / 1e3  # modules that a session compiles while pages come
    out["loader"] += early
    out["open"] -= early
    out["facts"] = phases["detect"] / 1e3
    out["open"] -= out["facts"]
    out["code"] = phases["code"] / 1e3
    out["engine"] -= out["code"]
    print(json.dumps({"phases": out, "ended": time.monotonic()}))


main()
