"""Runs a frontend graph of plain-format weights in onnxruntime (for tests of the frontends)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort


def run_graph(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of ``model`` for ``feeds``; one thread, no graph optimization."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def logits_of(model: ir.Model, tokens: list[int]) -> np.ndarray:
    """Logits [T, vocab] of a decoder graph for one sequence."""
    feeds = {
        "tokens": np.array(tokens, np.int64),
        "positions": np.arange(len(tokens), dtype=np.int64),
    }
    return run_graph(model, feeds)[0]
