"""``--check-passes``: every pass's graph before and after, executed and compared.

In: the graph after every pass.  Out: one :class:`PassReport` per pass, or NumericsError naming the
pass and the first value that moved too far.  Next file: none.

Both graphs run under onnxruntime on the same random inputs.  A decoder's residual stream is
compared layer by layer as well as its logits; the paged graphs get one sequence whose block table
is scrambled, so that a wrong slot cannot go unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from zerolayer.compiler.graph import domain
from zerolayer.compiler.graph.check import check_graph
from zerolayer.compiler.graph.execute import (
    Array,
    WeightCache,
    graph_without_weights,
    run,
    run_layerwise,
)
from zerolayer.compiler.graph.feeds import block_size, frontend_feeds, step_feeds
from zerolayer.compiler.graph.places import residual_taps
from zerolayer.compiler.graph.tolerances import pass_tolerance
from zerolayer.runtime_stub.errors import NumericsError, UnsupportedError
from zerolayer.targets import formats

from .edit import dims
from .paging import is_decoder

TOKENS = 21
DIM = 3  # size of every symbolic dimension of other graphs


@dataclass(frozen=True)
class PassReport:
    """``error`` is the largest relative error of any compared value, 0 where nothing changed."""

    name: str
    changed: bool
    error: float
    tolerance: float


class PassComparison:
    """Executes the graph it is given after every pass and compares with the one before.

    Takes about one execution of the model per pass that changes something; weights stay decoded up
    to 1 GiB.  ``reports`` collects what was found.
    """

    def __init__(self, model: ir.Model, seed: int = 0) -> None:
        self.reports: list[PassReport] = []
        self._cache = WeightCache()
        self._inputs = _random_inputs(model, np.random.default_rng(seed))
        self._before = _execute(model, self._inputs, self._cache)
        self._text = _text(model)
        self._precision = _precision(model)

    def after(self, step: str, model: ir.Model) -> PassReport:
        """Compare.  Raises NumericsError when a value moved further than ``tolerances.py`` allows,
        InputFileError when onnx's own shape inference disagrees with the graph."""
        check_graph(model, after=step, infer=True)
        text, precision = _text(model), _precision(model)
        report = PassReport(step, False, 0.0, 0.0)
        if text != self._text:
            limit = pass_tolerance(
                precision[0] - self._precision[0], precision[1] - self._precision[1]
            )
            found = _execute(model, self._inputs, self._cache)
            report = PassReport(step, True, _compare(step, self._before, found, limit), limit)
            self._before = found
        self._text, self._precision = text, precision
        self.reports.append(report)
        return report


def _text(graph: ir.Model) -> bytes:
    text: bytes = graph_without_weights(graph).SerializeToString(deterministic=True)
    return text


def _precision(model: ir.Model) -> tuple[set[str], set[str]]:
    """Weight formats that a pass has encoded to, and activation kinds in use."""
    encoded = {
        formats.SAME_VALUES.get(v.metadata_props["format"], v.metadata_props["format"])
        for v in model.graph.initializers.values()
        if str(v.metadata_props.get("transform", "")).startswith("quantized")
    }
    signatures = [domain.parse(n.op_type) for n in model.graph if n.domain == domain.DOMAIN]
    return encoded, {s.activations for s in signatures if s.activations}


def _random_inputs(model: ir.Model, rng: np.random.Generator) -> dict[str, Array]:
    graph = model.graph
    if is_decoder(model):
        vocab = next(
            dims(n.inputs[0])[0]
            for n in graph
            if n.op_type == "Gather" and n.inputs[0] is not None and n.inputs[1] in graph.inputs
            and n.inputs[1] is not None and n.inputs[1].name == "tokens"
        )  # fmt: skip
        assert isinstance(vocab, int)
        return frontend_feeds([int(t) for t in rng.integers(0, vocab, TOKENS)])
    feeds: dict[str, Array] = {}
    for value in graph.inputs:
        shape = [d if isinstance(d, int) else DIM for d in dims(value)]
        if value.dtype is None:
            raise UnsupportedError(f"input {value.name} has no type", where=graph.name or "")
        numpy_type = value.dtype.numpy()
        if np.issubdtype(numpy_type, np.floating):
            feeds[value.name or ""] = rng.standard_normal(shape).astype(numpy_type)
        else:
            feeds[value.name or ""] = rng.integers(0, 2, shape).astype(numpy_type)
    return feeds


def _execute(model: ir.Model, inputs: dict[str, Array], cache: WeightCache) -> dict[str, Array]:
    """Residual taps by position and outputs by name, whichever graph this is."""
    if not is_decoder(model):
        return run(model, inputs)
    feeds = inputs
    if any(v.name == "seq_starts" for v in model.graph.inputs):
        tokens = [int(t) for t in inputs["tokens"]]
        columns = -(-len(tokens) // block_size(model))
        scrambled = [(7 * i + 3) % (columns + 2) for i in range(columns)]
        blocks = scrambled if len(set(scrambled)) == columns else range(columns)
        feeds = step_feeds(model, [tokens], blocks=[list(blocks)])
    result = run_layerwise(model, [feeds], cache=cache)[0]
    taps = {f"residual.{i}": result[t] for i, t in enumerate(residual_taps(model))}
    caches = ("k_cache.", "v_cache.")
    names = [v.name or "" for v in model.graph.outputs]
    return taps | {n: result[n] for n in names if not n.startswith(caches)}


def _compare(step: str, before: dict[str, Array], after: dict[str, Array], limit: float) -> float:
    worst = 0.0
    for name, expected in before.items():
        found = after.get(name)
        if found is None or found.shape != expected.shape:
            raise NumericsError(f"pass {step} lost the value {name}", where="--check-passes")
        error = _relative(found, expected)
        if not error <= limit:
            raise NumericsError(
                f"pass {step} moves {name} by {error:.3g} of its norm, the limit is {limit:g}",
                where="--check-passes",
                next_step="a pass is wrong for this graph: report it with --dump's files",
            )
        worst = max(worst, error)
    return worst


def _relative(found: Array, expected: Array) -> float:
    difference = found.astype(np.float64) - expected.astype(np.float64)
    norm = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(difference)) / (norm or 1.0)
