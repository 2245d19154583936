"""Lowering: one node, one call; what is baked in; what is refused and where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from program_cases import LIMITS, TINY, small, step_program, tiny_decoder
from zerolayer.compiler.lower import LowerOptions, lower
from zerolayer.runtime_stub.errors import UnsupportedError, UsageError
from zerolayer.targets.facts import load_target
from zerolayer.targets.program import BufferKind, Program

ZEN4 = small(load_target("zen4"))
VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"}


def calls(program: Program) -> list[str]:
    return [c.op for c in program.entry_points[0].calls]


def test_one_node_is_one_call() -> None:
    for fusion in ("conservative", "balanced"):
        graph, program = step_program(tiny_decoder(), ZEN4, "int8", fusion)
        nodes = [str(n.name) for n in graph.graph if n.op_type not in VIEWS]
        assert sorted(nodes) == sorted(c.name for c in program.entry_points[0].calls)


def test_balanced_is_fused_and_conservative_is_not() -> None:
    _, balanced = step_program(tiny_decoder(), ZEN4, "int8", "balanced")
    _, conservative = step_program(tiny_decoder(), ZEN4, "int8", "conservative")
    assert {"QkvRopeCache", "LinearAdd", "GatedLinearQuantizeInt8"} <= set(calls(balanced))
    assert {"Linear", "Rope", "CacheWrite", "Add", "QuantizeInt8"} <= set(calls(conservative))
    assert not {"QkvRopeCache", "LinearAdd"} & set(calls(conservative))


def test_bounds_and_kv_layout() -> None:
    _, program = step_program(tiny_decoder(), ZEN4, "f32")
    bounds = dict(program.bounds)
    assert bounds["T"] == LIMITS["max_tokens"] and bounds["S"] == LIMITS["max_seqs"]
    assert bounds["B"] == 128 // 16 and bounds["S+1"] == 5
    assert program.kv is not None
    # 2 layers x (k, v) x 16 positions x 2 heads x 16 elements x 4 bytes
    assert program.kv.block_bytes == 2 * 2 * 16 * 32 * 4
    kv = [b for b in program.buffers if b.kind is BufferKind.KV]
    assert sorted(b.offset or 0 for b in kv) == [i * 2048 for i in range(4)]
    _, half = step_program(tiny_decoder(), ZEN4, "int8")
    assert half.kv is not None and half.kv.block_bytes * 2 == program.kv.block_bytes


def test_max_context() -> None:
    _, program = step_program(tiny_decoder(), ZEN4, "f32", max_context=40)
    assert program.bound("B") == 3
    with pytest.raises(UsageError, match="128"):
        step_program(tiny_decoder(), ZEN4, "f32", max_context=129)


def test_calls_of_a_phase_are_independent() -> None:
    _, program = step_program(tiny_decoder(), ZEN4, "f32", "conservative")
    entry = program.entry_points[0]
    phases: dict[int, list[str]] = {}
    for c in entry.calls:
        phases.setdefault(c.phase, []).append(c.name)
    assert sorted(phases) == list(range(len(phases)))
    qkv = {f"layers.0.attn.{x}" for x in "qkv"}
    assert any(qkv <= set(names) for names in phases.values())
    made: dict[str, int] = {}
    for c in entry.calls:
        for name in c.inputs:
            if name in made:
                assert made[name] < c.phase, (c.name, name)
        for name in c.outputs:
            made[name] = c.phase


def test_taps_are_the_residual_stream() -> None:
    _, program = step_program(tiny_decoder(), ZEN4, "int8")
    assert len(program.taps) == 3
    shapes = [program.buffer(name).shape for name in program.taps]
    assert shapes == [("T", 64), ("T", 64), ("R", 64)]  # the last layer: rows with logits
    producers = {o: c for c in program.entry_points[0].calls for o in c.outputs}
    assert [producers[t].layer for t in program.taps] == [None, 0, 1]


def test_tied_embeddings_are_stored_once() -> None:
    tied = replace(TINY, tied_embeddings=True)
    _, program = step_program(tiny_decoder(tied), ZEN4, "f32", config=tied)
    shared = [b for b in program.buffers if b.source == ("embed.weight",)]
    assert len(shared) == 1
    readers = [c.op for c in program.entry_points[0].calls if shared[0].name in c.inputs]
    assert sorted(readers) == ["Embed", "Linear"]


def test_weights_keep_the_bits_of_the_file() -> None:
    _, program = step_program(tiny_decoder(), ZEN4, "int8")
    gate = program.buffer("layers.0.mlp.gate.weight")
    assert gate.format == "Q4_1" and gate.logical_shape == (96, 64)
    assert gate.nbytes == 96 * 64 // 32 * 20
    norm = program.buffer("layers.0.attn_norm.weight")
    assert norm.layout == "decoded_f32" and norm.nbytes == 64 * 4


def test_flops_are_two_per_weight() -> None:
    _, program = step_program(tiny_decoder(), ZEN4, "int8")
    linear = sum(c.flops for c in program.entry_points[0].calls if c.weight_bytes > 1024)
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96
    assert linear == 2 * (2 * layer + 64 * 97)


def test_constants_are_attributes_and_sizes() -> None:
    _, program = step_program(tiny_decoder(), ZEN4, "int8")
    attention = [c for c in program.entry_points[0].calls if c.op.startswith("PagedAttention")]
    assert [dict(c.constants)["window"] for c in attention] == [0, 24]
    constants = dict(attention[0].constants)
    assert constants["head_dim"] == 16 and constants["num_heads"] == 4
    assert constants["scale"] == pytest.approx(0.25)


def test_no_kernel_names_operator_and_target() -> None:
    """int8 KV has no CPU kernel."""
    from zerolayer.targets.cpu import render

    with pytest.raises(UnsupportedError, match="kv_dtype = 'i8'"):
        _, program = step_program(tiny_decoder(), ZEN4, "int8", kv_dtype="i8")
        render(program, ZEN4)


def graph_of(nodes: list[ir.Node], inputs: list[ir.Value], outputs: list[ir.Value]) -> ir.Model:
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 24}, name="g")
    return ir.Model(graph, ir_version=10)


def value(name: str, shape: list[int | str], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def unary(op: str, x: ir.Value, shape: list[int | str], **attributes: int) -> ir.Node:
    node = ir.node(op, [x], attributes=attributes, name=f"the_{op}", outputs=[value("y", shape)])
    return node


def run_graph(op: str, shape: list[int | str], dims: tuple[tuple[str, int], ...] = ()) -> Program:
    x = value("x", shape)
    node = unary(op, x, shape)
    return lower(graph_of([node], [x], [node.outputs[0]]), None, ZEN4, LowerOptions(dims=dims))


def test_symbols_of_a_run_graph() -> None:
    program = run_graph("Relu", ["batch", "seq", 8], (("seq", 100),))
    bounds = dict(program.bounds)
    default = ZEN4.default("dim_bound")
    assert bounds == {"batch": default, "seq": 100, "batch*seq": default * 100}
    assert program.entry_points[0].name == "run"
    assert program.entry_points[0].calls[0].rows == "batch*seq"
    assert program.buffer("x").nbytes == default * 100 * 8 * 4


@pytest.mark.parametrize(
    ("op", "shape", "expect"),
    [
        ("Det", [4, 4], "no kernel for the operator Det"),
        ("Relu", [4, "n"], "last dimension"),
        ("Relu", [4, 0], "dimension of 0"),
    ],
)
def test_refused_graphs(op: str, shape: list[int | str], expect: str) -> None:
    with pytest.raises(UnsupportedError, match=expect):
        run_graph(op, shape)


def test_unknown_shapes_and_types_are_refused() -> None:
    x = value("x", [4, 8])
    node = ir.node("Relu", [x], name="r", outputs=[ir.Value(name="y")])
    with pytest.raises(UnsupportedError, match="shape of y is not known"):
        lower(graph_of([node], [x], [node.outputs[0]]), None, ZEN4, LowerOptions())
    x = value("x", [4, 8], ir.DataType.STRING)
    node = unary("Relu", x, [4, 8])
    with pytest.raises(UnsupportedError, match="STRING"):
        lower(graph_of([node], [x], [node.outputs[0]]), None, ZEN4, LowerOptions())


def test_an_input_that_is_an_output_is_refused() -> None:
    x = value("x", [4, 8])
    with pytest.raises(UnsupportedError, match="output x"):
        lower(graph_of([], [x], [x]), None, ZEN4, LowerOptions())


def test_a_bad_bound_is_refused() -> None:
    with pytest.raises(UsageError, match="n=0"):
        run_graph("Relu", ["n", 8], (("n", 0),))


def test_same_input_same_program() -> None:
    first = step_program(tiny_decoder(), ZEN4, "int8")[1]
    second = step_program(tiny_decoder(), ZEN4, "int8")[1]
    assert first == second
    assert np.isfinite(first.workspace_bytes)
