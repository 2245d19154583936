"""What every runner shares: arguments, prompts, packing of chunks, the JSON line it prints.

In: the command line, ``BENCH_START`` (``time.monotonic()`` just before the process was started).
Out: one JSON object on stdout.  Next file: a runner.  Standard library only: each runner runs in
its own peer's environment.  Imports little before the first token, whose time is a measurement.
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, NoReturn

SHORT_PROMPT = 16  # tokens before the first token of a cold start
VOCABULARY = 31000  # the compared models have more; the first 300 are special tokens and bytes


DEFAULTS: dict[str, Any] = {
    "model": "",
    "prompt": 512,  # tokens of each sequence
    "new": 128,  # decode steps
    "threads": 2,
    "batch": 1,
    "ids": "",  # file of token ids that the prompts are cut from; pseudo-random ones without
    "vocabulary": VOCABULARY,  # of pseudo-random ids
    "drawn": False,  # decode pseudo-random ids, not the tokens that are chosen (ours)
    "steps": False,  # also time the steps inside the kernels
    "calls": False,  # also time each kernel call
    "kv": "",  # what the KV cache keeps, where it is not the default (llama.cpp)
    "state": "",  # file that keeps the prompt's KV (llama.cpp)
}


def arguments() -> SimpleNamespace:
    """The options that every runner takes: ``--name=value``, a flag as ``--name``."""
    values = dict(DEFAULTS)
    for word in sys.argv[1:]:
        name, _, value = word.removeprefix("--").partition("=")
        if name not in DEFAULTS:
            raise SystemExit(f"unknown option {word}")
        kind = type(DEFAULTS[name])
        values[name] = True if kind is bool else kind(value)
    return SimpleNamespace(**values)


def count(text: str) -> int:
    """An option's number, at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def failed(code: int, problem: str, what: str) -> NoReturn:
    """Ends this process as a child did, with its own words."""
    sys.stderr.write(problem.strip() + "\n" if problem.strip() else "")
    sys.stderr.write(f"error: {what} ended with {code}\n")
    sys.exit(code if 0 < code < 128 else 1)


def prompt_ids(count: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    """Reproducible token ids, the same for every peer."""
    x, out = 12345 + seed * 977, []
    for _ in range(count):
        x = (x * 1103515245 + 12345) & 0x7FFFFFFF
        word = 300 + x % (min(vocabulary, VOCABULARY) - 300) if vocabulary > 300 else x
        out.append(word % vocabulary)
    return out


def prompts(options: SimpleNamespace) -> list[list[int]]:
    """One prompt for each sequence; from a file, one after another."""
    if not options.ids:
        return [prompt_ids(options.prompt, s, options.vocabulary) for s in range(options.batch)]
    with open(options.ids, encoding="ascii") as file:  # noqa: PTH123  # pathlib is no small import
        ids = [int(word) for word in file.read().split()]
    size = options.prompt
    if len(ids) < size * options.batch:
        raise SystemExit(f"{options.ids} has {len(ids)} token ids, not {size * options.batch}")
    return [ids[s * size : (s + 1) * size] for s in range(options.batch)]


def drawn(options: SimpleNamespace) -> list[int]:
    """Pseudo-random ids to decode; none where the tokens that are chosen are decoded."""
    return prompt_ids(options.new, options.batch, options.vocabulary) if options.drawn else []


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
    import json
    import resource

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
