"""The passes: one ordered list from a frontend's graph to the graph that is lowered.

In: an ``onnx_ir.Model`` from a frontend and :class:`PassOptions`.  Out: a new model that holds only
the operators of ``docs/architecture.md`` (tables and views).  Next file: ``../lower``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from zerolayer.compiler.graph import domain
from zerolayer.compiler.graph.check import check_graph
from zerolayer.compiler.graph.dump import dump_graph

from . import activations, edit, fuse, paging, screen, shorten, simplify, upstream, weights
from .compare import PassComparison, PassReport
from .options import PassOptions

__all__ = ["PASSES", "NamedPass", "PassOptions", "PassReport", "check_passes", "run_passes"]


@dataclass(frozen=True)
class NamedPass:
    """``why`` is the reason for the pass's place in the list."""

    name: str
    apply: Callable[[ir.Model, PassOptions], None]
    why: str


PASSES: tuple[NamedPass, ...] = (
    NamedPass("cleanup", simplify.cleanup, "first: the rest matches without noise in between"),
    NamedPass("float-vectors", simplify.float_vectors, "norms and biases lose their casts before "
              "anything matches them"),
    NamedPass("rope", simplify.rope, "names rotary tables while the cos and sin chains are whole"),
    NamedPass("head-norm", simplify.head_norm, "needs the reshapes that paging looks through"),
    NamedPass("softcap", simplify.softcap, "needs nothing but a clean graph"),
    NamedPass("page-kv", paging.page_kv, "after rope and head-norm: q, k, v are [T, ..] rows now"),
    NamedPass("select-logits", paging.select_logits, "after page-kv, which makes its row input"),
    NamedPass("linear", simplify.linear, "after all that matches standard layers by name"),
    NamedPass("quantize-weights", weights.quantize_weights, "on Linear and Embed, whose names "
              "carry the format; before activations, which depend on it"),
    NamedPass("views", fuse.views, "so that producers and readers of activations meet"),
    NamedPass("quantize-activations", activations.quantize_activations, "when formats are final"),
    NamedPass("fuse-qkv", fuse.fuse_qkv, "before other fusions can take one of q, k, v away"),
    NamedPass("fuse-gated", fuse.fuse_gated, "before fuse-activation: a gate is not a plain MLP"),
    NamedPass("fuse-activation", fuse.fuse_activation, "what fuse-gated left"),
    NamedPass("fuse-residual", fuse.fuse_residual, "after the MLP is one node"),
    NamedPass("fuse-quantize", fuse.fuse_quantize, "last of them: any producer of int8 may have "
              "changed"),
    NamedPass("upstream-gather", upstream.upstream_gather, "after fusion, which looks for readers "
              "that a gather would hide"),
    NamedPass("screen-head", screen.screen_head, "when the projection is final; its bounds are for "
              "one kernel's arithmetic"),
    NamedPass("shorten", shorten.shorten, "last: only products that are final, and not what the "
              "screened projection and the embedding share"),
)  # fmt: skip


def run_passes(
    model: ir.Model,
    options: PassOptions,
    *,
    dump: Path | None = None,
    check: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ir.Model:
    """Run every pass over a copy of ``model`` (weights are shared, never copied) and return it.

    The graph is verified after every pass (``check_graph``).  ``dump`` is a directory for
    ``00-frontend.onnx``, ``01-cleanup.onnx`` ..; ``check`` executes the graph before and after
    every pass and compares (``compare.py``); ``progress`` is told each pass's name.  Raises
    UnsupportedError naming the node that a pass cannot express, InputFileError for a graph that is
    not well formed, NumericsError when a pass changes the numbers.
    """
    return _run(model, options, dump, check, progress)[0]


def check_passes(
    model: ir.Model, options: PassOptions, *, progress: Callable[[str], None] | None = None
) -> tuple[PassReport, ...]:
    """``run_passes`` with ``check`` for its findings: one report per pass."""
    return tuple(_run(model, options, None, True, progress)[1])


def _run(
    model: ir.Model,
    options: PassOptions,
    dump: Path | None,
    check: bool,
    progress: Callable[[str], None] | None,
) -> tuple[ir.Model, list[PassReport]]:
    graph = model.clone()
    edit.name_nodes(graph)
    domain.attach_functions(graph)
    check_graph(graph, after="frontend")
    comparison = PassComparison(graph) if check else None
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        dump_graph(graph, dump / "00-frontend.onnx")
    for number, step in enumerate(PASSES, 1):
        if progress is not None:
            progress(step.name)
        apply_pass(graph, step, options)
        check_graph(graph, after=step.name)
        if dump is not None:
            dump_graph(graph, dump / f"{number:02d}-{step.name}.onnx")
        if comparison is not None:
            comparison.after(step.name, graph)
    return graph, comparison.reports if comparison is not None else []


def apply_pass(graph: ir.Model, step: NamedPass, options: PassOptions) -> None:
    """One pass in place, then dead nodes go and used operators get their bodies."""
    step.apply(graph, options)
    edit.sweep(graph)
    domain.attach_functions(graph)
