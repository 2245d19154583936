"""One ragged step as plain Python data: the border between the scheduler and a driver.

In: nothing.  Out: :class:`StepBatch`, :class:`SamplingParams`, :class:`Limits`, :class:`Pace`.
Next file: ``scheduler.py`` fills batches, ``driver_cpu.py`` runs them.
"""

from __future__ import annotations

import time
from array import array

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Optional, Union

    #: runs one batch and returns the next token of each logit row, in order
    StepFunction = Callable[["StepBatch"], Sequence[int]]
    #: runs up to so many steps of a batch that only decodes, to the first that chooses one of the
    #: ids; returns the tokens of each
    DecodeFunction = Callable[["StepBatch", int, "frozenset[int]"], Sequence[Sequence[int]]]
    Ints = Union[Sequence[int], "array[int]"]

NO_IDS: frozenset[int] = frozenset()

#: seconds that a call of several decode steps should take: a short time to wait for text, and a
#: long one beside what Python does between two calls
CALL_S = 0.025


class SamplingParams:
    """How the next token is drawn; see ``zl_sampling`` in zl_abi.h.  The defaults are greedy.

    ``seed`` and the index of the generated token alone decide a draw, so that a sequence yields
    the same tokens whatever runs beside it.
    """

    __slots__ = ("min_p", "repetition_penalty", "seed", "temperature", "top_k", "top_p")

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.min_p = min_p
        self.repetition_penalty = repetition_penalty
        self.seed = seed

    @property
    def plain_greedy(self) -> bool:
        """True when the choice is argmax of the logits as they are."""
        return self.temperature <= 0 and self.repetition_penalty == 1.0

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


class LogitRow:
    """One row whose logits are wanted: token row, sampling, draw index, tokens so far."""

    __slots__ = ("draw", "history", "params", "row")

    def __init__(self, row: int, params: SamplingParams, draw: int, history: array[int]) -> None:
        self.row = row
        self.params = params
        self.draw = draw
        self.history = history


class StepBatch:
    """A ragged batch of S sequences, T tokens, R logit rows.

    ``tokens[T]``, ``positions[T]``, ``seq_starts[S + 1]``, ``block_tables``: S rows of block ids,
    each long enough for the last position of its sequence, ``rows[R]`` ascending in ``row``.
    """

    __slots__ = ("block_tables", "positions", "rows", "seq_starts", "tokens")

    def __init__(self) -> None:
        self.tokens: array[int] = array("i")
        self.positions: array[int] = array("i")
        self.seq_starts: array[int] = array("i", (0,))
        self.block_tables: list[Ints] = []
        self.rows: list[LogitRow] = []

    def add(
        self,
        tokens: Ints,
        first_position: int,
        blocks: Ints,
        row: Optional[tuple[SamplingParams, int, array[int]]] = None,
    ) -> None:
        """Append one sequence's chunk; ``row`` = (sampling, draw, history) asks for the logits of
        its last token."""
        self.tokens.extend(tokens)
        self.positions.extend(range(first_position, first_position + len(tokens)))
        self.seq_starts.append(len(self.tokens))
        self.block_tables.append(blocks)
        if row is not None:
            self.rows.append(LogitRow(len(self.tokens) - 1, *row))


class Pace:
    """How many decode steps one call makes: as many as fit in CALL_S, going by the last call.

    A step has read all weights and left nothing else in the caches, so the Python after it takes
    longer than its instructions would: a hundred microseconds, a fortieth of a small model's step.
    """

    __slots__ = ("_sequences", "_step_s")

    def __init__(self) -> None:
        self._sequences = 0
        self._step_s = CALL_S

    def steps(self, most: int, sequences: int) -> int:
        """Steps of the next call, at least one; one where the last call was of another number of
        sequences, whose steps take another time."""
        if sequences != self._sequences:
            self._sequences, self._step_s = sequences, CALL_S
        return max(1, min(most, int(CALL_S / self._step_s)))

    def took(self, steps: int, seconds: float) -> None:
        """The last call made ``steps`` steps in ``seconds``."""
        self._step_s = max(seconds / steps, 1e-6)

    def call(
        self, function: DecodeFunction, batch: StepBatch, steps: int, stop_ids: frozenset[int]
    ) -> Sequence[Sequence[int]]:
        """``function``, timed."""
        begin = time.perf_counter()
        chosen = function(batch, steps, stop_ids)
        self.took(len(chosen), time.perf_counter() - begin)
        return chosen

    def decode(
        self,
        function: DecodeFunction,
        batch: Callable[[Sequence[int], int, int], StepBatch],
        tokens: Sequence[int],
        steps: int,
    ) -> list[Sequence[int]]:
        """``steps`` steps of sequences whose last tokens are ``tokens``, in calls at this pace.

        ``batch(tokens, done, count)`` is the batch after ``done`` steps, with blocks for ``count``
        more.  Returns the tokens of each step.
        """
        out: list[Sequence[int]] = []
        while len(out) < steps:
            count = self.steps(steps - len(out), len(tokens))
            step = batch(out[-1] if out else tokens, len(out), count)
            out += self.call(function, step, count, NO_IDS)
        return out


class Limits:
    """What one step and one sequence may have; from ``manifest['limits']`` and ``['memory']``."""

    __slots__ = ("block_size", "max_context", "max_logit_rows", "max_seqs", "max_tokens")

    def __init__(
        self,
        *,
        max_tokens: int,
        max_seqs: int,
        max_logit_rows: int,
        max_context: int,
        block_size: int,
    ) -> None:
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.max_logit_rows = max_logit_rows
        self.max_context = max_context
        self.block_size = block_size
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
