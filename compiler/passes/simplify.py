"""Passes that name what the graph already says: vectors, rotary tables, head norms, linear layers.

In: a frontend's graph in standard operators.  Out: the same values through the domain's plain
(unfused) operators; still single sequence, still float32.  Next file: ``paging.py``.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from zerolayer.compiler.graph import domain
from zerolayer.compiler.graph.execute import dequantize_tensor

from .edit import (
    constant,
    dims,
    domain_node,
    integer,
    lazy_initializer,
    new_node,
    number,
    only_consumer,
    producer,
    replace,
    rows_of,
    scalar,
    supersede,
    through_views,
    value_like,
)
from .options import PassOptions

FLOAT = ir.DataType.FLOAT
PLAIN_FORMATS = {FLOAT: "F32", ir.DataType.FLOAT16: "F16", ir.DataType.BFLOAT16: "BF16"}


def cleanup(model: ir.Model, options: PassOptions) -> None:
    """onnx_ir's own clean-up: constants to initializers; identities, duplicates, dead nodes go."""
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common_passes.IdentityEliminationPass()(model)
    common_passes.CommonSubexpressionEliminationPass()(model)
    common_passes.RemoveUnusedNodesPass()(model)


def float_vectors(model: ir.Model, options: PassOptions) -> None:
    """``Cast(w)`` of a norm weight or bias -> a float32 initializer (exact; recorded)."""
    for node in list(model.graph):
        if node.op_type != "Cast" or node.domain or integer(node, "to") != FLOAT:
            continue
        weight = node.inputs[0]
        if weight is None or not weight.is_initializer() or weight.shape is None:
            continue
        format = PLAIN_FORMATS.get(weight.dtype) if weight.dtype is not None else None
        all_casts = all(u.node.op_type == "Cast" for u in weight.uses())
        if format in (None, "F32") or len(weight.shape) == 2 or not all_casts:
            continue
        _widen(weight, format or "")
        for use in list(weight.uses()):
            supersede(use.node.outputs[0], weight)


def _widen(weight: ir.Value, format: str) -> None:
    tensor = weight.const_value
    assert tensor is not None and weight.shape is not None
    notes = {"format": "F32", "source_format": format, "transform": "widened to float32"}
    shape = [int(d) for d in weight.shape.numpy()]
    lazy_initializer(
        weight, lambda: ir.Tensor(dequantize_tensor(tensor.numpy(), format)), FLOAT, shape, notes
    )


def rope(model: ir.Model, options: PassOptions) -> None:
    """``RotaryEmbedding`` and the cos/sin chains before it -> ``Rope`` and one ``RopeTable``."""
    tables: dict[tuple[ir.Value, ir.Value], ir.Node] = {}
    for node in list(model.graph):
        if node.op_type != "RotaryEmbedding" or node.domain or len(node.inputs) != 3:
            continue
        x, cos, sin = node.inputs
        assert x is not None and cos is not None and sin is not None
        shape, rows = dims(x), rows_of(x)
        heads = integer(node, "num_heads")
        if len(shape) != 3 or shape[0] != 1 or len(dims(rows)) != 2 or not heads:
            continue
        key = (through_views(cos), through_views(sin))
        if key not in tables:
            table = _rope_table(*key)
            if table is None:
                continue
            tables[key] = table
        attrs = {"num_heads": heads, "interleaved": integer(node, "interleaved")}
        place = node.name or ""
        new = domain_node("Rope", [rows, *tables[key].outputs], attrs, place)
        assert node.graph is not None
        node.graph.insert_before(node, new)
        batch = value_like(f"{place}.batch", FLOAT, shape)
        view = new_node("", "Unsqueeze", [new.outputs[0], constant(model, [0])], {},
                        f"{place}.batch", [batch])  # fmt: skip
        replace(node, view, [(node.outputs[0], batch)])


def _rope_table(cos: ir.Value, sin: ir.Value) -> ir.Node | None:
    """``Cos(Cast(positions) * inv_freq) * factor`` and the same ``Sin`` -> a RopeTable node that
    stands before both; None when the values are made in another way."""
    found = [_angles(cos, "Cos"), _angles(sin, "Sin")]
    if found[0] is None or found[0] != found[1]:
        return None
    angles, factor = found[0]
    node = producer(angles, "Mul")
    if node is None:
        return None
    for a, b in (node.inputs, tuple(reversed(node.inputs))):
        cast = producer(through_views(a), "Cast") if a is not None else None
        if cast is None or b is None or not b.is_initializer() or cast.inputs[0] is None:
            continue
        positions = through_views(cast.inputs[0])
        if len(dims(positions)) != 1 or positions.dtype != ir.DataType.INT64:
            continue
        place = (node.name or "rope").removesuffix(".angles")
        table = domain_node("RopeTable", [positions, b], {"factor": factor}, place)
        assert node.graph is not None
        node.graph.insert_before(node, table)
        return table
    return None


