"""The activation-quantizing pass: the form in which each linear layer reads its input.

In: ``Linear_F_f32`` nodes.  Out: ``Linear_F_int8`` behind a shared ``QuantizeInt8``,
``Linear_F_bf16``, or unchanged.  Next file: ``fuse.py``.

``--activations`` names the lowest precision that is allowed.  The first kind in this order that the
target has a kernel for is taken; a wider one is never a loss, and the operator's name records it:

| asked | block formats | BF16 weights | F16, F32 weights |
|---|---|---|---|
| int8 | int8, f32 | bf16, f32 | f32 |
| bf16 | bf16, f32 | bf16, f32 | f32 |
| f32 | f32 | f32 | f32 |

Rounding an activation to bf16 costs no accuracy that BF16 weights have not lost already; F16 and
F32 weights were chosen for more, so their inputs stay float32.
"""

from __future__ import annotations

import onnx_ir as ir
from zerolayer.compiler.graph import domain
from zerolayer.targets import formats

from .edit import dims, discard, domain_node, supersede
from .options import PassOptions, supported


def candidates(format: str, asked: str) -> tuple[str, ...]:
    """Activation kinds for a weight format, best first (the table above)."""
    if asked == "f32" or format in ("F16", "F32"):
        return ("f32",)
    if asked == "int8" and format in formats.FORMATS:
        return ("int8", "f32")
    return ("bf16", "f32")


def quantize_activations(model: ir.Model, options: PassOptions) -> None:
    """Inputs of linear layers to int8 or bf16; readers of a value share one ``QuantizeInt8``."""
    quantized: dict[ir.Value, list[ir.Value]] = {}
    for node in list(model.graph):
        if node.domain != domain.DOMAIN:
            continue
        sig = domain.parse(node.op_type)
        if sig.base != "Linear" or sig.activations != "f32":
            continue
        for kind in candidates(sig.formats[0], options.activations):
            if kind == "f32" or _rewrite(node, sig.formats[0], kind, quantized, options):
                break


def _rewrite(
    node: ir.Node, format: str, kind: str, quantized: dict[ir.Value, list[ir.Value]],
    options: PassOptions,
) -> bool:  # fmt: skip
    graph, x = node.graph, node.inputs[0]
    assert graph is not None and x is not None
    name = domain.op_name("Linear", (format,), kind)
    if kind == "bf16":
        probe = domain_node(name, node.inputs, {}, node.name or "")
        ok = supported(probe, options)
        discard(probe)
        if ok:
            node.op_type = name
        return ok
    columns = dims(x)[-1]
    if not isinstance(columns, int) or columns % 32:
        return False
    made = quantized.get(x)
    quantizer: ir.Node | None = None
    if made is None:
        quantizer = domain_node("QuantizeInt8", [x], {}, f"{x.name}.quantize")
        for value, role in zip(quantizer.outputs, ("int8", "scale", "sums"), strict=True):
            value.name = f"{x.name}.{role}"
        made = list(quantizer.outputs)
    new = domain_node(name, [*made, *node.inputs[1:]], {}, node.name or "")
    if not supported(new, options) or (quantizer and not supported(quantizer, options)):
        discard(new)
        if quantizer is not None:
            discard(quantizer)
        return False
    if quantizer is not None:
        graph.insert_before(node, quantizer)
        quantized[x] = made
    graph.insert_before(node, new)
    supersede(node.outputs[0], new.outputs[0])
    return True
