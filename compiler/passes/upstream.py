"""Rows whose logits nobody asked for leave the graph as early as they can.

In: the fused step graph, in which a ``Gather`` picks the rows of ``logit_rows`` before the final
norm.  Out: the same logits; what only those rows need is computed for them alone: of the last layer
its output projection and its MLP, which neither attention nor a later step reads.  Next file:
``screen.py``.

Everything that moves works row by row, so that picking rows before it and after it is the same, bit
by bit.  The transform is known as upstreaming a gather (ONNX Runtime has one for training).
"""

from __future__ import annotations

import onnx_ir as ir
from zerolayer.compiler.graph import domain

from .edit import (
    bundle,
    dims,
    discard,
    domain_base,
    domain_node,
    integer,
    new_node,
    supersede,
    value_like,
)
from .options import PassOptions, supported
from .paging import is_decoder

#: operators that make row t of their outputs from row t of their inputs alone
_BY_ROW = frozenset({"Add", "Div", "Gelu", "Mul", "Relu", "Sub", "Swish", "Tanh"})
_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_LINEAR = frozenset({"ActLinear", "GatedLinear", "GatedLinearQuantizeInt8", "Linear", "LinearAdd"})
_BY_ROW_OF_DOMAIN = _LINEAR | {
    "HeadNorm", "LayerNormQuantizeInt8", "QuantizeInt8", "RmsNormQuantizeInt8", "Softcap",
}  # fmt: skip


def upstream_gather(model: ir.Model, options: PassOptions) -> None:
    """``Gather(f(x), logit_rows)`` -> ``f(Gather(x, logit_rows))`` for all ``f`` that allow it.

    Nothing changes where no linear layer would move, or where the target cannot pick rows of int8.
    """
    if not is_decoder(model):
        return
    graph = model.graph
    rows = next((v for v in graph.inputs if v.name == "logit_rows"), None)
    picks = [] if rows is None else [u.node for u in rows.uses() if u.node.op_type == "Gather"]
    tap = picks[0].inputs[0] if len(picks) == 1 else None
    if rows is None or tap is None:
        return
    moved = _movable(graph, picks[0], dims(tap)[0])
    if not any(domain_base(n) in _LINEAR for n in moved):
        return
    gathers = [(node, _gather(node, group, rows)) for node, group in _edge(moved, dims(tap)[0])]
    if not all(g.op_type == "Gather" or supported(g, options) for _, g in gathers):
        for _, gather in gathers:
            discard(gather)
        return
    for node, gather in gathers:
        graph.insert_before(node, gather)
        for value, picked in zip(gather.inputs, gather.outputs, strict=False):
            _read_instead(moved, value, picked)
    for node in moved:
        for value in node.outputs:
            value.shape = ir.Shape(["R", *dims(value)[1:]])
    supersede(picks[0].outputs[0], tap)


def _movable(graph: ir.Graph, pick: ir.Node, tokens: int | str | None) -> list[ir.Node]:
    """The nodes before ``pick``, in order, that work by row and that nothing but it needs."""
    moved: set[ir.Node] = set()
    for node in reversed(graph):
        readers = {u.node for v in node.outputs for u in v.uses()}
        alone = bool(readers) and readers <= moved | {pick}
        outputs = any(v.is_graph_output() for v in node.outputs)
        if alone and not outputs and _works_by_row(node, tokens):
            moved.add(node)
    return [n for n in graph if n in moved]


def _works_by_row(node: ir.Node, tokens: int | str | None) -> bool:
    """Every operand is a weight or has a row for each token: what is neither could be anything."""
    operands = [v for v in node.inputs if v is not None and not v.is_initializer()]
    if not all(_has_rows(v, tokens) for v in (*operands, *node.outputs)):
        return False
    if len({len(dims(v)) for v in (*operands, *node.outputs)}) != 1:
        return False  # of unlike ranks, a row of one may meet all rows of the other
    if node.domain == domain.DOMAIN:
        return domain_base(node) in _BY_ROW_OF_DOMAIN
    if node.op_type in _NORMS:
        return integer(node, "axis", -1) in (-1, len(dims(node.outputs[0])) - 1)
    return node.op_type in _BY_ROW


def _has_rows(value: ir.Value, tokens: int | str | None) -> bool:
    """Whether the first dimension is that of tokens: a symbol, which no weight has."""
    return isinstance(tokens, str) and len(dims(value)) >= 2 and dims(value)[0] == tokens


def _edge(
    moved: list[ir.Node], tokens: int | str | None
) -> list[tuple[ir.Node, tuple[ir.Value, ...]]]:
    """What the moving nodes read of others: a value or a bundle of three, with its first reader."""
    found: dict[ir.Value, tuple[ir.Node, tuple[ir.Value, ...]]] = {}
    for node in moved:
        values = [v for v in node.inputs if v is not None and v.producer() not in moved]
        of = bundle(node) if node.domain == domain.DOMAIN else ()
        for value in values:
            if _has_rows(value, tokens):
                group = of if len(of) == 3 and value in of else (value,)
                found.setdefault(group[0], (node, group))
    return list(found.values())


def _gather(reader: ir.Node, group: tuple[ir.Value, ...], rows: ir.Value) -> ir.Node:
    """A node outside of the graph that picks ``rows`` of a value or of a bundle.  Its place is the
    reader's: in the layer before, it would be the last node, whose value is the residual stream."""
    if len(group) == 3:
        return domain_node("GatherInt8", [*group, rows], {}, f"{reader.name}.rows")
    value = group[0]
    place = f"{reader.name}.rows.{list(reader.inputs).index(value)}"
    assert value.dtype is not None
    out = value_like(place, value.dtype, ["R", *dims(value)[1:]])
    return new_node("", "Gather", [value, rows], {"axis": 0}, place, [out])


def _read_instead(moved: list[ir.Node], value: ir.Value | None, picked: ir.Value) -> None:
    for node in moved:
        for i, v in enumerate(node.inputs):
            if v is value:
                node.replace_input_with(i, picked)
