"""A byte-level BPE tokenizer as a table that the loader reads in plain Python.

In: ``tokenizer.json``.  Out: :class:`TokenizerTable` (the member ``tokenizer.bin`` and the
manifest's ``tokenizer.table``), or the reason why this tokenizer needs the library.  Next file:
``runtime_stub/bytelevel.py``, which describes the format and reads it.

The vocabulary, the added tokens and the kinds of characters are what the installed tokenizers
library says they are, so the artifact's text does not depend on the host's Unicode version.  The
table is compared with the library before it is used.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers
from zerolayer.runtime_stub import bytelevel
from zerolayer.runtime_stub.errors import ZerolayerError

FILE = "tokenizer.bin"
MAX_CHARS = 1 << 20  # above, the library's start costs less than the table's slower loop
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    _CL100K: "cl100k",
    _CL100K.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2",
}
#: code points that may have a kind; the rest of Unicode is unassigned or private
_ASSIGNED = ((0, 0xD800), (0xE000, 0x40000), (0xE0000, 0xE1000))
_PROBES = (
    "The capital of France is",
    "  don't WE'LL  \n\n x = 3.14e-10;\r\n\t",
    "naïve café 你好 مرحبا ١٢٣",
    "👩\u200d👩\u200d👧 \u00a0\u2003\u3000 e\u0301 q\u0307 \ufeff\0\x7f",
    "a" * 300 + " " * 70 + "0" * 33,
)


@dataclass(frozen=True)
class TokenizerTable:
    """The member's bytes and ``manifest["tokenizer"]["table"]``."""

    data: bytes
    settings: Mapping[str, Any]


def encode_table(table: TokenizerTable | str) -> bytes:
    """For the compile cache: one line of JSON, then the member."""
    if isinstance(table, str):
        return json.dumps({"missing": table}).encode("ascii") + b"\n"
    head = json.dumps({"settings": dict(table.settings)}).encode("ascii")
    return head + b"\n" + table.data


def decode_table(data: bytes) -> TokenizerTable | str:
    """The inverse of :func:`encode_table`."""
    head, _, member = data.partition(b"\n")
    found = json.loads(head)
    if "missing" in found:
        return str(found["missing"])
    return TokenizerTable(member, found["settings"])


class _NotExact(Exception):
    """A feature that the table lacks."""


@lru_cache(maxsize=2)
def build_table(tokenizer_json: bytes) -> TokenizerTable | str:
    """The table of a tokenizer, or why there is none.

    Raises ZerolayerError when the table and the library disagree, which is a bug.
    """
    document = json.loads(tokenizer_json)
    try:
        settings = _settings(document)
        library = Tokenizer.from_buffer(tokenizer_json)
        data = _pack(document, library)
    except _NotExact as e:
        return str(e)
    table = TokenizerTable(data, settings)
    _compare(table, library)
    return table


