"""Matching and editing nodes: what every pass is written with.

In: an ``onnx_ir.Model`` that may be changed.  Out: the same model, changed.  Next file:
``options.py``, then the passes in their order (``__init__.py`` lists them).

A new node takes the place (node name) of the last node that it replaces, and its value the name of
the value that it replaces, so that errors, dumps and taps keep pointing at the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from zerolayer.compiler.graph import domain

Attribute = int | float | str

VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity"})


def producer(value: ir.Value | None, op_type: str, op_domain: str = "") -> ir.Node | None:
    """The node that makes ``value`` when it is an ``op_type``; None otherwise."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == op_type and node.domain == op_domain:
        return node
    return None


def domain_producer(value: ir.Value | None, *bases: str) -> ir.Node | None:
    """The domain node that makes ``value`` when its base name is one of ``bases``."""
    node = value.producer() if value is not None else None
    if node is not None and node.domain == domain.DOMAIN:
        return node if domain.parse(node.op_type).base in bases else None
    return None


def domain_base(node: ir.Node) -> str:
    """The base of a domain node's name; empty for any other node."""
    return domain.parse(node.op_type).base if node.domain == domain.DOMAIN else ""


def only_consumer(value: ir.Value) -> ir.Node | None:
    """The one node that reads ``value``; None when there are several reads or it is an output."""
    return next(iter(value.uses())).node if used_once(value) else None


def used_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def through_views(value: ir.Value) -> ir.Value:
    """The value that ``value`` is a reshaped view of."""
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in VIEWS:
        source = node.inputs[0]
        assert source is not None
        value, node = source, source.producer()
    return value


def rows_of(value: ir.Value) -> ir.Value:
    """The nearest value of two dimensions that ``value`` views; ``value`` if there is none."""
    found: ir.Value | None = value
    while found is not None and len(dims(found)) != 2:
        node = found.producer()
        is_view = node is not None and node.domain == "" and node.op_type in VIEWS
        found = node.inputs[0] if node is not None and is_view else None
    return value if found is None else found


def scalar(value: ir.Value | None) -> float | None:
    """The number in an initializer or Constant of one element; None for anything else."""
    tensor = value.const_value if value is not None else None
    if tensor is None or tensor.size != 1:
        return None
    return float(np.asarray(tensor.numpy()).reshape(-1)[0])


def dims(value: ir.Value) -> tuple[int | str | None, ...]:
    """Static dimensions as numbers, symbols as names, unknown ones as None."""
    if value.shape is None:
        return ()
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def attribute(node: ir.Node, name: str, default: Attribute) -> Attribute:
    """An attribute of ``node``, or ``default``."""
    found = node.attributes.get(name)
    if found is None:
        return default
    value = found.value
    assert isinstance(value, (int, float, str))
    return value


def integer(node: ir.Node, name: str, default: int = 0) -> int:
    return int(attribute(node, name, default))


def number(node: ir.Node, name: str, default: float = 0.0) -> float:
    return float(attribute(node, name, default))


def new_node(
    op_domain: str,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Attribute],
    place: str,
    outputs: Sequence[ir.Value],
) -> ir.Node:
    """A node outside of any graph."""
    kept = list(inputs)
    while kept and kept[-1] is None:
        kept.pop()
    attrs = [
        ir.AttrInt64(k, v)
        if isinstance(v, int)
        else ir.AttrFloat32(k, v)
        if isinstance(v, float)
        else ir.AttrString(k, v)
        for k, v in attributes.items()
    ]
    version = domain.DOMAIN_VERSION if op_domain == domain.DOMAIN else None
    return ir.Node(op_domain, op_type, kept, attrs, outputs=outputs, name=place, version=version)


