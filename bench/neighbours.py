"""What a neighbour costs: decode speed alone, beside a busy process, beside a second model.

In: an artifact.  Out: a table on stdout (or ``--json``).  Next file: ``footprint.py``.

Two threads on two CPUs wait for each other some 150 times a token.  When one CPU also runs
something else, a team that spins or yields at its barriers loses a time slice of several
milliseconds each time; what is left then is the question.  The busy process is pinned to the last
CPU of this process, at the same priority.  Rounds are interleaved; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "runners"))

import common

BUSY = "import os,sys\nos.sched_setaffinity(0,{int(sys.argv[1])})\nwhile True: pass"


def decode(artifact: Path, copies: int, steps: int) -> list[float]:
    """Tokens per second of each of ``copies`` processes that decode at the same time.

    One window each: the best of several would be the one that the neighbour disturbed least.
    """
    command = [sys.executable, str(artifact), "bench", "-p", "64", "-n", str(steps)]
    command += ["--repeat", "1", "--no-ceilings", "--json"]
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(copies)
    ]
    out = [(*process.communicate(), process.returncode) for process in running]
    for _, problem, code in out:
        if code:
            common.failed(code, problem, f"{artifact} bench")
    try:
        return [float(json.loads(text)["decode"]["tokens_per_second"]) for text, _, _ in out]
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"error: {artifact} printed no decode rate") from None


def beside_busy(artifact: Path, steps: int) -> float:
    """Tokens per second beside a process that never stops."""
    cpu = max(os.sched_getaffinity(0))
    busy = subprocess.Popen([sys.executable, "-c", BUSY, str(cpu)])
    try:
        return decode(artifact, 1, steps)[0]
    finally:
        busy.kill()
        busy.wait()


def measure(artifact: Path, rounds: int, steps: int) -> dict[str, float]:
    """Medians over ``rounds``: alone, beside a busy process, two models (one of them, and both)."""
    alone, busy, each, both = [], [], [], []
    for _ in range(rounds):
        alone += decode(artifact, 1, steps)
        busy.append(beside_busy(artifact, steps))
        two = decode(artifact, 2, steps)
        each += two
        both.append(sum(two))
    return {
        "alone": statistics.median(alone),
        "busy process on one CPU": statistics.median(busy),
        "two models, each": statistics.median(each),
        "two models, together": statistics.median(both),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--rounds", type=common.count, default=5)
    parser.add_argument("--steps", type=common.count, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.artifact, options.rounds, options.steps)
    if options.json:
        print(json.dumps(result))
        return
    print("| | decode tokens/s | against alone |\n|---|---|---|")
    for name, value in result.items():
        print(f"| {name} | {value:.0f} | {value / result['alone']:.2f}x |")


if __name__ == "__main__":
    main()
