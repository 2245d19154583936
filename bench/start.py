"""Where the time from process start to the first token goes.

``python bench/start.py FILE [FILE ...] [-n 11] [--python PYTHON ...]``: prints Markdown, a table of
phases for each Python (default: the one that runs this), a column for each artifact, medians in
milliseconds over processes that take turns, page cache warm.  The last lines are of the command
``FILE generate --tokens ... -n 1`` itself: to its first byte of output, and to its end.  The column
"floor" is what no loader can avoid: an interpreter without ``site``, the step once its pages are
mapped.  Give an artifact of before and one of after to compare them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

RUNNERS = Path(__file__).parent / "runners"
sys.path.append(str(RUNNERS))

import common  # noqa: E402

#: phase -> what it is; in the order in which they come
PHASES = {
    "interpreter": "interpreter: start, `site`, `runpy`",
    "library": "modules of the standard library",
    "loader": "loader: sources compiled and run",
    "open": "artifact opened: directory, manifest, digests",
    "facts": "host's facts, compared",
    "code": "code object: read, hashed, loaded",
    "engine": "weights mapped, memory, threads",
    "first step": "first step, 16 tokens",
    "close": "engine closed, weights unmapped",
    "exit": "interpreter's exit",
}
FIRST, WHOLE = "command, to its first byte", "command, to its end"
Times = dict[str, list[float]]


def environment() -> dict[str, str]:
    """Of one process; ``BENCH_START`` is now."""
    return os.environ | {"BENCH_START": repr(time.monotonic())}


def phases(python: str, artifact: Path, ids: str, threads: int) -> dict[str, float]:
    """Seconds of each phase of one process."""
    command = [python, str(RUNNERS / "start.py"), str(artifact), ids, str(threads)]
    done = subprocess.run(command, env=environment(), check=False, capture_output=True, text=True)
    end = time.monotonic()
    if done.returncode:
        common.failed(done.returncode, done.stderr, f"a start of {artifact}")
    printed = json.loads(done.stdout)
    return {**printed["phases"], "exit": end - float(printed["ended"])}


def command(python: str, artifact: Path, ids: str, threads: int) -> dict[str, float]:
    """Seconds to the first byte and to the end of the artifact's own command."""
    words = [python, str(artifact), "generate", "--tokens", ids, "-n", "1", "--threads"]
    start = time.monotonic()
    words.append(str(threads))
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        got = child.stdout.read(1)
        first = time.monotonic() - start
        child.stdout.read()
    if child.returncode or not got:
        common.failed(child.returncode, "", f"{artifact} generate")
    return {FIRST: first, WHOLE: time.monotonic() - start}


def empty(python: str) -> float:
    """Seconds of a Python that does nothing."""
    start = time.monotonic()
    subprocess.run([python, "-I", "-S", "-c", ""], check=True)
    return time.monotonic() - start


def vocabulary(python: str, artifact: Path) -> int:
    """The artifact's number of token ids, by its own word; ends with its message when it has none.

    Also the check that ``python`` runs and that ``artifact`` is a language model's.
    """
    words = [python, str(artifact), "info", "--json"]
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True)
    except OSError as e:
        raise SystemExit(f"error: {python}: {e.strerror}") from None
    if done.returncode:
        common.failed(done.returncode, done.stderr, f"{artifact} info")
    try:
        words_known = int(json.loads(done.stdout)["model"]["vocab_size"])
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"error: {artifact} is not an artifact") from None
    if words_known < 1:
        raise SystemExit(f"error: {artifact} is a graph: it has no first token")
    return words_known


def measure(python: str, artifacts: list[Path], rounds: int, threads: int) -> list[Times]:
    """For each artifact the times by phase; the first round only warms."""
    known = min(vocabulary(python, artifact) for artifact in artifacts)
    ids = ",".join(map(str, common.prompt_ids(common.SHORT_PROMPT, 0, known)))
    out: list[Times] = [defaultdict(list) for _ in artifacts]
    for index in range(rounds + 1):
        for times, artifact in zip(out, artifacts, strict=True):
            found = command(python, artifact, ids, threads)  # first: it refuses in words
            found |= phases(python, artifact, ids, threads)
            found["floor"] = empty(python)
            for name, value in found.items() if index else ():
                times[name].append(1e3 * value)
    return out


def table(python: str, artifacts: list[Path], measured: list[Times]) -> list[str]:
    """Markdown."""
    version = subprocess.run([python, "-V"], check=True, capture_output=True, text=True).stdout
    median = [{k: statistics.median(v) for k, v in times.items()} for times in measured]
    floor = {"interpreter": "floor", "first step": "same step again"}
    lines = [f"{version.strip()}, milliseconds:", ""]
    heads = [f"{a.stem} | floor" for a in artifacts]
    lines += [f"| phase | {' | '.join(heads)} |", "|---|" + "---|---|" * len(artifacts)]
    for name, text in [*PHASES.items(), (FIRST, FIRST), (WHOLE, WHOLE)]:
        cells = []
        for times in median:
            least = f"{times[floor[name]]:.1f}" if name in floor else ""
            cells.append(f"{times[name]:.1f} | {least}")
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifacts", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("-n", "--rounds", type=common.count, default=11, help="processes of each")
    parser.add_argument("--threads", type=common.count, default=2)
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PYTHON")
    options = parser.parse_args()
    for python in options.python:
        measured = measure(python, options.artifacts, options.rounds, options.threads)
        print("\n".join(table(python, options.artifacts, measured)), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
