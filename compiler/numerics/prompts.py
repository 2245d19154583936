"""What the gate and the artifact's self-test are run on.

In: a tokenizer or a vocabulary size.  Out: :func:`gate_prompts`.  Next file: ``gate.py``.
"""

from __future__ import annotations

import json

from zerolayer.compiler.frontends.config import ModelConfig, TokenizerAssets

#: prose, code, another language, numbers: short, because the float32 reference runs them too
TEXTS = (
    "The capital of France is",
    "Water boils at 100 degrees Celsius, which in Fahrenheit is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Der schnelle braune Fuchs springt über",
    "1, 1, 2, 3, 5, 8, 13,",
)

#: greedy tokens that follow each prompt in the golden self-test
GOLDEN_TOKENS = 16


def pseudo_random_ids(vocab_size: int, count: int, seed: int) -> list[int]:
    """Ids from a linear congruential generator (constants of ANSI C's example ``rand``)."""
    x = 12345 + seed * 977
    ids = []
    for _ in range(count):
        x = (x * 1103515245 + 12345) & 0x7FFFFFFF
        ids.append((x >> 8) % vocab_size)
    return ids


def gate_prompts(
    config: ModelConfig, tokenizer: TokenizerAssets | None, longest: int
) -> list[tuple[str | None, list[int]]]:
    """(text, ids) pairs; without a tokenizer the text is None and the ids are pseudo-random.

    No prompt is longer than ``longest`` tokens.
    """
    longest = max(1, longest)
    prompts: list[tuple[str | None, list[int]]] = []
    if tokenizer is not None:
        from tokenizers import Tokenizer

        encoder = Tokenizer.from_str(tokenizer.tokenizer_json.decode("utf-8"))
        for text in TEXTS:
            ids = list(encoder.encode(text, add_special_tokens=False).ids)
            if tokenizer.add_bos and tokenizer.bos_id is not None:
                ids = [tokenizer.bos_id, *ids]
            if ids and len(ids) <= longest and max(ids) < config.vocab_size:
                prompts.append((text, ids))
    if not prompts:
        for seed, count in enumerate((1, 5, 17, 33)):
            ids = pseudo_random_ids(config.vocab_size, min(count, longest), seed)
            prompts.append((None, ids))
    return prompts


def golden_json(cases: list[tuple[str | None, list[int], list[int]]]) -> bytes:
    """``golden.json`` of the artifact: prompts and the greedy tokens its own kernels gave."""
    body = {
        "cases": [
            {"prompt": text, "prompt_ids": ids, "expect_ids": expect} for text, ids, expect in cases
        ]
    }
    return json.dumps(body, ensure_ascii=True, sort_keys=True, separators=(",", ":")).encode()
