"""GGUF's tokenizer metadata as a Hugging Face ``tokenizers`` file.

In: a checked :class:`GgufFile` (keys ``tokenizer.*``).  Out: :class:`TokenizerAssets`.  Next file:
``gguf.py``.

Two kinds exist in the supported families:

* ``gpt2``: byte-level BPE with merges.  How text is cut before merging is not in the file, only its
  name (``tokenizer.ggml.pre``); the table ``PRE_TOKENIZERS`` spells each name out as the models'
  own tokenizer.json does.  A name that is not in the table is an error, never a guess.
* ``llama``: SentencePiece BPE with a score per piece and bytes as fallback.  SentencePiece merges
  the adjacent pair whose *result* has the best score, the leftmost first; ``tokenizers`` merges by
  the rank of the *pair*.  Every way to cut a piece into two pieces becomes a merge, best score
  first, which gives the same result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError

from .config import TokenizerAssets
from .gguf_file import FETCH_AGAIN, GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # SentencePiece's visible space
MAX_PIECE = 256  # characters; pieces in use have at most 48

Json = dict[str, object]


@dataclass(frozen=True)
class PreTokenizer:
    """How one kind of byte-level BPE cuts text: ``splits`` are regular expressions, applied one
    after another to what the former left; matches and gaps both become words."""

    splits: tuple[str, ...]
    single_digits: bool = False  # before that, every numeral is a word
    nfc: bool = False  # text is first composed (Unicode normalization form C)
    whole_words: bool = False  # a word that is a token is not merged up from its bytes
    add_bos: bool = False  # where the file has no add_bos_token


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    + _CASED_TAIL
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}|\p{{N}}{{1,3}}" + _CASED_TAIL
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]")

_LLAMA3 = PreTokenizer((_CL100K,), whole_words=True, add_bos=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT),
    "gpt-2": PreTokenizer((_GPT2,)),
    "phi-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((_GPT2,), single_digits=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "dbrx": PreTokenizer((_CL100K,)),  # phi-4
    "gpt-4o": PreTokenizer((_O200K,)),  # phi-4-mini
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True),
}
"""``tokenizer.ggml.pre`` of the supported families."""

_PRE_OF_ARCHITECTURE = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2"}
"""For old files without ``tokenizer.ggml.pre``: the architectures that leave no doubt."""

END_OF_TURN = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
)
"""Control tokens that end a reply even where the file names another end token."""

_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def read_tokenizer(file: GgufFile) -> TokenizerAssets | None:
    """The tokenizer in ``file``; ``None`` if it has none.

    Raises :class:`UnsupportedError` for a kind of tokenizer or pre-tokenizer without an exact
    conversion and :class:`InputFileError` for inconsistent metadata.
    """
    meta = _Metadata(file)
    kind = meta.text("ggml.model", "none")
    if kind == "none":
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"tokenizer kind {kind!r}",
            where=f"{file.name}: key tokenizer.ggml.model",
            next_step="gpt2 (byte-level BPE) and llama (SentencePiece BPE) are supported",
        )
    vocab = _read_vocab(meta, kind)
    build = _byte_level if kind == "gpt2" else _sentence_piece
    document, bos_default = build(meta, vocab)
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    _check_loads(meta, text, vocab)
    sentence_piece = kind == "llama"
    bos = meta.token("bos_token_id", vocab, 1 if sentence_piece else None)
    eos = meta.token("eos_token_id", vocab, 2 if sentence_piece else None)
    if meta.flag("ggml.add_eos_token", False):
        raise UnsupportedError(
            "an end token after every text", where=f"{file.name}: key tokenizer.ggml.add_eos_token"
        )
    return TokenizerAssets(
        tokenizer_json=text.encode(),
        chat_template=meta.text("chat_template", "") or None,
        bos_id=bos,
        eos_ids=_end_ids(meta, vocab, eos),
        add_bos=meta.flag("ggml.add_bos_token", bos_default) and bos is not None,
        bos_token="" if bos is None else vocab.tokens[bos],
        eos_token="" if eos is None else vocab.tokens[eos],
        generation=_sampling(file),
    )


@dataclass(frozen=True)
class _Vocab:
    """``tokens[id]`` as the tokenizer file spells it, with its GGUF type; all distinct."""

    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]


class _Metadata:
    """Typed access to ``tokenizer.*``."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def fail(self, key: str, what: str) -> InputFileError:
        return InputFileError(
            what, where=f"{self.file.name}: key tokenizer.{key}", next_step=FETCH_AGAIN
        )

    def text(self, key: str, default: str) -> str:
        value = self.file.metadata.get(f"tokenizer.{key}", default)
        if not isinstance(value, str):
            raise self.fail(key, f"a text is expected, not {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.file.metadata.get(f"tokenizer.{key}", default)
        if not isinstance(value, bool):
            raise self.fail(key, f"true or false is expected, not {value!r:.40}")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.file.metadata.get(f"tokenizer.{key}")
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.fail(key, "a list of texts is expected")
        return [v for v in value if isinstance(v, str)]

    def numbers(self, key: str, kind: str, count: int) -> list[int] | list[float] | None:
        """A numeric array of dtype kinds ``kind`` and length ``count``; ``None`` if absent."""
        value = self.file.metadata.get(f"tokenizer.{key}")
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kind:
            raise self.fail(key, "an array of numbers is expected")
        if len(value) != count:
            raise self.fail(key, f"{len(value)} entries for {count} tokens")
        numbers: list[int] | list[float] = value.tolist()
        return numbers

    def token(self, key: str, vocab: _Vocab, default: int | None = None) -> int | None:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(f"ggml.{key}", f"{value!r:.40} is not a token id")
        if not 0 <= value < len(vocab.tokens):
            raise self.fail(f"ggml.{key}", f"{value} is not one of {len(vocab.tokens)} tokens")
        return value


def _read_vocab(meta: _Metadata, kind: str) -> _Vocab:
    tokens = meta.texts("ggml.tokens")
    types = meta.numbers("ggml.token_type", "iu", len(tokens))
    if types is None:  # files of the first converters: only the named tokens are special
        types = [NORMAL] * len(tokens)
        for key in ("bos_token_id", "eos_token_id", "eot_token_id"):
            token = meta.token(key, _Vocab(tokens, (), {}))
            if token is not None:
                types[token] = CONTROL
    wrong = next((t for t in types if not NORMAL <= t <= BYTE), None)
    if wrong is not None:
        raise meta.fail("ggml.token_type", f"unknown type {wrong}")
    if kind == "llama":  # user-defined pieces match text, where a space is a space
        tokens = [
            token.replace(SPACE, " ") if type == USER_DEFINED else token
            for token, type in zip(tokens, types, strict=True)
        ]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise meta.fail("ggml.tokens", f"the token {twice!r:.60} appears twice")
    return _Vocab(tokens, [int(t) for t in types], ids)


# --- byte-level BPE ------------------------------------------------------------------------------


def _byte_level(meta: _Metadata, vocab: _Vocab) -> tuple[Json, bool]:
    """The document, and whether a beginning token is added where the file does not say."""
    pre = _pre_tokenizer(meta)
    steps: list[Json] = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in pre.splits
    ]
    if pre.single_digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    if meta.flag("ggml.add_space_prefix", False):
        raise UnsupportedError(
            "a space before every text is not part of these byte-level tokenizers",
            where=f"{meta.file.name}: key tokenizer.ggml.add_space_prefix",
        )
    byte_level: Json = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    document: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(meta, vocab, strip_after=frozenset()),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            # a byte without a token is dropped, by this as by the reference tokenizers
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole_words,
            "vocab": vocab.ids,
            "merges": _read_merges(meta, vocab),
        },
    }
    return document, pre.add_bos


