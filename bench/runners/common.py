"""What every runner shares: arguments, prompts, packing of chunks, the JSON line it prints.

In: the command line, ``BENCH_START`` (``time.monotonic()`` just before the process was started).
Out: one JSON object on stdout.  Next file: a runner.  Standard library only: each runner runs in
its own peer's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

SHORT_PROMPT = 16  # tokens before the first token of a cold start
VOCABULARY = 31000  # every model here has more; the first 300 are special tokens and bytes


def arguments() -> argparse.Namespace:
    """The options that every runner takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--new", type=int, default=128, help="decode steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--calls", action="store_true", help="also time each kernel call")
    parser.add_argument("--state", default="", help="file that keeps the prompt's KV (llama.cpp)")
    return parser.parse_args()


def prompt_ids(count: int, seed: int = 0) -> list[int]:
    """Reproducible token ids, the same for every peer."""
    x, out = 12345 + seed * 977, []
    for _ in range(count):
        x = (x * 1103515245 + 12345) & 0x7FFFFFFF
        out.append(300 + x % (VOCABULARY - 300))
    return out


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """One prompt for each sequence."""
    return [prompt_ids(options.prompt, s) for s in range(options.batch)]


def chunks(
    sequences: Sequence[Sequence[int]], limit: int
) -> Iterator[list[tuple[int, int, Sequence[int]]]]:
    """Prompts packed into steps of at most ``limit`` tokens: (sequence, first position, tokens)."""
    step: list[tuple[int, int, Sequence[int]]] = []
    room = limit
    for s, tokens in enumerate(sequences):
        at = 0
        while at < len(tokens):
            part = tokens[at : at + room]
            step.append((s, at, part))
            at += len(part)
            room -= len(part)
            if room == 0:
                yield step
                step, room = [], limit
    if step:
        yield step


def since_start() -> float:
    """Seconds since the process was started."""
    return time.monotonic() - float(os.environ["BENCH_START"])


def report(
    version: str,
    *,
    first_token_s: float,
    prefill_s: float | None,
    decode_s: float,
    ids: Sequence[int],
    **more: Any,
) -> None:
    """Print the result."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result = {
        "version": version,
        "first_token_s": first_token_s,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "ids": [int(i) for i in ids[:16]],
        **more,
    }
    print(json.dumps(result), flush=True)
