"""Weights on their way into the artifact: a few at a time, packed as the kernels read them.

In: the planned program and the graph whose initializers it names.  Out: the entries that
``artifact/writer.py`` streams.  Next file: ``artifact/writer.py``.

Packing takes longer than hashing and writing: while one tensor is written, threads pack those after
it, as long as they are small.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from zerolayer.runtime_stub.errors import InputFileError
from zerolayer.targets.families import Family
from zerolayer.targets.program import Buffer, BufferKind, Program

from .artifact.writer import WeightEntry

#: the weights lie in the order of first use, in one section: a step reads the file forwards
SECTION = "weights"
#: packed bytes that wait for the one before them; a larger tensor is packed alone
_AHEAD_BYTES = 64 << 20
_THREADS = 4


def weight_entries(program: Program, graph: ir.Model, family: Family) -> Iterator[WeightEntry]:
    """One entry per weight buffer, in file order; ``produce`` reads and packs when called, and
    begins with those after it."""
    buffers = sorted(
        (b for b in program.buffers if b.kind is BufferKind.WEIGHT), key=lambda b: b.offset or 0
    )
    packing = _Packing([(b.nbytes, _packer(b, graph, family)) for b in buffers])
    for i, b in enumerate(buffers):
        yield WeightEntry(
            name=b.name,
            nbytes=b.nbytes,
            dtype=b.dtype,
            shape=b.logical_shape,
            layout=b.layout,
            format=b.format,
            section=SECTION,
            produce=partial(packing.take, i),
            offset=b.offset,
        )


class _Packing:
    """The tensors of a file in their order: taking one begins those after it."""

    def __init__(self, jobs: Sequence[tuple[int, Callable[[], memoryview]]]) -> None:
        self._jobs = jobs
        self._begun: dict[int, Future[memoryview]] = {}
        workers = min(_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="pack")

    def take(self, number: int) -> memoryview:
        self._begin(number)
        ahead = 0
        for later in range(number + 1, len(self._jobs)):
            ahead += self._jobs[later][0]
            if ahead > _AHEAD_BYTES:
                break
            self._begin(later)
        try:
            return self._begun.pop(number).result()
        except BaseException:
            self._threads.shutdown(wait=False, cancel_futures=True)
            raise

    def _begin(self, number: int) -> None:
        if number not in self._begun:
            self._begun[number] = self._threads.submit(self._jobs[number][1])


def _packer(b: Buffer, graph: ir.Model, family: Family) -> Callable[[], memoryview]:
    def pack() -> memoryview:
        tensor = graph.graph.initializers[b.source[0]].const_value
        if tensor is None:
            raise InputFileError(f"weight {b.source[0]} has no data", where=b.name)
        packed = _pack(b, tensor.numpy(), family)
        if packed.nbytes != b.nbytes:
            raise InputFileError(
                f"weight {b.name} packs to {packed.nbytes} bytes, the plan says {b.nbytes}"
            )
        return memoryview(packed).cast("B")

    return pack


def _pack(b: Buffer, array: Any, family: Family) -> Any:
    raw = np.ascontiguousarray(array)
    rows = raw.shape[0] if raw.ndim > 1 else 1
    return family.pack(b.layout, b.format, raw.reshape(rows, -1).view(np.uint8))
