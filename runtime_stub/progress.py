"""A line on the terminal while a prompt is read or answers are not shown as they come.

In: sequences of a scheduler.  Out: a line on stderr, a terminal, that is rewritten and taken away.
Next file: ``scheduler.py``.
"""

from __future__ import annotations

import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf
    from typing import Callable, Optional

    from .scheduler import Sequence

    OnToken = Callable[[Sequence, int], Optional[bool]]

#: seconds before the line first appears, and between two of its texts
_AFTER, _EVERY = 0.5, 0.1
#: prompts of more tokens show it at once: their first step alone may take longer than that
_LONG = 128


class Line:
    """One line on stderr, which has to be a terminal."""

    def __init__(self) -> None:
        self._text = ""

    def show(self, text: str) -> None:
        """Puts ``text`` in the line's place."""
        if text != self._text:
            self._text = text
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Takes the line away; nothing is written where none is shown."""
        self.show("")


class Progress(Line):
    """``live``: the one answer is written as it comes, so the line goes before its first token."""

    def __init__(self, sequences: SequenceOf[Sequence], live: bool) -> None:
        super().__init__()
        self._sequences = sequences
        self._live = live
        long = sum(s.remaining for s in sequences) > _LONG
        self._next = time.monotonic() + (0 if long else _AFTER)
        one = sequences[0]
        if live and one.on_token is not None:
            one.on_token = self._before(one.on_token)

    def _before(self, on_token: OnToken) -> OnToken:
        def cleared(sequence: Sequence, token: int) -> Optional[bool]:
            self.clear()
            return on_token(sequence, token)

        return cleared

    def update(self) -> None:
        """Before a step of the scheduler: the line stands while it runs."""
        if self._live and _answered(self._sequences[0]):
            return
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self.show(self._state())

    def _state(self) -> str:
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
