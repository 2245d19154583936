"""The pass list: structure of the result, and numbers of the step against the frontend's graph."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decoders import CONFIGS, VOCAB, config, decoder
from zerolayer.compiler.frontends.config import Layer
from zerolayer.compiler.graph import domain
from zerolayer.compiler.graph.check import check_graph
from zerolayer.compiler.graph.dump import load_dump
from zerolayer.compiler.graph.execute import run, run_layerwise
from zerolayer.compiler.graph.feeds import frontend_feeds, next_caches, step_feeds
from zerolayer.compiler.graph.places import residual_taps
from zerolayer.compiler.passes import (
    PASSES,
    PassOptions,
    apply_pass,
    check_passes,
    edit,
    run_passes,
)
from zerolayer.compiler.passes.edit import dims, value_like
from zerolayer.compiler.passes.options import Activations, Fusion, Quantize
from zerolayer.runtime_stub.errors import InputFileError, NumericsError, UnsupportedError
from zerolayer.targets.kernels import KernelQuery

EXACT = PassOptions(activations="f32", block_size=4)
TOKENS = [5, 90, 3, 3, 17, 60, 2, 41, 8, 77, 30]
VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Identity"}
STANDARD = {
    "RMSNormalization", "LayerNormalization", "Add", "Mul", "Swish", "Gelu", "Relu", "Tanh",
    "Gather",
}  # fmt: skip


def ops(model: ir.Model) -> Counter[str]:
    return Counter(n.op_type for n in model.graph)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# --- structure -----------------------------------------------------------------------------------


def test_the_list_is_named_once_and_reasoned() -> None:
    names = [p.name for p in PASSES]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", n) for n in names)
    assert all(p.why for p in PASSES)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fusion", ["conservative", "balanced"])
def test_final_graphs_hold_only_documented_operators(name: str, fusion: Fusion) -> None:
    model = decoder(CONFIGS[name], ("Q8_0",))
    graph = run_passes(model, PassOptions(fusion=fusion))
    for node in graph.graph:
        known = node.op_type in STANDARD | VIEWS if not node.domain else True
        assert known and node.domain in ("", domain.DOMAIN), node
        if node.domain:
            domain.parse(node.op_type)
    assert not any(op in VIEWS for op in ops(graph))
    inputs = [v.name for v in graph.graph.inputs]
    assert inputs[:5] == ["tokens", "positions", "seq_starts", "block_table", "logit_rows"]
    assert inputs[5:] == [f"{r}_cache.{i}" for i in range(2) for r in "kv"]
    outputs = {v.name: dims(v) for v in graph.graph.outputs}
    assert outputs.pop("logits") == ("R", VOCAB)
    assert list(outputs) == [f"{r}_cache.{i}.out" for i in range(2) for r in "kv"]
    fused = re.compile("Fused|LinearAdd|Gated|ActLinear|Qkv|(Norm|Attention)QuantizeInt8")
    assert any(fused.search(op) for op in ops(graph)) == (fusion == "balanced")


def test_what_balanced_fusion_makes_of_a_llama() -> None:
    graph = run_passes(decoder(CONFIGS["llama"], ("Q4_1", "Q8_0")), PassOptions())
    found = Counter(domain.parse(n.op_type).base if n.domain else n.op_type for n in graph.graph)
    assert found == {
        "Embed": 1, "RopeTable": 1, "RmsNormQuantizeInt8": 5, "QkvRopeCache": 2,
        "PagedAttentionQuantizeInt8": 2, "LinearAdd": 4, "GatedLinearQuantizeInt8": 2, "Gather": 1,
        "GatherInt8": 1, "Linear": 1,
    }  # fmt: skip
    assert [n.name for n in graph.graph][:6] == [
        "embed", "rope.0", "layers.0.attn_norm", "layers.0.attn.qkv", "layers.0.attn.attention",
        "layers.0.attn.add",
    ]  # fmt: skip


def test_what_balanced_fusion_makes_of_a_gpt2() -> None:
    graph = run_passes(decoder(CONFIGS["gpt2"], ("F32",)), PassOptions())
    found = Counter(n.op_type for n in graph.graph)
    assert found == {
        "Embed_F32": 2, "Add": 1, "LayerNormalization": 5, "QkvRopeCache_F32_F32_F32_f32_norope": 2,
        "PagedAttention": 2, "LinearAdd_F32_f32": 4, "ActLinear_F32_f32": 2, "Gather": 2,
        "Linear_F32_f32": 1,
    }  # fmt: skip


UPSTREAM = {
    "llama": {"layers.1.attn.add", "layers.1.mlp_norm", "layers.1.mlp.gated", "layers.1.mlp.add"},
    "gpt2": {"layers.1.attn.add", "layers.1.mlp_norm", "layers.1.mlp.act", "layers.1.mlp.add"},
    "gemma2": {
        "layers.1.attn.o", "layers.1.attn_post_norm", "layers.1.attn.add", "layers.1.mlp_norm",
        "layers.1.mlp.gated", "layers.1.mlp.down", "layers.1.mlp_post_norm", "layers.1.mlp.add",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", UPSTREAM)
@pytest.mark.parametrize("format", ["Q8_0", "F32"])
def test_the_last_layer_is_computed_for_rows_with_logits_only(name: str, format: str) -> None:
    graph = run_passes(decoder(CONFIGS[name], (format,)), PassOptions())
    narrow = {n.name or "" for n in graph.graph if dims(n.outputs[0])[0] == "R"}
    assert UPSTREAM[name] <= narrow
    assert not any(n.startswith("layers.0.") or ".qkv" in n for n in narrow)
    # k and v of every token are written: later steps attend to them
    assert {dims(n.outputs[0])[0] for n in graph.graph if n.op_type == "PagedAttention"} <= {"T"}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fusion", ["conservative", "balanced"])
def test_picking_rows_early_changes_no_number(name: str, fusion: Fusion) -> None:
    """A ragged batch, against the same graph before the pass."""
    model = decoder(CONFIGS[name], ("Q8_0", "F32"))
    at = next(i for i, p in enumerate(PASSES) if p.name == "upstream-gather")
    options = replace(EXACT, fusion=fusion, activations="int8")
    before = model.clone()
    edit.name_nodes(before)
    for step in PASSES[:at]:
        apply_pass(before, step, options)
    after = before.clone()
    apply_pass(after, PASSES[at], options)
    assert sum(n.op_type.startswith("Gather") for n in after.graph) >= 2
    for rows in ([0, 6, 7, 10], [10]):
        sequences = [TOKENS[:7], TOKENS[3:4], TOKENS[2:5]]
        feeds = step_feeds(before, sequences, blocks=[[9, 1], [5], [0, 7]], logit_rows=rows)
        expected = run(before, feeds)
        found = run(after, feeds)
        for value in expected:  # onnxruntime's products depend on how many rows there are
            np.testing.assert_allclose(found[value], expected[value], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("activations", ["int8", "f32"])
def test_one_layer_is_the_first_and_the_last(activations: Activations) -> None:
    one = replace(CONFIGS["llama"], layers=CONFIGS["llama"].layers[:1])
    model = decoder(one, ("F32",))
    options = replace(EXACT, activations=activations)
    graph = run_passes(model, options)
    assert "layers.0.mlp.gated" in {n.name for n in graph.graph if dims(n.outputs[0])[0] == "R"}
    found = run(graph, step_feeds(graph, [TOKENS], logit_rows=[10]), ["logits"])["logits"]
    expected = run(model, frontend_feeds(TOKENS))["logits"][10:]
    assert error(found, expected) < (2e-6 if activations == "f32" else 0.05)


def test_only_a_decoders_rows_move() -> None:
    """A graph that happens to have such an input keeps its shapes."""
    x = value_like("x", ir.DataType.FLOAT, ["T", 8])
    rows = value_like("logit_rows", ir.DataType.INT64, ["N"])
    weight = ir.Value(name="w", const_value=ir.tensor(np.eye(8, dtype=np.float32), name="w"),
                      type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([8, 8]))  # fmt: skip
    y = edit.new_node("", "Gemm", [x, weight], {"transB": 1}, "gemm",
                      [value_like("h", ir.DataType.FLOAT, ["T", 8])])  # fmt: skip
    picked = edit.new_node("", "Gather", [y.outputs[0], rows], {"axis": 0}, "pick",
                           [value_like("y", ir.DataType.FLOAT, ["N", 8])])  # fmt: skip
    graph = ir.Graph([x, rows], picked.outputs, nodes=[y, picked], initializers=[weight],
                     opset_imports={"": 24}, name="plain")  # fmt: skip
    found = run_passes(ir.Model(graph, ir_version=11), EXACT).graph
    assert [n.op_type for n in found] == ["Linear_F32_f32", "Gather"]
    assert dims(found.outputs[0]) == ("N", 8)


def test_what_a_target_cannot_pick_stays() -> None:
    def supports(query: KernelQuery) -> str | None:
        return "no" if query.op == "GatherInt8" else None

    graph = run_passes(decoder(CONFIGS["llama"], ("Q8_0",)), PassOptions(supports=supports))
    found = ops(graph)
    assert found["Gather"] == 1 and found["GatherInt8"] == 0
    (rows,) = (v for v in graph.graph.inputs if v.name == "logit_rows")
    assert len(rows.uses()) == 1
    assert found["PagedAttentionQuantizeInt8"] == 2


def test_conservative_readers_share_one_quantizer() -> None:
    graph = run_passes(decoder(CONFIGS["llama"], ("Q8_0",)), PassOptions(fusion="conservative"))
    readers = Counter(
        len({u.node for o in n.outputs for u in o.uses()})
        for n in graph.graph
        if n.op_type == "QuantizeInt8"
    )
    # q k v; o; gate up; down in each of two layers, and the output projection
    assert readers == {3: 2, 1: 5, 2: 2}


def test_taps_keep_their_names_through_every_pass() -> None:
    model = decoder(CONFIGS["gemma2"], ("Q8_0",))
    taps = residual_taps(model)
    assert taps == ("embed", "layers.0.mlp.add", "layers.1.mlp.add")
    assert residual_taps(run_passes(model, PassOptions())) == taps
    assert residual_taps(run_passes(model, PassOptions(fusion="conservative"))) == taps


def test_the_frontend_graph_is_left_alone() -> None:
    model = decoder(CONFIGS["qwen3"], ("BF16",))
    before = run(model, frontend_feeds(TOKENS))["logits"]
    names = [n.name for n in model.graph]
    run_passes(model, PassOptions(quantize="int4"))
    assert [n.name for n in model.graph] == names
    np.testing.assert_array_equal(run(model, frontend_feeds(TOKENS))["logits"], before)


def test_fusion_asks_the_target() -> None:
    """A target without a fused kernel gets the unfused operators; the question names sizes."""
    asked: list[KernelQuery] = []

    def supports(query: KernelQuery) -> str | None:
        asked.append(query)
        return "no" if query.op in ("QkvRopeCache", "LinearAdd") else None

    model = decoder(CONFIGS["llama"], ("Q8_0",))
    found = ops(run_passes(model, PassOptions(supports=supports)))
    assert found["Rope"] == 4 and found["CacheWrite"] == 4 and found["Add"] == 4
    assert found["GatedLinearQuantizeInt8_Q8_0_int8"] == 2
    query = next(q for q in asked if q.op == "QkvRopeCache")
    assert query.formats == ("Q8_0",) * 3 and query.activations == "int8"
    constants = dict(query.constants)
    assert constants["K"] == 64 and constants["head_dim"] == 16 and constants["rotary_dim"] == 16


def test_activations_fall_to_the_next_wider_kind_that_has_a_kernel() -> None:
    def supports(query: KernelQuery) -> str | None:
        return "no" if query.activations == "int8" else None

    options = PassOptions(supports=supports, fusion="conservative")
    kinds = {
        (s.formats[0], s.activations)
        for n in run_passes(decoder(CONFIGS["llama"], ("Q8_0", "BF16", "F16")), options).graph
        if n.domain and (s := domain.parse(n.op_type)).base == "Linear"
    }
    assert kinds == {("Q8_0", "f32"), ("BF16", "bf16"), ("F16", "f32")}


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fusion", ["conservative", "balanced"])
def test_chunks_of_a_step_equal_the_whole_sequence(name: str, fusion: Fusion) -> None:
    """Prefill in two chunks, then decode token by token, through one paged cache."""
    model = decoder(CONFIGS[name], ("F32",))
    expected = run(model, frontend_feeds(TOKENS))["logits"]
    graph = run_passes(model, replace(EXACT, fusion=fusion))
    blocks, caches, rows, at = [[4, 0, 2]], None, [], 0
    for n in (4, 3, 1, 1, 2):
        feeds = step_feeds(graph, [TOKENS[at : at + n]], starts=[at], blocks=blocks, caches=caches)
        results = run(graph, feeds)
        rows.append(results["logits"])
        caches, at = next_caches(results), at + n
    assert at == len(TOKENS)
    assert error(np.concatenate(rows), expected) < 2e-6


def test_a_ragged_batch_equals_its_sequences() -> None:
    model = decoder(CONFIGS["gemma3"], ("BF16",))
    graph = run_passes(model, EXACT)
    sequences = [TOKENS[:7], TOKENS[3:4], TOKENS[2:]]
    feeds = step_feeds(
        graph, sequences, blocks=[[9, 1], [5], [0, 7, 3]], logit_rows=[0, 6, 7, 8, 16]
    )
    found = run(graph, feeds, ["logits"])["logits"]
    expected = [run(model, frontend_feeds(s))["logits"] for s in sequences]
    whole = np.concatenate(expected)
    assert error(found, whole[[0, 6, 7, 8, 16]]) < 2e-6


@pytest.mark.parametrize("formats", [("Q4_1", "Q8_0"), ("BF16",), ("F16",), ("Q5_0", "Q4_0")])
def test_folded_weights_are_the_bodies_numbers(formats: tuple[str, ...]) -> None:
    graph = run_passes(decoder(CONFIGS["llama"], formats), PassOptions(block_size=4))
    feeds = step_feeds(graph, [TOKENS])
    found = run(graph, feeds, ["logits"])["logits"]
    np.testing.assert_array_equal(
        run(graph, feeds, ["logits"], fold_weights=False)["logits"], found
    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_layer_by_layer_equals_the_whole_graph(name: str) -> None:
    model = decoder(CONFIGS[name], ("Q8_0", "BF16"))
    feeds = [frontend_feeds(TOKENS), frontend_feeds(TOKENS[:2])]
    taps = residual_taps(model)
    for feed, result in zip(feeds, run_layerwise(model, feeds), strict=True):
        whole = run(model, feed, [*taps, "logits"])
        for value in (*taps, "logits"):
            np.testing.assert_allclose(result[value], whole[value], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["interleaved-tied", "gemma2", "gemma3", "gpt2"])
def test_check_passes_accepts_every_decoder(name: str) -> None:
    reports = check_passes(decoder(CONFIGS[name], ("F32",)), PassOptions(block_size=4))
    assert [r.name for r in reports] == [p.name for p in PASSES]
    assert all(r.error <= r.tolerance for r in reports)
    assert sum(r.changed for r in reports) >= 4


@pytest.mark.parametrize(
    ("scheme", "activations"), [("bf16", "bf16"), ("int8", "f32"), ("int4", "int8")]
)
def test_check_passes_of_quantizing(scheme: Quantize, activations: Activations) -> None:
    options = PassOptions(quantize=scheme, activations=activations)
    model = decoder(CONFIGS["bias-everywhere"], ("F32",))
    reports = {r.name: r for r in check_passes(model, options)}
    assert 0 < reports["quantize-weights"].error < reports["quantize-weights"].tolerance
    # f32 activations are what the graph had: the pass has nothing to do
    assert reports["quantize-activations"].changed == (activations != "f32")


def test_check_passes_finds_a_pass_that_changes_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerolayer.compiler import passes

    def wrong(model: ir.Model, options: PassOptions) -> None:
        for node in model.graph:
            if node.op_type == "Rope":
                node.attributes["interleaved"] = ir.AttrInt64("interleaved", 1)

    broken = (*PASSES[:4], passes.NamedPass("broken", wrong, "test"), *PASSES[4:])
    monkeypatch.setattr(passes, "PASSES", broken)
    with pytest.raises(NumericsError, match=r"pass broken moves residual\.1"):
        check_passes(decoder(CONFIGS["llama"]), PassOptions())


# --- quantizing weights --------------------------------------------------------------------------


def formats_of(graph: ir.Model) -> dict[str, str]:
    return {
        name: str(v.metadata_props["format"])
        for name, v in graph.graph.initializers.items()
        if len(dims(v)) == 2
    }


def test_int4_keeps_embedding_and_output_at_eight_bits() -> None:
    graph = run_passes(decoder(CONFIGS["llama"], ("BF16",)), PassOptions(quantize="int4"))
    found = formats_of(graph)
    assert found.pop("embed.weight") == "Q8_0" and found.pop("lm_head.weight") == "Q8_0"
    assert set(found.values()) == {"Q4_1"}
    notes = graph.graph.initializers["layers.0.attn.q.weight"].metadata_props
    assert notes["source_format"] == "BF16" and notes["transform"] == "quantized to Q4_1"


def test_weights_with_fewer_bits_are_kept() -> None:
    model = decoder(CONFIGS["llama"], ("Q4_0", "Q8_0", "F16"))
    before = formats_of(run_passes(model, PassOptions()))
    schemes: dict[Quantize, set[str]] = {
        "int8": {"F16"}, "bf16": {"F16"}, "int4": {"F16", "Q8_0"},
    }  # fmt: skip
    for scheme, changed in schemes.items():
        after = formats_of(run_passes(model, PassOptions(quantize=scheme)))
        for name, format in before.items():
            outer = not name.startswith("layers.")
            kept = format not in changed or (outer and format == "Q8_0")
            assert (after[name] == format) == kept, (scheme, name)


def test_rows_that_are_not_whole_blocks_keep_their_format() -> None:
    odd = config(hidden_size=40, intermediate_size=64, head_dim=16)
    graph = run_passes(decoder(odd, ("F32",)), PassOptions(quantize="int8"))
    found = formats_of(graph)
    assert found["layers.0.attn.q.weight"] == "F32" and found["layers.0.mlp.down.weight"] == "Q8_0"
    notes = graph.graph.initializers["layers.0.attn.q.weight"].metadata_props
    assert "40" in notes["not_quantized"]


def test_vectors_are_widened_and_recorded() -> None:
    graph = run_passes(decoder(CONFIGS["gpt2"], ("BF16",)), PassOptions())
    bias = graph.graph.initializers["layers.0.attn.q.bias"]
    assert bias.dtype == ir.DataType.FLOAT and bias.metadata_props["source_format"] == "BF16"
    assert "Cast" not in ops(graph)


# --- dumps ---------------------------------------------------------------------------------------


def test_dumps_open_and_restart(tmp_path: Path) -> None:
    model = decoder(CONFIGS["llama"], ("Q8_0",))
    final = run_passes(model, EXACT, dump=tmp_path)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files[0] == "00-frontend.onnx"
    assert files[1:] == [f"{i:02d}-{p.name}.onnx" for i, p in enumerate(PASSES, 1)]
    for name in files:
        onnx.checker.check_model(onnx.load(tmp_path / name), full_check=False)
        assert (tmp_path / name).stat().st_size < 100_000
    again = load_dump(tmp_path / "00-frontend.onnx", model)
    feeds = frontend_feeds(TOKENS)
    np.testing.assert_array_equal(run(again, feeds)["logits"], run(model, feeds)["logits"])
    restarted = load_dump(tmp_path / files[-1], final)
    step = step_feeds(final, [TOKENS])
    np.testing.assert_array_equal(run(restarted, step)["logits"], run(final, step)["logits"])
    with pytest.raises(InputFileError, match="no weight called"):
        load_dump(tmp_path / files[-1], ir.from_onnx_text(_MATMUL))
    (tmp_path / "bad.onnx").write_bytes(b"\x0a\xff")
    with pytest.raises(InputFileError, match="not an ONNX file"):
        load_dump(tmp_path / "bad.onnx", model)


# --- graphs that are not decoders ----------------------------------------------------------------

_MATMUL = """
<ir_version: 10, opset_import: ["" : 24]>
net (float[batch, seq, 8] x) => (float[batch, seq, 3] y)
<float[8, 6] w, float[6] b, float[6, 3] v> {
  h = MatMul(x, w)
  hb = Add(b, h)
  r = Relu(hb)
  y = MatMul(r, v)
}
"""


def network(text: str) -> ir.Model:
    model = ir.from_onnx_text(text)
    rng = np.random.default_rng(3)
    for value in model.graph.initializers.values():
        assert value.shape is not None
        array = rng.standard_normal(value.shape.numpy()).astype(np.float32)
        value.const_value = ir.tensor(array, name=value.name)
    shapes = {"h": 6, "hb": 6, "r": 6}
    for node in model.graph:
        for v in node.outputs:
            if v.shape is None:
                v.dtype, v.shape = (
                    ir.DataType.FLOAT,
                    ir.Shape(["batch", "seq", shapes[v.name or ""]]),
                )
    return model


def test_matmul_with_constant_weights_becomes_linear() -> None:
    zeros = {name: ", ".join("0" * n) for name, n in (("w", 48), ("b", 6), ("v", 18))}
    text = re.sub(r"\] ([wbv])", lambda m: f"] {m[1]} = {{{zeros[m[1]]}}}", _MATMUL)
    model = network(text)
    graph = run_passes(model, PassOptions(fusion="conservative"))
    assert ops(graph) == {"Linear_F32_f32": 2, "Relu": 1}
    assert dims(graph.graph.outputs[0]) == ("batch", "seq", 3)
    fused = run_passes(model, PassOptions(), check=True)
    assert ops(fused) == {"ActLinear_F32_f32": 1, "Linear_F32_f32": 1}
    narrow = run_passes(model, PassOptions(quantize="bf16"), check=True)  # 8 and 6: no blocks of 32
    assert ops(narrow) == {"ActLinear_BF16_bf16": 1, "Linear_BF16_bf16": 1}
    x = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    np.testing.assert_allclose(run(fused, {"x": x})["y"], run(model, {"x": x})["y"], rtol=1e-5)


# --- refusals ------------------------------------------------------------------------------------


def test_attention_with_an_unknown_mask_is_refused() -> None:
    model = decoder(CONFIGS["gemma2"])
    limit = model.graph.initializers["mask.5.limit"]
    node = next(u.node for u in limit.uses())
    node.op_type = "LessOrEqual"
    with pytest.raises(UnsupportedError, match="neither causal nor a causal window"):
        run_passes(model, PassOptions())


def test_a_window_is_read_from_its_mask() -> None:
    model = decoder(config(layers=(Layer(window=5), Layer())))
    graph = run_passes(model, PassOptions(fusion="conservative"))
    windows = [
        n.attributes["window"].as_int() for n in graph.graph if n.op_type == "PagedAttention"
    ]
    assert windows == [5, 0]


def broken_graphs() -> dict[str, ir.Model]:
    found = {}
    for fault in ("name", "order", "shape", "attribute", "body", "node-name", "initializer"):
        model = run_passes(decoder(CONFIGS["llama"], ("Q8_0",)), PassOptions())
        nodes = list(model.graph)
        if fault == "name":
            nodes[3].outputs[0].name = nodes[0].outputs[0].name
        elif fault == "order":
            model.graph.remove(nodes[0])
            model.graph.append(nodes[0])
        elif fault == "shape":
            nodes[3].outputs[0].shape = ir.Shape(["T", 65])
        elif fault == "attribute":
            del nodes[3].attributes["head_dim"]
        elif fault == "body":
            del model.functions[(domain.DOMAIN, nodes[3].op_type, "")]
        elif fault == "node-name":
            nodes[3].name = nodes[0].name
        else:
            model.graph.initializers["embed.weight"].shape = ir.Shape([1, 34])
        found[fault] = model
    return found


BROKEN = {
    "name": "exists already", "order": "not made before it", "shape": "should be",
    "attribute": "head_dim", "body": "has no body", "node-name": "is missing or taken",
    "initializer": "type of its data",
}  # fmt: skip


def test_check_names_every_fault() -> None:
    for fault, model in broken_graphs().items():
        with pytest.raises(InputFileError, match=BROKEN[fault]):
            check_graph(model, after="test")


def test_control_flow_is_refused() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 24]>
    net (float[2] x, bool c) => (float[2] y) {
      y = If (c) <
        then_branch = a () => (float[2] p) { p = Relu(x) },
        else_branch = b () => (float[2] q) { q = Abs(x) }
      >
    }
    """
    with pytest.raises(UnsupportedError, match="graph of its own"):
        run_passes(ir.from_onnx_text(text), PassOptions())


def test_check_compares_with_onnx_inference() -> None:
    model = decoder(CONFIGS["llama"])
    check_graph(model, infer=True)
    next(n for n in model.graph if n.name == "layers.0.mlp.up").outputs[0].shape = ir.Shape(
        ["T", 95]
    )
    with pytest.raises(InputFileError, match="onnx"):
        check_graph(model, infer=True)


def test_run_names_what_it_lacks() -> None:
    model = decoder(CONFIGS["llama"])
    with pytest.raises(InputFileError, match="positions"):
        run(model, {"tokens": np.array([1])})
    with pytest.raises(UnsupportedError, match="no residual stream"):
        residual_taps(network_without_layers())


def network_without_layers() -> ir.Model:
    x = value_like("x", ir.DataType.FLOAT, [2])
    node = ir.Node("", "Relu", [x], name="relu")
    node.outputs[0].name = "y"
    return ir.Model(
        ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 24}, name="n"), ir_version=10
    )
