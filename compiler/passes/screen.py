"""The screening pass: a greedy step finds its largest logits without reading the whole projection.

In: the step graph with the final format and activations of its output projection.  Out: its logits
(of Q8_0: as the sum of two products), with bounds before them that say which can be the largest.
Next file: ``../lower``; the bounds are derived in ``templates/cpu/zl_screen.h`` and
``zl_screen_split.h``.

Decoding reads every weight once for each token, and the output projection is the largest of them.
Most groups of 16 logits are told apart from the largest by fewer bits than the weights have, and
only the others are computed.  Where those bits come from depends on the weights:

* floats: an int8 copy (Q8_0, half the bytes of bf16) beside them (``HeadBounds``,
  ``ScreenedLinear``).
  A step whose logits are asked for, or sampled from, reads the floats and not the copy.
* Q8_0 with int8 activations: its codes are taken apart, the upper six bits and the lower two, and
  a logit is the sum of two products (``SplitBounds``, ``ScreenedSplitLinear``).  A greedy step
  reads the upper bits, any other step both.  An embedding that shares the weights adds its two
  rows (``SplitEmbed``), exactly.

Only a projection whose products are the graph's logits is screened: what comes after it (a cap, a
scale) can round two logits to one, and then the first of them would win, not the larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from zerolayer.compiler.graph import domain
from zerolayer.compiler.graph.execute import dequantize_tensor
from zerolayer.targets import formats

from .edit import (
    bundle,
    dims,
    discard,
    domain_base,
    domain_node,
    lazy_initializer,
    number,
    operands,
    replace,
)
from .options import Head, PassOptions, supported
from .screen_split import HIGH, LOW, SPLIT, gain_before, made_from, split_values

F32 = npt.NDArray[np.float32]

COPY = "Q8_0"
#: rows decoded at a time: bounds the copies in float64
_CHUNK_ELEMENTS = 1 << 22
#: the largest weight whose block has a scale in float16
_LARGEST = 127 * 65504.0


@dataclass(frozen=True)
class _Plan:
    """``bounds`` goes before the projection; ``swaps`` are (old, new) nodes, the projection first;
    ``weights`` are new initializers."""

    bounds: ir.Node
    swaps: tuple[tuple[ir.Node, ir.Node], ...]
    weights: tuple[ir.Value, ...]


def screen_head(model: ir.Model, options: PassOptions) -> None:
    """``Linear`` of the logits -> ``HeadBounds`` + ``ScreenedLinear``, or ``SplitBounds`` +
    ``ScreenedSplitLinear``, where the target says that it pays."""
    found = _find(model)
    if isinstance(found, str) or not options.screen(found[1]):
        return
    node, head = found
    plan = (_split if head.format == SPLIT else _beside)(model, node, head)
    made = [plan.bounds, *(new for _, new in plan.swaps)]
    if not all(supported(n, options) for n in made):
        for n in reversed(made):
            discard(n)
        return
    assert node.graph is not None
    for value in plan.weights:
        model.graph.initializers[value.name or ""] = value
    node.graph.insert_before(node, plan.bounds)
    for old, new in plan.swaps:
        replace(old, new, [(old.outputs[0], new.outputs[0])])


def screening_format(head: Head) -> str:
    """The format of what a greedy step reads of the whole projection."""
    return HIGH if head.format == SPLIT else COPY


def why_not(model: ir.Model) -> str:
    """Why the output projection of a graph that the pass left alone cannot be screened; empty when
    it could be."""
    found = _find(model)
    return found if isinstance(found, str) else ""


def _find(model: ir.Model) -> tuple[ir.Node, Head] | str:
    """The output projection, or why it cannot be screened."""
    node = next((v.producer() for v in model.graph.outputs if v.name == "logits"), None)
    if node is None:
        return "the graph has no logits"
    sig = domain.parse(node.op_type) if node.domain == domain.DOMAIN else None
    if sig is None or sig.base != "Linear":
        return f"the logits are made by {node.op_type}, not by a projection alone"
    given = operands(node)
    weight, format = given["weight"], sig.formats[0]
    if format not in formats.PLAIN and (format, sig.activations) != (SPLIT, "int8"):
        return (
            f"the output projection has {format} weights and {sig.activations} activations; floats,"
            f" and {SPLIT} with int8 activations, can be screened"
        )
    if "bias" in given:
        return "it has a bias"
    shape = dims(weight)
    if not weight.is_initializer() or len(shape) != 2:
        return "its weights are no matrix of the model"
    rows, columns = domain.weight_shape(format, shape)
    if not isinstance(rows, int) or not isinstance(columns, int):
        return "its shape is not known"
    if columns % formats.FORMATS[COPY].block_elems:
        return f"rows of {columns} are not whole blocks of {COPY}"
    others = [use.node for use in weight.uses() if use.node is not node]
    strange = [n.op_type for n in others if domain_base(n) != "Embed"]
    if format == SPLIT and strange:
        return f"its weights are read by {strange[0]} too"
    return node, Head(format, rows, columns, sig.activations)


def _beside(model: ir.Model, node: ir.Node, head: Head) -> _Plan:
    """Floats, with a copy beside them."""
    given = operands(node)
    x, weight = given["x"], given["weight"]
    copy, norms = _copy(model, weight, head)
    place = node.name or "logits"
    name = domain.op_name("HeadBounds", (COPY,), head.activations)
    bounds = domain_node(name, [x, copy, norms], {}, f"{place}.bounds")
    name = domain.op_name("ScreenedLinear", (head.format,), head.activations)
    new = domain_node(name, [x, weight, bounds.outputs[0]], {}, place)
    return _Plan(bounds, ((node, new),), (copy, norms))


def _split(model: ir.Model, node: ir.Node, head: Head) -> _Plan:
    """Q8_0, its codes taken apart, for all that read it."""
    weight, x = operands(node)["weight"], bundle(node)
    high, low, norms, spread = split_values(weight, head, gain_before(node))
    place = node.name or "logits"
    name = domain.op_name("SplitBounds", (HIGH,), head.activations)
    bounds = domain_node(name, [*x, high, norms, spread], {}, f"{place}.bounds")
    name = domain.op_name("ScreenedSplitLinear", (HIGH, LOW), head.activations)
    new = domain_node(name, [*x, high, low, bounds.outputs[0]], {}, place)
    swaps = [(node, new)]
    for use in list(weight.uses()):
        if use.node is not node:
            swaps.append((use.node, _split_embed(use.node, high, low)))
    return _Plan(bounds, tuple(swaps), (high, low, norms, spread))


def _split_embed(node: ir.Node, high: ir.Value, low: ir.Value) -> ir.Node:
    name = domain.op_name("SplitEmbed", (HIGH, LOW))
    scale = {"scale": number(node, "scale", 1.0)}
    return domain_node(name, [operands(node)["tokens"], high, low], scale, node.name or "embed")


def _copy(model: ir.Model, weight: ir.Value, head: Head) -> tuple[ir.Value, ir.Value]:
    """The int8 copy [N, row_bytes] and, float32 [2, N], the norms of its error and of the rows."""
    tensor = weight.const_value
    assert tensor is not None
    row_bytes = formats.row_bytes(COPY, head.columns)

    def load_copy() -> ir.TensorProtocol:
        out = np.empty((head.rows, row_bytes), np.uint8)
        for start, x in _rows(tensor.numpy(), head):
            out[start : start + len(x)] = copy_of(x)[2]
        return ir.Tensor(out, name=copy.name)

    def load_norms() -> ir.TensorProtocol:
        out = np.empty((2, head.rows), np.float32)
        for start, x in _rows(tensor.numpy(), head):
            out[:, start : start + len(x)] = norms_of(*copy_of(x))
        return ir.Tensor(out, name=norms.name)

    copy, norms = ir.Value(name=f"{weight.name}.int8"), ir.Value(name=f"{weight.name}.norms")
    notes = made_from(weight, head, COPY, f"screening copy in {COPY}")
    lazy_initializer(copy, load_copy, ir.DataType.UINT8, (head.rows, row_bytes), notes)
    notes = made_from(weight, head, "F32", "norms of the screening copy's error and of the rows")
    lazy_initializer(norms, load_norms, ir.DataType.FLOAT, (2, head.rows), notes)
    return copy, norms


def _rows(stored: npt.NDArray[np.generic], head: Head) -> Iterator[tuple[int, F32]]:
    """(first row, some rows as float32), all rows in order."""
    step = max(1, _CHUNK_ELEMENTS // head.columns)
    for start in range(0, head.rows, step):
        yield start, dequantize_tensor(stored[start : start + step], head.format)


def copy_of(x: F32) -> tuple[npt.NDArray[np.bool_], F32, npt.NDArray[np.uint8]]:
    """``x`` [N, K] -> which rows the copy holds, those rows (zeros for the others), and the copy,
    uint8 [N, row_bytes].

    A row that Q8_0 cannot hold (not finite, too large) is zero in the copy.
    """
    with np.errstate(invalid="ignore"):
        fits = np.abs(x).max(axis=1) < _LARGEST
    kept = np.where(fits[:, None], x, np.float32(0))
    return fits, kept, formats.quantize(COPY, kept)


def norms_of(fits: npt.NDArray[np.bool_], kept: F32, copy: npt.NDArray[np.uint8]) -> F32:
    """float32 [2, N]: the Euclidean norms of the copy's error and of the rows, not below the exact
    ones; infinite for a row that the copy does not hold, which is always computed from the floats.
    """
    exact = kept.astype(np.float64)
    error = exact - formats.dequantize(COPY, copy)
    out = np.empty((2, len(kept)), np.float32)
    for i, part in enumerate((error, exact)):
        # column by column: the same bits whatever vectors numpy adds with
        squares = np.zeros(len(kept))
        for column in np.ascontiguousarray(part.T):
            squares += column * column
        norm = np.sqrt(squares) * (1 + 2.0**-20)
        out[i] = np.where(fits, np.nextafter(norm.astype(np.float32), np.float32(np.inf)), np.inf)
    return out


def encode(x: F32) -> tuple[npt.NDArray[np.uint8], F32]:
    """``x`` [N, K] -> its copy and the norms."""
    fits, kept, copy = copy_of(x)
    return copy, norms_of(fits, kept, copy)
