"""The int8 products by matrix tiles, with a model of the tile instructions.

No test here needs a processor with AMX: the kernels are zen4's code with ``tile_model.h`` in place
of the instructions, the model is compared with a statement of Intel's pseudocode in numpy, and the
sapphirerapids code object is read for the instructions themselves.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from cpu_harness import (
    BLOCK,
    KV_BLOCK_BYTES,
    LEVELS,
    Batch,
    Kernels,
    floats,
    host_flags,
    kernels_for,
)
from program_cases import TINY, engine, packed_weights, small, step_program, tiny_decoder, zig_cache
from test_cpu_kernels_attention import F16, make_batch
from test_cpu_kernels_linear import ACT, bundle, packed, weights
from zerolayer.runtime_stub.errors import HardwareMismatchError
from zerolayer.runtime_stub.step import SamplingParams, StepBatch
from zerolayer.targets import cpu, cpu_compile, formats, roofline
from zerolayer.targets.facts import Target, load_target
from zerolayer.targets.program import Program


@pytest.fixture(scope="module")
def amx() -> Kernels:
    return kernels_for("amx")


@pytest.fixture(scope="module")
def vnni() -> Kernels:
    return kernels_for("zen4")


def used_tiles(k: Kernels) -> bool:
    """Whether a product went through tiles since the last call; no thread may still hold any."""
    k.lib.tile_products.restype = ctypes.c_long
    assert k.lib.tiles_open() == 0
    return bool(k.lib.tile_products())


# --- the model ----------------------------------------------------------------------------------


def product(a: Any, b: Any, c: Any, shape: tuple[int, int, int], signed: bool) -> Any:
    """TDPBSSD, TDPBSUD: ``shape`` is rows, dwords of a row of c, dwords of a row of a."""
    rows, columns, depth = shape
    x = a[:rows, : 4 * depth].view(np.int8).astype(np.int64).reshape(rows, depth, 4)
    y = b[:depth, : 4 * columns]
    y = (y.view(np.int8) if signed else y).astype(np.int64).reshape(depth, columns, 4)
    total = np.zeros((16, 16), np.int64)
    total[:rows, :columns] = c.view(np.int32)[:rows, :columns]
    total[:rows, :columns] += np.einsum("mki,kni->mn", x, y)
    return total.astype(np.int32)  # the low 32 bits


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("shape", [(16, 16, 16), (16, 16, 8), (16, 16, 4), (5, 3, 2), (1, 16, 1)])
def test_the_model_is_the_pseudocode(
    amx: Kernels, shape: tuple[int, int, int], signed: bool
) -> None:
    rows, columns, depth = shape
    config = np.zeros(64, np.uint8)
    config[0] = 1
    words = config[16:32].view(np.uint16)
    words[:3] = 4 * columns, 4 * depth, 4 * columns
    config[48:51] = rows, rows, depth
    rng = np.random.default_rng(sum(shape))
    for extreme in (False, True):
        a, b = (rng.integers(0, 256, (16, 64), dtype=np.uint8) for _ in range(2))
        c = rng.integers(0, 256, (16, 64), dtype=np.uint8)
        if extreme:  # the largest products, on a sum that wraps
            a[:], b[:], c.view(np.int32)[:] = 0x80, 0x80 if signed else 0xFF, 2**31 - 1
        want = product(a, b, c, shape, signed)
        got = c.copy()
        arrays = [ctypes.c_void_p(x.ctypes.data) for x in (a, b, got)]
        amx.lib.tile_once(ctypes.c_void_p(config.ctypes.data), int(signed), *arrays)
        region = (slice(rows), slice(columns))
        assert (got.view(np.int32)[region] == want[region]).all()
        got.view(np.int32)[region] = c.view(np.int32)[region]
        assert (got == c).all()  # nothing beside the tile is written
    assert used_tiles(amx)


# --- the kernels --------------------------------------------------------------------------------

#: outputs, columns: tails of 16 outputs, one and several panels of 32 blocks, an odd last block
SHAPES = [(1, 32), (17, 96), (48, 256), (16, 1056), (40, 2304)]
#: tokens: below a tile, one tile, rests that stay with dot products and that overlap, many
TOKENS = [1, 15, 16, 17, 19, 20, 31, 33, 48, 300]


@pytest.mark.parametrize("fmt", BLOCK)
def test_tiles_and_dot_products_agree_to_the_bit(amx: Kernels, vnni: Kernels, fmt: str) -> None:
    rng = np.random.default_rng(1)
    used_tiles(amx)
    for n, k in SHAPES:
        if k % formats.FORMATS[fmt].block_elems:
            continue
        w = packed(fmt, weights(rng, fmt, n, k)[0])
        bias = floats(rng, n)
        for t in TOKENS:
            a = bundle(floats(rng, t, k) * 3)
            outs = [np.full((t, n), np.nan, np.float32) for _ in range(2)]
            for lib, out, threads in ((vnni, outs[0], 2), (amx, outs[1], 1 + t % 3)):
                lib.call(f"linear_int8_{fmt}", t, [*a, w, bias, out], [n, k], threads=threads)
            assert outs[0].tobytes() == outs[1].tobytes(), (n, k, t)
            assert used_tiles(amx) == (t >= 16)


@pytest.mark.parametrize("fmt", ["Q4_1", "Q8_0", "Q6_K"])
def test_fused_forms_agree_to_the_bit(amx: Kernels, vnni: Kernels, fmt: str) -> None:
    """In place, with each activation, with and without biases, and quantized again."""
    rng = np.random.default_rng(2)
    suffix = "" if fmt == "Q4_1" else f"_{fmt}"
    n, k = 96, 256
    gate, up = (packed(fmt, weights(rng, fmt, n, k)[0]) for _ in range(2))
    for t, threads in ((16, 1), (37, 3), (18, 2), (300, 2)):
        a, residual = bundle(floats(rng, t, k)), floats(rng, t, n)
        for act in ACT.values():
            for bias in (floats(rng, n), None):
                results = []
                for lib in (vnni, amx):
                    out, acted, gated = (residual.copy() for _ in range(3))
                    q = np.zeros((t, n), np.int8)
                    scale, sums = (np.zeros((t, n // c), np.float32) for c in (32, 16))
                    for name, arrays, ints in (
                        ("linear_add", [gate, out, bias, out], [n, k]),
                        ("act_linear", [gate, bias, acted], [n, k, act]),
                        ("gated", [gate, up, bias, bias, gated], [n, k, act]),
                        ("gated_quantize", [gate, up, bias, bias, q, scale, sums], [n, k, act]),
                    ):
                        lib.call(f"{name}_int8{suffix}", t, [*a, *arrays], ints, threads=threads)
                    results.append([x.tobytes() for x in (out, acted, gated, q, scale, sums)])
                assert results[0] == results[1], (t, act)
                assert used_tiles(amx)


@pytest.mark.parametrize("name", ["qkv_int8", "qkv_int8_mixed"])
@pytest.mark.parametrize(("hd", "kvh", "lengths"), [
    (64, 2, [(0, 21), (30, 1), (5, 12)]),
    (48, 1, [(3, 400)]),
    (512, 1, [(0, 47)]),
])  # fmt: skip
def test_qkv_agrees_to_the_bit(
    amx: Kernels, vnni: Kernels, name: str, hd: int, kvh: int, lengths: list[tuple[int, int]]
) -> None:
    rng = np.random.default_rng(3)
    heads, k, bs = 2 * kvh, 256, 16
    batch: Batch
    batch, t, total = make_batch(lengths, bs)
    fmts = ("Q4_K", "Q8_0", "Q6_K") if "mixed" in name else ("Q4_1",) * 3
    sizes = (heads * hd, kvh * hd, kvh * hd)
    ws = [packed(f, weights(rng, f, n, k)[0]) for f, n in zip(fmts, sizes, strict=True)]
    biases, norms = [floats(rng, n) for n in sizes], [floats(rng, hd) for _ in range(2)]
    a, (cos, sin) = bundle(floats(rng, t, k)), (floats(rng, t, hd // 2) for _ in range(2))
    results = []
    for lib, threads in ((vnni, 2), (amx, 1), (amx, 3)):
        caches = [np.zeros(total * KV_BLOCK_BYTES, np.uint8) for _ in range(2)]
        q = np.zeros((t, heads * hd), np.float32)
        lib.call(
            name, t,
            [*a, *ws, *biases, *norms, cos, sin, *caches, batch.positions, None, None, q, *caches],
            [k, heads, kvh, hd, hd, 0, bs, F16], [1e-6], batch, threads=threads,
        )  # fmt: skip
        results.append([q.tobytes(), *(c.tobytes() for c in caches)])
    assert results[0] == results[1] == results[2]
    assert used_tiles(amx)


# --- the module ---------------------------------------------------------------------------------

SPR, ZEN4 = (small(load_target(name)) for name in ("sapphirerapids", "zen4"))


def program_of(target: Target, fmt: str = "Q4_1") -> tuple[ir.Model, Program]:
    return step_program(tiny_decoder(format=fmt), target, "int8", "aggressive")


def listing(code: bytes, folder: Path) -> str:
    objdump = shutil.which("objdump") or shutil.which("llvm-objdump")
    assert objdump, "install binutils: this test reads the machine code"
    (folder / "m.so").write_bytes(code)
    command = [objdump, "-d", "--no-show-raw-insn", str(folder / "m.so")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("fmt", "dot"), [("Q4_1", "tdpbsud"), ("Q8_0", "tdpbssd")])
def test_the_object_has_the_instructions(fmt: str, dot: str, tmp_path: Path) -> None:
    """Configuration and release in every kernel, products of the format's kind, two in flight.
    That the other targets have none is in test_targets_cpu.py."""
    _, program = program_of(SPR, fmt)
    rows = {c.row for c in program.entry_points[0].calls}
    products = {r for r in rows if ".int8." in r}
    assert {"QkvRopeCache.int8.amx", "LinearAdd.int8.amx", "Linear.int8.amx"} <= products
    assert all(r.endswith(".amx") for r in products)
    binaries = cpu.build(program, SPR, work_dir=zig_cache())
    text = listing(binaries.files[binaries.entry], tmp_path)
    other = {"tdpbsud": "tdpbssd", "tdpbssd": "tdpbsud"}[dot]
    # the measurement of the peak (zl_probe.h) multiplies tiles 6 and 7, the kernels others
    found = re.findall(r"(tdpb\w+) +%tmm(?:6,%tmm4|7,%tmm5)", text)
    assert found.count(dot) >= 2 * len(products) and other not in found
    for name in ("ldtilecfg", "tilerelease", "tileloadd", "tilestored", "tilezero"):
        assert text.count(name) >= len(products), name
    assert "vpdpbusd" in text and "tdpbf16ps" not in text
    kernels = {str(k["kernel"]).split()[-1]: k for k in binaries.kernels}
    record = kernels["LinearAdd.int8.amx"]
    sets = {c["name"]: c["value"] for c in record["constants"]}  # type: ignore[attr-defined]
    tile = {d["name"]: d["value"] for d in record["derived"]}  # type: ignore[attr-defined]
    assert sets["instruction_set"] == "amx" and tile["tile_tokens"] % 16 == 0


@pytest.fixture(scope="module")
def modelled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """sapphirerapids' source, compiled for zen4 with the model in place of the instructions."""
    folder = tmp_path_factory.mktemp("modelled")
    source, _ = cpu.render(program_of(SPR)[1], SPR)
    (folder / "module.c").write_text(source)
    command = [
        sys.executable, "-m", "ziglang", "cc", *cpu_compile.cpu_flag(ZEN4),
        '-DZL_TILE_MODEL="tile_model.h"', f"-I{Path(__file__).parent}", "-o", "m.so", "module.c",
    ]  # fmt: skip
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "m.so").read_bytes()