def _settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the pipeline around the vocabulary does; _NotExact for what the loader does not do."""
    model = document.get("model") or {}
    if model.get("type") != "BPE":
        raise _NotExact(f"the model is {model.get('type')}, not BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise _NotExact(f"the model has {key}")
    for key in ("truncation", "padding"):
        if document.get(key) is not None:
            raise _NotExact(f"the tokenizer has {key}")
    nfc = _normal_form(document.get("normalizer"))
    pattern, single_digits = _pre_tokenizer(document.get("pre_tokenizer"))
    if [step.get("type") for step in _steps(document.get("decoder"), "decoders")] != ["ByteLevel"]:
        raise _NotExact("the decoder is not ByteLevel")
    return {
        "file": FILE,
        "pattern": pattern,
        "single_digits": single_digits,
        "nfc": nfc,
        "whole_words": bool(model.get("ignore_merges")),
        "max_chars": MAX_CHARS,
    }


def _steps(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """A pipeline part as a list of steps."""
    if part is None:
        return []
    return list(part[key]) if part.get("type") == "Sequence" else [part]


def _normal_form(normalizer: Mapping[str, Any] | None) -> bool:
    kinds = [step.get("type") for step in _steps(normalizer, "normalizers")]
    if kinds not in ([], ["NFC"]):
        raise _NotExact(f"the normalizer is {', '.join(map(str, kinds))}")
    return kinds == ["NFC"]


def _pre_tokenizer(part: Mapping[str, Any] | None) -> tuple[str, bool]:
    """(pattern, whether every numeral is a word)."""
    steps = _steps(part, "pretokenizers")
    digits = bool(steps) and steps[0].get("type") == "Digits"
    if digits:
        if not steps[0].get("individual_digits"):
            raise _NotExact("the pre-tokenizer keeps digits together")
        steps = steps[1:]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise _NotExact("the pre-tokenizer does not end in ByteLevel without a prefix space")
    if steps[-1].get("use_regex", True):
        if len(steps) != 1:
            raise _NotExact("the pre-tokenizer has two patterns")
        return "gpt2", digits
    if len(steps) != 2 or steps[0].get("type") != "Split":
        raise _NotExact("the pre-tokenizer is not one Split and ByteLevel")
    split = steps[0]
    regex = (split.get("pattern") or {}).get("Regex")
    if split.get("behavior") != "Isolated" or split.get("invert") or regex not in _PATTERNS:
        raise _NotExact("the pre-tokenizer's pattern is not one that the loader knows")
    return _PATTERNS[regex], digits


# the table ----------------------------------------------------------------------------------------


def byte_characters() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes as."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def _pack(document: Mapping[str, Any], library: Tokenizer) -> bytes:
    model = document["model"]
    vocab: dict[str, int] = model["vocab"]
    added = library.get_added_tokens_decoder()
    characters = byte_characters()
    missing = sum(c not in vocab for c in characters)
    if missing and model.get("unk_token") is not None:
        raise _NotExact(f"{missing} of the 256 bytes are the unknown token")
    special = {token.content for token in added.values() if token.special}
    texts, words = _tokens(library, vocab, special, characters)
    offsets = array("I", [0])
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    rows, contents = _added(added)
    starts, rights, ranks, merged = _merges(model.get("merges") or [], vocab, len(texts))
    by_byte = sorted((byte, vocab.get(c, bytelevel.NONE)) for c, byte in characters.items())
    edges, kinds = character_kinds()
    if not model.get("ignore_merges"):
        words = []
    blob = b"".join(texts)
    counts = (len(texts), len(merged), len(rights), len(edges), len(words), len(added))
    arrays = [offsets, starts, rights, ranks, merged, array("I", [i for _, i in by_byte])]
    arrays += [array("I", edges), array("I", kinds), array("I", words), rows]
    if sys.byteorder != "little":
        for part in arrays:
            part.byteswap()
    head = bytelevel.MAGIC + struct.pack("<8I", *counts, len(contents), len(blob))
    return head + b"".join(part.tobytes() for part in arrays) + contents + blob


def _tokens(
    library: Tokenizer, vocab: Mapping[str, int], special: set[str], characters: Mapping[str, int]
) -> tuple[list[bytes], list[int]]:
    """(the bytes that each id decodes to, the ids that a word can be, in the order of bytes)."""
    count = max(library.get_vocab(with_added_tokens=True).values()) + 1
    texts = []
    words = []
    for i in range(count):
        token = library.id_to_token(i)
        if token is None or token in special:
            texts.append(b"")
            continue
        if any(c not in characters for c in token):
            texts.append(token.encode("utf-8"))
            continue
        texts.append(bytes(characters[c] for c in token))
        if vocab.get(token) == i and token:
            words.append(i)
    return texts, sorted(words, key=lambda i: texts[i])


def _added(added: Mapping[int, Any]) -> tuple[array[int], bytes]:
    """(rows of id, flags, bytes; contents) of the added tokens."""
    rows = array("I")
    contents = b""
    for number, token in sorted(added.items()):
        if token.lstrip or token.rstrip or token.single_word:
            raise _NotExact(f"the added token {token.content!r} takes blanks or whole words only")
        if not token.content or (token.normalized and not token.content.isascii()):
            raise _NotExact(f"the added token {token.content!r} is normalized or empty")
        data = token.content.encode("utf-8")
        flags = bytelevel.SPECIAL * token.special + bytelevel.NORMALIZED * token.normalized
        rows.extend((number, flags, len(data)))
        contents += data
    return rows, contents


def _merges(
    merges: Sequence[Any], vocab: Mapping[str, int], count: int
) -> tuple[array[int], array[int], array[int], array[int]]:
    """(start of each left token's pairs, right tokens, ranks, the token of each rank)."""
    pairs: dict[tuple[int, int], int] = {}
    merged = array("I")
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        pairs[vocab[left], vocab[right]] = rank  # of two equal ones the last counts
        merged.append(vocab[left + right])
    starts, rights, ranks = array("I", [0] * (count + 1)), array("I"), array("I")
    for (left_id, right_id), rank in sorted(pairs.items()):
        starts[left_id + 1] += 1
        rights.append(right_id)
        ranks.append(rank)
    for i in range(count):
        starts[i + 1] += starts[i]
    return starts, rights, ranks, merged


@lru_cache(maxsize=1)
def character_kinds() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(first code point, kind) of each range of code points of one kind, as the library sees them.

    The ranges begin at 0 and cover all of Unicode.
    """
    runs = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}+|\s+"), "isolated")
    numerals = pre_tokenizers.Digits(individual_digits=False)
    at: dict[int, list[int]] = {0: [0, 0]}
    for low, high in _ASSIGNED:
        for start in range(low, high, 8192):
            text = "".join(map(chr, range(start, min(high, start + 8192))))
            for column, pieces in enumerate((runs, numerals)):
                for _, (first, _end) in pieces.pre_tokenize_str(text):
                    at.setdefault(start + first, [0, 0])[column] = 1
        at.setdefault(high, [1, 1])
    edges: list[int] = []
    kinds: list[int] = []
    for first in sorted(at):
        kind = _kind(chr(first)) if not 0xD800 <= first < 0xE000 else 0
        if not kinds or kinds[-1] != kind:
            edges.append(first)
            kinds.append(kind)
    return tuple(edges), tuple(kinds)


_KINDS = (
    (r"\p{L}", bytelevel.LETTER),
    (r"\p{N}", bytelevel.NUMBER),
    (r"\s", bytelevel.SPACE),
)


@cache
def _splitters() -> tuple[tuple[Any, int], ...]:
    return tuple((pre_tokenizers.Split(Regex(p), "removed"), kind) for p, kind in _KINDS)


def _kind(character: str) -> int:
    found = sum(kind for split, kind in _splitters() if not split.pre_tokenize_str(character))
    numeral = len(pre_tokenizers.Digits().pre_tokenize_str(f"a{character}a")) > 1
    return found + (bytelevel.NUMERAL if numeral else 0)


def _compare(table: TokenizerTable, library: Tokenizer) -> None:
    """Ids and text of both on some text of every kind and on the vocabulary's own words."""
    reader = bytelevel.ByteLevelTable(table.data, table.settings, FILE)
    count = max(library.get_vocab().values()) + 1
    step = max(1, count // 1024)
    texts = [*_PROBES]
    for first in range(0, count, 8 * step):
        texts.append(library.decode(list(range(first, min(count, first + 8 * step), step))))
    for text in texts:
        if not reader.takes(text):
            continue
        ids = library.encode(text, add_special_tokens=False).ids
        if reader.encode(text) != ids or reader.decode(ids) != library.decode(ids):
            raise ZerolayerError(
                f"the tokenizer's table and the library disagree on {text[:60]!r}",
                where="tokenizer.json",
                next_step="report this as a bug",
            )
