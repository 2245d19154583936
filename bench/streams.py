"""How this host reads weights fastest: what the facts ``weight_streams`` and
``stream_prefetch_bytes`` of its target should be.

In: nothing but the templates.  Out: a table on stdout (or ``--json``): GB/s of a product of one
token that reads one, two or four streams a thread and asks for them so many bytes ahead or not at
all, beside a program that only reads; medians over rounds, each in an order of its own.
Next file: ``neighbours.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ("Q4_0", "Q8_0")


def build(fmt: str, folder: Path) -> Path:
    """The program for one format, compiled for this host."""
    binary = folder / f"streams-{fmt}"
    command = [sys.executable, "-m", "ziglang", "cc", "-O3", "-march=native", "-std=gnu11"]
    command += ["-pthread", "-I", str(ROOT / "templates" / "cpu"), f"-DZL_FMT_BENCH=ZL_FMT_{fmt}"]
    subprocess.run([*command, str(ROOT / "bench" / "streams.c"), "-o", str(binary)], check=True)
    return binary


def measure(binary: Path, threads: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of each way, a figure a round."""
    command = [str(binary), str(threads), str(rounds)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = (line.split() for line in text.splitlines())
    return {name: [float(x) for x in figures] for name, *figures in lines}


def named(way: str) -> tuple[str, str]:
    """(streams, bytes ahead) as the table has them: ``product_2_1536``, ``read_4``."""
    what, streams, *ahead = way.split("_")
    return streams, "only reads" if what == "read" else ahead[0] if ahead[0] != "0" else "not asked"


def main() -> int:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--threads", type=int, nargs="+", help="default 1 2")
    parser.add_argument("--rounds", type=int, default=15, help="1 to 200, default 15")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cpus = min(64, len(os.sched_getaffinity(0)))
    options.threads = options.threads or [1, 2][:cpus]
    if not 1 <= options.rounds <= 200 or not all(1 <= t <= cpus for t in options.threads):
        parser.error(f"--rounds is in 1..200, --threads in 1..{cpus} (CPUs of this process)")
    found = []
    with tempfile.TemporaryDirectory(prefix="zl-streams-") as folder:
        for fmt in FORMATS:
            binary = build(fmt, Path(folder))
            for threads in options.threads:
                for way, figures in measure(binary, threads, options.rounds).items():
                    streams, ahead = named(way)
                    row = {"format": fmt, "threads": threads, "streams": int(streams)}
                    found.append(row | {"ahead": ahead, "gb_per_second": figures})
    if options.json:
        print(json.dumps(found))
        return 0
    columns = [(f, t) for f in FORMATS for t in options.threads]
    print(
        "| streams | bytes ahead | " + " | ".join(f"{f}, threads: {t}" for f, t in columns) + " |"
    )
    print("|---" * (2 + len(columns)) + "|")
    cells = {
        (r["streams"], r["ahead"], r["format"], r["threads"]): (
            f"{statistics.median(r['gb_per_second']):.1f}"
            f" ({min(r['gb_per_second']):.1f}-{max(r['gb_per_second']):.1f})"
        )
        for r in found
    }
    for streams, ahead in dict.fromkeys(key[:2] for key in cells):
        line = [cells[streams, ahead, fmt, threads] for fmt, threads in columns]
        print(f"| {streams} | {ahead} | " + " | ".join(line) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