def logits(code: bytes, weights: mmap.mmap, program: Program, threads: int) -> Any:
    """A prompt of 20 tokens beside one of 3, then both once more."""
    tokens = [5, 17, 3, 80, 44, 2, 91, 33, 60, 11, 7, 7, 19, 23, 50, 51, 52, 53, 54, 55, 1, 9]
    greedy = (SamplingParams(), 0, array("i"))
    out = []
    with engine(code, weights, program, threads) as run:
        for a, b in (((0, 20), (0, 3)), ((20, 22), (3, 4))):
            batch = StepBatch()
            batch.add(array("i", tokens[slice(*a)]), a[0], array("i", [7, 3]), greedy)
            batch.add(array("i", tokens[slice(*b)]), b[0], array("i", [5]), greedy)
            rows = np.zeros((2, TINY.vocab_size), np.float32)
            run.step(batch, logits=rows)
            out.append(rows)
    return np.stack(out)


def test_a_whole_step_is_zen4s_to_the_bit(modelled: bytes) -> None:
    if not LEVELS["zen4"][1] | {"avx512_bf16"} <= host_flags():
        pytest.skip("this machine cannot run zen4")
    graph, spr = program_of(SPR)
    weights = packed_weights(graph, spr)
    _, zen4 = program_of(ZEN4)
    binaries = cpu.build(zen4, ZEN4, work_dir=zig_cache())
    want = logits(binaries.files[binaries.entry], weights, zen4, 2)
    assert np.isfinite(want).all() and want.std() > 0
    for threads in (1, 3):
        assert np.array_equal(logits(modelled, weights, spr, threads), want)