def value_like(name: str, dtype: ir.DataType, shape: Sequence[int | str | None]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def domain_node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Attribute],
    place: str,
) -> ir.Node:
    """A domain node outside of any graph, its outputs typed.  One output is named like the place,
    several ``place.role``."""
    shapes = [None if v is None else dims(v) for v in inputs]
    typed = domain.infer(op_type, shapes, attributes)
    names = [place]
    if len(typed) == 3 and typed[0][0] == ir.DataType.INT8:
        names = [f"{place}.int8", f"{place}.scale", f"{place}.sums"]
    elif domain.parse(op_type).base == "RopeTable":
        names = [f"{place}.cos", f"{place}.sin"]
    elif len(typed) == 3:
        names = [f"{place}.q", f"{place}.k_cache", f"{place}.v_cache"]
    outputs = [value_like(n, d, s) for n, (d, s) in zip(names, typed, strict=True)]
    return new_node(domain.DOMAIN, op_type, inputs, attributes, place, outputs)


def discard(node: ir.Node) -> None:
    """Drop a node that never entered a graph, with its uses of values."""
    for i in range(len(node.inputs)):
        node.replace_input_with(i, None)


def operands(node: ir.Node) -> dict[str, ir.Value]:
    """Inputs of a domain node by role; absent optional inputs are absent."""
    roles = domain.input_names(node.op_type)
    pairs = zip(roles, node.inputs, strict=False)
    return {role.rstrip("?"): value for role, value in pairs if value is not None}


def bundle(node: ir.Node) -> tuple[ir.Value, ...]:
    """The activation bundle that a domain node reads: ``(x,)`` or ``(q, scale, sums)``."""
    found = operands(node)
    return tuple(found[r] for r in ("x", "q", "scale", "sums") if r in found)


def replace(old: ir.Node, new: ir.Node, pairs: Sequence[tuple[ir.Value, ir.Value]]) -> None:
    """Put ``new`` where ``old`` stands and let it make the values in ``pairs`` (old, new).

    The new value takes the old one's name when that names a place (its node's) or a graph output.
    Nodes that nothing reads any more are left for :func:`sweep`.
    """
    graph = old.graph
    assert isinstance(graph, ir.Graph)
    graph.insert_before(old, new)
    for before, after in pairs:
        supersede(before, after)


def supersede(before: ir.Value, after: ir.Value) -> None:
    """Everything that reads ``before`` reads ``after``; a graph output keeps its name."""
    if before.is_graph_output() or before.name == after.name:
        name, before.name = before.name, f"{before.name}.replaced"
        after.name = name
    before.replace_all_uses_with(after, replace_graph_outputs=True)


def constant(model: ir.Model, values: Sequence[int]) -> ir.Value:
    """An int64 vector as an initializer, made once per model (shapes and axes of views)."""
    name = "const." + "_".join(map(str, values)).replace("-", "m")
    found = model.graph.initializers.get(name)
    if found is None:
        tensor = ir.Tensor(np.array(values, np.int64), name=name)
        found = ir.Value(
            name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([len(values)]),
            const_value=tensor,
        )  # fmt: skip
        model.graph.initializers[name] = found
    return found


def name_nodes(model: ir.Model) -> None:
    """Give every node a unique name: its place in errors.  Imported graphs may have none."""
    taken: set[str] = set()
    for node in model.graph:
        base = node.name or (node.outputs[0].name if node.outputs else "") or node.op_type
        name, n = base, 1
        while name in taken:
            n += 1
            name = f"{base}#{n}"
        taken.add(name)
        node.name = name


def sweep(model: ir.Model) -> None:
    """Remove nodes and initializers that nothing reads.  (onnx_ir's pass also walks every function
    body, every time.)"""
    graph = model.graph
    for node in reversed(graph):
        if not any(v.uses() or v.is_graph_output() for v in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def lazy_initializer(
    value: ir.Value,
    load: Callable[[], ir.TensorProtocol],
    dtype: ir.DataType,
    shape: Sequence[int],
    notes: Mapping[str, str],
) -> None:
    """Give an initializer new contents, made from the old ones when they are asked for.

    ``notes`` go to its ``metadata_props``: the manifest lists them as recorded transforms.
    """
    tensor = ir.LazyTensor(load, dtype, ir.Shape(shape), cache=False, name=value.name)
    value.const_value = tensor
    value.type = ir.TensorType(dtype)  # a new object: copies of a model share the old one
    value.shape = ir.Shape(shape)
    value.metadata_props.update(notes)
