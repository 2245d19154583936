"""Weights on their way into the artifact: one at a time, packed as the kernels read them.

In: the planned program and the graph whose initializers it names.  Out: the entries that
``artifact/writer.py`` streams.  Next file: ``artifact/writer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from zerolayer.runtime_stub.errors import InputFileError
from zerolayer.targets.families import Family
from zerolayer.targets.program import Buffer, BufferKind, Program

from .artifact.writer import WeightEntry

#: the weights lie in the order of first use, in one section: a step reads the file forwards
SECTION = "weights"


def weight_entries(program: Program, graph: ir.Model, family: Family) -> Iterator[WeightEntry]:
    """One entry per weight buffer, in file order; ``produce`` reads and packs when called."""
    for b in sorted(
        (b for b in program.buffers if b.kind is BufferKind.WEIGHT), key=lambda b: b.offset or 0
    ):
        yield WeightEntry(
            name=b.name,
            nbytes=b.nbytes,
            dtype=b.dtype,
            shape=b.logical_shape,
            layout=b.layout,
            format=b.format,
            section=SECTION,
            produce=_producer(b, graph, family),
            offset=b.offset,
        )


def _producer(b: Buffer, graph: ir.Model, family: Family) -> Callable[[], memoryview]:
    def produce() -> memoryview:
        tensor = graph.graph.initializers[b.source[0]].const_value
        if tensor is None:
            raise InputFileError(f"weight {b.source[0]} has no data", where=b.name)
        packed = _pack(b, tensor.numpy(), family)
        if packed.nbytes != b.nbytes:
            raise InputFileError(
                f"weight {b.name} packs to {packed.nbytes} bytes, the plan says {b.nbytes}"
            )
        return memoryview(packed).cast("B")

    return produce


def _pack(b: Buffer, array: Any, family: Family) -> Any:
    raw = np.ascontiguousarray(array)
    rows = raw.shape[0] if raw.ndim > 1 else 1
    return family.pack(b.layout, b.format, raw.reshape(rows, -1).view(np.uint8))
