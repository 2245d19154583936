"""Measures llama.cpp through ``llama_decode``; see ``common.py`` for what goes in and out.

``--state FILE`` reads the prompt's KV from the file, or writes it there, so that a decode at a long
context needs not the prefill again (its time is then not reported).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path

import common

OPTIONS = common.arguments()

import llama_cpp as llama  # noqa: E402
import numpy as np  # noqa: E402

CHUNK = 512
CACHE_TYPES = {"q8_0": 8}  # ggml.h, ggml_type


@llama.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
def silent(_level: int, _text: bytes, _user: object) -> None:
    """Takes the library's log."""


class Runner:
    """A context with one cache for all sequences."""

    def __init__(self) -> None:
        llama.llama_log_set(silent, ctypes.c_void_p(0))
        llama.llama_backend_init()
        settings = llama.llama_model_default_params()
        settings.n_gpu_layers, settings.use_mmap = 0, True
        self.model = llama.llama_model_load_from_file(OPTIONS.model.encode(), settings)
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        params = llama.llama_context_default_params()
        params.n_ctx = OPTIONS.batch * (OPTIONS.prompt + OPTIONS.new + 32)
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = OPTIONS.threads
        params.n_seq_max = OPTIONS.batch
        if OPTIONS.kv:  # values of other types are for its flash attention only
            params.type_k = params.type_v = CACHE_TYPES[OPTIONS.kv]
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = llama.llama_init_from_model(self.model, params)
        self.batch = llama.llama_batch_init(CHUNK, 0, OPTIONS.batch)

    def step(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Rows of (token, position, sequence, logits wanted); the wanted rows' next tokens."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = wanted
        failed = llama.llama_decode(self.context, self.batch)
        if failed:
            raise SystemExit(f"llama_decode returned {failed}")
        return [self.best(i) for i, row in enumerate(rows) if row[3]]

    def best(self, row: int) -> int:
        """Greedy choice."""
        logits = llama.llama_get_logits_ith(self.context, row)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.vocabulary,))))

    def prefill(self, sequences: Sequence[Sequence[int]]) -> list[int]:
        """The next token of each sequence."""
        out: list[int] = []
        for step in common.chunks(sequences, CHUNK):
            rows = [
                (token, at + i, s, at + i + 1 == len(sequences[s]))
                for s, at, part in step
                for i, token in enumerate(part)
            ]
            out += self.step(rows)
        return out

    def clear(self) -> None:
        """Forget all sequences."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def restore(self, path: str) -> list[int]:
        """The state of a file, and each sequence's next token."""
        tokens, count = (llama.llama_token * OPTIONS.batch)(), ctypes.c_size_t()
        if not llama.llama_state_load_file(
            self.context, path.encode(), tokens, OPTIONS.batch, ctypes.byref(count)
        ):
            raise SystemExit(f"{path} is no state of this model")
        return list(tokens[: count.value])

    def save(self, path: str, tokens: list[int]) -> None:
        """The state to a file, whole or not at all, with each sequence's next token."""
        kept, part = (llama.llama_token * len(tokens))(*tokens), path + ".part"
        llama.llama_state_save_file(self.context, part.encode(), kept, len(tokens))
        Path(part).rename(path)


def main() -> None:
    runner = Runner()
    runner.prefill([common.prompt_ids(common.SHORT_PROMPT)])
    first = common.since_start()
    runner.clear()
    prefill: float | None = None
    if OPTIONS.state and Path(OPTIONS.state).exists():
        tokens = runner.restore(OPTIONS.state)
    else:
        prompts = common.prompts(OPTIONS)
        start = time.perf_counter()
        tokens = runner.prefill(prompts)
        prefill = time.perf_counter() - start
        if OPTIONS.state:
            runner.save(OPTIONS.state, tokens)
    ids = [tokens[0]]
    start = time.perf_counter()
    for i in range(OPTIONS.new):
        tokens = runner.step([(t, OPTIONS.prompt + i, s, True) for s, t in enumerate(tokens)])
        ids.append(tokens[0])
    decode = time.perf_counter() - start
    version = f"llama-cpp-python {llama.__version__}"
    common.report(version, first_token_s=first, prefill_s=prefill, decode_s=decode, ids=ids)


main()
