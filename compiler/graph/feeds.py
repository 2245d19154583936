"""Feeds of the step graph: ragged batches, block tables, caches, built from token lists.

In: a step graph and the tokens of some sequences.  Out: numpy feeds by input name.  Next file:
``check.py``.  A loader does the same from its scheduler; this is for the oracle and the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from zerolayer.runtime_stub.errors import InputFileError

from .execute import Array, Feeds

INT64 = np.int64


def frontend_feeds(tokens: Sequence[int]) -> dict[str, Array]:
    """Feeds of a frontend's graph for one sequence that starts at position 0."""
    return {"tokens": np.array(tokens, INT64), "positions": np.arange(len(tokens), dtype=INT64)}


def block_size(model: ir.Model) -> int:
    """The KV block size that a step graph was made for."""
    sizes = {
        n.attributes["block_size"].as_int() for n in model.graph if "block_size" in n.attributes
    }
    if len(sizes) != 1:
        raise InputFileError("not a step graph: no block size", where=model.graph.name or "")
    return sizes.pop()


def step_feeds(
    model: ir.Model,
    sequences: Sequence[Sequence[int]],
    *,
    starts: Sequence[int] | None = None,
    blocks: Sequence[Sequence[int]] | None = None,
    logit_rows: Sequence[int] | None = None,
    caches: Mapping[str, Array] | None = None,
    capacity: int | None = None,
) -> dict[str, Array]:
    """Feeds for one step over ``sequences`` (the new tokens of each).

    ``starts[s]`` is the position of the first new token of sequence s (default 0).  ``blocks[s]``
    are its block ids; by default sequence s has blocks s * B .. of a table wide enough for
    ``capacity`` positions.  ``logit_rows`` defaults to every row.  ``caches`` are the outputs of
    the step before (``next_caches``); by default they are zero.
    """
    starts = starts or [0] * len(sequences)
    size = block_size(model)
    longest = max(a + len(s) for a, s in zip(starts, sequences, strict=True))
    if blocks is None:
        columns = -(-max(longest, capacity or 0) // size)
        blocks = [range(i * columns, (i + 1) * columns) for i in range(len(sequences))]
    width = max(len(b) for b in blocks)
    table = np.zeros((len(blocks), width), INT64)
    for row, ids in zip(table, blocks, strict=True):
        row[: len(ids)] = list(ids)
    counts = [len(s) for s in sequences]
    total = sum(counts)
    feeds: dict[str, Array] = {
        "tokens": np.array([t for s in sequences for t in s], INT64),
        "positions": np.concatenate(
            [np.arange(a, a + n, dtype=INT64) for a, n in zip(starts, counts, strict=True)]
        ),
        "seq_starts": np.cumsum([0, *counts], dtype=INT64),
        "block_table": table,
        "logit_rows": np.array(range(total) if logit_rows is None else logit_rows, INT64),
    }
    slots = (int(table.max()) + 1) * size
    for value in model.graph.inputs:
        name = value.name or ""
        if not name.startswith(("k_cache.", "v_cache.")):
            continue
        if caches is not None:
            feeds[name] = caches[name]
        else:
            assert value.shape is not None
            elements = value.shape[-1]
            assert isinstance(elements, int)
            feeds[name] = np.zeros((slots, elements), np.float32)
    return feeds


def next_caches(results: Feeds) -> dict[str, Array]:
    """The caches that a step gave back, as inputs of the next."""
    return {n.removesuffix(".out"): a for n, a in results.items() if n.endswith(".out")}
