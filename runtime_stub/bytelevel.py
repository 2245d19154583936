"""Byte-level BPE from a table: text to ids and back in plain Python, at once.

In: the member ``tokenizer.bin`` and the manifest's ``tokenizer.table``, both written by
``compiler/artifact/tokenizer_table.py`` for the tokenizers that this module does exactly.  Out: the
ids and the text that the tokenizers library gives.  Next file: ``text.py``, which asks the library
for what :meth:`ByteLevelTable.takes` refuses.

Loading the library and its vocabulary takes longer than reading the model; a prompt takes this
module a millisecond.  What kind a character is (letter, number, space) comes from the table, not
from this Python's Unicode version.

The table, little-endian 32-bit: magic, counts (tokens V, merge ranks M, pairs P, ranges R, words W,
added tokens A, bytes of added text, bytes of tokens); ``offsets[V + 1]`` into the tokens' bytes;
``starts[V + 1]`` into the pairs by left token, ``rights[P]`` ascending within, ``ranks[P]``;
``merged[M]`` the token that a rank makes; ``bytes[256]`` (NONE: dropped); ``range starts[R]``,
``kinds[R]``; ``words[W]`` tokens in the order of their bytes; ``added[A, 3]`` (id, flags, length);
added text; token bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from .errors import InputFileError, UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Callable

MAGIC = b"ZLTOKEN1"
COUNTS = 8
LETTER, NUMBER, SPACE, NUMERAL = 1, 2, 3, 4  # NUMERAL is a flag: what the Digits step takes
SPECIAL, NORMALIZED = 1, 2  # flags of an added token
NONE = 0xFFFFFFFF  # the vocabulary lacks this byte
_NEVER = 1 << 40  # above every rank
_LONG = 96  # bytes of a word above which a heap is faster
#: code points that normalization form C leaves alone wherever they stand
NFC_STABLE = (
    (0x0, 0x2FF), (0x400, 0x482), (0x48A, 0x52F), (0x2010, 0x2027), (0x3001, 0x3029),
    (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFF01, 0xFF60),
    (0x1F300, 0x1FAFF),
)  # fmt: skip
_SHORT = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_ONE = frozenset("sStTmMdD\u017f")  # U+017F is another s where case is ignored
_TWO = frozenset(a + b for p in ("rR", "vV") for a in p for b in "eE") | {"ll", "lL", "Ll", "LL"}


class ByteLevelTable:
    """One tokenizer.  InputFileError for a table that contradicts itself."""

    def __init__(self, data: bytes, settings: Mapping[str, Any], where: str) -> None:
        self._where = where
        try:
            self._read(data)
            self._configure(settings)
        except (IndexError, ValueError, TypeError, KeyError, OverflowError) as e:
            raise self._damaged(e) from None
        self._cache: dict[str, list[int]] = {}

    def _damaged(self, error: object) -> InputFileError:
        return InputFileError(
            f"the tokenizer's table is damaged: {error}",
            where=self._where,
            next_step="build the artifact again",
        )

    def _read(self, data: bytes) -> None:
        view = memoryview(data)
        at = len(MAGIC) + 4 * COUNTS
        if view[: len(MAGIC)] != MAGIC or len(data) < at:
            raise ValueError("its first bytes are wrong")
        v, m, p, r, w, a, added, blob = view[len(MAGIC) : at].cast("I")
        sizes = (v + 1, v + 1, p, p, m, 256, r, r, w, 3 * a)
        words = view[at : at + 4 * sum(sizes)].cast("I")
        text_at = at + 4 * len(words)
        if len(words) != sum(sizes) or text_at + added + blob != len(data) or not r:
            raise ValueError("its size is wrong")
        parts = []
        at = 0
        for size in sizes:
            parts.append(words[at : at + size])
            at += size
        self._offsets, self._starts, self._rights, self._ranks, self._merged = parts[:5]
        self._bytes, self._range_starts, self._range_kinds, self._words, rows = parts[5:]
        self._blob = data[text_at + added :]
        if self._offsets[0] or self._offsets[v] != blob or self._range_starts[0]:
            raise ValueError("its offsets are wrong")
        self._special: dict[str, int] = {}
        self._added: tuple[Any, Any] = ({}, {})
        for i in range(0, 3 * a, 3):
            number, flags, size = rows[i : i + 3]
            content = str(data[text_at : text_at + size], "utf-8")
            text_at += size
            if flags & SPECIAL:
                self._special[content] = number
            group = self._added[1 if flags & NORMALIZED else 0]
            group.setdefault(content[0], []).append((content, number))
        for group in self._added:
            for entries in group.values():
                entries.sort(key=lambda e: -len(e[0]))

    def _configure(self, settings: Mapping[str, Any]) -> None:
        pattern = settings["pattern"]
        if pattern not in _PATTERNS:
            raise UnsupportedError(f"the text pattern {pattern!r}", where=self._where)
        self._cut, self._digits = _PATTERNS[pattern]
        self._single_digits = bool(settings["single_digits"])
        self._nfc = bool(settings["nfc"])
        self._whole_words = bool(settings["whole_words"])
        self._max_chars = int(settings["max_chars"])
        low = bytes(self._kind(c) for c in range(128))
        self._ascii = low + bytes(128)

    def _kind(self, code: int) -> int:
        return self._range_kinds[bisect_right(self._range_starts, code) - 1]

    # public -------------------------------------------------------------------------------------

    def takes(self, text: str) -> bool:
        """Whether this text is for the table: not too long, and in form C where that is asked."""
        if len(text) > self._max_chars:
            return False
        if not self._nfc or text.isascii():
            return True
        return all(any(low <= ord(c) <= high for low, high in NFC_STABLE) for c in set(text))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; an added token that is written out is that token."""
        try:
            ids: list[int] = []
            for part, known in self._split(text):
                if known >= 0:
                    ids.append(known)
                    continue
                for word in self._words_of(part):
                    found = self._cache.get(word)
                    if found is None:
                        found = self._cache[word] = self._word(word.encode("utf-8"))
                    ids += found
            return ids
        except (IndexError, ValueError) as e:
            raise self._damaged(e) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special tokens and unknown ids have none."""
        offsets, blob = self._offsets, self._blob
        count = len(offsets) - 1
        parts = [blob[offsets[i] : offsets[i + 1]] for i in ids if 0 <= i < count]
        return b"".join(parts).decode("utf-8", "replace")

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written ``text``."""
        return self._special.get(text)

    # from text to words -------------------------------------------------------------------------

    def _split(self, text: str) -> list[tuple[str, int]]:
        """Text and added tokens in order, as (text, -1) and (content, id)."""
        parts = [(text, -1)]
        for table in self._added:
            if table:
                parts = [q for p in parts for q in ([p] if p[1] >= 0 else _split(p[0], table))]
        return parts

    def _words_of(self, text: str) -> list[str]:
        if text.isascii():
            kinds = text.encode("ascii").translate(self._ascii)
        else:
            kinds = bytes([self._kind(ord(c)) for c in text])
        if not self._single_digits:
            return self._cut(text, kinds.translate(_PLAIN), self._digits)
        words: list[str] = []
        plain = kinds.translate(_PLAIN)
        start = 0
        for i, kind in enumerate(kinds):
            if kind >= NUMERAL:
                words += self._cut(text[start:i], plain[start:i], self._digits)
                words += self._cut(text[i], plain[i : i + 1], self._digits)
                start = i + 1
        return words + self._cut(text[start:], plain[start:], self._digits)

    # from words to tokens -----------------------------------------------------------------------

    def _word(self, data: bytes) -> list[int]:
        """The tokens of one word: the pair of the lowest rank is merged, leftmost first, until no
        pair has one."""
        if self._whole_words:
            whole = self._find(data)
            if whole >= 0:
                return [whole]
        table = self._bytes
        ids = [table[b] for b in data if table[b] != NONE]
        if len(ids) > _LONG:
            return self._merge_long(ids)
        rank, merged = self._rank, self._merged
        ranks = [rank(ids[i], ids[i + 1]) for i in range(len(ids) - 1)]
        while ranks:
            least = min(ranks)
            if least == _NEVER:
                break
            i = ranks.index(least)
            ids[i] = merged[least]
            del ids[i + 1], ranks[i]
            if i < len(ranks):
                ranks[i] = rank(ids[i], ids[i + 1])
            if i:
                ranks[i - 1] = rank(ids[i - 1], ids[i])
        return ids

    def _rank(self, left: int, right: int) -> int:
        end = self._starts[left + 1]
        i = bisect_left(self._rights, right, self._starts[left], end)
        return self._ranks[i] if i < end and self._rights[i] == right else _NEVER

    def _merge_long(self, ids: list[int]) -> list[int]:
        """The same with a heap of (rank, place, left, right); entries that no longer stand are
        passed over."""
        from heapq import heapify, heappop, heappush

        count = len(ids)
        after, before = list(range(1, count + 1)), list(range(-1, count - 1))
        heap = []
        for i in range(count - 1):
            rank = self._rank(ids[i], ids[i + 1])
            if rank != _NEVER:
                heap.append((rank, i, ids[i], ids[i + 1]))
        heapify(heap)
        while heap:
            rank, i, left, right = heappop(heap)
            j = after[i]
            if ids[i] != left or j >= count or ids[j] != right:
                continue
            ids[i], ids[j] = self._merged[rank], -1
            after[i] = after[j]
            if after[i] < count:
                before[after[i]] = i
            for a, b in ((before[i], i), (i, after[i])):
                if a >= 0 and b < count:
                    rank = self._rank(ids[a], ids[b])
                    if rank != _NEVER:
                        heappush(heap, (rank, a, ids[a], ids[b]))
        return [i for i in ids if i >= 0]

    def _find(self, data: bytes) -> int:
        """The token whose bytes are ``data``, or -1."""
        words, offsets, blob = self._words, self._offsets, self._blob
        low, high = 0, len(words)
        while low < high:
            middle = (low + high) // 2
            token = words[middle]
            found = blob[offsets[token] : offsets[token + 1]]
            if found == data:
                return token
            if found < data:
                low = middle + 1
            else:
                high = middle
        return -1


