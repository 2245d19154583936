"""The tokenizer's table: the same ids and the same text as the tokenizers library."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import loader_fake
import pytest
import text_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from zerolayer.compiler.artifact import tokenizer_table
from zerolayer.compiler.artifact.tokenizer_table import TokenizerTable, build_table
from zerolayer.compiler.frontends.gguf_tokenizer import PRE_TOKENIZERS, PreTokenizer
from zerolayer.runtime_stub import bytelevel
from zerolayer.runtime_stub.bytelevel import ByteLevelTable
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError, ZerolayerError

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>x", "‹é›"]
EXACT = ("gpt-2", "smollm", "llama3", "dbrx", "qwen2", "deepseek-r1-qwen")


def document(kind: PreTokenizer, *, every_byte: bool = True) -> dict[str, Any]:
    """A trained ``tokenizer.json`` with the pre-tokenizer of ``kind``."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind.whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if kind.single_digits else []
    steps += [pre_tokenizers.Split(Regex(s), "isolated") for s in kind.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if every_byte else [],
    )
    lines = text_corpus.corpus([], count=1200, seed=3)
    tokenizer.train_from_iterator(lines, trainer)
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    if kind.nfc:
        found["normalizer"] = {"type": "NFC"}
    plain = {"special": False, "single_word": False, "lstrip": False, "rstrip": False}
    for content, normalized in (("<tool>", False), ("def f", True), ("<t", True)):
        number = max(t["id"] for t in found["added_tokens"]) + 5000
        found["added_tokens"].append(
            {"id": number, "content": content, "normalized": normalized, **plain}
        )
    return found


def both(found: dict[str, Any]) -> tuple[ByteLevelTable, Tokenizer]:
    raw = json.dumps(found).encode()
    table = build_table(raw)
    assert isinstance(table, TokenizerTable), table
    return ByteLevelTable(table.data, table.settings, "x"), Tokenizer.from_buffer(raw)


_PAIRS: dict[str, tuple[ByteLevelTable, Tokenizer]] = {}


def pair(name: str) -> tuple[ByteLevelTable, Tokenizer]:
    if name not in _PAIRS:
        _PAIRS[name] = both(document(PRE_TOKENIZERS[name]))
    return _PAIRS[name]


def ids_of(library: Tokenizer, text: str) -> list[int]:
    ids: list[int] = library.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", EXACT)
def test_same_ids_and_text_on_the_corpus(name: str) -> None:
    table, library = pair(name)
    taken = 0
    for text in text_corpus.corpus([*SPECIALS, "<tool>", "def f", "<t"]):
        if not table.takes(text):
            assert PRE_TOKENIZERS[name].nfc
            continue
        taken += 1
        ids = ids_of(library, text)
        assert table.encode(text) == ids, text
        assert table.decode(ids) == library.decode(ids), text
    assert taken == 2400 or (PRE_TOKENIZERS[name].nfc and taken > 1200)


WORDS = [*SPECIALS, "<tool>", "<t", "'", "'s", "'LL", "'\u017f", " ", "\n", "\r\n", "1", "\u00b2",
         "\u0660", "\u3000", "\x85",
         "a", "\u017f", "\u0130", "\u4f60", "e\u0301", "-", "\0"]  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=400, deadline=None)
@given(text=st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=6))).map("".join))
def test_same_ids_on_any_text(name: str, text: str) -> None:
    table, library = pair(name)
    if table.takes(text):
        assert table.encode(text) == ids_of(library, text)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 12_000), max_size=12))
def test_same_text_of_any_ids(ids: list[int]) -> None:
    """Half characters, holes in the vocabulary and special tokens included."""
    table, library = pair("gpt-2")
    assert table.decode(ids) == library.decode(ids)


def test_long_words_are_merged_the_same() -> None:
    rng = random.Random(1)
    for name in ("gpt-2", "llama3"):
        table, library = pair(name)
        for n in (95, 96, 97, 98, 500, 5000):
            for text in ("a" * n, " " * n + "x", "".join(rng.choices("theanrs", k=n))):
                assert table.encode(text) == ids_of(library, text)


