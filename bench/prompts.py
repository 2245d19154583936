"""The comparison's prompts: English text, as a user's are, in the ids of SmolLM2's tokenizer.

In: ``prompt.txt``, the tokenizer in SmolLM2's GGUF file.  Out: one file of token ids beside the
models for each size of vocabulary.  Next file: ``runners/common.py``, which cuts prompts from it.

``prompt.txt`` is prose of this project's own documents as it was when prompts became text, without
tables and code.  It stays as it is when the documents change: another text is another measurement.
Licences and books are known to a model by heart; this text no model was trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.matrix import Suite

TEXT = Path(__file__).parent / "prompt.txt"
TOKENIZER = "smollm2-135m-q4_1.gguf"
SPECIAL = 17  # SmolLM2's first tokens, which text has none of


def ids_file(models: Path, words: int) -> Path:
    """Where the ids for a vocabulary of ``words`` are."""
    return models / f"prompt-{words}.ids"


def digest(path: Path) -> str:
    """Of a file of ids, for the names of what was computed from it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def text_ids(gguf: Path) -> list[int]:
    """``prompt.txt`` in the ids of a GGUF file's tokenizer."""
    from tokenizers import Tokenizer
    from zerolayer.compiler.frontends.gguf_file import read_gguf
    from zerolayer.compiler.frontends.gguf_tokenizer import read_tokenizer

    assets = read_tokenizer(read_gguf(gguf))
    if assets is None:
        raise SystemExit(f"error: {gguf} has no tokenizer")
    text = TEXT.read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_buffer(assets.tokenizer_json)
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def mapped(ids: Sequence[int], words: int) -> list[int]:
    """Ids in a smaller vocabulary: those that it lacks become others of its words."""
    return [i if i < words else SPECIAL + (i - SPECIAL) % (words - SPECIAL) for i in ids]


def write(models: Path, suites: Iterable[Suite]) -> None:
    """The files that the suites' prompts are cut from."""
    sizes = sorted({s.text for s in suites if s.text})
    if not sizes or not (models / TOKENIZER).exists():
        return  # no model of theirs either: it is the one that the others are made from
    ids = text_ids(models / TOKENIZER)
    for words in sizes:
        line = " ".join(map(str, mapped(ids, words)))
        ids_file(models, words).write_text(line + "\n", encoding="ascii")
