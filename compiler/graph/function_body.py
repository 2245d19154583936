"""A notation for writing ONNX function bodies as arithmetic.

In: standard operators called as methods and Python's ``+ - * /`` on :class:`Val`.  Out: an
``onnx_ir.Function``.  Next file: ``domain_dequantize.py`` (bodies of the weight formats), then
``domain_ops.py`` (bodies of everything else).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

OPSET = 24
DOMAIN = "zerolayer"
DOMAIN_VERSION = 1

FLOAT = ir.DataType.FLOAT
BFLOAT16 = ir.DataType.BFLOAT16
INT8 = ir.DataType.INT8
INT32 = ir.DataType.INT32
INT64 = ir.DataType.INT64
UINT8 = ir.DataType.UINT8
UINT32 = ir.DataType.UINT32
BOOL = ir.DataType.BOOL

_ATTRIBUTE_TYPES = {
    "int": ir.AttributeType.INT,
    "float": ir.AttributeType.FLOAT,
    "string": ir.AttributeType.STRING,
}


@dataclass(frozen=True)
class Ref:
    """An attribute of the enclosing function, passed on to a node of its body."""

    name: str
    type: str  # int, float or string


@dataclass(frozen=True)
class Val:
    """A value of a body.  Arithmetic with a Python number makes a constant of type ``dtype``."""

    body: Body
    value: ir.Value
    dtype: ir.DataType = FLOAT

    def _other(self, other: Operand) -> Val:
        return other if isinstance(other, Val) else self.body.const(other, self.dtype)

    def _binary(self, op_type: str, other: Operand) -> Val:
        return self.body.op(op_type, self, self._other(other), dtype=self.dtype)

    def __add__(self, other: Operand) -> Val:
        return self._binary("Add", other)

    def __sub__(self, other: Operand) -> Val:
        return self._binary("Sub", other)

    def __mul__(self, other: Operand) -> Val:
        return self._binary("Mul", other)

    def __truediv__(self, other: Operand) -> Val:
        return self._binary("Div", other)

    def __and__(self, other: Operand) -> Val:
        """Bitwise on integers."""
        return self._binary("BitwiseAnd", other)

    def __or__(self, other: Operand) -> Val:
        """Bitwise on integers."""
        return self._binary("BitwiseOr", other)

    def __rshift__(self, other: Operand) -> Val:
        """Logical shift of an unsigned integer."""
        return self.body.op(
            "BitShift", self, self._other(other), direction="RIGHT", dtype=self.dtype
        )

    def __lshift__(self, other: Operand) -> Val:
        return self.body.op(
            "BitShift", self, self._other(other), direction="LEFT", dtype=self.dtype
        )

    def compare(self, op_type: str, other: Operand) -> Val:
        """``Equal``, ``Less``, ``LessOrEqual``, ``Greater`` or ``GreaterOrEqual``."""
        return self.body.op(op_type, self, self._other(other), dtype=BOOL)

    def cast(self, dtype: ir.DataType) -> Val:
        return (
            self if dtype == self.dtype else self.body.op("Cast", self, to=int(dtype), dtype=dtype)
        )

    def reshape(self, *shape: int | Val) -> Val:
        """Dimensions are numbers (0 keeps, -1 infers) or int64 values of shape [1]."""
        return self.body.op("Reshape", self, self.body.ints(*shape), dtype=self.dtype)

    def unsqueeze(self, *axes: int) -> Val:
        return self.body.op("Unsqueeze", self, self.body.ints(*axes), dtype=self.dtype)

    def transpose(self, *perm: int) -> Val:
        return self.body.op("Transpose", self, perm=list(perm), dtype=self.dtype)

    def slice(self, start: int | Val, stop: int | Val, axis: int) -> Val:
        args = (self.body.ints(start), self.body.ints(stop), self.body.ints(axis))
        return self.body.op("Slice", self, *args, dtype=self.dtype)

    def gather(self, indices: Val, axis: int = 0) -> Val:
        return self.body.op("Gather", self, indices, axis=axis, dtype=self.dtype)

    def dim(self, axis: int) -> Val:
        """The size of one axis (-1: the last), int64 [1]."""
        ends = {} if axis == -1 else {"end": axis + 1}
        return self.body.op("Shape", self, start=axis, dtype=INT64, **ends)


Operand = Val | int | float


class Body:
    """A function under construction.  ``inputs`` may be left out by a caller only where the body
    hands them to an optional input of a standard operator."""

    def __init__(self, inputs: Sequence[tuple[str, ir.DataType]]) -> None:
        self.nodes: list[ir.Node] = []
        self._constants: dict[tuple[Any, ...], Val] = {}
        self.inputs = {name: Val(self, ir.Value(name=name), dtype) for name, dtype in inputs}

    def __getitem__(self, name: str) -> Val:
        return self.inputs[name]

    def op(
        self, op_type: str, *inputs: Val | None, dtype: ir.DataType = FLOAT, **attrs: Any
    ) -> Val:
        """Append a node with one output."""
        node = ir.Node(
            "",
            op_type,
            [None if v is None else v.value for v in inputs],
            [_attribute(k, v) for k, v in attrs.items()],
        )
        node.outputs[0].name = f"v{len(self.nodes)}"
        self.nodes.append(node)
        return Val(self, node.outputs[0], dtype)

    def const(self, value: Any, dtype: ir.DataType = FLOAT) -> Val:
        """A constant scalar or array."""
        array = np.asarray(value, dtype=dtype.numpy())
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=ir.tensor(array), dtype=dtype)
        return self._constants[key]

    def ints(self, *values: int | Val) -> Val:
        """An int64 vector; each entry is a number or an int64 value of shape [1]."""
        if all(isinstance(v, int) for v in values):
            return self.const(list(values), INT64)
        parts = [v if isinstance(v, Val) else self.const([v], INT64) for v in values]
        return self.concat(parts, 0) if len(parts) > 1 else parts[0]

    def attribute(self, name: str, type: str) -> Val:
        """An attribute of the function as a scalar."""
        dtype = {"int": INT64, "float": FLOAT, "string": ir.DataType.STRING}[type]
        key = ("attribute", name)
        if key not in self._constants:
            args = {f"value_{type}": Ref(name, type)}
            self._constants[key] = self.op("Constant", dtype=dtype, **args)
        return self._constants[key]

    def concat(self, parts: Sequence[Val], axis: int) -> Val:
        return self.op("Concat", *parts, axis=axis, dtype=parts[0].dtype)

    def where(self, condition: Val, yes: Operand, no: Operand, dtype: ir.DataType = FLOAT) -> Val:
        a = yes if isinstance(yes, Val) else self.const(yes, dtype)
        b = no if isinstance(no, Val) else self.const(no, dtype)
        return self.op("Where", condition, a, b, dtype=dtype)

    def range(self, stop: Val) -> Val:
        """0 .. stop - 1; ``stop`` is an int64 of shape [1]."""
        scalar = self.op("Squeeze", stop, dtype=INT64)
        return self.op("Range", self.const(0, INT64), scalar, self.const(1, INT64), dtype=INT64)

    def function(
        self, name: str, outputs: Sequence[tuple[str, Val]], attributes: Sequence[str]
    ) -> ir.Function:
        """The finished ``onnx_ir.Function`` with named outputs and required attributes."""
        for output, val in outputs:
            if val.value.producer() is None:  # an input handed through
                val = self.op("Identity", val, dtype=val.dtype)  # noqa: PLW2901
            val.value.name = output
        graph = ir.Graph(
            [v.value for v in self.inputs.values()],
            [self.nodes_output(output) for output, _ in outputs],
            nodes=self.nodes,
            opset_imports={"": OPSET},
            name=name,
        )
        undefined = ir.AttributeType.UNDEFINED
        return ir.Function(
            DOMAIN, name, graph=graph, attributes=[ir.Attr(a, undefined, None) for a in attributes]
        )

    def nodes_output(self, name: str) -> ir.Value:
        """The value called ``name``; the names of outputs are unique."""
        return next(v for n in reversed(self.nodes) for v in n.outputs if v.name == name)


def _attribute(name: str, value: Any) -> ir.Attr:
    if isinstance(value, Ref):
        return ir.RefAttr(name, value.name, _ATTRIBUTE_TYPES[value.type])
    if isinstance(value, int):
        return ir.AttrInt64(name, value)
    if isinstance(value, float):
        return ir.AttrFloat32(name, value)
    if isinstance(value, str):
        return ir.AttrString(name, value)
    if isinstance(value, list):
        return ir.AttrInt64s(name, value)
    return ir.AttrTensor(name, value)