def test_bytes_that_the_vocabulary_lacks_are_dropped() -> None:
    found = document(PRE_TOKENIZERS["gpt-2"])
    lacking = "\u0100"  # byte 0
    number = found["model"]["vocab"].pop(lacking)
    found["model"]["vocab"]["unused"] = number
    merges = found["model"]["merges"]
    found["model"]["merges"] = [m for m in merges if not any(lacking in part for part in m)]
    table, library = both(found)
    for text in ("\0", "a\0b", "th\0e the", "\0\0"):
        assert table.encode(text) == ids_of(library, text)
    found["model"]["unk_token"] = "unused"
    assert "unknown token" in str(build_table(json.dumps(found).encode()))


def test_kinds_of_characters_are_the_librarys() -> None:
    """All of Unicode, also the planes that the table's builder does not ask about."""
    edges, kinds = tokenizer_table.character_kinds()
    assert edges[0] == 0 and list(edges) == sorted(set(edges)) and len(edges) == len(kinds)
    everything = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for pattern, wanted in ((r"\p{L}", 1), (r"\p{N}", 2), (r"\s", 3)):
        split = pre_tokenizers.Split(Regex(pattern), "removed")
        mine = [
            c
            for low, high, kind in zip(edges, [*edges[1:], 0x110000], kinds, strict=True)
            for c in range(low, high)
            if kind & 3 == wanted and not 0xD800 <= c < 0xE000
        ]
        theirs = set(everything)
        for start in range(0, len(everything), 4096):
            part = everything[start : start + 4096]
            for text, _ in split.pre_tokenize_str("".join(map(chr, part))):
                theirs.difference_update(map(ord, text))
        assert mine == sorted(theirs), pattern


def test_form_c_is_left_to_the_library_where_it_matters() -> None:
    from unicodedata import is_normalized, normalize

    table, _ = pair("qwen2")
    assert (
        table.takes("plain") and table.takes("naïve 你好 Привет 👍") and not table.takes("e\u0301")
    )
    followers = ["\u0301", "\u0327", "\u1161", "\u11a8", "\u3099"]
    for low, high in bytelevel.NFC_STABLE:
        text = "".join(map(chr, range(low, high + 1)))
        assert is_normalized("NFC", text) and is_normalized("NFC", text[::-1])
        for c in text[:: max(1, len(text) // 300)]:
            assert normalize("NFC", "a" + c) == "a" + c and c not in followers


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizer"),
        ({"pre_tokenizer": None}, "ByteLevel"),
        ({"decoder": None}, "decoder"),
        ({"truncation": {"max_length": 5}}, "truncation"),
        ({"model": {"dropout": 0.1}}, "dropout"),
        ({"model": {"type": "Unigram"}}, "Unigram"),
    ],
)
def test_other_tokenizers_have_no_table_and_say_why(change: dict[str, Any], why: str) -> None:
    found = document(PRE_TOKENIZERS["gpt-2"])
    for key, value in change.items():
        found[key] = {**found[key], **value} if key == "model" else value
    assert why in str(build_table(json.dumps(found).encode()))


def test_tokens_with_conditions_and_other_patterns_have_no_table() -> None:
    found = document(PRE_TOKENIZERS["gpt-2"])
    found["added_tokens"][0]["lstrip"] = True
    assert "takes blanks" in str(build_table(json.dumps(found).encode()))
    for name in ("tekken", "gpt-4o", "default"):
        assert "pattern" in str(
            build_table(json.dumps(document(PRE_TOKENIZERS[name])).encode())
        ) or ("one Split" in str(build_table(json.dumps(document(PRE_TOKENIZERS[name])).encode())))


def test_the_builder_compares_before_it_believes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytelevel, "_spaces", lambda kinds, i: i + 1)
    found = document(PRE_TOKENIZERS["gpt-2"])
    found["added_tokens"] = found["added_tokens"][:3]
    with pytest.raises(ZerolayerError, match="disagree"):
        build_table(json.dumps(found).encode())


def test_same_input_same_bytes() -> None:
    raw = json.dumps(document(PRE_TOKENIZERS["smollm"])).encode()
    first = build_table(raw)
    build_table.cache_clear()
    tokenizer_table.character_kinds.cache_clear()
    assert build_table(raw) == first


