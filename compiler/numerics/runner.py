"""Executes the compiled step on the build host, through the loader's own driver.

In: the code object's bytes and the packed weights as they lie in the artifact being written.  Out:
a :class:`StepRunner` for the gate.  Next file: ``gate.py``.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from zerolayer.runtime_stub.driver_cpu import CodeObject, CpuEngine
from zerolayer.runtime_stub.errors import ResourceError
from zerolayer.runtime_stub.step import LogitRow, SamplingParams, StepBatch
from zerolayer.targets.program import Program

from .metrics import F32


class StepRunner:
    """Sequences through ``zl_step``, one at a time or side by side; block tables are deliberately
    out of order, so that a kernel which ignores them cannot pass."""

    def __init__(self, engine: CpuEngine, program: Program, context: int) -> None:
        if program.kv is None:
            raise ValueError("the program has no KV cache")
        self._engine = engine
        self._program = program
        self._blocks = array("i", reversed(range(engine.kv_blocks)))
        self._each = -(-context // program.kv.block_size)  # of them for a sequence
        self._context = context
        self._chunk = min(program.bound("T"), program.bound("R"))
        self._greedy = SamplingParams()

    def _batch(self, tokens: Sequence[int], first: int, rows: Sequence[int]) -> StepBatch:
        assert self._program.kv is not None
        used = -(-(first + len(tokens)) // self._program.kv.block_size)
        batch = StepBatch()
        batch.add(array("i", tokens), first, self._blocks[:used])
        for row in rows:
            batch.rows.append(LogitRow(row, self._greedy, 0, array("i")))
        return batch

    def forward(self, tokens: Sequence[int]) -> tuple[F32, F32]:
        """Logits ``[T, vocab]`` and taps ``[n_taps, T, hidden]``, in chunks of at most R tokens."""
        self._check(len(tokens))
        p = self._program
        logits = np.empty((len(tokens), p.vocab_size), np.float32)
        taps = np.empty((len(p.taps), len(tokens), p.hidden_size), np.float32)
        for start in range(0, len(tokens), self._chunk):
            part = tokens[start : start + self._chunk]
            tap = np.empty((len(p.taps), len(part), p.hidden_size), np.float32)
            stop = start + len(part)
            self._engine.step(
                self._batch(part, start, range(len(part))), logits=logits[start:stop], taps=tap
            )
            taps[:, start:stop] = tap
        return logits, taps

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Prefill in chunks, then one token per step; no logits leave the kernels."""
        self._check(len(prompt) + count)
        for start in range(0, len(prompt), self._program.bound("T")):
            part = prompt[start : start + self._program.bound("T")]
            token = self._engine.step(self._batch(part, start, [len(part) - 1]))[0]
        out = [token]
        while len(out) < count:
            batch = self._batch(out[-1:], len(prompt) + len(out) - 1, [0])
            out.append(self._engine.step(batch)[0])
        return out

    def together(self, sequences: Sequence[Sequence[int]]) -> list[F32]:
        """The logits after each sequence: ragged steps of a share of each, then one step that has
        the last token of each."""
        p = self._program
        most = min(p.bound("S"), p.bound("R"), p.bound("T"), self._engine.kv_blocks // self._each)
        out: list[F32] = []
        for start in range(0, len(sequences), max(1, most)):
            group = sequences[start : start + max(1, most)]
            self._check(max(map(len, group)))
            share = p.bound("T") // len(group)
            for at in range(0, max(map(len, group)) - 1, share):
                parts = [(at, s[at : min(at + share, len(s) - 1)]) for s in group]
                self._engine.step(self._beside(parts))
            last = [(len(s) - 1, s[-1:]) for s in group]
            logits = np.empty((len(group), p.vocab_size), np.float32)
            self._engine.step(self._beside(last, rows=True), logits=logits)
            out += list(logits)
        return out

    def _beside(self, parts: Sequence[tuple[int, Sequence[int]]], rows: bool = False) -> StepBatch:
        """(first position, tokens) of each sequence in one batch; ``rows``: with their logits."""
        assert self._program.kv is not None
        batch = StepBatch()
        for i, (first, tokens) in enumerate(parts):
            if tokens:
                used = -(-(first + len(tokens)) // self._program.kv.block_size)
                table = self._blocks[i * self._each : i * self._each + used]
                row = (self._greedy, 0, array("i")) if rows else None
                batch.add(array("i", tokens), first, table, row)
        return batch

    def _check(self, tokens: int) -> None:
        if tokens > self._context:
            raise ResourceError(
                f"the numerics gate needs {tokens} positions, the model has {self._context}",
                next_step="compile with a larger --max-context",
            )


@contextlib.contextmanager
def step_runner(
    code: bytes,
    weights: Any,
    offset: int,
    program: Program,
    *,
    context: int,
    threads: int,
    sequences: int = 1,
) -> Iterator[StepRunner]:
    """A runner over ``weights[offset:]`` with room for ``sequences`` of ``context`` positions."""
    if program.kv is None:
        raise ValueError("the program has no KV cache")
    with CpuEngine(
        CodeObject(code),
        weights,
        offset,
        program.weights_bytes,
        kv_blocks=sequences * -(-context // program.kv.block_size),
        n_threads=threads,
    ) as engine:
        yield StepRunner(engine, program, context)
