"""Places: which layer a node belongs to, and where the residual stream can be tapped.

In: a graph whose node names are places (``layers.3.attn.q``), before or after the passes.  Out:
layer numbers and value names.  Next file: ``execute.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx_ir as ir
from zerolayer.runtime_stub.errors import UnsupportedError

_LAYER = re.compile(r"layers\.(\d+)\.")


def layer_of(place: str | None) -> int | None:
    """``layers.3.attn.q`` -> 3; None outside the layers."""
    match = _LAYER.match(place or "")
    return int(match.group(1)) if match else None


def residual_taps(model: ir.Model) -> tuple[str, ...]:
    """Names of the residual stream's values: after the embedding, then after each layer.

    The node ``embed`` and the last node of ``layers.i`` make them, before and after every
    pass.  Raises UnsupportedError for a graph that is not a decoder.
    """
    embedding: str | None = None
    layers: dict[int, str] = {}
    for node in model.graph:
        name = node.name or ""
        layer = layer_of(name)
        if layer is not None:
            layers[layer] = _only_name(node)
        elif name == "embed":
            embedding = _only_name(node)
    if embedding is None or sorted(layers) != list(range(len(layers))) or not layers:
        raise UnsupportedError(
            "the graph has no residual stream: it needs nodes named embed and layers.0 to layers.n",
            where=model.graph.name or "",
        )
    return (embedding, *(layers[i] for i in range(len(layers))))


def needed_nodes(
    graph: ir.Graph, outputs: Iterable[ir.Value], given: frozenset[ir.Value] = frozenset()
) -> list[ir.Node]:
    """Nodes that ``outputs`` need, in order, when the values in ``given`` are already known."""
    stack = [v for v in outputs if v not in given]
    needed: set[ir.Node] = set()
    while stack:
        node = stack.pop().producer()
        if node is None or node in needed:
            continue
        needed.add(node)
        stack += [v for v in node.inputs if v is not None and v not in given]
    return [n for n in graph if n in needed]


def _only_name(node: ir.Node) -> str:
    return node.outputs[0].name or ""
