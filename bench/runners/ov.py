"""Measures OpenVINO GenAI's LLMPipeline; see ``common.py`` for what goes in and out.

The SDPA backend: the paged one keeps prompt prefixes between calls and would show a false prefill.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import common

OPTIONS = common.arguments()

import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import openvino_genai as genai  # noqa: E402


def generate(pipe: Any, sequences: Sequence[Sequence[int]], count: int) -> Any:
    """``count`` greedy tokens of each sequence."""
    ids = np.array(sequences, dtype=np.int64)
    inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = count
    config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
    return pipe.generate(inputs, config)


def main() -> None:
    properties = {"INFERENCE_NUM_THREADS": OPTIONS.threads, "ATTENTION_BACKEND": "SDPA"}
    pipe = genai.LLMPipeline(OPTIONS.model, "CPU", **properties)
    generate(pipe, [common.prompt_ids(common.SHORT_PROMPT)], 1)
    first = common.since_start()
    prompts = common.prompts(OPTIONS)
    start = time.perf_counter()
    out = generate(pipe, prompts, OPTIONS.new + 1)
    whole = time.perf_counter() - start
    prefill = out.perf_metrics.get_ttft().mean / 1e3
    ids = list(out.tokens[0])
    if len(ids) != OPTIONS.new + 1:
        raise SystemExit(f"{len(ids)} tokens, not {OPTIONS.new + 1}")
    version = f"openvino-genai {genai.__version__}"
    common.report(
        version, first_token_s=first, prefill_s=prefill, decode_s=whole - prefill, ids=ids
    )


main()
