"""The screening pass: a greedy step finds its largest logits without reading the whole projection.

In: the step graph with the final format and activations of its output projection.  Out: the same
logits, with a ``HeadBounds`` over an int8 copy of the projection before a ``ScreenedLinear``.  Next
file: ``../lower``; the bounds are derived in ``templates/cpu/zl_screen.h``.

Decoding reads every weight once for each token, and the output projection is the largest of them.
The copy (Q8_0, half the bytes of bf16) says of most groups of 16 logits that none of them can be
the largest; only the others are computed from the floats.  A step whose logits are asked for, or
sampled from, reads the floats and not the copy.

Only a projection whose products are the graph's logits is screened: what comes after it (a cap, a
scale) can round two logits to one, and then the first of them would win, not the larger.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from zerolayer.compiler.graph import domain
from zerolayer.compiler.graph.execute import dequantize_tensor
from zerolayer.targets import formats

from .edit import dims, discard, domain_node, lazy_initializer, operands, replace
from .options import Head, PassOptions, supported

F32 = npt.NDArray[np.float32]

COPY = "Q8_0"
#: rows decoded at a time: bounds the copies in float64
_CHUNK_ELEMENTS = 1 << 22
#: the largest weight whose block has a scale in float16
_LARGEST = 127 * 65504.0


def screen_head(model: ir.Model, options: PassOptions) -> None:
    """``Linear`` of the logits -> ``HeadBounds`` + ``ScreenedLinear``, where the target says that
    it pays."""
    found = _find(model)
    if isinstance(found, str) or not options.screen(found[1]):
        return
    node, head = found
    given = operands(node)
    x, weight = given["x"], given["weight"]
    copy, norms = _copy(model, weight, head)
    place = node.name or "logits"
    name = domain.op_name("HeadBounds", (COPY,), head.activations)
    bounds = domain_node(name, [x, copy, norms], {}, f"{place}.bounds")
    name = domain.op_name("ScreenedLinear", (head.format,), head.activations)
    new = domain_node(name, [x, weight, bounds.outputs[0]], {}, place)
    if not supported(bounds, options) or not supported(new, options):
        discard(new)
        discard(bounds)
        return
    assert node.graph is not None
    for value in (copy, norms):
        model.graph.initializers[value.name or ""] = value
    node.graph.insert_before(node, bounds)
    replace(node, new, [(node.outputs[0], new.outputs[0])])


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
    weight = given["weight"]
    if sig.formats[0] not in formats.PLAIN:
        return f"its weights are {sig.formats[0]}, not floats"
    if "bias" in given:
        return "it has a bias"
    shape = dims(weight)
    if not weight.is_initializer() or len(shape) != 2:
        return "its weights are no matrix of the model"
    rows, columns = shape
    if not isinstance(rows, int) or not isinstance(columns, int):
        return "its shape is not known"
    if columns % formats.FORMATS[COPY].block_elems:
        return f"rows of {columns} are not whole blocks of {COPY}"
    return node, Head(sig.formats[0], rows, columns, sig.activations)


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
    source = {"source": weight.metadata_props.get("source", weight.name or "")}
    notes = source | {"source_format": head.format, "format": COPY}
    notes["transform"] = f"screening copy in {COPY}"
    lazy_initializer(copy, load_copy, ir.DataType.UINT8, (head.rows, row_bytes), notes)
    notes |= {"format": "F32", "transform": "norms of the screening copy's error and of the rows"}
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
