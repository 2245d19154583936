"""Measures ONNX Runtime GenAI's Generator; see ``common.py`` for what goes in and out."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Sequence
from typing import Any

import common

OPTIONS = common.arguments()

import numpy as np  # noqa: E402
import onnxruntime_genai as genai  # noqa: E402


def generate(
    model: Any, sequences: Sequence[Sequence[int]], count: int
) -> tuple[float, float, list[int]]:
    """Seconds to the first token and for the others, and the first sequence's tokens."""
    length = len(sequences[0])
    params = genai.GeneratorParams(model)
    params.set_search_options(
        max_length=length + count,
        min_length=length + count,
        do_sample=False,
        batch_size=len(sequences),
        past_present_share_buffer=True,
    )
    generator = genai.Generator(model, params)
    start = time.perf_counter()
    generator.append_tokens(np.array(sequences, dtype=np.int32))
    generator.generate_next_token()
    first = time.perf_counter()
    for _ in range(count - 1):
        generator.generate_next_token()
    end = time.perf_counter()
    ids = [int(i) for i in generator.get_sequence(0)][length:]
    if len(ids) != count:
        raise SystemExit(f"{len(ids)} tokens, not {count}")
    return first - start, end - first, ids


def main() -> None:
    session = {"intra_op_num_threads": OPTIONS.threads, "inter_op_num_threads": 1}
    config = genai.Config(OPTIONS.model)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = genai.Model(config)
    generate(model, [common.prompt_ids(common.SHORT_PROMPT)] * OPTIONS.batch, 1)
    first = common.since_start()
    prefill, decode, ids = generate(model, common.prompts(OPTIONS), OPTIONS.new + 1)
    names = ("onnxruntime-genai", "onnxruntime")
    version = " ".join(f"{n} {importlib.metadata.version(n)}" for n in names)
    common.report(version, first_token_s=first, prefill_s=prefill, decode_s=decode, ids=ids)


main()
