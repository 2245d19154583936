"""The comparison's prompts: text in a tokenizer's ids, the same for every engine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "bench" / "runners"))

import common  # noqa: E402

from bench import measure, prompts, results  # noqa: E402
from bench.matrix import LINES, OURS, SUITES  # noqa: E402
from bench.sweep import SWEEP  # noqa: E402

SUITE = {s.name: s for s in SUITES}


@pytest.fixture(scope="module")
def models(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models' folder with nothing but the demo model and the prompts."""
    folder = tmp_path_factory.mktemp("models")
    (folder / prompts.TOKENIZER).symlink_to(smollm2_gguf)
    prompts.write(folder, SUITES)
    return folder


def test_the_ids_are_the_text(models: Path, smollm2_gguf: Path) -> None:
    """By another reader and another tokenizer: gguf's tokens, decoded byte by byte."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ids = [int(i) for i in prompts.ids_file(models, 49152).read_text().split()]
    fields = gguf.GGUFReader(smollm2_gguf).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    byte = {c: b for b, c in bytes_to_unicode().items()}
    text = bytes(byte[c] for i in ids for c in tokens[i]).decode()
    assert text == prompts.TEXT.read_text(encoding="utf-8")
    special = {i for i, kind in enumerate(types) if kind != gguf.TokenType.NORMAL}
    assert special == set(range(prompts.SPECIAL))
    for words in (49152, 32000):
        known = {int(i) for i in prompts.ids_file(models, words).read_text().split()}
        assert min(known) >= prompts.SPECIAL and max(known) < words
        assert len(known) > 1000


def test_the_same_ids_every_time(models: Path, tmp_path: Path) -> None:
    (tmp_path / prompts.TOKENIZER).symlink_to(models / prompts.TOKENIZER)
    prompts.write(tmp_path, SUITES)
    for words in (49152, 32000):
        again = prompts.ids_file(tmp_path, words)
        assert again.read_bytes() == prompts.ids_file(models, words).read_bytes()
    prompts.write(tmp_path / "nothing", SUITES)  # no tokenizer, no ids
    assert not (tmp_path / "nothing").exists()


def test_a_smaller_vocabulary_keeps_what_it_has() -> None:
    # 17 special tokens and 3 words: 20 is the first word again, 22 the last, 23 the first
    assert prompts.mapped([17, 19, 20, 22, 23], 20) == [17, 19, 17, 19, 17]
    assert prompts.mapped([17, 31999, 32000, 49151], 32000) == [17, 31999, 17, 17 + 17151]


def test_every_suite_has_its_prompts(models: Path) -> None:
    """As many as it needs, each of its length, no two alike; random where nothing is decoded."""
    place = measure.Place(models.parent, models / "results.jsonl")
    for suite in (*SUITES, *SWEEP):
        options = SimpleNamespace(**common.DEFAULTS)
        options.prompt, options.batch = suite.prompt, suite.batch
        options.vocabulary = suite.vocabulary or common.VOCABULARY
        options.ids = str(prompts.ids_file(models, suite.text)) if suite.text else ""
        found = common.prompts(options)
        assert [len(p) for p in found] == [suite.prompt] * suite.batch
        assert len({tuple(p) for p in found}) == suite.batch
        for system in suite.systems:
            given = [a for a in place.command(replace(system), replace(suite, keep_state=False))
                     if a.startswith("--ids=")]  # fmt: skip
            where = place.peers / "models" / f"prompt-{suite.text}.ids"
            assert given == ([f"--ids={where}"] if suite.text else [])
    textless = [s for s in SUITES if not s.text]
    assert [s.name for s in textless] == ["smollm2-random"]
    usual = SUITE["smollm2-2"]
    assert replace(usual, name="", title="", systems=(), text=0, drawn=True) == replace(
        textless[0], name="", title="", systems=()
    )
    assert "--drawn" in textless[0].arguments() and "--drawn" not in usual.arguments()
    assert {s.peer for s in textless[0].systems} == {OURS}


def test_prompts_are_pieces_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.ids"
    file.write_text("5 6 7 8 9\n", encoding="ascii")
    options = SimpleNamespace(ids=str(file), prompt=2, batch=2, vocabulary=10)
    assert common.prompts(options) == [[5, 6], [7, 8]]
    options.batch = 3
    with pytest.raises(SystemExit, match="5 token ids, not 6"):
        common.prompts(options)


def test_a_kept_state_is_of_its_prompt(tmp_path: Path) -> None:
    """Another text has another file of llama.cpp's KV."""
    place = measure.Place(tmp_path, tmp_path / "results.jsonl")
    (tmp_path / "models").mkdir()
    suite = SUITE["smollm2-8k"]
    assert suite.keep_state
    system = next(s for s in suite.systems if s.peer == "llama.cpp")
    ids = prompts.ids_file(tmp_path / "models", suite.text)
    names = []
    for text in ("1 2 3\n", "1 2 4\n", "1 2 3\n"):
        ids.write_text(text, encoding="ascii")
        names += [a for a in place.command(system, suite) if a.startswith("--state=")]
    names += [a for a in place.command(system, replace(suite, text=0)) if a.startswith("--state=")]
    assert names[0] == names[2] and len(set(names)) == 3
    assert all(name.startswith(f"--state={tmp_path}/models/{system.model}.8064.") for name in names)


