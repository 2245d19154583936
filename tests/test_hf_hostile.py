"""Damaged and hostile Hugging Face and ONNX files give one clear error, never a traceback."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as save_tensors
from tiny_models import make_model
from zerolayer.compiler.frontends import load_model
from zerolayer.compiler.frontends.json_file import parse_json_object
from zerolayer.compiler.frontends.safetensors_file import open_safetensors
from zerolayer.runtime_stub.errors import InputFileError, ZerolayerError

FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from([0, 1, -1, 2**31, 2**32, 2**63, 2**64, "", "F32", "silu", [], {}]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=6,
)


@contextmanager
def only_clear_errors() -> Iterator[None]:
    """Whatever happens inside ends well or in an error for the user."""
    try:
        yield
    except ZerolayerError as error:
        assert error.what
        assert "\n" not in error.one_line()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile") / "llama"
    make_model("llama", directory, num_hidden_layers=1)
    return directory


@contextmanager
def replaced(path: Path, data: bytes) -> Iterator[None]:
    """``path`` holds ``data`` for a while."""
    old = path.read_bytes() if path.is_file() else None
    path.write_bytes(data)
    try:
        yield
    finally:
        if old is None:
            path.unlink()
        else:
            path.write_bytes(old)


# ---- JSON


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "not JSON"),
        (b"[1]", "not an object"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "overflows"),
        (b'{"a": 99999999999999999999999}', "64 bits"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "64 bits"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "deeper"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "deeper"),
        (b'{"a": 1} x', "not JSON"),
    ],
)
def test_bad_json_is_named(data: bytes, word: str) -> None:
    with pytest.raises(InputFileError, match=word):
        parse_json_object(data, "here")


def test_huge_integers_only_where_asked_for() -> None:
    assert parse_json_object(b'{"a": %d}' % 10**30, "here", huge=True) == {"a": 1e30}
    with pytest.raises(InputFileError, match="64 bits"):
        parse_json_object(b'{"a": ' + b"9" * 41 + b"}", "here", huge=True)


@FUZZ
@given(st.binary(max_size=200))
def test_any_bytes_as_json(data: bytes) -> None:
    with only_clear_errors():
        parse_json_object(data, "here")


# ---- safetensors


def header(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: Any, begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = header({"a": entry([2], 0, 8), "b": entry([1, 2], 8, 16)}, bytes(16))
BAD_SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "header of -1"),
    "short": (b"\x01\x00", "header of -1"),
    "header past the end": (header({}, length=10**6), "header of 1000000"),
    "header of 2^63": (header({}, length=2**63), "header of"),
    "not json": (header(b"{nothing}"), "not JSON"),
    "list": (header(b"[1,2,3]"), "not a JSON object"),
    "hole before": (header({"a": entry([2], 4, 12)}, bytes(12)), "hole"),
    "hole between": (header({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)), "hole"),
    "overlap": (header({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)), "overlap"),
    "trailing": (header({"a": entry([2], 0, 8)}, bytes(9)), "its tensors at"),
    "truncated": (header({"a": entry([2], 0, 8)}, bytes(7)), "its tensors at"),
    "size": (header({"a": entry([3], 0, 8)}, bytes(8)), "needs 12 bytes"),
    "overflow": (header({"a": entry([2**62, 2**62], 0, 8)}, bytes(8)), "needs"),
    "negative": (header({"a": entry([-2], 0, 8)}, bytes(8)), "shape"),
    "bool": (header({"a": entry([True], 0, 4)}, bytes(4)), "shape"),
    "rank": (header({"a": entry([1] * 9, 0, 4)}, bytes(4)), "shape"),
    "backwards": (header({"a": entry([2], 8, 0)}, bytes(8)), "needs 8 bytes but has -8"),
    "offsets": (header({"a": entry([2], 0, "8")}, bytes(8)), "data_offsets"),  # type: ignore[arg-type]
    "dtype": (header({"a": entry([2], 0, 8, "F31")}, bytes(8)), "F31"),
    "extra key": (header({"a": {**entry([2], 0, 8), "x": 1}}, bytes(8)), "exactly"),
    "name": (header({"a\u0000b": entry([2], 0, 8)}, bytes(8)), "name"),
    "metadata": (header({"__metadata__": {"a": 1}}), "__metadata__"),
    "twice": (
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
               b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BAD_SAFETENSORS))
def test_bad_safetensors_are_named(name: str, tmp_path: Path) -> None:
    data, word = BAD_SAFETENSORS[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(InputFileError) as caught:
        open_safetensors(path)
    assert word in caught.value.what
    assert caught.value.where == str(path)


def test_good_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD)
    assert open_safetensors(path).entries["b"].shape == (1, 2)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    path.write_bytes(save_tensors({"x": array, "empty": np.zeros((0, 3), np.float32)}))
    file = open_safetensors(path)
    np.testing.assert_array_equal(file.tensor("x").numpy(), array)
    assert file.tensor("empty").numpy().shape == (0, 3)


def test_every_truncation_and_flipped_header_byte(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for cut in range(len(GOOD)):
        path.write_bytes(GOOD[:cut])
        with pytest.raises(InputFileError):
            open_safetensors(path)
    for at in range(len(GOOD) - 16):
        for bit in (1, 0x80):
            data = bytearray(GOOD)
            data[at] ^= bit
            path.write_bytes(bytes(data))
            with only_clear_errors():
                open_safetensors(path)


@FUZZ
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]) | st.text(max_size=4),
        JSON_VALUES
        | st.fixed_dictionaries(
            {"dtype": JSON_VALUES | st.just("F16"), "shape": JSON_VALUES | st.just([4]),
             "data_offsets": JSON_VALUES | st.just([0, 8])}
        ),
        max_size=3,
    ),
    st.binary(max_size=16),
)  # fmt: skip
def test_any_safetensors_header(tmp_path: Path, entries: Any, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(entries, data))
    with only_clear_errors():
        open_safetensors(path)


def test_file_that_shrinks_after_the_check(llama: Path) -> None:
    weights = llama / "model.safetensors"
    loaded = load_model(llama)
    tensor = loaded.graph.graph.initializers["lm_head.weight"].const_value
    assert tensor is not None
    with replaced(weights, weights.read_bytes()[:5000]), pytest.raises(InputFileError):
        for value in loaded.graph.graph.initializers.values():
            assert value.const_value is not None
            value.const_value.tobytes()


# ---- whole directories


CONFIG_KEYS = [
    "architectures", "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads",
    "num_hidden_layers", "intermediate_size", "vocab_size", "max_position_embeddings",
    "rms_norm_eps", "hidden_act", "rope_parameters", "rope_scaling", "rope_theta",
    "tie_word_embeddings", "eos_token_id", "bos_token_id", "attention_bias", "model_type",
    "sliding_window", "layer_types", "max_window_layers", "use_sliding_window",
    "sliding_window_pattern", "original_max_position_embeddings", "partial_rotary_factor",
    "attn_logit_softcapping", "query_pre_attn_scalar",
]  # fmt: skip
ROPES = st.fixed_dictionaries(
    {},
    optional={
        "rope_type": st.sampled_from(
            ["default", "linear", "dynamic", "llama3", "yarn", "longrope", "su"]
        )
        | JSON_VALUES,
        **dict.fromkeys(
            ["factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast",
             "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "short_factor",
             "long_factor", "truncate", "original_max_position_embeddings",
             "partial_rotary_factor", "full_attention", "sliding_attention"],
            JSON_VALUES | st.floats(0, 1e30),
        ),
    },
)  # fmt: skip


@FUZZ
@given(
    st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON_VALUES, max_size=3),
    ROPES | st.none(),
    st.sampled_from([
        None, ("LlamaForCausalLM", "llama"), ("MistralForCausalLM", "mistral"),
        ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3"),
        ("Gemma2ForCausalLM", "gemma2"), ("Gemma3ForCausalLM", "gemma3_text"),
        ("Phi3ForCausalLM", "phi3"), ("GPT2LMHeadModel", "gpt2"),
    ]),
)  # fmt: skip
def test_any_config(
    llama: Path, changes: dict[str, Any], rope: dict[str, Any] | None, row: tuple[str, str] | None
) -> None:
    path = llama / "config.json"
    config = json.loads(path.read_text())
    if row:
        for key in ("attention_bias", "mlp_bias", "pretraining_tp"):
            config.pop(key, None)
        config.update(architectures=[row[0]], model_type=row[1])
    if rope is not None:
        config["rope_parameters"] = rope
    config.update(changes)
    with replaced(path, json.dumps(config).encode()), only_clear_errors():
        load_model(llama)


@FUZZ
@given(
    st.sampled_from(
        ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
         "model.safetensors", "chat_template.jinja"]
    ),
    st.integers(0, 10**6),
    st.binary(max_size=3),
    st.integers(0, 3),
)  # fmt: skip
def test_any_damaged_file(llama: Path, name: str, at: int, insert: bytes, drop: int) -> None:
    path = llama / name
    data = path.read_bytes() if path.is_file() else b"{{ x }}"
    at %= min(len(data), 4096) + 1
    with replaced(path, data[:at] + insert + data[at + drop :]), only_clear_errors():
        load_model(llama)


@FUZZ
@given(
    st.dictionaries(
        st.sampled_from(["bos_token", "eos_token", "chat_template", "add_bos_token"]), JSON_VALUES
    ),
    st.dictionaries(
        st.sampled_from(["eos_token_id", "do_sample", "temperature", "top_k", "top_p"]), JSON_VALUES
    ),
)
def test_any_settings(llama: Path, settings: dict[str, Any], generation: dict[str, Any]) -> None:
    with (
        replaced(llama / "tokenizer_config.json", json.dumps(settings).encode()),
        replaced(llama / "generation_config.json", json.dumps(generation).encode()),
        only_clear_errors(),
    ):
        load_model(llama)


@FUZZ
@given(
    st.recursive(
        JSON_VALUES,
        lambda inner: st.fixed_dictionaries(
            {}, optional={"weight_map": inner, "metadata": inner, "lm_head.weight": inner}
        ),
        max_leaves=4,
    )
)
def test_any_index(llama: Path, index: Any) -> None:
    single = llama / "model.safetensors"
    shard = llama / "shard.safetensors"
    single.rename(shard)
    try:
        data = json.dumps(index).encode()
        with replaced(llama / "model.safetensors.index.json", data), only_clear_errors():
            load_model(llama)
    finally:
        shard.rename(single)


# ---- ONNX


def small_onnx() -> bytes:
    weight = onnx.numpy_helper.from_array(np.ones((3, 4), np.float32), "w")
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="m"),
            onnx.helper.make_node("Relu", ["y"], ["z"], name="r"),
        ],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["B", 3])],
        [onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["B", 4])],
        [weight],
    )
    opset = [onnx.helper.make_opsetid("", 21)]
    data: bytes = onnx.helper.make_model(graph, opset_imports=opset).SerializeToString()
    return data


ONNX = small_onnx()


def test_every_truncation_of_onnx(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(ONNX)
    assert load_model(path).config is None
    for cut in range(len(ONNX)):
        path.write_bytes(ONNX[:cut])
        with only_clear_errors():
            load_model(path)


@FUZZ
@given(st.integers(0, len(ONNX) - 1), st.binary(max_size=3), st.integers(0, 3))
def test_any_damaged_onnx(tmp_path: Path, at: int, insert: bytes, drop: int) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(ONNX[:at] + insert + ONNX[at + drop :])
    with only_clear_errors():
        load_model(path)


@FUZZ
@given(st.binary(max_size=64))
def test_any_bytes_as_a_model(tmp_path: Path, data: bytes) -> None:
    for name in ("m.onnx", "m.gguf", "m"):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ZerolayerError):
            load_model(path)
