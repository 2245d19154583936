"""The gate of graphs that are not language models: one run on random inputs against onnxruntime.

In: the frontend graph, the program's ``run`` entry, the written weights.  Out: the report for the
manifest.  Next file: ``bounds.py``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from zerolayer.compiler.artifact.writer import WrittenWeights
from zerolayer.compiler.frontends.config import LoadedModel
from zerolayer.compiler.graph.execute import run
from zerolayer.runtime_stub.driver_cpu import CodeObject, CpuEngine
from zerolayer.runtime_stub.errors import NumericsError
from zerolayer.targets.program import Dim, Program

from .bounds import BY_ACTIVATIONS
from .metrics import recorded

#: values of the symbols that the gate runs with: odd, so that no vector width divides them
_SIZES = (3, 5, 7)
_DTYPES = {"f32": np.float32, "i32": np.int32}


def run_graph_gate(
    model: LoadedModel,
    program: Program,
    code: bytes,
    weights: Any,
    written: WrittenWeights,
    threads: int,
) -> dict[str, Any]:
    """The report; raises NumericsError when an output is wrong."""
    entry = program.entry_points[0]
    symbols = _symbol_values(program)
    rng = np.random.default_rng(0)
    inputs = []
    for name in entry.inputs:
        b = program.buffer(name)
        shape = [_size(d, symbols) for d in b.shape]
        if b.dtype == "f32":
            inputs.append(rng.standard_normal(shape).astype(np.float32))
        else:
            inputs.append(np.zeros(shape, _DTYPES[b.dtype]))
    outputs = [
        np.zeros([_size(d, symbols) for d in program.buffer(n).shape], np.float32)
        for n in entry.outputs
    ]
    with CpuEngine(
        CodeObject(code), weights, written.offset, written.size, n_threads=threads
    ) as engine:
        engine.run(inputs, outputs, [symbols[name] for name in program.plain_symbols])
    feeds = {
        v.name or "": (x.astype(np.int64) if x.dtype == np.int32 else x)
        for v, x in zip(model.graph.graph.inputs, inputs, strict=True)
    }
    reference = run(model.graph, feeds)
    bound = BY_ACTIVATIONS["f32"].logits
    rows = []
    for value, got in zip(model.graph.graph.outputs, outputs, strict=True):
        want = np.asarray(reference[value.name or ""], np.float64).reshape(got.shape)
        power = math.sqrt(float((want**2).mean())) if want.size else 0.0
        error = math.sqrt(float(((want - got) ** 2).mean())) if want.size else 0.0
        relative = error / power if power else error
        if not relative <= bound:
            raise NumericsError(
                f"relative error {relative:.2g} > {bound} of output {value.name}",
                where=f"numerics gate of {model.name}",
                next_step="compile with --check-passes to find the pass that changed it",
            )
        rows.append({"output": value.name, "relative_error": recorded(relative, bound)})
    return {
        "status": "passed",
        "reference": "the graph in float32, onnxruntime",
        "bounds": {"name": "f32", "relative_error": bound},
        "outputs": rows,
    }


def _symbol_values(program: Program) -> dict[str, int]:
    """Odd values within the bounds; a product symbol (``batch*seq``) follows from its factors."""
    values: dict[str, int] = {}
    for i, (name, bound) in enumerate(program.bounds):
        if "*" in name:
            parts = name.split("*")
            values[name] = math.prod(int(p) if p.isdigit() else values[p] for p in parts)
        else:
            values[name] = min(bound, _SIZES[i % len(_SIZES)])
    return values


def _size(dim: Dim, symbols: dict[str, int]) -> int:
    return dim if isinstance(dim, int) else symbols[dim]
