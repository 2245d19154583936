"""The shortening pass: bf16 weights in 12 bits, none of them changed.

In: the graph with the final format and activations of its linear layers.  Out: ``Op_BF16_12_bf16``
where it read ``BF16``, the values themselves untouched; a packer writes them shorter.  Next file:
``../lower``; ``targets/bf16_12.py`` says how.

Decoding takes as long as reading the weights does.  A weight is shortened when every operator that
reads it has a kernel for it, all their weights can be written so, and a step reads them from memory
and not from a cache, where taking them apart costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx_ir as ir
from zerolayer.compiler.graph import domain
from zerolayer.targets import formats

from .edit import dims, discard, domain_node
from .options import PassOptions, supported

SHORT = "BF16_12"
LONG = formats.SAME_VALUES[SHORT]


def shorten(model: ir.Model, options: PassOptions) -> None:
    """BF16 weights to BF16_12, where the target can and it pays."""
    nodes = [n for n in model.graph if _reads_long(n) and _has_kernel(n, options)]
    nodes = _alone(nodes)
    weights = list(dict.fromkeys(w for n in nodes for w in _weights(n)))
    if not weights or not options.shorten(sum(_nbytes(w) for w in weights)):
        return
    held = _held(weights, options)
    for node in _alone([n for n in nodes if all(w in held for w in _weights(n))]):
        node.op_type = _short_name(node)
        for weight in _weights(node):
            _note(weight)


def _note(weight: ir.Value) -> None:
    """What the manifest says of it, after what became of it before."""
    notes = weight.metadata_props
    if notes.get("format") != SHORT:
        before = [notes["transform"]] if "transform" in notes else []
        notes.setdefault("source_format", LONG)
        notes["format"] = SHORT
        notes["transform"] = "; ".join([*before, "bf16 in 12 bits, values unchanged"])


def _reads_long(node: ir.Node) -> bool:
    if node.domain != domain.DOMAIN:
        return False
    sig = domain.parse(node.op_type)
    return bool(sig.formats) and set(sig.formats) == {LONG} and sig.activations == "bf16"


def _short_name(node: ir.Node) -> str:
    sig = domain.parse(node.op_type)
    return domain.op_name(sig.base, (SHORT,) * len(sig.formats), sig.activations, sig.variant)


def _has_kernel(node: ir.Node, options: PassOptions) -> bool:
    attributes = {n: a.value for n, a in node.attributes.items()}
    probe = domain_node(_short_name(node), node.inputs, attributes, node.name or "")
    found = supported(probe, options)
    discard(probe)
    return found


def _weights(node: ir.Node) -> list[ir.Value]:
    """The matrices of a node."""
    roles = domain.OPERATORS[domain.parse(node.op_type).base].weights
    names = domain.input_names(node.op_type)
    return [v for n, v in zip(names, node.inputs, strict=False) if n in roles and v is not None]


def _alone(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Those of ``nodes`` all of whose weights are initializers that no other node reads."""
    kept = list(nodes)
    while True:
        chosen = set(kept)
        left = [
            n
            for n in kept
            if all(w.is_initializer() and {u.node for u in w.uses()} <= chosen for w in _weights(n))
        ]
        if len(left) == len(kept):
            return left
        kept = left


def _nbytes(weight: ir.Value) -> int:
    n, k = (d if isinstance(d, int) else 0 for d in dims(weight))
    return 2 * n * k


def _held(weights: Sequence[ir.Value], options: PassOptions) -> set[ir.Value]:
    """Those that can be written so.  A few that lie in the file are looked at together; one that is
    made when it is loaded takes the memory of both forms, so it is alone."""

    def holds(weight: ir.Value) -> bool:
        assert weight.const_value is not None
        stored = np.ascontiguousarray(weight.const_value.numpy())
        return options.holds(SHORT, stored.reshape(len(stored), -1).view(np.uint8))

    made = [w for w in weights if "transform" in w.metadata_props]
    stored = [w for w in weights if "transform" not in w.metadata_props]
    with ThreadPoolExecutor(4, thread_name_prefix="shorten") as threads:
        found = {w for w, yes in zip(stored, threads.map(holds, stored), strict=True) if yes}
    return found | {w for w in made if holds(w)}