def _pre_tokenizer(meta: _Metadata) -> PreTokenizer:
    architecture = meta.file.metadata.get("general.architecture")
    fallback = _PRE_OF_ARCHITECTURE.get(architecture, "") if isinstance(architecture, str) else ""
    name = meta.text("ggml.pre", fallback)
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        what = f"pre-tokenizer {name!r:.60}" if name else "the file does not name its pre-tokenizer"
        raise UnsupportedError(
            what,
            where=f"{meta.file.name}: key tokenizer.ggml.pre",
            next_step=f"supported: {', '.join(PRE_TOKENIZERS)}; or convert the model again",
        )
    return pre


def _read_merges(meta: _Metadata, vocab: _Vocab) -> list[tuple[str, str]]:
    """``"left right"`` texts in order of rank -> pairs whose parts and result are tokens."""
    merges: dict[tuple[str, str], None] = {}
    for rank, text in enumerate(meta.texts("ggml.merges")):
        space = text.find(" ", 1)  # the left part is never empty, but may be a space in odd files
        left, right = text[:space], text[space + 1 :]
        if space < 1 or not (
            left in vocab.ids and right in vocab.ids and left + right in vocab.ids
        ):
            raise meta.fail("ggml.merges", f"merge {rank}, {text!r:.60}, is not made of tokens")
        merges.setdefault((left, right))
    return list(merges)


# --- SentencePiece BPE ---------------------------------------------------------------------------