def test_damaged_tables_are_errors() -> None:
    table = build_table(json.dumps(document(PRE_TOKENIZERS["llama3"])).encode())
    assert isinstance(table, TokenizerTable)
    good = dict(table.settings)
    with pytest.raises(UnsupportedError, match="pattern"):
        ByteLevelTable(table.data, {**good, "pattern": "other"}, "x")
    for settings_ in ({}, {**good, "max_chars": None}):
        with pytest.raises(InputFileError, match="damaged"):
            ByteLevelTable(table.data, settings_, "x")
    rng = random.Random(2)
    sizes = [0, 7, 8, 39, 40, 41, len(table.data) - 1, *rng.sample(range(len(table.data)), 40)]
    for size in sizes:
        with pytest.raises(InputFileError, match="damaged"):
            ByteLevelTable(table.data[:size], good, "x")
    for _ in range(200):
        data = bytearray(table.data)
        for _ in range(20):
            data[rng.randrange(len(data) if rng.random() < 0.5 else 60)] = rng.randrange(256)
        try:
            reader = ByteLevelTable(bytes(data), good, "x")
            reader.decode(reader.encode("The capital of France is 12 <|im_end|> 你好"))
        except InputFileError as e:
            assert "damaged" in str(e)


def test_demo_tokenizer(smollm2_gguf: Path) -> None:
    """A real vocabulary of 49,152 tokens, which lacks 21 of the 256 bytes."""
    from zerolayer.compiler.frontends import load_model

    assets = load_model(smollm2_gguf).tokenizer
    assert assets is not None
    table, library = both(json.loads(assets.tokenizer_json))
    specials = [t.content for t in library.get_added_tokens_decoder().values()]
    for text in text_corpus.corpus(specials):
        ids = ids_of(library, text)
        assert table.encode(text) == ids and table.decode(ids) == library.decode(ids), text
    assert table.special_id("<|im_end|>") == 2 and table.special_id("a") is None


def test_text_on_the_way_to_the_first_token_imports_little(tmp_path: Path) -> None:
    """No library, no regular expressions, no JSON package; each source is compiled once."""
    raw = loader_fake.tokenizer_json().replace(b'"use_regex":false', b'"use_regex":true')
    table = build_table(raw)
    assert isinstance(table, TokenizerTable)
    out = loader_fake.build(
        tmp_path / "x.zla",
        members={"tokenizer.json": raw, "tokenizer.bin": table.data},
        vendor=False,
        tokenizer={"table": dict(table.settings)},
    )
    program = (
        "import runpy, sys\n"
        "compiled = []\n"
        "def hook(event, args):\n"
        "    if event == 'compile' and 'zerolayer_stub' in str(args[1]): compiled.append(args[1])\n"
        "sys.addaudithook(hook)\n"
        "sys.argv = ['x', 'generate', '--raw', '-n', '4', 'Paris <eos>']\n"
        f"try: runpy.run_path({str(out)!r}, run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "print(len(compiled), len(compiled) - len(set(compiled)))"
    )
    flags = [sys.executable, "-I", "-S"]
    twice = subprocess.run([*flags, "-c", program], check=True, capture_output=True, timeout=60)
    sources, again = map(int, twice.stdout.splitlines()[-1].split())
    assert sources > 10 and again == 0
    command = [*flags, "-X", "importtime", str(out), "generate", "--raw", "-n", "4", "Paris <eos>"]
    run = subprocess.run(command, check=True, capture_output=True, timeout=60)
    modules = {line.rpartition("|")[2].strip() for line in run.stderr.decode().splitlines()}
    assert "zerolayer_stub.bytelevel" in modules
    assert not modules & {"re", "json", "enum", "tokenizers.tokenizers", "zerolayer_stub.template"}
    ids = loader_fake.expected([loader_fake.BOS, *b"Paris ", loader_fake.EOS], 4)
    wanted = bytes(i for i in ids if i < 256).decode("utf-8", "replace").encode()
    assert run.stdout.rstrip(b"\n") == wanted.rstrip(b"\n")
