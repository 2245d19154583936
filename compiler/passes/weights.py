"""The weight-quantizing pass: what ``--quantize`` does to each weight.

In: a graph whose matrices are read by ``Linear_F_A`` and ``Embed_F``.  Out: the same graph with
other formats, each change a recorded lazy transform.  Next file: ``activations.py``.

| scheme | linear layers | embedding tables, output projection |
|---|---|---|
| keep | as in the file | as in the file |
| bf16 | BF16 | BF16 |
| int8 | Q8_0 | Q8_0 |
| int4 | Q4_1 | Q8_0: their errors reach the logits undamped |

A weight that already has at most as many bits per code keeps its format: requantizing would only
lose.  A matrix whose rows are not whole blocks of 32 keeps its format; its metadata say so.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
from zerolayer.compiler.graph import domain
from zerolayer.compiler.graph.execute import dequantize_tensor
from zerolayer.compiler.graph.places import layer_of
from zerolayer.targets import formats

from .edit import dims, lazy_initializer
from .options import PassOptions

#: rows decoded and encoded at a time: bounds the float32 copy of a large table
_CHUNK_ELEMENTS = 1 << 24


def quantize_weights(model: ir.Model, options: PassOptions) -> None:
    """Weights to the scheme's formats; every reader of a weight changes with it."""
    if options.quantize == "keep":
        return
    for value in list(model.graph.initializers.values()):
        if not value.uses() or not all(_reads_as_weight(u.node, u.idx) for u in value.uses()):
            continue
        uses = [u.node for u in value.uses()]
        format = domain.parse(uses[0].op_type).formats[0]
        wanted = _wanted(options.quantize, uses)
        if not _improves(format, wanted):
            continue
        k = domain.weight_shape(format, dims(value))[1]
        assert isinstance(k, int)
        if wanted != "BF16" and k % formats.FORMATS[wanted].block_elems:
            value.metadata_props["not_quantized"] = f"rows of {k} are not whole blocks of {wanted}"
            continue
        requantize(value, format, wanted)
        for node in uses:
            sig = domain.parse(node.op_type)
            node.op_type = domain.op_name(sig.base, (wanted,), sig.activations)


def _reads_as_weight(node: ir.Node, index: int) -> bool:
    """Whether input ``index`` of ``node`` is the weight of a linear layer or embedding."""
    if node.domain != domain.DOMAIN:
        return False
    if domain.parse(node.op_type).base not in ("Linear", "Embed"):
        return False
    return domain.input_names(node.op_type)[index] == "weight"


def _wanted(scheme: str, readers: list[ir.Node]) -> str:
    if scheme == "bf16":
        return "BF16"
    outer = any(layer_of(n.name) is None for n in readers)
    return formats.QUANTIZE_SCHEMES["int8" if outer else scheme]


def code_bits(format: str) -> int:
    """Bits of one element's code: 4 for Q4_1, 16 for BF16."""
    block = formats.FORMATS.get(format)
    return block.code_bits if block is not None else 8 * formats.PLAIN[format]


def _improves(format: str, wanted: str) -> bool:
    if format == "F16" and wanted == "BF16":
        return True
    return code_bits(format) > code_bits(wanted)


def requantize(value: ir.Value, format: str, wanted: str) -> None:
    """Re-encode an initializer lazily; its metadata record from what."""
    tensor = value.const_value
    assert tensor is not None
    n, k = domain.weight_shape(format, dims(value))
    assert isinstance(n, int) and isinstance(k, int)
    plain = wanted == "BF16"
    shape = (n, k if plain else formats.row_bytes(wanted, k))
    rows = max(1, _CHUNK_ELEMENTS // k)

    def load() -> ir.TensorProtocol:
        stored = tensor.numpy()
        out = np.empty(shape, ml_dtypes.bfloat16 if plain else np.uint8)
        for start in range(0, n, rows):
            x = dequantize_tensor(stored[start : start + rows], format)
            out[start : start + rows] = x if plain else formats.quantize(wanted, x)
        return ir.Tensor(out, name=value.name)

    notes = {"format": wanted, "source_format": format, "transform": f"quantized to {wanted}"}
    dtype = ir.DataType.BFLOAT16 if plain else ir.DataType.UINT8
    lazy_initializer(value, load, dtype, shape, notes)
