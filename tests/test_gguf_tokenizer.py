"""GGUF tokenizers give the ids of the reference tokenizers: transformers, sentencepiece."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import gguf
import pytest
from gguf_models import Vocabulary, write_vocabulary
from text_corpus import corpus
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from zerolayer.compiler.frontends.config import TokenizerAssets
from zerolayer.compiler.frontends.gguf_file import read_gguf
from zerolayer.compiler.frontends.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError, ZerolayerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def load(path: Path) -> tuple[TokenizerAssets, Tokenizer]:
    assets = read_tokenizer(read_gguf(path))
    assert assets is not None
    return assets, Tokenizer.from_str(assets.tokenizer_json.decode())


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


def differences(
    got: Callable[[str], list[int]], want: Callable[[str], list[int]], texts: list[str]
) -> list[tuple[str, list[int], list[int]]]:
    pairs = [(text, got(text), want(text)) for text in texts]
    return [pair for pair in pairs if pair[1] != pair[2]]


def transformers_tokenizer(path: Path) -> Any:
    """transformers' own conversion of the same file."""
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


# --- the real model ------------------------------------------------------------------------------


def test_smollm2_gives_the_references_ids(smollm2_gguf: Path) -> None:
    assets, ours = load(smollm2_gguf)
    document = json.loads(assets.tokenizer_json)
    specials = [token["content"] for token in document["added_tokens"]]
    assert specials[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] and len(specials) == 17
    texts = corpus(specials)
    assert len(texts) >= 2000

    # transformers' GGUF reader does not know "smollm" and leaves digits together with what is
    # before them, so only texts without numerals are the same,
    reference = transformers_tokenizer(smollm2_gguf)
    plain = [text for text in texts if not any(c.isnumeric() for c in text)]
    assert len(plain) >= 1000
    want = {text: reference.encode(text, add_special_tokens=False) for text in texts}
    assert differences(lambda t: ids(ours, t), want.__getitem__, plain) == []
    # and all are once it cuts text as the model's own tokenizer.json does: digits first.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    want = {text: reference.encode(text, add_special_tokens=False) for text in texts}
    assert differences(lambda t: ids(ours, t), want.__getitem__, texts) == []


def test_smollm2_decodes_to_the_text(smollm2_gguf: Path) -> None:
    assets, ours = load(smollm2_gguf)
    alphabet = set(json.loads(assets.tokenizer_json)["model"]["vocab"])
    missing = {byte for byte, char in byte_characters().items() if char not in alphabet}
    for text in corpus([]):
        if missing.isdisjoint(text.encode()):  # this vocabulary lacks some bytes: they are dropped
            assert ours.decode(ids(ours, text), skip_special_tokens=False) == text


def byte_characters() -> dict[int, str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return dict(bytes_to_unicode())


# --- byte-level BPE by the name of its pre-tokenizer ---------------------------------------------

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]