def test_a_peer_is_told_what_its_cache_keeps(tmp_path: Path) -> None:
    """llama.cpp by an option, with a kept state of its own; ours is compiled with it.  No line
    compares such a system with one that comes as it is."""
    place = measure.Place(tmp_path, tmp_path / "results.jsonl")
    suite = replace(SUITE["smollm2-8k"], text=0)
    told = [s for s in suite.systems if s.kv]
    assert [s.name for s in told] == ["zerolayer Q4_0, KV q8_0", "llama.cpp Q4_0, KV q8_0"]
    ours, theirs = told
    assert ours.artifact == "smollm2-135m-q4_0-q8_0.zla"
    assert not [a for a in place.command(ours, suite) if a.startswith("--kv")]
    assert "--kv=q8_0" in place.command(theirs, suite)
    usual = replace(theirs, kv="")
    states = [a for s in (theirs, usual) for a in place.command(s, suite) if "--state=" in a]
    assert len(set(states)) == 2
    assert not [line for line in LINES for s in told if results.allowed(line, s)]


def test_our_runner_decodes_what_the_command_does(tiny_artifact: Path, tmp_path: Path) -> None:
    """From the ids of a file."""
    ids = tmp_path / "x.ids"
    ids.write_text("7 3 5 11 2\n", encoding="ascii")
    runner = [sys.executable, str(ROOT / "bench" / "runners" / "ours.py")]
    options = [f"--model={tiny_artifact}", "--prompt=4", "--new=5", f"--ids={ids}"]
    out = measure.measured([*runner, *options, "--vocabulary=100", "--calls"], 1)
    words = [sys.executable, str(tiny_artifact), "generate", "--tokens", "7,3,5,11", "-n", "6"]
    done = subprocess.run(
        [*words, "--ignore-eos", "--json"], check=True, capture_output=True, text=True
    )
    assert out.get("ids", out) == json.loads(done.stdout)["tokens"]


def test_our_runner_decodes_drawn_tokens(tiny_artifact: Path) -> None:
    """As a prompt of the same ids would: what it chose last follows from all but the last."""
    options = SimpleNamespace(**common.DEFAULTS | {"new": 5, "vocabulary": 100, "drawn": True})
    ids, fed = common.prompt_ids(4, 0, 100), common.drawn(options)
    assert len(set(fed)) == 5 and common.drawn(SimpleNamespace(**common.DEFAULTS)) == []
    runner = [sys.executable, str(ROOT / "bench" / "runners" / "ours.py"), "--drawn"]
    words = [f"--model={tiny_artifact}", "--prompt=4", "--new=5", "--vocabulary=100"]
    found = measure.measured([*runner, *words], 1)["ids"]
    for i in (0, 2, 5):
        prompt = ",".join(map(str, [*ids, *fed[:i]]))
        command = [sys.executable, str(tiny_artifact), "generate", "--tokens", prompt, "-n", "1"]
        done = subprocess.run(
            [*command, "--ignore-eos", "--json"], check=True, capture_output=True, text=True
        )
        assert json.loads(done.stdout)["tokens"] == [found[i]]
