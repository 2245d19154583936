"""Runs the gate on weights that have just been written, before the artifact gets its name.

In: the written weights region, the code object, the frontend's graph.  Out: :class:`Verified`, the
report for the manifest and ``golden.json``.  Next file: ``gate.py``.

The result is a function of the model file, the packed weights, the code object, this compiler and
the runtime that executes the reference, so it is kept in the compile cache under a key of exactly
these; a different byte anywhere runs it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
from zerolayer.compiler.artifact.writer import WrittenWeights
from zerolayer.compiler.cache import CompileCache, compiler_digest
from zerolayer.compiler.frontends.config import LoadedModel
from zerolayer.compiler.graph.execute import run_layerwise
from zerolayer.compiler.graph.places import residual_taps
from zerolayer.runtime_stub import detect
from zerolayer.runtime_stub.requires import compare
from zerolayer.targets.facts import Target
from zerolayer.targets.program import Program

from .bounds import bounds_for
from .gate import require, run_gate
from .graph_gate import run_graph_gate
from .metrics import F32
from .prompts import GOLDEN_TOKENS, gate_prompts, golden_json
from .runner import step_runner

#: a larger region is dropped from this process's address space while the gate runs (see _trimmed)
_TRIM_ABOVE = 512 << 20
_TRIM_SECONDS = 0.01


@dataclass(frozen=True)
class GateInputs:
    """What the gate needs besides the weights.  ``skip`` says why it does not run, empty when it
    does (:func:`cannot_run`); ``batch_invariant`` whether the kernels promise it."""

    model: LoadedModel
    program: Program
    code: bytes
    quantize: str
    activations: str
    kv_dtype: str
    skip: str
    batch_invariant: bool = True

    def prompts(self) -> list[tuple[str | None, list[int]]]:
        """The prompts of a language model; none for other graphs."""
        if self.model.config is None:
            return []
        context: int = min(
            self.model.config.max_context,
            self.program.bound("B") * (self.program.kv.block_size if self.program.kv else 1),
        )
        return gate_prompts(self.model.config, self.model.tokenizer, context - GOLDEN_TOKENS)

    def units(self) -> int | None:
        """Steps of progress; None where there are none to count: no prompts, or it does not run."""
        return None if self.skip else 2 * len(self.prompts()) or None


@dataclass(frozen=True)
class Verified:
    """``report`` goes into the manifest; ``golden`` is ``golden.json`` or None; ``not_run`` says
    why the gate did not run, empty when it did; ``cached`` whether the verdict is an earlier
    run's."""

    report: dict[str, Any] | None = None
    golden: bytes | None = None
    not_run: str = ""
    cached: bool = False


def verify_weights(
    gate: GateInputs,
    written: WrittenWeights,
    cache: CompileCache,
    advance: Callable[[int], None],
) -> Verified:
    """Run the gate, or take its result from the cache.

    Raises NumericsError when a bound is exceeded.
    """
    if gate.skip:
        return Verified({"status": "not run", "reason": gate.skip}, None, gate.skip)

    def run() -> bytes:
        report, golden = _run(gate, written, advance)
        return json.dumps(
            {"report": report, "golden": golden.decode() if golden else None}
        ).encode()

    data, hit = cache.get_or_build(_key(gate, written), run)
    if hit:
        advance(gate.units() or 0)
    found = json.loads(data)
    golden = found["golden"]
    golden_bytes = golden.encode() if golden is not None else None
    return Verified(found["report"], golden_bytes, cached=hit)


def cannot_run(target: Target) -> str:
    """Why this machine cannot execute code for ``target``; empty when it can."""
    if target.family != "cpu":
        return f"the build host has no {target.family} device"
    bad = compare(target.requires.as_dict(), detect.host_facts())
    if not bad:
        return ""
    # the host's own features stay out of the text: the artifact's bytes must not depend on them
    return f"the build host cannot execute {target.name} code"


def _run(
    gate: GateInputs, written: WrittenWeights, advance: Callable[[int], None]
) -> tuple[dict[str, Any], bytes | None]:
    bounds = bounds_for(gate.quantize, gate.activations, gate.kv_dtype)
    threads = min(len(os.sched_getaffinity(0)), detect.MAX_THREADS)
    with _mapped(written) as weights:
        if gate.model.config is None:
            report = run_graph_gate(gate.model, gate.program, gate.code, weights, written, threads)
            return report, None
        prompts = gate.prompts()
        context = max(len(ids) for _, ids in prompts) + GOLDEN_TOKENS
        with step_runner(
            gate.code,
            weights,
            written.offset,
            gate.program,
            context=context,
            threads=threads,
            sequences=len(prompts),
        ) as runner:
            result, cases = run_gate(
                runner,
                lambda sequences: _reference(gate.model, sequences),
                prompts,
                bounds,
                golden_tokens=GOLDEN_TOKENS,
                batch_invariant=gate.batch_invariant,
                advance=advance,
            )
    require(result, gate.model.name, _wider(gate))
    return result.as_dict(), golden_json(cases)


def _reference(
    model: LoadedModel, sequences: Sequence[Sequence[int]]
) -> Iterator[tuple[F32, list[F32]]]:
    taps = residual_taps(model.graph)
    output = model.graph.graph.outputs[0].name or ""
    feeds = [
        {
            "tokens": np.asarray(ids, np.int64),
            "positions": np.arange(len(ids), dtype=np.int64),
        }
        for ids in sequences
    ]
    for result in run_layerwise(model.graph, feeds):
        yield result[output], [result[t] for t in taps]


def _wider(gate: GateInputs) -> list[str]:
    """What loses less than the options of this compile, the narrowest first."""
    narrow = (
        ("--kv-dtype f16", gate.kv_dtype == "q8_0"),
        ("--kv-dtype f32", gate.kv_dtype in ("f16", "bf16") and gate.activations == "f32"),
        ("a wider --quantize", gate.quantize != "keep"),
        ("--activations f32", gate.activations != "f32"),
    )
    return [option for option, is_narrow in narrow if is_narrow]


def _key(gate: GateInputs, written: WrittenWeights) -> dict[str, str | bytes]:
    return {
        "what": "numerics",
        "sources": json.dumps([(s.name, s.sha256) for s in gate.model.sources]),
        "code": hashlib.sha256(gate.code).hexdigest(),
        "weights": json.dumps(list(written.hashes)),
        "prompts": json.dumps(gate.prompts()),
        "precision": f"{gate.quantize} {gate.activations} {gate.kv_dtype} {gate.batch_invariant}",
        "compiler": compiler_digest(),
        "reference": " ".join(f"{n} {metadata.version(n)}" for n in ("onnxruntime", "numpy")),
    }


@contextlib.contextmanager
def _mapped(written: WrittenWeights) -> Iterator[mmap.mmap | None]:
    """The file that is being written, mapped read-only; None for a model without weights."""
    if written.size == 0:
        yield None
        return
    with (
        mmap.mmap(written.fd, written.offset + written.size, access=mmap.ACCESS_READ) as weights,
        _trimmed(weights),
    ):
        yield weights


@contextlib.contextmanager
def _trimmed(weights: mmap.mmap) -> Iterator[None]:
    """Keeps a big mapping from filling this process's resident memory.

    The pages are clean page cache: dropping them from the address space costs a minor fault on the
    next touch, and the kernels read every weight once per step.
    """
    if len(weights) < _TRIM_ABOVE:
        yield
        return
    done = threading.Event()

    def trim() -> None:
        while not done.wait(_TRIM_SECONDS):
            weights.madvise(mmap.MADV_DONTNEED)

    thread = threading.Thread(target=trim, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