@pytest.fixture(scope="module")
def trained() -> Vocabulary:
    """A byte-level BPE of 1500 tokens with four specials, trained on another corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus([], 1500, seed=1) * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (len(tokens) - 4)
    merges = [" ".join(merge) for merge in model["merges"]]
    return Vocabulary("gpt2", tokens, types, merges=merges, pre="gpt-2", bos=0, eos=2)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "dbrx", "tekken", "gpt-4o", "qwen2",
                                 "deepseek-r1-qwen"])  # fmt: skip
def test_pre_tokenizers_equal_transformers(pre: str, trained: Vocabulary, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "t.gguf", replace(trained, pre=pre))
    _, ours = load(path)
    reference = transformers_tokenizer(path)
    texts = corpus(SPECIALS, seed=2)
    if PRE_TOKENIZERS[pre].nfc:  # transformers' GGUF reader forgets it; see the next test
        import unicodedata

        texts = [text for text in texts if unicodedata.is_normalized("NFC", text)]
    want = {text: reference.encode(text, add_special_tokens=False) for text in texts}
    assert differences(lambda t: ids(ours, t), want.__getitem__, texts) == []
    assert len(texts) > 2000


def test_qwen2_equals_the_model_familys_own_tokenizer(trained: Vocabulary, tmp_path: Path) -> None:
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    _, ours = load(write_vocabulary(tmp_path / "t.gguf", replace(trained, pre="qwen2")))
    assert trained.merges is not None
    reference = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(trained.tokens)},
        merges=cast(Any, [tuple(merge.split(" ")) for merge in trained.merges]),
    )
    texts = corpus([], seed=3)
    want = {text: reference.encode(text, add_special_tokens=False) for text in texts}
    assert differences(lambda t: ids(ours, t), want.__getitem__, texts) == []


def test_smollm_and_default_equal_the_librarys_parts(trained: Vocabulary, tmp_path: Path) -> None:
    parts = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)],
        # llama.cpp's default is Falcon's, with digits in threes, except that "`" is no punctuation
        "default": [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.Split(
                Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
                "isolated",
            ),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ],
    }
    texts = [text for text in corpus([], seed=4) if "`" not in text]
    for pre, sequence in parts.items():
        assets, ours = load(write_vocabulary(tmp_path / f"{pre}.gguf", replace(trained, pre=pre)))
        reference = Tokenizer.from_str(assets.tokenizer_json.decode())
        reference.pre_tokenizer = pre_tokenizers.Sequence(sequence)
        want = {text: ids(reference, text) for text in texts}
        assert differences(partial(ids, ours), want.__getitem__, texts) == [], pre


def test_byte_level_round_trip(trained: Vocabulary, tmp_path: Path) -> None:
    for pre in ("smollm", "llama-bpe", "default"):
        _, ours = load(write_vocabulary(tmp_path / f"{pre}.gguf", replace(trained, pre=pre)))
        for text in corpus(SPECIALS, seed=5):
            assert ours.decode(ids(ours, text), skip_special_tokens=False) == text


def test_special_tokens_are_whole_and_others_are_not(trained: Vocabulary, tmp_path: Path) -> None:
    _, ours = load(write_vocabulary(tmp_path / "t.gguf", trained))
    assert ids(ours, "<|im_start|><think><|im_end|>") == [1, 3, 2]
    assert ids(ours, "<|im_start|") != [1] and 1 not in ids(ours, "<|im_start |>")
    assert ours.decode([1, 3, 2], skip_special_tokens=True) == "<think>"  # user-defined stays
    plain = replace(trained, types=[NORMAL] * len(trained.tokens))
    _, none_special = load(
        write_vocabulary(tmp_path / "u.gguf", replace(plain, bos=None, eos=None))
    )
    assert 1 not in ids(none_special, "<|im_start|>")


# --- SentencePiece -------------------------------------------------------------------------------


RUNS = [c * n for c in "ab= -.0" for n in range(1, 40)]


def train_sentencepiece(directory: Path, lines: list[str] | None = None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sentencepiece
    if lines is None:
        texts = [text for text in corpus([], 1200, seed=6) if "\0" not in text]
        lines = [line for text in texts for line in text.splitlines()] + 3 * RUNS
    (directory / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text.txt"), model_prefix=str(directory / "sp"), model_type="bpe",
        **{"vocab_size": 1800, "byte_fallback": True, "normalization_rule_name": "identity",
           "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True,
           "split_digits": True, "character_coverage": 0.99, "hard_vocab_limit": False,
           "num_threads": 1, "minloglevel": 2, **options},
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "sp.model"))


def sentencepiece_vocabulary(sp: Any, user_defined: tuple[str, ...] = ()) -> Vocabulary:
    count = sp.vocab_size()
    tokens = [sp.id_to_piece(i) for i in range(count)]

    def kind(i: int) -> int:
        if tokens[i] in user_defined:
            return USER_DEFINED
        tests = {
            UNKNOWN: sp.is_unknown,
            CONTROL: sp.is_control,
            UNUSED: sp.is_unused,
            BYTE: sp.is_byte,
        }
        return next((name for name, test in tests.items() if test(i)), NORMAL)

    types = [kind(i) for i in range(count)]
    scores = [sp.get_score(i) for i in range(count)]
    return Vocabulary("llama", tokens, types, scores=scores, bos=sp.bos_id(), eos=sp.eos_id())


def test_sentencepiece_bpe_equals_sentencepiece(tmp_path: Path) -> None:
    sp = train_sentencepiece(tmp_path)
    assets, ours = load(write_vocabulary(tmp_path / "t.gguf", sentencepiece_vocabulary(sp)))
    assert (assets.bos_id, assets.eos_ids, assets.add_bos) == (1, (2,), True)
    assert (assets.bos_token, assets.eos_token) == ("<s>", "</s>")
    texts = corpus([], seed=7)
    assert differences(lambda t: ids(ours, t), sp.encode, texts) == []
    for text in texts:
        # sentencepiece shows its visible space as a space, here as there
        assert ours.decode(sp.encode(text), skip_special_tokens=False) == sp.decode(sp.encode(text))


def test_sentencepiece_ties_go_to_the_left(tmp_path: Path) -> None:
    """Runs of two letters: every piece can be cut in many ways."""
    rng = random.Random(8)

    def some(count: int) -> list[str]:
        kinds = ["ab", "aab", "aaab", "a= ", "-.", "0a "]
        return ["".join(rng.choices(rng.choice(kinds), k=rng.randint(1, 60))) for _ in range(count)]

    sp = train_sentencepiece(tmp_path, some(2000) + RUNS, vocab_size=800)
    _, ours = load(write_vocabulary(tmp_path / "t.gguf", sentencepiece_vocabulary(sp)))
    texts = some(3000) + RUNS
    assert differences(lambda t: ids(ours, t), sp.encode, texts) == []


def test_gemmas_kind_has_user_defined_pieces_and_no_prefix(tmp_path: Path) -> None:
    defined = ("\n\n", "\n\n\n", "<b>", "\u2581\u2581\u2581\u2581", "<start_of_turn>")
    sp = train_sentencepiece(tmp_path, add_dummy_prefix=False, user_defined_symbols=list(defined))
    vocabulary = sentencepiece_vocabulary(sp, defined)
    path = write_vocabulary(
        tmp_path / "t.gguf", vocabulary, "gemma2", lambda w: w.add_add_space_prefix(False)
    )
    _, ours = load(path)
    texts = corpus(["\n\n", "\n\n\n", "<b>", "    ", "<start_of_turn>"], seed=9)
    # the library cuts user-defined pieces out before spaces become visible, so a typed "▁" differs
    texts = [text for text in texts if "\u2581" not in text]
    assert differences(lambda t: ids(ours, t), sp.encode, texts) == []


def test_a_prefix_follows_every_special_token(tmp_path: Path) -> None:
    """As in llama.cpp and in the families' own tokenizer.json; sentencepiece knows no special
    tokens in text, so each text between them is one of its texts."""
    sp = train_sentencepiece(tmp_path)
    _, ours = load(write_vocabulary(tmp_path / "t.gguf", sentencepiece_vocabulary(sp)))
    parts = ["the water", " two  spaces", "x"]
    want = [token for part in parts for token in [1, *sp.encode(part)]]
    assert ids(ours, "".join(f"<s>{part}" for part in parts)) == want


def test_phi3_strips_spaces_after_special_tokens(tmp_path: Path) -> None:
    sp = train_sentencepiece(tmp_path)
    vocabulary = sentencepiece_vocabulary(sp)
    tokens, types = (
        [*vocabulary.tokens, "<|user|>", "<|end|>"],
        [*vocabulary.types, CONTROL, CONTROL],
    )
    assert vocabulary.scores is not None
    vocabulary = replace(
        vocabulary, tokens=tokens, types=types, scores=[*vocabulary.scores, 0.0, 0.0]
    )
    n = len(tokens)
    assets, ours = load(write_vocabulary(tmp_path / "t.gguf", vocabulary, "phi3"))
    assert assets.eos_ids == (2, n - 1)
    assert ids(ours, "<|user|>\n  the water<|end|>\n") == [n - 2, *sp.encode("the water"), n - 1]
    assert ids(ours, "<s>\nx") == [1, *sp.encode("\nx")]
    _, other = load(write_vocabulary(tmp_path / "u.gguf", vocabulary, "llama"))
    assert ids(other, "<|user|>\nx") == [n - 2, *sp.encode("\nx")]


# --- settings ------------------------------------------------------------------------------------


def small(**changes: Any) -> Vocabulary:
    tokens = ["<s>", "</s>", "a", "b", "ab", "\u0120"]
    base = Vocabulary("gpt2", tokens, [CONTROL, CONTROL, 1, 1, 1, 1], merges=["a b"], pre="gpt-2")
    return replace(base, **changes)


def test_bos_eos_and_templates(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(4)
        writer.add_chat_template("{{ messages }}")
        writer.add_add_bos_token(True)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 40)

    path = write_vocabulary(tmp_path / "t.gguf", small(bos=0, eos=1), extra=extra)
    assets, tokenizer = load(path)
    assert (assets.bos_id, assets.add_bos, assets.bos_token) == (0, True, "<s>")
    assert (assets.eos_ids, assets.eos_token) == ((1, 4), "</s>")
    assert assets.chat_template == "{{ messages }}"
    assert assets.generation == (("temperature", 0.5), ("top_k", 40.0))
    assert ids(tokenizer, "ab a") == [4, 5, 2]


def test_defaults_of_the_families(tmp_path: Path) -> None:
    """Where the file does not say: Llama 3 adds its beginning token, others do not."""
    for pre, adds in (("llama-bpe", True), ("gpt-2", False), ("qwen2", False)):
        assets, _ = load(write_vocabulary(tmp_path / "t.gguf", small(pre=pre, bos=0)))
        assert assets.add_bos is adds
    assets, _ = load(write_vocabulary(tmp_path / "t.gguf", small()))
    assert (assets.bos_id, assets.eos_ids, assets.add_bos) == (None, (), False)
    ends = small(tokens=["<|im_end|>", "<|eot_id|>", "a", "b", "ab", "<|end|>"])
    assets, _ = load(write_vocabulary(tmp_path / "t.gguf", replace(ends, eos=0)))
    assert assets.eos_ids == (0, 1)  # "<|end|>" is an ordinary token here


def test_old_files_without_a_pre_tokenizer(trained: Vocabulary, tmp_path: Path) -> None:
    bare = replace(trained, pre=None)
    _, gpt2 = load(write_vocabulary(tmp_path / "a.gguf", bare, "gpt2"))
    _, named = load(write_vocabulary(tmp_path / "b.gguf", trained, "gpt2"))
    assert gpt2.to_str() == named.to_str()
    with pytest.raises(UnsupportedError, match=r"does not name its pre-tokenizer.*convert"):
        load(write_vocabulary(tmp_path / "c.gguf", bare, "llama"))


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("none")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_tokenizer(read_gguf(tmp_path / "t.gguf")) is None


SPM = Vocabulary("llama", ["<unk>", "<s>", "</s>", "a", "b", "ab"], [2, 3, 3, 1, 1, 1],
                 scores=[0.0, 0.0, 0.0, -1.0, -2.0, -3.0])  # fmt: skip


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (small(kind="bert"), "tokenizer kind 'bert'"),
        (small(pre="deepseek-v3"), "pre-tokenizer 'deepseek-v3'.*supported: default"),
        (small(tokens=["a"] * 6), "'a' appears twice"),
        (small(types=[1] * 5), "5 entries for 6 tokens"),
        (small(types=[0] * 6), "unknown type 0"),
        (small(types=[7] * 6), "unknown type 7"),
        (small(merges=["a c"]), "merge 0, 'a c', is not made of tokens"),
        (small(merges=["a b", "b a"]), "merge 1, 'b a'"),
        (small(merges=["ab"]), "merge 0, 'ab'"),
        (small(merges=["a "]), "merge 0, 'a '"),
        (small(bos=6), "bos_token_id.*6 is not one of 6 tokens"),
        (small(eos=2**31), "eos_token_id"),
        (small(tokens=["", "</s>", "a", "b", "ab", "x"]), "token 0 is special and empty"),
        (replace(SPM, scores=None), "scores.*missing"),
        (replace(SPM, scores=[0.0] * 5), "5 entries for 6 tokens"),
        (replace(SPM, scores=[float("nan")] * 6), "not finite"),
        (replace(SPM, scores=[float("-inf")] * 6), "not finite"),
        (replace(SPM, tokens=[*SPM.tokens[:5], "a" * 257]), "piece of 257 characters"),
    ],
)  # fmt: skip
def test_bad_metadata_is_named(vocabulary: Vocabulary, message: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "bad.gguf", vocabulary)
    with pytest.raises(ZerolayerError, match=f"bad.gguf.*{message}") as error:
        load(path)
    assert error.value.exit_code in (3, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.tokens", 5),
        ("tokenizer.ggml.token_type", "x"),
        ("tokenizer.ggml.merges", [1, 2]),
        ("tokenizer.ggml.pre", 1),
        ("tokenizer.ggml.model", 1),
        ("tokenizer.ggml.add_bos_token", 1),
        ("tokenizer.ggml.add_eos_token", True),
        ("tokenizer.ggml.add_space_prefix", True),
        ("tokenizer.ggml.bos_token_id", "1"),
        ("tokenizer.ggml.bos_token_id", -1),
        ("tokenizer.ggml.remove_extra_whitespaces", True),
        ("tokenizer.ggml.precompiled_charsmap", [1, 2, 3]),
        ("tokenizer.chat_template", False),
        ("general.sampling.temp", "hot"),
        ("general.sampling.temp", float("inf")),
    ],
)
def test_bad_types_are_named(key: str, value: Any, tmp_path: Path) -> None:
    spm = key.endswith(("whitespaces", "charsmap"))
    vocabulary = SPM if spm else small()
    writer = gguf.GGUFWriter(tmp_path / "bad.gguf", "llama")
    vocabulary.add(writer)
    writer.kv_data[0].pop(key, None)
    kind = gguf.GGUFValueType.get_type(value)
    writer.add_key_value(key, value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises((InputFileError, UnsupportedError)) as error:
        load(tmp_path / "bad.gguf")
    assert key in error.value.one_line()
