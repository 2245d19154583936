"""Small models for the tests of lowering and code generation, and running what was built.

In: a graph.  Out: programs, code objects, packed weights, engines.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from zerolayer.compiler.frontends.config import Layer, ModelConfig, Rope
from zerolayer.compiler.frontends.decoder import build_decoder, expected_weights
from zerolayer.compiler.frontends.weights import Weight
from zerolayer.compiler.lower import LowerOptions, lower
from zerolayer.compiler.memory import check_plan, plan
from zerolayer.compiler.passes import PassOptions, run_passes
from zerolayer.runtime_stub.driver_cpu import CodeObject, CpuEngine
from zerolayer.runtime_stub.errors import UnsupportedError
from zerolayer.targets import cpu, cpu_layouts, cpu_rows, formats
from zerolayer.targets.facts import Target, with_defaults
from zerolayer.targets.kernels import KernelQuery, select
from zerolayer.targets.program import BufferKind, Program

TINY = ModelConfig(
    architecture="tiny",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    max_context=128,
    layers=(Layer(), Layer(window=24)),
    ropes=(Rope(tuple(10000.0 ** (-i / 8) for i in range(8))),),
)
_PLAIN_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
LIMITS = {"kv_block_size": 16, "max_tokens": 48, "max_seqs": 4, "max_logit_rows": 8}


def tiny_decoder(
    config: ModelConfig = TINY, format: str = "Q4_1", seed: int = 1, head: str = ""
) -> ir.Model:
    """Random weights; matrices in ``format``, the output projection in ``head`` where one is given,
    vectors in float32."""
    rng = np.random.default_rng(seed)
    weights: dict[str, Weight] = {}
    for name, shape in expected_weights(config).items():
        values = rng.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            values = (1 + 0.1 * values).astype(np.float32)
        kind = format if len(shape) == 2 and shape[1] % 32 == 0 else "F32"
        if head and name in ("lm_head.weight", "embed.weight"):
            kind = head
        if kind in formats.PLAIN:
            raw = values.astype(_PLAIN_TYPES[kind])
        else:
            raw = formats.quantize(kind, values)
        tensor = ir.Tensor(raw, name=name)
        weights[name] = Weight(name, kind, shape, tensor, name)
    return build_decoder(config, weights, "tiny")


def small(target: Target) -> Target:
    """``target`` with the limits that the tests use."""
    return with_defaults(target, **LIMITS)


def step_program(
    model: ir.Model,
    target: Target,
    activations: str = "f32",
    fusion: str = "balanced",
    config: ModelConfig | None = TINY,
    screen: bool = False,
    shorten: bool = False,
    **options: Any,
) -> tuple[ir.Model, Program]:
    """Passes, lowering, plan and its check: (final graph, program).  ``screen``: the output
    projection is screened where it can be, however small it is; ``shorten``: so are bf16 weights
    written in 12 bits."""

    def supports(query: KernelQuery) -> str | None:
        try:
            select(cpu_rows.ROWS, query, target.features, target.name)
        except UnsupportedError as e:
            return e.what
        return None

    kv_dtype = "f32" if activations == "f32" else target.choice("kv_dtype")
    graph = run_passes(
        model,
        PassOptions(
            activations=activations,  # type: ignore[arg-type]
            fusion=fusion,  # type: ignore[arg-type]
            block_size=target.default("kv_block_size"),
            kv_dtype=kv_dtype,
            supports=supports,
            screen=lambda _head: screen,
            shorten=lambda _nbytes: shorten,
            holds=cpu_layouts.holds,
        ),
    )
    lowered = lower(
        graph,
        config,
        target,
        LowerOptions(name="tiny", activations=activations, fusion=fusion, **options),
    )
    program = plan(lowered)
    check_plan(program)
    return graph, program


def packed_weights(graph: ir.Model, program: Program) -> mmap.mmap:
    """The weights region, page aligned."""
    region = mmap.mmap(-1, max(program.weights_bytes, 1))
    for b in program.buffers:
        if b.kind is not BufferKind.WEIGHT:
            continue
        tensor = graph.graph.initializers[b.source[0]].const_value
        assert tensor is not None and b.offset is not None
        raw = np.ascontiguousarray(tensor.numpy())
        raw = raw.reshape(raw.shape[0] if raw.ndim > 1 else 1, -1).view(np.uint8)
        packed = cpu.pack(b.layout, b.format, raw)
        assert packed.nbytes == b.nbytes, b.name
        region[b.offset : b.offset + b.nbytes] = packed.tobytes()
    return region


def engine(code: bytes, weights: mmap.mmap, program: Program, threads: int = 1) -> CpuEngine:
    """A running engine with 24 KV blocks."""
    return CpuEngine(
        CodeObject(code),
        weights,
        0,
        len(weights),
        kv_blocks=24 if program.kv else 0,
        n_threads=threads,
    )


def zig_cache() -> Path | None:
    """Where zig keeps its start-up objects between runs: beside the compile cache."""
    from zerolayer.compiler.cache import CompileCache

    return CompileCache().directory
