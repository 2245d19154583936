"""Passes that turn the single-sequence graph into the step over a ragged batch with a paged cache.

In: a decoder's graph with inputs ``tokens`` and ``positions``.  Out: the step graph of
``docs/architecture.md``: inputs ``seq_starts``, ``block_table``, ``logit_rows`` and the caches.
Graphs that are not decoders pass through unchanged.  Next file: ``weights.py``.
"""

from __future__ import annotations

import onnx_ir as ir
from zerolayer.compiler.graph.places import layer_of, residual_taps
from zerolayer.runtime_stub.errors import UnsupportedError

from .edit import (
    Attribute,
    constant,
    dims,
    domain_node,
    integer,
    new_node,
    number,
    producer,
    replace,
    rows_of,
    scalar,
    through_views,
    value_like,
)
from .options import PassOptions

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def is_decoder(model: ir.Model) -> bool:
    """Whether the graph is ``tokens[T], positions[T] -> logits`` with named layers."""
    inputs = {v.name: v for v in model.graph.inputs}
    rows = [inputs[n] for n in ("tokens", "positions") if n in inputs]
    if len(rows) != 2 or any(v.dtype != INT64 or len(dims(v)) != 1 for v in rows):
        return False
    return any(layer_of(n.name) is not None for n in model.graph)


def _input(model: ir.Model, name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
    value = value_like(name, dtype, shape)
    model.graph.inputs.append(value)
    return value


def page_kv(model: ir.Model, options: PassOptions) -> None:
    """``Attention`` over one sequence -> ``CacheWrite`` k and v + ``PagedAttention``."""
    if not is_decoder(model):
        return
    graph = model.graph
    positions = next(v for v in graph.inputs if v.name == "positions")
    seq_starts = _input(model, "seq_starts", INT64, ["S+1"])
    block_table = _input(model, "block_table", INT64, ["S", "B"])
    _input(model, "logit_rows", INT64, ["R"])
    step = [positions, seq_starts, block_table]
    layer = 0
    for node in list(graph):
        if node.op_type == "Attention" and not node.domain:
            _page(model, node, layer, step, options)
            layer += 1


def _page(
    model: ir.Model, node: ir.Node, layer: int, step: list[ir.Value], options: PassOptions
) -> None:
    graph, place = model.graph, node.name or f"layers.{layer}.attn.attention"
    window = _window(node, step[0])
    heads, kv_heads = integer(node, "q_num_heads"), integer(node, "kv_num_heads")
    q, k, v = (rows_of(x) for x in node.inputs[:3] if x is not None)
    width = dims(k)[-1]
    if not heads or not kv_heads or not isinstance(width, int) or any(
        len(dims(x)) != 2 for x in (q, k, v)
    ):  # fmt: skip
        raise UnsupportedError(
            "attention that is not over [T, heads * head_dim] rows", where=place,
            next_step="export the decoder with 3-D queries, keys and values",
        )  # fmt: skip
    caches: list[ir.Value] = []
    for role, x in (("k", k), ("v", v)):
        cache = _input(model, f"{role}_cache.{layer}", FLOAT, ["slots", width])
        attrs: dict[str, Attribute] = {
            "block_size": options.block_size,
            "role": role,
            "kv_num_heads": kv_heads,
        }
        at = f"{place.rpartition('.')[0]}.{role}_cache"
        write = domain_node("CacheWrite", [cache, x, *step], attrs, at)
        write.outputs[0].name = f"{role}_cache.{layer}.out"
        graph.insert_before(node, write)
        graph.outputs.append(write.outputs[0])
        caches.append(write.outputs[0])
    scale = number(node, "scale") or float(width // kv_heads) ** -0.5
    attributes: dict[str, Attribute] = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "scale": scale,
        "softcap": number(node, "softcap"),
        "window": window,
        "block_size": options.block_size,
    }
    new = domain_node("PagedAttention", [q, *caches, *step], attributes, place)
    graph.insert_before(node, new)
    batch = value_like(f"{place}.batch", FLOAT, dims(node.outputs[0]))
    view = new_node("", "Unsqueeze", [new.outputs[0], constant(model, [0])], {},
                    f"{place}.batch", [batch])  # fmt: skip
    replace(node, view, [(node.outputs[0], batch)])


def _window(node: ir.Node, positions: ir.Value) -> int:
    """0 for causal attention over everything; the window of a mask made from positions.

    Raises UnsupportedError for any other attention: a paged kernel knows no other mask.
    """
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    extra = len(node.inputs) > 4 or any(o.uses() for o in node.outputs[1:])
    if mask is None and integer(node, "is_causal") and not extra:
        return 0
    both = producer(mask, "And")
    if both is not None and not extra and not integer(node, "is_causal"):
        limits = {c.op_type: c for v in both.inputs if v is not None and (c := v.producer())}
        past, near = limits.get("GreaterOrEqual"), limits.get("Less")
        if past is not None and near is not None and past.inputs[0] is near.inputs[0]:
            distance, limit = producer(near.inputs[0], "Sub"), scalar(near.inputs[1])
            ends = [] if distance is None else [through_views(v) for v in distance.inputs if v]
            shapes = [] if distance is None else [dims(v) for v in distance.inputs if v]
            by_row = [len(s) == 2 and s[1] == 1 for s in shapes] == [True, False]
            if scalar(past.inputs[1]) == 0 and limit and ends == [positions] * 2 and by_row:
                return int(limit)
    raise UnsupportedError(
        "attention with a mask that is neither causal nor a causal window over positions",
        where=node.name or "",
        next_step="only decoder-only (causal) attention can be paged",
    )


def select_logits(model: ir.Model, options: PassOptions) -> None:
    """Rows that want logits are picked before the final norm: the rest of the graph is [R, ..]."""
    if not is_decoder(model):
        return
    graph = model.graph
    last = residual_taps(model)[-1]
    tap = next(v for n in graph for v in n.outputs if v.name == last)
    rows = next(v for v in graph.inputs if v.name == "logit_rows")
    readers = [u for u in tap.uses() if layer_of(u.node.name) is None]
    if not readers:
        raise UnsupportedError("nothing reads the last layer's output", where=graph.name or "")
    out = value_like("final_norm.rows", FLOAT, ["R", *dims(tap)[1:]])
    gather = new_node("", "Gather", [tap, rows], {"axis": 0}, "final_norm.rows", [out])
    graph.insert_before(readers[0].node, gather)
    tokens = dims(tap)[0]
    for use in readers:
        use.node.replace_input_with(use.idx, out)
    downstream = {out}
    for node in graph:
        if any(v in downstream for v in node.inputs):
            for value in node.outputs:
                downstream.add(value)
                value.shape = ir.Shape(["R" if d == tokens else d for d in dims(value)])
