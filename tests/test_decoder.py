"""The decoder graph: its contract with the passes, weight accounting, block-format weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from ort_run import logits_of, run_graph
from zerolayer.compiler.frontends.config import Layer, ModelConfig, Rope
from zerolayer.compiler.frontends.decoder import OPSET, build_decoder, expected_weights
from zerolayer.compiler.frontends.weights import Weight, lazy_tensor, mapped_tensor
from zerolayer.compiler.graph import domain
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError
from zerolayer.targets import formats

ROPE = Rope(tuple(float(10_000.0 ** (-i / 8)) for i in range(8)))
CONFIG = ModelConfig(
    architecture="test",
    vocab_size=50,
    hidden_size=64,
    intermediate_size=96,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    max_context=64,
    layers=(Layer(), Layer(window=5)),
    ropes=(ROPE,),
)
EVERYTHING = replace(
    CONFIG, qk_norm=True, post_norms=True, qkv_bias=True, attention_out_bias=True, mlp_bias=True,
    logit_softcap=30.0, attention_softcap=50.0, embedding_scale=8.0, logit_scale=0.5,
    layers=(Layer(window=5), Layer(rope=1), Layer(rope=None)),
    ropes=(ROPE, replace(ROPE, attention_factor=1.25, interleaved=True)),
)  # fmt: skip


def plain(config: ModelConfig, seed: int = 0) -> dict[str, Weight]:
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_weights(config).items():
        array = (rng.standard_normal(shape) * 0.2).astype(np.float32)
        weights[name] = Weight(name, "F32", shape, ir.Tensor(array, name=name), f"file.{name}")
    return weights


def test_interface_places_and_provenance() -> None:
    model = build_decoder(EVERYTHING, plain(EVERYTHING), "tiny")
    graph = model.graph
    assert model.opset_imports == {"": OPSET}
    described: list[Any] = [(v.name, v.dtype, list(v.shape or ())) for v in graph.inputs]
    assert described == [
        ("tokens", ir.DataType.INT64, ["T"]),
        ("positions", ir.DataType.INT64, ["T"]),
    ]
    assert [(v.name, v.dtype, list(v.shape or ())) for v in graph.outputs] == [
        ("logits", ir.DataType.FLOAT, ["T", 50])
    ]
    names = [node.name for node in graph]
    assert len(set(names)) == len(names)
    places = {
        "embed", "layers.0.attn_norm", "layers.2.attn.q", "layers.1.attn.k_norm",
        "layers.0.attn.attention", "layers.0.attn_post_norm", "layers.1.mlp.down",
        "layers.1.mlp.add", "final_norm", "lm_head", "logits", "mask.5",
    }  # fmt: skip
    assert places <= set(names)
    for node in graph:
        assert [o.name for o in node.outputs] == [node.name]
        assert all(o.shape is not None and o.dtype is not None for o in node.outputs)
    for name in expected_weights(EVERYTHING):
        assert graph.initializers[name].metadata_props == {
            "source": f"file.{name}", "format": "F32",
        }  # fmt: skip
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_attention_sees_what_it_should() -> None:
    """A change at one position reaches later ones, through the window layer only its window."""
    config = replace(CONFIG, layers=(Layer(window=5),))
    model = build_decoder(config, plain(config), "tiny")
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, 50, 20)]
    changed = [*tokens[:8], (tokens[8] + 1) % 50, *tokens[9:]]
    same = np.isclose(logits_of(model, tokens), logits_of(model, changed), atol=1e-6).all(axis=1)
    assert [i for i in range(20) if not same[i]] == [8, 9, 10, 11, 12]
    full = replace(CONFIG, layers=(Layer(),))
    model = build_decoder(full, plain(full), "tiny")
    same = np.isclose(logits_of(model, tokens), logits_of(model, changed), atol=1e-6).all(axis=1)
    assert [i for i in range(20) if not same[i]] == list(range(8, 20))


def test_positions_are_relative() -> None:
    """Rotary attention depends on distances only."""
    model = build_decoder(EVERYTHING, plain(EVERYTHING), "tiny")
    tokens = np.arange(12, dtype=np.int64)
    outputs = [
        run_graph(model, {"tokens": tokens, "positions": tokens + shift})[0] for shift in (0, 40)
    ]
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_block_formats_are_decoded_in_the_graph(kind: str) -> None:
    config = replace(CONFIG, hidden_size=256, intermediate_size=256, tied_embeddings=True)
    weights: dict[str, Weight] = {}
    decoded: dict[str, Weight] = {}
    rng = np.random.default_rng(5)
    for name, weight in plain(config).items():
        if len(weight.shape) == 1 or weight.shape[1] % 256:
            weights[name] = decoded[name] = weight
            continue
        row_bytes = formats.row_bytes(kind, weight.shape[1])
        raw = rng.integers(0, 256, (weight.shape[0], row_bytes), np.uint8)
        set_scales(raw, kind)
        weights[name] = Weight(name, kind, weight.shape, ir.Tensor(raw, name=name), name)
        array = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
        decoded[name] = Weight(name, "F32", weight.shape, ir.Tensor(array, name=name), name)
    model = build_decoder(config, weights, "blocks")
    embedding = model.graph.initializers["embed.weight"]
    assert embedding.dtype == ir.DataType.UINT8
    assert {u.node.op_type for u in embedding.uses()} == {"Gather", f"Dequantize_{kind}"}
    domain.attach_functions(model)
    tokens = [int(t) for t in rng.integers(0, 50, 9)]
    want = logits_of(build_decoder(config, decoded, "plain"), tokens)
    assert np.abs(logits_of(model, tokens) - want).max() < 1e-5 * np.abs(want).max()


def set_scales(raw: Any, kind: str) -> None:
    """Give every block of random bytes small float16 scales at the place its format keeps them."""
    block_bytes, at, count = {"Q8_0": (34, 0, 1), "Q4_1": (20, 0, 2), "Q6_K": (210, 208, 1)}[kind]
    blocks = raw.reshape(raw.shape[0], -1, block_bytes)
    scale = np.full(count, 0.003, np.float16).view(np.uint8)
    blocks[:, :, at : at + 2 * count] = scale


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"layers": ()}, "no layers"),
    "zero": ({"vocab_size": 0}, "vocab_size is 0"),
    "heads": ({"n_kv_heads": 3}, "3 key/value heads"),
    "rope too wide": ({"head_dim": 8}, "rotates 16 of the 8"),
    "rope index": ({"layers": (Layer(rope=2),)}, "names rope 2"),
    "window": ({"layers": (Layer(window=0),)}, "window of 0"),
    "rope nan": ({"ropes": (Rope((float("nan"),)),)}, "not a finite number"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_contradictory_sizes_are_named(name: str) -> None:
    changes, word = BAD[name]
    with pytest.raises(InputFileError, match=word):
        build_decoder(replace(CONFIG, **changes), {}, "tiny")


def test_every_weight_is_accounted_for() -> None:
    weights = plain(CONFIG)

    def message(edited: Mapping[str, Weight]) -> str:
        with pytest.raises(InputFileError) as caught:
            build_decoder(CONFIG, edited, "tiny")
        assert caught.value.where == "tiny"
        return caught.value.one_line()

    name = "layers.1.attn.o.weight"
    assert name in message({k: v for k, v in weights.items() if k != name})
    extra = weights[name].renamed("layers.1.attn.o.bias")
    text = message({**weights, "layers.1.attn.o.bias": extra})
    assert "layers.1.attn.o.bias" in text and f"file.{name}" in text
    text = message({**weights, name: weights[name].rows(0, 63, name)})
    assert "[63, 64]" in text and "[64, 64]" in text and "[rows 0:63]" in text


def test_weight_transforms(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    path = tmp_path / "w.bin"
    path.write_bytes(b"abc" + array.tobytes())
    tensor = mapped_tensor(path, 3, ir.DataType.FLOAT, (4, 6), "w")
    weight = Weight("w", "F32", (4, 6), tensor, "file.w")
    part = weight.transposed("t").rows(1, 3, "p")
    assert (part.shape, part.source, part.size) == ((2, 4), "file.w[transposed][rows 1:3]", 8)
    np.testing.assert_array_equal(part.tensor.numpy(), array.T[1:3])
    assert part.tensor.tobytes() == array.T[1:3].tobytes()
    np.testing.assert_array_equal(weight.plus_one("n").tensor.numpy(), array + 1)
    with pytest.raises(InputFileError, match="rows 3:5"):
        weight.rows(3, 5, "x")
    blocks = Weight("b", "Q8_0", (4, 32), mapped_tensor(path, 0, ir.DataType.UINT8, (2, 34), "b"),
                    "file.b")  # fmt: skip
    with pytest.raises(UnsupportedError, match="Q8_0"):
        blocks.transposed("t")
    assert blocks.rows(1, 2, "r").tensor.shape.numpy() == (1, 34)


def test_nothing_is_read_before_it_is_used() -> None:
    read: list[str] = []
    weights = {}
    for name, shape in expected_weights(CONFIG).items():

        def load(name: str = name, shape: tuple[int, ...] = shape) -> Any:
            read.append(name)
            return np.zeros(shape, np.float32)

        tensor = lazy_tensor(load, ir.DataType.FLOAT, shape, name)
        weights[name] = Weight(name, "F32", shape, tensor, name)
    model = build_decoder(CONFIG, weights, "tiny")
    assert read == []
    logits_of(model, [1, 2, 3])
    assert set(read) == set(weights)
