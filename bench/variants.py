"""Builds of one model against each other: steps in turn, in one process, on the same weights.

In: artifacts of the same model, target and formats, for example of two versions of the compiler or
of two fusion levels.  Out: a table on stdout (or ``--json``).  Next file: ``streams.py``.

A machine whose memory and cores others share moves by tens of per cent within a minute; differences
of a few per cent need more than two runs after each other.  Here each build's code runs on the
first artifact's mapping of the weights, a few steps of each in an order drawn anew for every round,
and a ratio is of steps that were neighbours in time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from zerolayer.runtime_stub.container import open_artifact
from zerolayer.runtime_stub.driver_cpu import CodeObject, CpuEngine
from zerolayer.runtime_stub.errors import UsageError, ZerolayerError
from zerolayer.runtime_stub.step import SamplingParams, StepBatch

MOST_STEPS = 64  #: of a turn; their tokens are the prompt's first ones
GREEDY = SamplingParams()
EMPTY: array[int] = array("i")


class Build:
    """One artifact's code on shared weights, with a prompt behind it."""

    def __init__(
        self, path: Path, weights: Any, offset: int, nbytes: int, threads: int, prompt: int
    ) -> None:
        artifact = open_artifact(str(path))
        self.name = path.stem
        block = artifact.manifest["memory"]["kv_block_size"]
        blocks = -(-(prompt + MOST_STEPS) // block)
        code = CodeObject(artifact.member(artifact.manifest["code"]["path"]))
        self.engine = CpuEngine(code, weights, offset, nbytes, kv_blocks=blocks, n_threads=threads)
        self.blocks = array("i", range(blocks))
        vocabulary = code.info.vocab_size
        self.prompt = array("i", ((i * 7919 + 13) % vocabulary for i in range(prompt)))
        self.prefill_s: list[float] = []
        self.decode_s: list[float] = []

    def _step(self, tokens: array[int], start: int) -> float:
        batch = StepBatch()
        batch.add(tokens, start, self.blocks, (GREEDY, 0, EMPTY))
        begin = time.perf_counter()
        self.engine.step(batch)
        return time.perf_counter() - begin

    def prefill(self) -> None:
        """The prompt once more."""
        most = self.engine.code.info.max_tokens
        parts = range(0, len(self.prompt), most)
        self.prefill_s.append(sum(self._step(self.prompt[p : p + most], p) for p in parts))

    def decode(self, steps: int) -> None:
        """Some steps behind the prompt; the first two only warm the caches up again."""
        times = [self._step(self.prompt[i : i + 1], len(self.prompt) + i) for i in range(steps)]
        self.decode_s.append(statistics.median(times[2:]))


def run(builds: list[Build], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Medians of each build, and of its ratios to the first."""
    for _ in range(rounds):
        for build in random.sample(builds, len(builds)):
            build.prefill()
            build.decode(steps)
    first = builds[0]
    rows = []
    for build in builds:
        row: dict[str, Any] = {"build": build.name}
        for what, tokens in (("prefill", len(first.prompt)), ("decode", 1)):
            mine, base = getattr(build, f"{what}_s"), getattr(first, f"{what}_s")
            row[f"{what}_tokens_per_second"] = tokens / statistics.median(mine)
            ratios = [b / m for m, b in zip(mine, base, strict=True)]
            row[f"{what}_ratio"] = statistics.median(ratios)
        rows.append(row)
    return rows


def load(paths: list[Path], threads: int, prompt: int = 512) -> list[Build]:
    """The builds, for a prompt of so many tokens; UsageError when their weights differ or it is
    longer than a context."""
    shared = open_artifact(str(paths[0]))
    weights, offset = shared.map_weights()
    for path in paths[1:]:
        other = open_artifact(str(path))
        theirs, start = other.map_weights()
        size = shared.weights_size
        if weights[offset : offset + size] != theirs[start : start + other.weights_size]:
            raise UsageError(f"other weights than {paths[0]}", where=str(path))
    for path in paths:
        context = open_artifact(str(path)).manifest["limits"]["max_context"]
        if prompt + MOST_STEPS > context:
            raise UsageError(
                f"a prompt of {prompt} tokens and {MOST_STEPS} steps need more than its context of"
                f" {context}",
                where=str(path),
                next_step="give a smaller --prompt",
            )
    return [Build(p, weights, offset, shared.weights_size, threads, prompt) for p in paths]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifacts", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12, help="decode steps of a turn, at least 3")
    parser.add_argument("--prompt", type=int, default=512, help="tokens before the first step")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    most = min(MOST_STEPS, options.prompt)
    if min(options.threads, options.rounds, options.steps - 2) < 1 or options.steps > most:
        parser.error(f"--threads and --rounds are at least 1, --steps is in 3..{most}")
    try:
        rows = run(
            load(options.artifacts, options.threads, options.prompt),
            options.rounds,
            options.steps,
        )
    except ZerolayerError as e:
        print(f"bench/variants.py: {e}", file=sys.stderr)
        return e.exit_code
    if options.json:
        print(json.dumps(rows))
        return 0
    print("| build | prefill tokens/s | against the first | decode tokens/s | against the first |")
    print("|---|---|---|---|---|")
    for row in rows:
        prefill, decode = row["prefill_tokens_per_second"], row["decode_tokens_per_second"]
        print(
            f"| {row['build']} | {prefill:.0f} | {row['prefill_ratio']:.3f}x"
            f" | {decode:.1f} | {row['decode_ratio']:.3f}x |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