_PLAIN = bytes(kind & 3 for kind in range(256))


def _split(text: str, table: Mapping[str, list[tuple[str, int]]]) -> list[tuple[str, int]]:
    """``text`` cut at the added tokens of ``table`` (by first character, longest first): leftmost,
    then longest."""
    parts: list[tuple[str, int]] = []
    at = start = 0
    while True:
        at = min((p for p in (text.find(c, at) for c in table) if p >= 0), default=-1)
        if at < 0:
            break
        for content, number in table[text[at]]:
            if text.startswith(content, at):
                if at > start:
                    parts.append((text[start:at], -1))
                parts.append((content, number))
                at = start = at + len(content)
                break
        else:
            at += 1
    if start < len(text):
        parts.append((text[start:], -1))
    return parts


# patterns: text and the kind of each character to words ------------------------------------------


def _spaces(kinds: bytes, i: int) -> int:
    r"""The end of ``\s+(?!\S)|\s+`` at ``i``: a blank before a word belongs to the word."""
    n = len(kinds)
    end = i + 1
    while end < n and kinds[end] == SPACE:
        end += 1
    return end - 1 if end < n and end - i > 1 else end


def cut_gpt2(text: str, kinds: bytes, _digits: int) -> list[str]:
    r"""``'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+``."""
    words = []
    i, n = 0, len(text)
    while i < n:
        if text[i] == "'" and text.startswith(_SHORT, i):
            end = i + (2 if text[i + 1] in "stmd" else 3)
        else:
            kind = kinds[i]
            end = i + 1
            if text[i] == " " and end < n:
                kind = kinds[end]
            if kind == SPACE:
                end = _spaces(kinds, i)
            else:
                while end < n and kinds[end] == kind:
                    end += 1
        words.append(text[i:end])
        i = end
    return words


