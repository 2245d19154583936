"""What the user chose, as the passes see it, and the question they ask the target.

In: nothing.  Out: :class:`PassOptions` and :func:`kernel_query`.  Next file: ``simplify.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from zerolayer.compiler.graph import domain
from zerolayer.compiler.lower.constants import (
    DEFAULTS,
    STANDARD_INPUTS,
    Call,
    Operand,
    constants_of,
)
from zerolayer.runtime_stub.errors import UnsupportedError
from zerolayer.targets.kernels import KernelQuery
from zerolayer.targets.program import Constant

from .edit import dims

Quantize = Literal["keep", "bf16", "int8", "int4"]
Activations = Literal["int8", "bf16", "f32"]
Fusion = Literal["conservative", "balanced", "aggressive"]
Supports = Callable[[KernelQuery], "str | None"]


@dataclass(frozen=True)
class Head:
    """An output projection that could be screened: ``screen.py``."""

    format: str
    rows: int
    columns: int
    activations: str


def no_screen(_head: Head) -> bool:
    """A target for which screening never pays."""
    return False


def no_shorter(_nbytes: int) -> bool:
    """A target for which shorter weights never pay."""
    return False


def holds_nothing(_format: str, _raw: npt.NDArray[np.uint8]) -> bool:
    """A target without formats of its own."""
    return False


def every_kernel(_query: KernelQuery) -> str | None:
    """A target that has every kernel (tests, and graphs that are not lowered)."""
    return None


@dataclass(frozen=True)
class PassOptions:
    """``supports`` says why the target has no kernel for a query, or None when it has one;
    ``screen`` whether a greedy step is to screen an output projection; ``shorten`` whether so many
    bytes of weights are worth taking apart to read fewer, and ``holds`` whether a format of the
    target's own can have a weight's values, uint8 [N, row_bytes]."""

    quantize: Quantize = "keep"
    activations: Activations = "int8"
    fusion: Fusion = "balanced"
    block_size: int = 16
    kv_dtype: str = "f32"
    supports: Supports = every_kernel
    screen: Callable[[Head], bool] = no_screen
    shorten: Callable[[int], bool] = no_shorter
    holds: Callable[[str, npt.NDArray[np.uint8]], bool] = holds_nothing

    @property
    def fuses(self) -> bool:
        return self.fusion != "conservative"


def kernel_query(node: ir.Node, kv_dtype: str = "f32") -> KernelQuery:
    """The question "is there a kernel for this node", with the constants that lowering would use.

    Raises UnsupportedError when no kernel can exist (shapes that contradict each other).
    """
    call = _call(node, kv_dtype)
    constants = tuple(sorted(constants_of(call).items()))
    return KernelQuery(call.op, call.formats, call.activations, constants, call.place)


def supported(node: ir.Node, options: PassOptions) -> bool:
    """Whether the target has a kernel for ``node`` (which need not be in a graph yet)."""
    try:
        query = kernel_query(node, options.kv_dtype)
    except UnsupportedError:
        return False
    return options.supports(query) is None


def _call(node: ir.Node, kv_dtype: str) -> Call:
    formats: tuple[str, ...] = ()
    activations, op = "", node.op_type
    weights: Mapping[str, str] = {}
    if node.domain == domain.DOMAIN:
        sig = domain.parse(node.op_type)
        op, formats, activations = sig.base, sig.formats, sig.activations
        weights = dict(zip(domain.OPERATORS[op].weights, formats, strict=True))
        names = domain.input_names(node.op_type)
    else:
        names = STANDARD_INPUTS.get(op, ())
    inputs: dict[str, Operand] = {}
    for name, value in zip(names, node.inputs, strict=False):
        role = name.rstrip("?")
        if value is not None:
            inputs[role] = _operand(value, weights.get(role, ""))
    attributes: dict[str, Constant] = dict(DEFAULTS.get(op, {}))
    for key, attr in node.attributes.items():
        if isinstance(attr.value, (int, float, str)):
            attributes[key] = attr.value
    outputs = tuple(_operand(v, "") for v in node.outputs)
    return Call(node.name or "", op, formats, activations, attributes, inputs, outputs, kv_dtype)


def _operand(value: ir.Value, format: str) -> Operand:
    shape = dims(value)
    if format:
        shape = domain.weight_shape(format, shape)
    return Operand(value.name or "", tuple("?" if d is None else d for d in shape))
