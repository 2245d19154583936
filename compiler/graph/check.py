"""Verifies a graph: what every pass must leave true.

In: an ``onnx_ir.Model``.  Out: nothing, or an error that names the pass, the node and the fault.
Next file: ``dump.py``.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError

from . import domain
from .execute import graph_without_weights

Dims = tuple[object, ...]
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def check_graph(model: ir.Model, *, after: str = "", infer: bool = False) -> None:
    """Check names, single assignment, order, dangling values, types and shapes.

    Every value has a type and shape; a domain operator has its body in the model, all its required
    inputs and attributes, and outputs of the types that its shape rule says.  ``infer`` also lets
    onnx infer every shape, through the operators' bodies, and compares.  Raises InputFileError
    naming pass (``after``), node and fault.
    """
    where = f"graph {model.graph.name or ''}" + (f" after pass {after}" if after else "")
    _check_values(model.graph, where)
    for node in model.graph:
        if any(a.type in _GRAPHS for a in node.attributes.values()):
            raise UnsupportedError(
                f"node {node.name} ({node.op_type}) holds a graph of its own",
                where=where,
                next_step="export the model without control flow",
            )
        if node.domain == domain.DOMAIN:
            _check_domain_node(model, node, where)
        elif node.domain and (node.domain, node.op_type, node.overload) not in model.functions:
            raise UnsupportedError(
                f"node {node.name} is {node.domain}::{node.op_type}, which has no definition",
                where=where,
                next_step="export the model without custom operators",
            )
    if infer:
        _check_inferred(model, where)


def _fault(where: str, what: str) -> InputFileError:
    return InputFileError(what, where=where)


def _check_values(graph: ir.Graph, where: str) -> None:
    known: dict[str, ir.Value] = {}

    def define(value: ir.Value, by: str) -> None:
        name = value.name
        if not name:
            raise _fault(where, f"{by} makes a value without a name")
        if name in known:
            raise _fault(where, f"{by} makes {name}, which exists already")
        known[name] = value

    for value in (*graph.inputs, *graph.initializers.values()):
        if not (value.is_initializer() and value in graph.inputs):
            define(value, "the graph")
    for value in graph.initializers.values():
        if value.const_value is None:
            raise _fault(where, f"initializer {value.name} has no data")
        stored = tuple(int(d) for d in value.const_value.shape.numpy())
        if value.dtype != value.const_value.dtype or _static(value) != stored:
            raise _fault(where, f"initializer {value.name} does not have the type of its data")
    places: set[str] = set()
    for node in graph:
        if not node.name or node.name in places:
            raise _fault(where, f"node name {node.name!r} ({node.op_type}) is missing or taken")
        places.add(node.name)
        for used in node.inputs:
            if used is not None and known.get(used.name or "") is not used:
                raise _fault(where, f"node {node.name} reads {used.name}, not made before it")
        for value in node.outputs:
            define(value, f"node {node.name}")
            if (value.dtype is None or value.shape is None) and value.uses():
                raise _fault(where, f"node {node.name} makes {value.name} without a type or shape")
    for value in graph.outputs:
        if known.get(value.name or "") is not value:
            raise _fault(where, f"nothing makes the output {value.name}")


def _static(value: ir.Value) -> Dims:
    return () if value.shape is None else tuple(
        d if isinstance(d, int) else d.value for d in value.shape
    )  # fmt: skip


def _check_domain_node(model: ir.Model, node: ir.Node, where: str) -> None:
    at = f"node {node.name} ({node.op_type})"
    roles = domain.input_names(node.op_type)
    given = [*node.inputs, *([None] * (len(roles) - len(node.inputs)))]
    if len(node.inputs) > len(roles):
        raise _fault(where, f"{at} has {len(node.inputs)} inputs, the operator takes {len(roles)}")
    for role, value in zip(roles, given, strict=True):
        if value is None and not role.endswith("?"):
            raise _fault(where, f"{at} lacks its input {role}")
        if value is not None:
            wanted = domain.input_dtype(node.op_type, role.rstrip("?"))
            if value.dtype != wanted:
                raise _fault(where, f"{at}: input {role} is {value.dtype}, not {wanted}")
    operator = domain.OPERATORS[domain.parse(node.op_type).base]
    names = {name for name, _ in operator.attributes}
    if set(node.attributes) != names:
        odd = ", ".join(sorted(names ^ set(node.attributes)))
        raise _fault(where, f"{at}: attributes missing or unknown: {odd}")
    if (domain.DOMAIN, node.op_type, "") not in model.functions:
        raise _fault(where, f"{at} has no body in the model")
    shapes = [None if v is None else _dims(v) for v in node.inputs]
    attributes = {k: a.value for k, a in node.attributes.items()}
    typed = domain.infer(node.op_type, shapes, attributes)
    if len(typed) != len(node.outputs):
        raise _fault(where, f"{at} has {len(node.outputs)} outputs, not {len(typed)}")
    for value, (dtype, shape) in zip(node.outputs, typed, strict=True):
        if value.dtype != dtype or _contradict(_static(value), shape):
            raise _fault(
                where,
                f"{at}: {value.name} is {value.dtype} {value.shape}, should be {dtype} {shape}",
            )


def _dims(value: ir.Value) -> domain.Shape:
    if value.shape is None:
        return ()
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def _contradict(a: Dims, b: Dims) -> bool:
    return len(a) != len(b) or any(
        isinstance(x, int) and isinstance(y, int) and x != y for x, y in zip(a, b, strict=True)
    )


def _check_inferred(model: ir.Model, where: str) -> None:
    proto = graph_without_weights(model)
    declared = {v.name or "": v for n in model.graph for v in n.outputs}
    del proto.graph.value_info[:]
    try:
        # Without data propagation: it takes any small int64 vector for a shape and multiplies it.
        inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    except Exception as error:
        raise _fault(where, f"onnx finds a fault: {error}") from error
    for info in inferred.graph.value_info:
        value = declared.get(info.name)
        tensor = info.type.tensor_type
        if value is None or value.dtype is None:
            continue
        if tensor.elem_type and int(value.dtype) != tensor.elem_type:
            raise _fault(
                where, f"{info.name} is {value.dtype}, onnx infers type {tensor.elem_type}"
            )
        if tensor.HasField("shape"):
            shape = tuple(d.dim_value or None for d in tensor.shape.dim)
            if _contradict(_static(value), shape):
                raise _fault(where, f"{info.name} is {value.shape}, onnx infers {shape}")