def _angles(value: ir.Value, op_type: str) -> tuple[ir.Value, float] | None:
    factor = 1.0
    scaled = producer(value, "Mul")
    if scaled is not None:
        by = [scalar(v) for v in scaled.inputs]
        if (by[0] is None) == (by[1] is None):
            return None
        at = 0 if by[0] is None else 1
        known, inner = by[1 - at], scaled.inputs[at]
        assert known is not None and inner is not None
        factor, value = known, through_views(inner)
    node = producer(value, op_type)
    if node is None or node.inputs[0] is None:
        return None
    return through_views(node.inputs[0]), factor


def head_norm(model: ir.Model, options: PassOptions) -> None:
    """``Reshape [T, n, hd] -> RMSNormalization -> Reshape [T, n * hd]`` -> ``HeadNorm``."""
    for node in list(model.graph):
        if node.op_type != "RMSNormalization" or node.domain:
            continue
        x, weight = node.inputs[0], node.inputs[1]
        assert x is not None and weight is not None
        split, merge = producer(x, "Reshape"), only_consumer(node.outputs[0])
        shape = dims(x)
        if split is None or merge is None or merge.op_type != "Reshape" or len(shape) != 3:
            continue
        rows = split.inputs[0]
        heads = shape[1]
        assert rows is not None
        if dims(rows) != dims(merge.outputs[0]) or len(dims(rows)) != 2:
            continue
        if not isinstance(heads, int) or dims(weight) != shape[2:]:
            continue
        attrs = {"num_heads": heads, "epsilon": number(node, "epsilon", 1e-5)}
        new = domain_node("HeadNorm", [rows, weight], attrs, node.name or "")
        replace(node, new, [(merge.outputs[0], new.outputs[0])])


def linear(model: ir.Model, options: PassOptions) -> None:
    """``Gemm`` or ``MatMul`` with a constant weight -> ``Linear_F_f32``; rows of a table picked by
    ids -> ``Embed_F``."""
    for node in list(model.graph):
        if node.domain:
            continue
        if node.op_type == "Gemm":
            _gemm(model, node)
        elif node.op_type == "MatMul":
            _matmul(model, node)
        elif node.op_type == "Gather":
            _embed(node)


def weight_of(value: ir.Value | None) -> tuple[ir.Value, str] | None:
    """The stored matrix and format behind a float32 view of a weight; None for anything else."""
    if value is None:
        return None
    format = "F32"
    node = value.producer()
    if node is not None:
        if node.domain == domain.DOMAIN:
            sig = domain.parse(node.op_type)
            if sig.base != "Dequantize":
                return None
            format = sig.formats[0]
        elif node.op_type == "Cast" and integer(node, "to") == FLOAT and node.inputs[0] is not None:
            dtype = node.inputs[0].dtype
            format = PLAIN_FORMATS.get(dtype, "") if dtype is not None else ""
        else:
            return None
        source = node.inputs[0]
        assert source is not None
        value = source
    if not value.is_initializer() or value.dtype != domain.FORMAT_DTYPES.get(format):
        return None
    return (value, format) if len(dims(value)) == 2 else None


def _gemm(model: ir.Model, node: ir.Node) -> None:
    found = weight_of(node.inputs[1])
    plain = number(node, "alpha", 1.0) == 1.0 and number(node, "beta", 1.0) == 1.0
    if found is None or integer(node, "transA") or not plain:
        return
    weight, format = found
    if not integer(node, "transB"):
        if format not in PLAIN_FORMATS.values():
            return
        weight = _transposed(model, weight, format)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None and dims(bias) != (dims(weight)[0],):
        return
    name = domain.op_name("Linear", (format,), "f32")
    new = domain_node(name, [node.inputs[0], weight, bias], {}, node.name or "")
    replace(node, new, [(node.outputs[0], new.outputs[0])])


