"""A line on the terminal while a long prompt is read or answers are not shown as they come.

In: sequences of a scheduler.  Out: a line on stderr, a terminal, that is rewritten and taken away.
Next file: ``scheduler.py``.
"""

from __future__ import annotations

import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from .scheduler import Sequence

#: seconds before the line first appears, and between two of its texts
_AFTER, _EVERY = 0.5, 0.1


class Progress:
    """``live``: the one answer is written as it comes, so the line is gone before its first token.
    ``chunk``: tokens of a prompt that one step reads."""

    def __init__(self, sequences: SequenceOf[Sequence], live: bool, chunk: int) -> None:
        self._sequences = sequences
        self._live = live
        self._chunk = chunk
        self._next = time.monotonic() + _AFTER
        self._shown = False

    def update(self) -> None:
        """After a step of the scheduler."""
        one = self._sequences[0]
        if self._live and (_answered(one) or one.remaining <= self._chunk):
            self.clear()
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._shown = True
            sys.stderr.write(f"\r\x1b[K{self._text()}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _text(self) -> str:
        found = self._sequences
        if len(found) > 1:
            done = sum(s.finished for s in found)
            tokens = sum(map(_answered, found))
            return f"{done} of {len(found)} answers, {tokens} tokens"
        one = found[0]
        if _answered(one):
            return f"{_answered(one)} token{'s' if _answered(one) > 1 else ''}"
        return f"{one.n_computed} of {one.n_prompt} tokens of the prompt"


def _answered(sequence: Sequence) -> int:
    """Tokens that it got."""
    return len(sequence.tokens) - sequence.n_prompt