def _sentence_piece(meta: _Metadata, vocab: _Vocab) -> tuple[Json, bool]:
    """The document, and whether a beginning token is added where the file does not say."""
    if meta.flag("ggml.remove_extra_whitespaces", False):
        raise UnsupportedError(
            "a tokenizer that removes spaces",
            where=f"{meta.file.name}: key tokenizer.ggml.remove_extra_whitespaces",
        )
    charsmap = meta.file.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None and not (isinstance(charsmap, np.ndarray) and charsmap.size == 0):
        raise UnsupportedError(
            "a tokenizer with its own character map",
            where=f"{meta.file.name}: key tokenizer.ggml.precompiled_charsmap",
        )
    prefix = meta.flag("ggml.add_space_prefix", True)
    unknown = meta.token("unknown_token_id", vocab, 0)
    assert unknown is not None
    # Every text between special tokens gets the prefix, as llama.cpp and the families' own
    # tokenizer.json do.
    spaces: list[Json] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    spaces.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    phi3 = meta.file.metadata.get("general.architecture") == "phi3"
    document: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(meta, vocab, _PHI3_STRIPS if phi3 else frozenset()),
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocab.tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": BYTE in vocab.types,
            "ignore_merges": False,
            "vocab": vocab.ids,
            "merges": _merges_from_scores(meta, vocab),
        },
    }
    return document, True


_PHI3_STRIPS = frozenset({CONTROL})
_PHI3_KEEPS = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Phi-3's own tokenizer file strips spaces after its special tokens, these excepted; GGUF does not
record it."""


def _merges_from_scores(meta: _Metadata, vocab: _Vocab) -> list[tuple[str, str]]:
    """All (left, right) of pieces that are pieces together, best score of the result first."""
    scores = meta.numbers("ggml.scores", "f", len(vocab.tokens))
    if scores is None:
        raise meta.fail("ggml.scores", "the key is missing")
    if not all(math.isfinite(score) for score in scores):
        raise meta.fail("ggml.scores", "a score is not finite")
    # What SentencePiece may merge.  Control and byte pieces never match text; user-defined ones are
    # cut out before merging.
    pieces = {
        token: scores[i]
        for i, (token, type) in enumerate(zip(vocab.tokens, vocab.types, strict=True))
        if type in (NORMAL, UNUSED)
    }
    too_long = next((piece for piece in pieces if len(piece) > MAX_PIECE), None)
    if too_long is not None:
        raise meta.fail("ggml.tokens", f"a piece of {len(too_long)} characters")
    merges: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=lambda p: -pieces[p]):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
    return merges


# --- both ----------------------------------------------------------------------------------------


def _added_tokens(meta: _Metadata, vocab: _Vocab, strip_after: frozenset[int]) -> list[Json]:
    """Tokens that match text as a whole, before anything else: control and user-defined ones."""
    added: list[Json] = []
    for i, (token, type) in enumerate(zip(vocab.tokens, vocab.types, strict=True)):
        if type not in (UNKNOWN, CONTROL, USER_DEFINED):
            continue
        if not token:
            raise meta.fail("ggml.tokens", f"token {i} is special and empty")
        added.append(
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": type in strip_after and token not in _PHI3_KEEPS,
                "normalized": False,
                "special": type != USER_DEFINED,
            }
        )
    return added


def _end_ids(meta: _Metadata, vocab: _Vocab, eos: int | None) -> tuple[int, ...]:
    """Tokens that end generation: the file's, then those of the same meaning in other families."""
    named = [eos, meta.token("eot_token_id", vocab), meta.token("eom_token_id", vocab)]
    ends = [token for token in named if token is not None]
    ends += [
        vocab.ids[text]
        for text in sorted(END_OF_TURN & vocab.ids.keys())
        if vocab.types[vocab.ids[text]] == CONTROL
    ]
    return tuple(dict.fromkeys(ends))


def _sampling(file: GgufFile) -> tuple[tuple[str, float], ...]:
    """Sampling defaults that the file recommends."""
    found: list[tuple[str, float]] = []
    for key, name in _SAMPLING.items():
        value = file.metadata.get(key)
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
        ):
            raise InputFileError(
                f"{value!r:.40} is not a number", where=f"{file.name}: key {key}",
                next_step=FETCH_AGAIN,
            )  # fmt: skip
        found.append((name, float(value)))
    return tuple(found)


def _check_loads(meta: _Metadata, text: str, vocab: _Vocab) -> None:
    """Proves that ``tokenizers`` reads the document and gives every token its id."""
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        raise meta.fail("ggml", f"the vocabulary is not usable: {error}") from error
    if tokenizer.get_vocab(with_added_tokens=True) != vocab.ids:
        raise meta.fail("ggml", "special tokens and vocabulary contradict each other")
