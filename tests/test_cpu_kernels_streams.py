"""One and two rows that read two streams of weights side by side (``zl_first_half``).

The same bits as one stream, which the other tests compare with numpy, for all formats, numbers of
outputs and threads; and memory ends where the arrays end.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cpu_harness import BLOCK, KV_BLOCK_BYTES, Batch, Kernels, floats, kernels_for
from test_cpu_kernels_attention import F16, make_batch
from test_cpu_kernels_linear import ACT, F32, bundle, packed, weights
from test_cpu_kernels_screen import SCREENED, gaussian
from test_cpu_kernels_split import Split, quantized
from zerolayer.compiler.passes.screen import encode
from zerolayer.targets import cpu_layouts

#: outputs: whole pairs, the last group alone, a last group of five, fewer than two pairs a thread
OUTPUTS = (64, 144, 341, 40)
#: threads and rows; the last are none, and more than are read in two streams
RUNS = [(threads, rows) for threads in (1, 2, 3, 5) for rows in (1, 2)] + [(2, 0), (2, 3)]


def test_items_are_paired_as_the_runs_expect(streams: Kernels, one: Kernels) -> None:
    """Halves are rounded up; one by one for less than two pairs a thread, no rows, three rows."""
    half = streams.lib.first_half
    half.argtypes, half.restype = (ctypes.c_int32, ctypes.c_int64, ctypes.c_int64), ctypes.c_int64
    assert [half(t, 1, 22) for t in (1, 2, 3, 5, 6)] == [11, 11, 11, 11, 0]
    assert [half(2, 2, n) for n in (7, 8, 9, 10)] == [0, 4, 5, 5]
    assert [half(1, rows, 22) for rows in (0, 1, 2, 3)] == [0, 11, 11, 0]
    assert one.lib.first_half(ctypes.c_int32(1), ctypes.c_int64(1), ctypes.c_int64(22)) == 0


@pytest.fixture(scope="module", params=["streams", "ubsan-v3"])
def two(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(kernels_for(request.param).path, guard=True)


@pytest.fixture(scope="module")
def streams() -> Kernels:
    return Kernels(kernels_for("streams").path, guard=True)


@pytest.fixture(scope="module")
def one() -> Kernels:
    return kernels_for("v3")


def same(
    two: Kernels,
    one: Kernels,
    name: str,
    rows: int,
    threads: int,
    arrays: list[Any],
    results: int,
    ints: list[int],
    batch: Batch | None = None,
) -> None:
    """The last ``results`` of the arrays have the same bytes."""
    found, wanted = ([np.full_like(a, 77) for a in arrays[-results:]] for _ in range(2))
    one.call(name, rows, [*arrays[:-results], *wanted], ints, batch=batch, threads=1)
    two.call(name, rows, [*arrays[:-results], *found], ints, batch=batch, threads=threads)
    for got, want in zip(found, wanted, strict=True):
        assert got.tobytes() == want.tobytes(), (name, rows, threads)
        assert (want != 77).any() or not rows


def dealt(kernels: Kernels) -> int:
    """Items that the last call of several threads dealt out."""
    return ctypes.c_int64.in_dll(kernels.lib, "items_dealt").value


def test_kernels_deal_out_pairs(streams: Kernels, one: Kernels) -> None:
    """Half of the groups or heads, rounded up, for one and two rows; all of them for three, and of
    several formats; gate and up are not paired."""
    rng = np.random.default_rng(6)
    n, k, bs = 341, 320, 16
    weight = {form: made(rng, form, n, k) for form in ("bf16", "bf16_12")}
    weight["int8"] = packed("Q4_1", weights(rng, "Q4_1", n, k)[0])
    head = Split(one, quantized(gaussian(rng, n, k)))
    copy, norms = encode(gaussian(rng, n, k))
    for kernels, rows in ((streams, 1), (streams, 2), (streams, 3), (one, 1)):
        paired = kernels is streams and rows < 3
        x, out = floats(rng, rows, k), np.zeros((rows, n), np.float32)
        bounds = np.zeros((rows, 2, 22), np.float32)
        for name, arrays in (
            ("linear_int8_Q4_1", [*bundle(x), weight["int8"], None, out]),
            ("linear_bf16", [x, weight["bf16"], None, out]),
            ("linear_bf16_12", [x, weight["bf16_12"], None, out]),
            ("split_bounds_int8", [*bundle(x), head.high, head.norms, head.spread, bounds]),
        ):
            kernels.call(name, rows, arrays, [n, k], batch=SCREENED, threads=2)
            assert dealt(kernels) == (11 if paired else 22), (name, rows)
        arrays = [x, packed("Q8_0", copy), norms, bounds]
        kernels.call("head_bounds", rows, arrays, [n, k, F32], batch=SCREENED, threads=2)
        assert dealt(kernels) == (11 if paired else 22), rows
        groups = made(rng, "int8", 352, k)
        arrays = [*bundle(x), groups, groups, None, None, np.zeros((rows, 352), np.float32)]
        kernels.call("gated_int8", rows, arrays, [352, k, ACT["silu"]], threads=2)
        assert dealt(kernels) == 22
        for name in ("qkv_int8", "qkv_int8_mixed", "qkv_bf16"):
            batch, _, total = make_batch([(7, 1), (30, 1), (5, 1)][:rows], bs)
            formats = ("Q4_K", "Q8_0", "Q6_K") if "mixed" in name else ("Q4_1",) * 3
            sizes, width = (9 * 32, 3 * 32, 3 * 32), 256
            ws = [
                packed(f, weights(rng, f, m, width)[0]) for f, m in zip(formats, sizes, strict=True)
            ]
            if name == "qkv_bf16":
                ws = [made(rng, "bf16", m, width) for m in sizes]
            y = floats(rng, rows, width)
            a = [y] if name == "qkv_bf16" else list(bundle(y))
            pools = [np.zeros(total * KV_BLOCK_BYTES, np.uint8) for _ in range(2)]
            tables = [floats(rng, rows, 16), floats(rng, rows, 16)]
            arrays = [*a, *ws, *[None] * 5, *tables, *pools, batch.positions, None, None]
            arrays += [np.zeros((rows, 288), np.float32), *pools]
            kernels.call(name, rows, arrays, [width, 9, 3, 32, 32, 0, bs, F16], [1e-6], batch, 2)
            assert dealt(kernels) == (8 if paired and "mixed" not in name else 15), (name, rows)


@pytest.mark.parametrize("fmt", [*BLOCK, "Q8_HIGH", "Q8_LOW"])
def test_linear_int8(two: Kernels, one: Kernels, fmt: str) -> None:
    rng = np.random.default_rng(1)
    for n in OUTPUTS:
        source = "Q8_0" if fmt.startswith("Q8_") else fmt
        w, _ = weights(rng, source, n, 512)
        w = Split(one, w).high if fmt == "Q8_HIGH" else Split(one, w).low if fmt == "Q8_LOW" else (
            packed(fmt, w)
        )  # fmt: skip
        for threads, rows in RUNS:
            bias = floats(rng, n) if threads % 2 else None
            arrays = [*bundle(floats(rng, rows, 512)), w, bias, np.zeros((rows, n), np.float32)]
            same(two, one, f"linear_int8_{fmt}", rows, threads, arrays, 1, [n, 512])


@pytest.mark.parametrize("form", ["int8", "bf16", "bf16_12"])
def test_fused_forms(streams: Kernels, one: Kernels, form: str) -> None:
    """LinearAdd, ActLinear, GatedLinear and its quantizing form."""
    rng = np.random.default_rng(2)
    k = 320
    for n in (64, 96, 160, 352):
        gate, up = (made(rng, form, n, k) for _ in range(2))
        biases = [floats(rng, n), None]
        for threads, rows in RUNS:
            x, residual = floats(rng, rows, k), floats(rng, rows, n)
            a = list(bundle(x)) if form == "int8" else [x]
            out = np.zeros((rows, n), np.float32)
            bundle_ = [np.zeros((rows, n), np.int8), out[:, : n // 32].copy()]
            bundle_.append(out[:, : n // 16].copy())
            runs: list[tuple[str, list[Any], int, list[int]]] = [
                ("linear_add", [*a, gate, residual, biases[0], out], 1, [n, k]),
                ("act_linear", [*a, gate, biases[1], out], 1, [n, k, ACT["silu"]]),
                ("gated", [*a, gate, up, *biases, out], 1, [n, k, ACT["silu"]]),
                ("gated_quantize", [*a, gate, up, *biases, *bundle_], 3, [n, k, ACT["silu"]]),
            ]
            for name, arrays, results, ints in runs:
                same(streams, one, f"{name}_{form}", rows, threads, arrays, results, ints)
            found = []
            for kernels, n_threads in ((one, 1), (streams, threads)):  # in place
                x = residual.copy()
                kernels.call(
                    f"linear_add_{form}", rows, [*a, gate, x, None, x], [n, k], threads=n_threads
                )
                found.append(x.tobytes())
            assert found[0] == found[1], (n, threads, rows)


def made(rng: np.random.Generator, form: str, n: int, k: int) -> Any:
    """Packed weights of a form of the kernels."""
    if form == "int8":
        return packed("Q4_1", weights(rng, "Q4_1", n, k)[0])
    return cpu_layouts.pack("rows16", form.upper(), weights(rng, "BF16", n, k)[0])


def test_linear_bf16(two: Kernels, one: Kernels) -> None:
    rng = np.random.default_rng(3)
    for form, k in (("bf16", 77), ("bf16_12", 320)):
        for n in OUTPUTS:
            w = made(rng, form, n, k)
            for threads, rows in RUNS:
                arrays = [floats(rng, rows, k), w, floats(rng, n), np.zeros((rows, n), np.float32)]
                same(two, one, f"linear_{form}", rows, threads, arrays, 1, [n, k])


@pytest.mark.parametrize("name", ["qkv_int8", "qkv_int8_mixed", "qkv_bf16", "qkv_bf16_12"])
def test_qkv_rope_cache(streams: Kernels, one: Kernels, name: str) -> None:
    """Pairs of q, k and v in all ways, and a head alone; three formats are not paired."""
    rng = np.random.default_rng(4)
    hd, k, bs = 32, 256, 16
    formats = ("Q4_K", "Q8_0", "Q6_K") if "mixed" in name else ("Q4_1",) * 3
    for heads, kvh in ((6, 2), (5, 2), (3, 3), (9, 3), (14, 4)):
        sizes = (heads * hd, kvh * hd, kvh * hd)
        if "int8" in name:
            ws = [packed(f, weights(rng, f, n, k)[0]) for f, n in zip(formats, sizes, strict=True)]
        else:
            ws = [made(rng, name.removeprefix("qkv_"), n, k) for n in sizes]
        for threads, rows in (run for run in RUNS if run[1]):
            batch, t, total = make_batch([(7, 1), (30, 1), (5, 1)][:rows], bs)
            assert t == rows
            x = floats(rng, rows, k)
            a = list(bundle(x)) if "int8" in name else [x]
            rest: list[Any] = [*(floats(rng, n) for n in sizes), floats(rng, hd), None]
            rest += [floats(rng, rows, hd // 2), floats(rng, rows, hd // 2)]
            found = []
            for kernels, n_threads in ((one, 1), (streams, threads)):
                q = np.full((rows, heads * hd), 77, np.float32)
                pools = [np.zeros(total * KV_BLOCK_BYTES, np.uint8) for _ in range(2)]
                arrays = [*a, *ws, *rest, *pools, batch.positions, None, None, q, *pools]
                ints = [k, heads, kvh, hd, hd, 0, bs, F16]
                kernels.call(name, rows, arrays, ints, [1e-6], batch, n_threads)
                outputs: list[Any] = [q, *pools]
                found.append([x.tobytes() for x in outputs])
                assert (q != 77).all() and all(p.any() for p in pools)
            assert found[0] == found[1], (heads, kvh, threads, rows)


def test_screens(two: Kernels, one: Kernels) -> None:
    """Bounds of a projection's own upper bits and of a copy, and the logits of both parts."""
    rng = np.random.default_rng(5)
    k = 256
    for n in OUTPUTS:
        w = gaussian(rng, n, k)
        head = Split(one, quantized(w))
        copy, norms = encode(w)
        for threads, rows in RUNS:
            x = floats(rng, rows, k)
            a = bundle(x)
            bounds = np.zeros((rows, 2, -(-n // 16)), np.float32)
            arrays = [*a, head.high, head.norms, head.spread, bounds]
            same(two, one, "split_bounds_int8", rows, threads, arrays, 1, [n, k], SCREENED)
            arrays = [x, packed("Q8_0", copy), norms, bounds]
            same(two, one, "head_bounds", rows, threads, arrays, 1, [n, k, F32], SCREENED)
            both = np.ascontiguousarray(np.stack(head.bounds(x), axis=1))
            for batch in (SCREENED, Batch()):
                arrays = [*a, head.high, head.low, both, np.zeros((rows, n), np.float32)]
                same(two, one, "split_int8", rows, threads, arrays, 1, [n, k], batch)
