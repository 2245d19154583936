"""Fusion: groups of domain operators that one kernel of the target does at once.

In: the step graph in unfused operators.  Out: the same values, fewer nodes, for fusion levels
``balanced`` and ``aggressive``.  Next file: ``upstream.py``.

Every rule builds the fused node, asks the target's kernel table whether it has a kernel for it, and
takes it only then.  A value that is fused away must have no other reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from zerolayer.compiler.graph import domain

from .edit import (
    VIEWS,
    Attribute,
    attribute,
    bundle,
    dims,
    discard,
    domain_node,
    domain_producer,
    integer,
    number,
    only_consumer,
    operands,
    replace,
    supersede,
    used_once,
)
from .options import PassOptions, supported


def views(model: ir.Model, options: PassOptions) -> None:
    """A view that gives back the shape it started from goes: ``Squeeze(Unsqueeze(x))`` -> x."""
    for node in list(model.graph):
        out = node.outputs[0]
        if node.domain or node.op_type not in VIEWS or out.is_graph_output():
            continue
        source = node.inputs[0]
        while source is not None:
            if dims(source) == dims(out) and None not in dims(out):
                supersede(out, source)
                break
            before = source.producer()
            if before is None or before.domain or before.op_type not in VIEWS:
                break
            source = before.inputs[0]


def _take(
    old: ir.Node, new: ir.Node, pairs: Sequence[tuple[ir.Value, ir.Value]], options: PassOptions
) -> bool:
    """Replace ``old`` by ``new`` when the target has a kernel for it."""
    if not supported(new, options):
        discard(new)
        return False
    replace(old, new, pairs)
    return True


# --- q, k and v -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Projection:
    """One of q, k, v: the linear layer, and what stands between it and the attention or cache."""

    linear: ir.Node
    norm: ir.Node | None
    rope: ir.Node | None


def _projection(value: ir.Value | None) -> _Projection | None:
    rope = domain_producer(value, "Rope")
    if rope is not None and value is not None and used_once(value):
        value = rope.inputs[0]
    norm = domain_producer(value, "HeadNorm")
    if norm is not None and value is not None and used_once(value):
        value = norm.inputs[0]
    linear = domain_producer(value, "Linear")
    if linear is None or value is None or not used_once(value):
        return None
    return _Projection(linear, norm, rope)


def fuse_qkv(model: ir.Model, options: PassOptions) -> None:
    """Linear q, k, v + head norms + rope + cache writes -> ``QkvRopeCache``."""
    if not options.fuses:
        return
    for node in list(model.graph):
        if domain_producer(node.outputs[0], "PagedAttention") is node:
            _fuse_qkv(node, options)


def _fuse_qkv(attention: ir.Node, options: PassOptions) -> None:
    roles = operands(attention)
    writes = [domain_producer(roles[f"{r}_cache"], "CacheWrite") for r in "kv"]
    if writes[0] is None or writes[1] is None:
        return
    k_write, v_write = operands(writes[0]), operands(writes[1])
    found = [_projection(v) for v in (roles["q"], k_write["x"], v_write["x"])]
    if found[0] is None or found[1] is None or found[2] is None:
        return
    q, k, v = found[0], found[1], found[2]
    linears = [p.linear for p in (q, k, v)]
    if len({bundle(n) for n in linears}) != 1 or v.norm is not None or v.rope is not None:
        return
    shared = _shared(q.rope, k.rope, ("cos", "sin"), ("interleaved",))
    norms = _shared(q.norm, k.norm, (), ("epsilon",))
    if shared is None or norms is None:
        return
    sigs = [domain.parse(n.op_type) for n in linears]
    variant = [name for name, on in (("qknorm", q.norm), ("norope", q.rope is None)) if on]
    op_type = domain.op_name(
        "QkvRopeCache", [s.formats[0] for s in sigs], sigs[0].activations, "_".join(variant)
    )
    weights = [operands(n)["weight"] for n in linears]
    biases = [operands(n).get("bias") for n in linears]
    scales = [None if p.norm is None else operands(p.norm)["weight"] for p in (q, k)]
    tables = [None, None] if q.rope is None else q.rope.inputs[1:3]
    step = [roles[r] for r in ("positions", "seq_starts", "block_table")]
    caches = [k_write["cache"], v_write["cache"]]
    inputs = [*bundle(linears[0]), *weights, *biases, *scales, *tables, *caches, *step]
    width = dims(linears[0].outputs[0])[-1]
    assert isinstance(width, int)
    heads = integer(attention, "num_heads")
    attributes: dict[str, Attribute] = {
        "num_heads": heads,
        "kv_num_heads": integer(attention, "kv_num_heads"),
        "head_dim": width // heads,
        "interleaved": 0 if q.rope is None else integer(q.rope, "interleaved"),
        "epsilon": 0.0 if q.norm is None else number(q.norm, "epsilon"),
        "block_size": integer(attention, "block_size"),
    }
    place = f"{(attention.name or '').rpartition('.')[0]}.qkv"
    new = domain_node(op_type, inputs, attributes, place)
    pairs = list(zip((roles["q"], roles["k_cache"], roles["v_cache"]), new.outputs, strict=True))
    if supported(new, options):
        assert attention.graph is not None
        attention.graph.insert_before(attention, new)
        for before, after in pairs:
            supersede(before, after)
    else:
        discard(new)


def _shared(
    a: ir.Node | None, b: ir.Node | None, inputs: Sequence[str], attributes: Sequence[str]
) -> bool | None:
    """None unless both nodes are absent, or both present with the same inputs and attributes."""
    if a is None or b is None:
        return None if a is not b else False
    same = all(operands(a)[r] is operands(b)[r] for r in inputs)
    same = same and all(attribute(a, n, 0) == attribute(b, n, 0) for n in attributes)
    return True if same else None


# --- feed-forward and residual ------------------------------------------------------------------


def _activation(node: ir.Node) -> str | None:
    """The activation that a standard node computes, by the domain's name; None for others."""
    if node.domain:
        return None
    if node.op_type == "Swish":
        return "silu" if number(node, "alpha", 1.0) == 1.0 else None
    if node.op_type == "Gelu":
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(
            str(attribute(node, "approximate", "none"))
        )
    return "relu" if node.op_type == "Relu" else None