def cut_cl100k(text: str, kinds: bytes, digits: int) -> list[str]:
    r"""``(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}``
    ``| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+``."""
    words = []
    i, n = 0, len(text)
    while i < n:
        c, kind = text[i], kinds[i]
        following = kinds[i + 1] if i + 1 < n else SPACE
        end = i + 1
        if c == "'" and text[i + 1 : i + 2] in _ONE:
            end = i + 2
        elif c == "'" and text[i + 1 : i + 3] in _TWO:
            end = i + 3
        elif kind == LETTER or (kind != NUMBER and c not in "\r\n" and following == LETTER):
            while end < n and kinds[end] == LETTER:
                end += 1
        elif kind == NUMBER:
            while end < n and end - i < digits and kinds[end] == NUMBER:
                end += 1
        elif kind == 0 or (c == " " and following == 0):
            while end < n and kinds[end] == 0:
                end += 1
            while end < n and text[end] in "\r\n":
                end += 1
        else:
            end = _spaces_or_lines(text, kinds, i)
        words.append(text[i:end])
        i = end
    return words


def _spaces_or_lines(text: str, kinds: bytes, i: int) -> int:
    r"""The end of ``\s*[\r\n]+|\s+(?!\S)|\s+`` at ``i``."""
    n = len(kinds)
    end = i + 1
    while end < n and kinds[end] == SPACE:
        end += 1
    line = max(text.rfind("\n", i, end), text.rfind("\r", i, end))
    if line >= 0:
        return line + 1
    return end - 1 if end < n and end - i > 1 else end


_PATTERNS: dict[str, tuple[Callable[[str, bytes, int], list[str]], int]] = {
    "gpt2": (cut_gpt2, 0),
    "cl100k": (cut_cl100k, 3),
    "qwen2": (cut_cl100k, 1),
}