def test_no_tiles_no_engine(modelled: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that refuses the tiles: a typed error before any thread starts."""
    graph, program = program_of(SPR)
    monkeypatch.setenv("ZL_TILE_MODEL_REFUSES", "1")
    with pytest.raises(HardwareMismatchError, match="AMX tile registers") as refused:
        engine(modelled, packed_weights(graph, program), program, 2)
    assert refused.value.exit_code == 5 and "5.16" in refused.value.next_step
    assert refused.value.where == "creating the engine"


def test_the_roofline_is_that_of_products_of_blocks() -> None:
    """Not the peak of AMX: three vector operations for each row of a tile, 24 cycles on two pipes,
    bound what blocks of 32 columns can reach."""
    facts = {f.name: float(f.value) for f in SPR.facts}
    assert facts["int8_block_ops_per_cycle"] == 2 * 16 * 16 * 32 // (16 * 3 / 2)
    prediction = roofline.predict(program_of(SPR)[1], SPR, tokens=100_000, context=1)
    call = next(c for c in prediction.calls if c.row == "LinearAdd.int8.amx")
    assert call.bound == "compute"
    rate = call.flops / call.seconds / facts["cores"] / facts["clock_ghz"] / 1e9
    assert rate == pytest.approx(682, rel=1e-9)
