"""Token ids to text, one token at a time: never half a character, never part of a stop string.

In: token ids and a ``decode(ids) -> str``.  Out: text that will not change any more.  Next file:
``text.py`` (where ``decode`` comes from).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 64


class Detokenizer:
    """Incremental ``decode``.

    Text that ends in U+FFFD may be an incomplete UTF-8 sequence and is held back until it is
    complete, until the end, or for at most 64 tokens.  ``context`` are the last ids of the prompt:
    decoders that strip a leading blank need to see what the text follows.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context)[-8:]
        self._emitted = len(decode(self._ids)) if self._ids else 0  # characters of the window
        self._clean = len(self._ids)  # a token boundary at which nothing was held back

    def push(self, token: int) -> str:
        """The text that ``token`` completes."""
        self._ids.append(token)
        text = self._decode(self._ids)
        held = text.endswith(_REPLACEMENT) and len(self._ids) - self._clean < _MAX_HELD_TOKENS
        safe = text.rstrip(_REPLACEMENT) if held else text
        new = safe[self._emitted :]
        self._emitted = max(self._emitted, len(safe))
        if not held:
            # Start the next window at the previous clean boundary: two tokens of context are enough
            # and the cost of a token does not grow with the text.
            del self._ids[: self._clean]
            self._emitted = len(self._decode(self._ids))
            self._clean = len(self._ids)
        return new

    def finish(self) -> str:
        """What was still held back."""
        text = self._decode(self._ids) if self._ids else ""
        new = text[self._emitted :]
        self._emitted = len(text)
        return new


class StopMatcher:
    """Ends text at the stop string that is complete first (of two, the longer), however the text is
    cut into pieces; holds back what could be the beginning of one."""

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.matched = ""

    def push(self, text: str) -> str:
        """The part of the text so far that is certain.  After a match it is empty."""
        if self.matched:
            return ""
        text = self._held + text
        if not self._stops:
            return text
        found = [(at, s) for at, s in ((text.find(s), s) for s in self._stops) if at >= 0]
        if found:
            at, self.matched = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, s) for s in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when the text has ended without a match."""
        held, self._held = self._held, ""
        return "" if self.matched else held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that begins ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


class TextStream:
    """Detokenizer and stop strings of one sequence; ``text`` is everything given out so far."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        context: Sequence[int] = (),
        stops: Iterable[str] = (),
        write: Callable[[str], None] | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(decode, context)
        self._matcher = StopMatcher(stops)
        self._write = write
        self.text = ""

    def push(self, token: int) -> bool:
        """Takes one token; True when a stop string is complete."""
        self._give(self._matcher.push(self._detokenizer.push(token)))
        return bool(self._matcher.matched)

    def finish(self) -> str:
        """Gives out what was held back; returns the whole text."""
        if not self._matcher.matched:
            self._give(self._matcher.push(self._detokenizer.finish()))
            self._give(self._matcher.finish())
        return self.text

    def _give(self, new: str) -> None:
        if new:
            self.text += new
            if self._write is not None:
                self._write(new)
