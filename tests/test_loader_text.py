"""Streaming text, stop strings, the tokenizer and the chat template of an artifact."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import loader_fake
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerolayer.runtime_stub import template
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError, UsageError
from zerolayer.runtime_stub.stream import Detokenizer, StopMatcher, TextStream
from zerolayer.runtime_stub.template import compile_template
from zerolayer.runtime_stub.text import TextCodec


def decode_bytes(ids: Any) -> str:
    return bytes(ids).decode("utf-8", "replace")


@given(st.text(), st.lists(st.binary(max_size=3), max_size=3))
def test_streamed_pieces_are_the_whole_text(text: str, damage: list[bytes]) -> None:
    data = text.encode() + b"".join(damage)
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.push(b) for b in data]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == decode_bytes(data)


@given(st.text(min_size=1))
def test_no_piece_ends_inside_a_character(text: str) -> None:
    detokenizer = Detokenizer(decode_bytes)
    so_far = ""
    for b in text.encode():
        so_far += detokenizer.push(b)
        assert text.startswith(so_far)


def test_a_character_of_four_bytes_comes_at_its_last() -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert [detokenizer.push(b) for b in "a🙂é".encode()] == ["a", "", "", "", "🙂", "", "é"]


def test_leading_blank_depends_on_what_is_before() -> None:
    # SentencePiece decoders drop the blank of the first piece
    pieces = ["▁Paris", "▁is", "▁nice"]

    def decode(ids: Any) -> str:
        return "".join(pieces[i] for i in ids).replace("▁", " ")[1:]

    alone = Detokenizer(decode)
    assert [alone.push(i) for i in range(3)] == ["Paris", " is", " nice"]
    after = Detokenizer(decode, context=[0])
    assert [after.push(1), after.push(2)] == [" is", " nice"]


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), max_size=40),
)
def test_stop_strings_cut_exactly(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher = StopMatcher(stops)
    given_out, rest = "", text
    hits = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    end = min(hits)[1] if hits else len(text)
    for size in sizes:
        piece, rest = rest[:size], rest[size:]
        given_out += matcher.push(piece)
        assert text[:end].startswith(given_out)
    given_out += matcher.push(rest)
    given_out += matcher.finish()
    if not hits:
        assert (given_out, matcher.matched) == (text, "")
    else:
        assert (given_out, matcher.matched) == (text[:end], min(hits)[2])


def test_stop_string_across_tokens_and_characters() -> None:
    written: list[str] = []
    stream = TextStream(decode_bytes, stops=["é!"], write=written.append)
    stopped = [stream.push(b) for b in "caféé!x".encode()]
    assert stopped.index(True) == len("caféé!".encode()) - 1
    assert stream.finish() == "caf" + "é"
    assert "".join(written) == "café"


def test_held_back_text_comes_out_at_the_end() -> None:
    stream = TextStream(decode_bytes, stops=["END"])
    for b in b"the EN":
        assert not stream.push(b)
    assert stream.text == "the "
    assert stream.finish() == "the EN"


# tokenizer --------------------------------------------------------------------------------------


class FakeArtifact:
    path = "fake.zla"

    def __init__(self, **settings: Any) -> None:
        self.manifest = loader_fake.manifest(tokenizer=settings)
        self.members = {
            "tokenizer.json": loader_fake.tokenizer_json(),
            "chat_template.jinja": loader_fake.TEMPLATE.encode(),
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.members)

    def member(self, name: str) -> bytes:
        return self.members[name]


def codec(artifact: Any) -> TextCodec:
    import tokenizers.tokenizers  # noqa: F401 (stands for the vendored module)

    return TextCodec(artifact)


def test_bos_exactly_once() -> None:
    c = codec(FakeArtifact())
    assert c.encode("hi", raw=True) == [loader_fake.BOS, *b"hi"]
    assert c.encode("<bos>hi", raw=True) == [loader_fake.BOS, *b"hi"]
    assert c.encode("<bos>hi", raw=False) == [loader_fake.BOS, *b"hi"]
    assert c.encode("hi", raw=False) == [*b"hi"]
    assert codec(FakeArtifact(add_bos=False)).encode("hi", raw=True) == [*b"hi"]


def test_decode_leaves_special_tokens_out() -> None:
    c = codec(FakeArtifact())
    assert c.decode([*"é".encode(), loader_fake.EOS]) == "é"
    assert c.special_id("<eos>") == loader_fake.EOS
    assert c.special_id("e") is None


def test_bad_text_and_bad_tokenizer() -> None:
    c = codec(FakeArtifact())
    with pytest.raises(UsageError, match="not valid UTF-8"):
        c.encode("a\udcff", raw=True)
    for bad in (b"{}", b"\xff", b"", b'{"version":"1.0","model":{"type":"BPE"}}'):
        artifact = FakeArtifact()
        artifact.members["tokenizer.json"] = bad
        with pytest.raises(InputFileError, match=r"tokenizer\.json"):
            codec(artifact)
    none = FakeArtifact()
    none.manifest["tokenizer"] = None
    with pytest.raises(UnsupportedError, match="token ids only"):
        codec(none)


def test_template_is_rendered_as_transformers_renders_it() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{%- if messages[0]['role'] != 'system' %}\n  {{- 'S: default\\n' }}\n{%- endif %}\n"
        "{% for m in messages %}\n"
        "    {% if loop.index > 3 %}{% break %}{% endif %}\n"
        "{{ m.role }}: {{ m.content | trim }} {{ {'a<b': 'é'} | tojson }}\n"
        "{% generation %}x{{ m['content']|length }}{% endgeneration %}\n"
        "{% endfor %}\n{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}\n"
        "{% if add_generation_prompt %}A:{% endif %}{{ missing }}"
    )
    messages = [{"role": r, "content": f"  {r} <&> \n"} for r in ("user", "assistant") * 2]
    theirs = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, bos_token="<bos>"
    )
    artifact = FakeArtifact()
    artifact.members["chat_template.jinja"] = source.encode()
    assert codec(artifact).render(messages) == theirs[0][0]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute"),
        ("{% for m in %}", "chat template"),
        ("{{ messages.append(1) }}", "not safely callable|access to attribute|append"),
    ],
)
def test_bad_templates_are_errors(source: str, says: str) -> None:
    artifact = FakeArtifact()
    artifact.members["chat_template.jinja"] = source.encode()
    with pytest.raises(InputFileError, match=says):
        codec(artifact).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "end"),
        ("{{ lipsum(100000) }}", "end within"),
        ("{{ 'a' * 10**10 }}", "1024 MiB"),
        ("{{ '%99999999999d'|format(1) }}", "1024 MiB"),
        ("{% set n = namespace(x='aaaaaaaa') %}{% for i in range(40) %}"
         "{% set n.x = n.x ~ n.x %}{% endfor %}", "1024 MiB"),
    ],
)  # fmt: skip
def test_templates_have_bounds(source: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(template.bounded, "__defaults__", (0.5,))
    if "end" not in says:
        monkeypatch.setattr(template.bounded, "__defaults__", (60.0,))
    artifact = FakeArtifact()
    artifact.members["chat_template.jinja"] = source.encode()
    with pytest.raises(InputFileError, match=says):
        codec(artifact).render([{"role": "user", "content": "x"}])
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    for _ in range(1000):  # nothing arrives late
        assert template.bounded(lambda: 1, "x", 0.001) == 1


def test_strftime_now_is_there() -> None:
    year = compile_template("{{ strftime_now('%Y') }}", "x").render()
    assert len(year) == 4 and year.isdigit()


def test_fake_tokenizer_is_bytes(tmp_path: Path) -> None:
    c = codec(FakeArtifact())
    text = "Aé🙂\n"
    assert c.encode(text, raw=False) == list(text.encode())