def _activated_linear(value: ir.Value | None) -> tuple[ir.Node, str] | None:
    """The linear layer and activation that make ``value``, when nothing else reads in between."""
    node = value.producer() if value is not None else None
    kind = _activation(node) if node is not None else None
    if node is None or kind is None or value is None:
        return None
    linear = domain_producer(node.inputs[0], "Linear")
    if linear is None or not used_once(linear.outputs[0]) or not used_once(value):
        return None
    return linear, kind


def fuse_gated(model: ir.Model, options: PassOptions) -> None:
    """``act(linear gate) * linear up`` -> ``GatedLinear``."""
    if not options.fuses:
        return
    for node in list(model.graph):
        if node.op_type != "Mul" or node.domain:
            continue
        for a, b in (node.inputs, tuple(reversed(node.inputs))):
            found, up = _activated_linear(a), domain_producer(b, "Linear")
            if found is None or up is None or not used_once(up.outputs[0]):
                continue
            gate, kind = found
            sigs = [domain.parse(n.op_type) for n in (gate, up)]
            if sigs[0] != sigs[1] or bundle(gate) != bundle(up):
                continue
            weights = [operands(n)["weight"] for n in (gate, up)]
            biases = [operands(n).get("bias") for n in (gate, up)]
            name = domain.op_name("GatedLinear", [s.formats[0] for s in sigs], sigs[0].activations)
            inputs = [*bundle(gate), *weights, *biases]
            new = domain_node(name, inputs, {"activation": kind}, node.name or "")
            if _take(node, new, [(node.outputs[0], new.outputs[0])], options):
                break


def fuse_activation(model: ir.Model, options: PassOptions) -> None:
    """``act(linear)`` of an MLP without a gate -> ``ActLinear``."""
    if not options.fuses:
        return
    for node in list(model.graph):
        kind = _activation(node)
        linear = domain_producer(node.inputs[0], "Linear") if kind is not None else None
        if kind is None or linear is None or not used_once(linear.outputs[0]):
            continue
        sig = domain.parse(linear.op_type)
        name = domain.op_name("ActLinear", sig.formats, sig.activations)
        new = domain_node(name, linear.inputs, {"activation": kind}, node.name or "")
        _take(node, new, [(node.outputs[0], new.outputs[0])], options)


def fuse_residual(model: ir.Model, options: PassOptions) -> None:
    """``residual + linear`` -> ``LinearAdd``."""
    if not options.fuses:
        return
    for node in list(model.graph):
        if node.op_type != "Add" or node.domain:
            continue
        for residual, y in (node.inputs, tuple(reversed(node.inputs))):
            linear = domain_producer(y, "Linear")
            if linear is None or y is None or residual is None or not used_once(y):
                continue
            if dims(residual) != dims(y):
                continue
            sig, found = domain.parse(linear.op_type), operands(linear)
            name = domain.op_name("LinearAdd", sig.formats, sig.activations)
            inputs = [*bundle(linear), found["weight"], residual, found.get("bias")]
            new = domain_node(name, inputs, {}, node.name or "")
            if _take(node, new, [(node.outputs[0], new.outputs[0])], options):
                break


# --- producers of int8 activations ---------------------------------------------------------------

_QUANTIZING = {
    "PagedAttention": "PagedAttentionQuantizeInt8",
    "GatedLinear": "GatedLinearQuantizeInt8",
    "RMSNormalization": "RmsNormQuantizeInt8",
    "LayerNormalization": "LayerNormQuantizeInt8",
}


def fuse_quantize(model: ir.Model, options: PassOptions) -> None:
    """A norm, attention or gated linear layer whose only reader is ``QuantizeInt8`` -> one operator
    that writes int8."""
    if not options.fuses:
        return
    for node in list(model.graph):
        quantizer = only_consumer(node.outputs[0]) if len(node.outputs) == 1 else None
        if quantizer is None or quantizer.op_type != "QuantizeInt8":
            continue
        sig = domain.parse(node.op_type) if node.domain == domain.DOMAIN else None
        base = _QUANTIZING.get(sig.base if sig is not None else node.op_type)
        if base is None:
            continue
        if sig is not None:
            name = domain.op_name(base, sig.formats, sig.activations)
            attributes = {k: attribute(node, k, 0) for k in node.attributes}
        else:
            if integer(node, "axis", -1) not in (-1, len(dims(node.outputs[0])) - 1):
                continue
            name, attributes = base, {"epsilon": number(node, "epsilon", 1e-5)}
        new = domain_node(name, node.inputs, attributes, node.name or "")
        for value, old in zip(new.outputs, quantizer.outputs, strict=True):
            value.name = old.name
        _take(quantizer, new, list(zip(quantizer.outputs, new.outputs, strict=True)), options)