def _matmul(model: ir.Model, node: ir.Node) -> None:
    """x [.., K] times W [K, N], with the bias of an ``Add`` behind it."""
    found, x = weight_of(node.inputs[1]), node.inputs[0]
    if found is None or x is None or found[1] not in PLAIN_FORMATS.values():
        return
    if len(dims(x)) < 2:
        return
    weight = _transposed(model, *found)
    n = dims(weight)[0]
    last, bias = node, None
    add = only_consumer(node.outputs[0])
    if add is not None and add.op_type == "Add" and not add.domain:
        other = next(v for v in add.inputs if v is not node.outputs[0])
        if other is not None and other.is_initializer() and dims(other) == (n,):
            last, bias = add, other
    name = domain.op_name("Linear", (found[1],), "f32")
    new = domain_node(name, [x, weight, bias], {}, last.name or node.name or "")
    replace(last, new, [(last.outputs[0], new.outputs[0])])


def _transposed(model: ir.Model, weight: ir.Value, format: str) -> ir.Value:
    """[K, N] -> an initializer [N, K]; made once per weight."""
    name = f"{weight.name}.transposed"
    found = model.graph.initializers.get(name)
    if found is not None:
        return found
    tensor = weight.const_value
    assert tensor is not None and weight.dtype is not None and weight.shape is not None
    dtype = weight.dtype
    k, n = (int(d) for d in weight.shape.numpy())

    def load() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(tensor.numpy().T), dtype=dtype)

    new = value_like(name, dtype, [n, k])
    new.metadata_props.update(weight.metadata_props)
    source = weight.metadata_props.get("source", weight.name or "")
    lazy_initializer(new, load, dtype, [n, k],
                     {"format": format, "source": source, "transform": "transposed"})  # fmt: skip
    model.graph.initializers[name] = new
    return new


def _embed(node: ir.Node) -> None:
    """``Gather(w, ids)``, its view and a scale -> ``Embed_F``."""
    weight, tokens = node.inputs
    assert weight is not None and tokens is not None
    if not weight.is_initializer() or len(dims(weight)) != 2 or integer(node, "axis"):
        return
    if tokens.dtype != ir.DataType.INT64 or len(dims(tokens)) != 1 or tokens.is_initializer():
        return
    last, format = node, "F32"
    if weight.dtype != FLOAT:
        view = only_consumer(node.outputs[0])
        decoded = _decoder_format(view, weight) if view is not None else ""
        if view is None or not decoded:
            return
        last, format = view, decoded
    scale = 1.0
    mul = only_consumer(last.outputs[0])
    if mul is not None and mul.op_type == "Mul" and not mul.domain:
        by = next((s for v in mul.inputs if (s := scalar(v)) is not None), None)
        if by is not None:
            last, scale = mul, by
    name = domain.op_name("Embed", (format,))
    new = domain_node(name, [tokens, weight], {"scale": scale}, last.name or "")
    replace(last, new, [(last.outputs[0], new.outputs[0])])


def _decoder_format(view: ir.Node, weight: ir.Value) -> str:
    if view.domain == domain.DOMAIN:
        sig = domain.parse(view.op_type)
        return sig.formats[0] if sig.base == "Dequantize" else ""
    if view.op_type == "Cast" and integer(view, "to") == FLOAT and weight.dtype is not None:
        return PLAIN_FORMATS.get(weight.dtype, "")
    return ""


def softcap(model: ir.Model, options: PassOptions) -> None:
    """``cap * tanh(x / cap)`` written as Mul or Div, Tanh, Mul -> ``Softcap``."""
    for node in list(model.graph):
        tanh = node if node.op_type == "Tanh" and not node.domain else None
        if tanh is None or tanh.inputs[0] is None:
            continue
        before, after = tanh.inputs[0].producer(), only_consumer(tanh.outputs[0])
        if before is None or after is None or before.domain or after.op_type != "Mul":
            continue
        cap = next((s for v in after.inputs if (s := scalar(v)) is not None), None)
        by = scalar(before.inputs[1]) if len(before.inputs) > 1 else None
        if cap is None or by is None or len(before.outputs[0].uses()) != 1:
            continue
        divisor = by if before.op_type == "Div" else 1.0 / by if before.op_type == "Mul" else None
        if divisor is None or not math.isclose(divisor, cap, rel_tol=1e-6):
            continue
        new = domain_node("Softcap", [before.inputs[0]], {"cap": cap}, after.name or "")
        replace(after, new, [(after.outputs[0], new.outputs[0])])
