"""Matrix products on every format, activation kind, shape and instruction-set level, against numpy.

The reference multiplies weights dequantized by the ``gguf`` package (not by our code) in float64.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from cpu_harness import BLOCK, LEVELS, PLAIN, Kernels, floats, has, host_flags, kernels_for
from zerolayer.targets import cpu_layouts, formats

ACT = {"silu": 1, "gelu_tanh": 2, "gelu_erf": 3, "relu": 4, "tanh": 5, "sigmoid": 6}
F32, BF16 = 0, 1
#: where the half-precision scales of a block are
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q8_HIGH": [0],
    "Q8_LOW": [0],
}  # fmt: skip


@pytest.fixture(scope="session", params=["zen4", "amx", "v4", "v3"])
def int8_kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_for(request.param)


@pytest.fixture(scope="session", params=["zen4", "amx", "v4", "v3"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_for(request.param)


def level_of(k: Kernels) -> str:
    return k.path.stem


def weights(rng: np.random.Generator, fmt: str, n: int, k: int) -> tuple[Any, Any]:
    """Random bytes of a format with sane scales: raw uint8 [n, row_bytes], float32 [n, k] by
    gguf."""
    if fmt in PLAIN:
        w = floats(rng, n, k)
        if fmt == "BF16":
            bits = (w.view(np.uint32) >> 16).astype(np.uint16)
            return bits.view(np.uint8).reshape(n, -1), (bits.astype(np.uint32) << 16).view(
                np.float32
            )
        w = w.astype(np.float32 if fmt == "F32" else np.float16)
        return w.view(np.uint8).reshape(n, -1), w.astype(np.float32)
    f = formats.FORMATS[fmt]
    raw = rng.integers(0, 256, (n, k // f.block_elems, f.block_bytes), dtype=np.uint8)
    for at in HALVES[fmt]:
        d = (rng.standard_normal(raw.shape[:2]) * 0.01).astype(np.float16)
        raw[:, :, at : at + 2] = d[..., None].view(np.uint8)
    raw = raw.reshape(n, -1)
    return raw, gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[fmt])


def bundle(x: Any) -> tuple[Any, Any, Any]:
    """q, scale, sums as docs/architecture.md defines them."""
    t, k = x.shape
    g = x.reshape(t, k // 32, 32)
    scale = (np.abs(g).max(axis=2) / np.float32(127)).astype(np.float32)
    tiny = scale < np.finfo(np.float32).tiny
    inverse = np.where(tiny, np.float32(0), np.float32(1) / np.where(tiny, np.float32(1), scale))
    q = np.clip(np.rint(g * inverse[:, :, None]), -127, 127).astype(np.int8)
    sums = (q.reshape(t, k // 32, 2, 16).astype(np.int32).sum(axis=3) * scale[:, :, None]).astype(
        np.float32
    )
    return q.reshape(t, k), scale, sums.reshape(t, k // 16)


def expand(q: Any, scale: Any) -> Any:
    """The float64 values that a bundle stands for."""
    return q.astype(np.float64) * np.repeat(scale, 32, axis=1)


def to_bf16(x: Any) -> Any:
    u = x.view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def bound(a: Any, w: Any, eps: float = 3e-7) -> Any:
    """Error of a float32 sum: eps times the sum of magnitudes, for codes up to 16 times the weight
    they stand for."""
    k = a.shape[1]
    return eps * (np.abs(a) @ np.abs(w).T) * max(1.0, k / 64) ** 0.5 * 16 + 1e-9


def packed(fmt: str, raw: Any) -> Any:
    return cpu_layouts.pack("rows16", fmt, raw)


SHAPES = [(1, 32, 1), (17, 96, 3), (40, 256, 9), (64, 768, 1), (40, 768, 37)]


@pytest.mark.parametrize("fmt", BLOCK)
def test_linear_int8(int8_kernels: Kernels, fmt: str) -> None:
    rng = np.random.default_rng(1)
    for n, k, t in SHAPES:
        if k % formats.FORMATS[fmt].block_elems:
            continue
        raw, w = weights(rng, fmt, n, k)
        q, scale, sums = bundle(floats(rng, t, k))
        bias = floats(rng, n) if t != 9 else None
        out = np.full((t, n), np.nan, np.float32)
        int8_kernels.call(
            f"linear_int8_{fmt}", t, [q, scale, sums, packed(fmt, raw), bias, out], [n, k]
        )
        a = expand(q, scale)
        want = a @ w.astype(np.float64).T + (0 if bias is None else bias)
        assert (np.abs(out - want) <= bound(a, w) + 1e-6 * np.abs(want)).all(), (n, k, t)


@pytest.mark.parametrize("kernels", ["zen4", "v4", "v3"], indirect=True)
@pytest.mark.parametrize("kind", [F32, BF16])
@pytest.mark.parametrize("fmt", [*BLOCK, *PLAIN])
def test_linear_float(kernels: Kernels, fmt: str, kind: int) -> None:
    rng = np.random.default_rng(2)
    for n, k, t in [*SHAPES, (33, 45, 5), (16, 1, 2)]:
        if fmt not in PLAIN and k % formats.FORMATS[fmt].block_elems:
            continue
        raw, w = weights(rng, fmt, n, k)
        x, bias = floats(rng, t, k), floats(rng, n) if t != 9 else None
        out = np.full((t, n), np.nan, np.float32)
        kernels.call(f"linear_float_{fmt}", t, [x, packed(fmt, raw), bias, out], [n, k, kind])
        a = (to_bf16(x) if kind == BF16 else x).astype(np.float64)
        want = a @ w.astype(np.float64).T + (0 if bias is None else bias)
        assert (np.abs(out - want) <= bound(a, w) / 16 + 1e-6 * np.abs(want)).all(), (n, k, t)


def test_integer_dot_products_are_exact(int8_kernels: Kernels) -> None:
    """The extremes saturate a 16-bit multiply-add; the products must not."""
    rng = np.random.default_rng(3)
    for u_max, s_fill in [(255, 127), (255, -128), (255, None), (128, None), (128, -127)]:
        u = (
            np.full(64, u_max, np.uint8)
            if s_fill
            else rng.integers(0, u_max + 1, 64).astype(np.uint8)
        )
        s = np.full(64, s_fill, np.int8) if s_fill else rng.integers(-127, 128, 64).astype(np.int8)
        out = np.zeros(16, np.int32)
        int8_kernels.lib.dots(*[ctypes.c_void_p(a.ctypes.data) for a in (u, s, out)])
        assert (out == (u.astype(np.int32) * s).reshape(16, 4).sum(axis=1)).all()


@pytest.mark.parametrize("fmt", [*BLOCK, "Q8_HIGH", "Q8_LOW"])
def test_sums_of_the_largest_codes_are_exact(int8_kernels: Kernels, fmt: str) -> None:
    """Without VNNI products are added in 16 bits as far as a format's codes leave room there; the
    largest and the least codes against activations of one sign are the worst case."""
    n, k = 16, 256
    q = np.full((13, k), 127, np.int8)
    q[1::2] = -127
    q[2::3, ::2] *= -1
    q[[4, 12]] = -128  # of eight tokens, and alone
    scale = np.ones((13, k // 32), np.float32)
    sums = q.reshape(13, k // 16, 16).astype(np.float32).sum(axis=2)
    for fill in (0xFF, 0x00, 0xF0, 0x7F, 0x80):
        f = formats.FORMATS[fmt]
        blocks = np.full((n, k // f.block_elems, f.block_bytes), fill, np.uint8)
        for at in HALVES[fmt]:
            blocks[:, :, at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
        raw = blocks.reshape(n, -1)
        if fmt in BLOCK:
            w = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[fmt]).astype(np.float64)
        else:  # ours alone; test_domain_dequantize.py has its definition
            w = formats.dequantize(fmt, raw).astype(np.float64)
        out = np.full((13, n), np.nan, np.float32)
        int8_kernels.call(
            f"linear_int8_{fmt}", 13, [q, scale, sums, packed(fmt, raw), None, out], [n, k]
        )
        assert (np.abs(out - q @ w.T) <= bound(q.astype(np.float64), w)).all(), fill


@pytest.mark.parametrize("k", [512, 2048, 4096])  # 32, 16 and 8 tokens at a time, without AVX-512
@pytest.mark.parametrize("fmt", ["Q4_0", "Q4_1", "Q6_K", "Q8_0"])
def test_rows_do_not_depend_on_the_batch_or_the_threads(
    int8_kernels: Kernels, fmt: str, k: int
) -> None:
    rng = np.random.default_rng(4)
    n, t = 50, 63
    raw, _ = weights(rng, fmt, n, k)
    q, scale, sums = bundle(floats(rng, t, k))
    x, w = floats(rng, t, k), packed(fmt, raw)
    both, ones = np.zeros((t, n), np.float32), np.zeros((t, n), np.float32)
    int8_kernels.call(f"linear_int8_{fmt}", t, [q, scale, sums, w, None, both], [n, k], threads=3)
    for i in range(t):
        row = np.zeros((1, n), np.float32)
        int8_kernels.call(
            f"linear_int8_{fmt}",
            1,
            [q[i : i + 1], scale[i : i + 1], sums[i : i + 1], w, None, row],
            [n, k],
            threads=1,
        )
        ones[i] = row
    assert (both == ones).all()
    if not has(level_of(int8_kernels), f"linear_float_{fmt}"):
        return
    int8_kernels.call(f"linear_float_{fmt}", t, [x, w, None, both], [n, k, F32], threads=2)
    for i in range(t):
        row = np.zeros((1, n), np.float32)
        int8_kernels.call(
            f"linear_float_{fmt}", 1, [x[i : i + 1], w, None, row], [n, k, F32], threads=1
        )
        ones[i] = row
    assert (both == ones).all()


@pytest.mark.parametrize("t", [64, 65, 121, 515, 257, 903])  # the last two: empty pieces
@pytest.mark.parametrize("fmt", ["Q4_1", "Q8_0"])
def test_prompts_of_several_pieces_and_tiles(int8_kernels: Kernels, fmt: str, t: int) -> None:
    """Tokens are dealt out in pieces of about 64, of tiles of at most 512: every output once, of
    the right words."""
    rng = np.random.default_rng(8)
    n, k = 80, 96
    raw, w = weights(rng, fmt, n, k)
    a = bundle(floats(rng, t, k))
    want = expand(a[0], a[1]) @ w.T.astype(np.float64)
    for threads in (1, 3):
        out = np.full((t, n), np.nan, np.float32)
        arrays = [*a, packed(fmt, raw), None, out]
        int8_kernels.call(f"linear_int8_{fmt}", t, arrays, [n, k], threads=threads)
        assert (np.abs(out - want) <= bound(expand(a[0], a[1]), w)).all(), threads
    if fmt == "Q4_1" and has(level_of(int8_kernels), "linear_add_int8"):  # in place: once
        residual = floats(rng, t, n)
        out = residual.copy()
        arrays = [*a, packed(fmt, raw), out, None, out]
        int8_kernels.call("linear_add_int8", t, arrays, [n, k], threads=3)
        np.testing.assert_allclose(out, residual + want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kernels", ["zen4", "v4", "v3"], indirect=True)
@pytest.mark.parametrize("kind", [F32, BF16])
@pytest.mark.parametrize("fmt", PLAIN)
def test_rows_of_plain_weights_do_not_depend_on_the_batch(
    kernels: Kernels, fmt: str, kind: int
) -> None:
    """Columns of several spans, an odd number of them."""
    rng = np.random.default_rng(6)
    n, k = 20, 259
    raw, _ = weights(rng, fmt, n, k)
    x, w = floats(rng, 37, k), packed(fmt, raw)
    ones = np.zeros((37, n), np.float32)
    for i in range(37):
        row = ones[i : i + 1]
        kernels.call(f"linear_float_{fmt}", 1, [x[i : i + 1], w, None, row], [n, k, kind])
    for t in (2, 3, 5, 8, 9, 11, 33, 37):
        out = np.zeros((t, n), np.float32)
        kernels.call(f"linear_float_{fmt}", t, [x[:t], w, None, out], [n, k, kind])
        assert (out == ones[:t]).all(), t


def activation(name: str, x: Any) -> Any:
    from math import erf

    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if name == "gelu_erf":
        return 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))
    if name == "relu":
        return np.maximum(x, 0)
    return np.tanh(x) if name == "tanh" else 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(
    ("kernels", "form"),
    [(level, "int8") for level in ("zen4", "amx", "v4", "v3")]
    + [(level, form) for level in ("zen4", "v3") for form in ("int8_Q8_0", "int8_Q6_K")]
    + [(level, "float") for level in ("zen4", "v4", "v3")],
    indirect=["kernels"],
)
def test_fused_forms(kernels: Kernels, form: str) -> None:
    """LinearAdd (in place too), ActLinear, GatedLinear and its quantizing form."""
    rng = np.random.default_rng(5)
    fmt = {"int8": "Q4_1", "float": "F16"}.get(form, form.removeprefix("int8_"))
    n, k, t = 96, 256 if fmt == "Q6_K" else 160, 125
    (raw_g, g), (raw_u, u) = weights(rng, fmt, n, k), weights(rng, fmt, n, k)
    x, bg, bu, residual = floats(rng, t, k), floats(rng, n), floats(rng, n), floats(rng, t, n)
    x *= np.float32(0.01 if fmt == "Q6_K" else 1)  # whose random weights are large
    if form != "float":
        a: list[Any] = list(bundle(x))
        value, tail = expand(a[0], a[1]), []
    else:
        a, value, tail = [x], x.astype(np.float64), [F32]
    wg, wu = packed(fmt, raw_g), packed(fmt, raw_u)
    gate, up = value @ g.astype(np.float64).T + bg, value @ u.astype(np.float64).T + bu
    out = residual.copy()
    kernels.call(f"linear_add_{form}", t, [*a, wg, out, bg, out], [n, k, *tail])
    np.testing.assert_allclose(out, residual + gate, rtol=1e-5, atol=1e-4)
    for name, act in ACT.items():
        kernels.call(f"act_linear_{form}", t, [*a, wg, bg, out], [n, k, act, *tail])
        np.testing.assert_allclose(out, activation(name, gate), rtol=1e-4, atol=1e-4)
        want = activation(name, gate) * up
        kernels.call(f"gated_{form}", t, [*a, wg, wu, bg, bu, out], [n, k, act, *tail])
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=3e-4)
        q, scale, sums = (
            np.zeros((t, n), np.int8),
            np.zeros((t, n // 32), np.float32),
            np.zeros((t, n // 16), np.float32),
        )
        kernels.call(
            f"gated_quantize_{form}", t, [*a, wg, wu, bg, bu, q, scale, sums], [n, k, act, *tail]
        )
        for got, expected in zip((q, scale, sums), bundle(out), strict=True):
            assert (got == expected).all()


def test_layout_has_the_bits_of_the_file() -> None:
    """No growth but the padding to 16 rows, and no two weights share a bit: one flipped element
    changes its place only."""
    rng = np.random.default_rng(6)
    for fmt in (*BLOCK, *PLAIN):
        for n, k in [(16, 256), (17, 512)]:
            raw, _ = weights(rng, fmt, n, k)
            size = cpu_layouts.packed_bytes("rows16", fmt, n, k)
            assert size == -(-n // 16) * 16 * raw.shape[1]
            one = packed(fmt, raw)
            assert one.size == size and (one == packed(fmt, raw)).all()
            if n == 16:
                assert (
                    np.bincount(np.unpackbits(one)).tolist()
                    == np.bincount(np.unpackbits(unsigned(fmt, raw))).tolist()
                )


def unsigned(fmt: str, raw: Any) -> Any:
    """Q8_0 and Q3_K store biased integers: bring the file's bytes to the same bias."""
    raw = raw.copy()
    if fmt == "Q8_0":
        blocks = raw.reshape(raw.shape[0], -1, 34)
        blocks[:, :, 2:] ^= 0x80
    return raw


def test_hot_loop_uses_vnni(tmp_path: Path) -> None:
    """The zen4 build consumes broadcast activations in the instruction itself."""
    import subprocess

    source = tmp_path / "hot.c"
    source.write_text(
        '#include "zl_linear_int8.h"\n'
        "void hot(const zl_task *t, const int8_t *q, const float *s, const float *u,\n"
        "         const uint8_t *w, float *o) {\n"
        "  zl_linear_int8(t, 512, q, s, u, w, NULL, o, 576, 1536, ZL_FMT_Q4_1);\n}\n"
    )
    import sys

    from cpu_harness import FLAGS, TEMPLATES

    target = tmp_path / "hot.o"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-target",
            "x86_64-linux-gnu",
            "-mcpu=znver4",
            "-O3",
            "-fPIC",
            *FLAGS,
            "-I",
            str(TEMPLATES),
            "-c",
            str(source),
            "-o",
            str(target),
        ],
        check=True,
    )
    text = subprocess.run(
        ["objdump", "-d", str(target)], capture_output=True, text=True, check=True
    ).stdout
    dots = [line for line in text.splitlines() if "vpdpbusd" in line]
    assert len(dots) >= 8 * (8 + 4 + 2 + 1)
    assert sum("{1to16}" in line and "zmm" in line for line in dots) >= 0.9 * len(dots)


@pytest.mark.parametrize("fmt", ["Q4_1", "Q8_0", "Q6_K", "IQ4_NL"])
def test_levels_agree_to_the_bit(fmt: str) -> None:
    """The same numbers from 512-bit and 256-bit code, with and without VNNI or tiles."""
    levels = [name for name in ("zen4", "amx", "v4", "v3") if LEVELS[name][1] <= host_flags()]
    rng = np.random.default_rng(7)
    n, k, t = 24, 512, 21
    raw, _ = weights(rng, fmt, n, k)
    w, x = packed(fmt, raw), floats(rng, t, k)
    results: dict[str, list[bytes]] = {"int8": [], "float": []}
    for level in levels:
        lib = kernels_for(level)
        out = np.zeros((t, n), np.float32)
        lib.call(f"linear_int8_{fmt}", t, [*bundle(x), w, None, out], [n, k])
        results["int8"].append(out.tobytes())
        if has(level, f"linear_float_{fmt}"):
            lib.call(f"linear_float_{fmt}", t, [x, w, None, out], [n, k, F32])
            results["float"].append(out.tobytes())
    for kind, outputs in results.items():
        assert len(set(outputs)) == 1, kind


def test_the_gate_of_silu_errs_as_little_as_stated(kernels: Kernels) -> None:
    """zl_act_times: 5e-7 + 8e-8 |x| with the roundings around it; no product overflows early."""
    x = np.concatenate([np.linspace(-80, 80, 160001), np.geomspace(1e-30, 3e38, 4001)])
    x = np.concatenate([x, -x]).astype(np.float32)
    u = np.resize(np.array([1, -3, 0.7], np.float32), x.shape)
    y = np.zeros_like(x)
    kernels.lib.silu_times_all(
        *(ctypes.c_void_p(a.ctypes.data) for a in (x, u, y)), ctypes.c_int64(x.size)
    )
    x64 = x.astype(np.float64)
    want = x64 / (1 + np.exp(np.minimum(-x64, 700))) * u
    allowed = (5e-7 + 8e-8 * np.abs(x64)) * np.abs(want) + 1e-37
    usual = np.abs(want) < 3.4e38
    assert (np.abs(y - want)[usual] <= allowed[usual]).all()
    assert np.isinf(y[~usual]).all()
    special = np.array([np.nan, np.inf, -1e30, 0, 1], np.float32)
    factor, out = np.array([1, 1, 1e30, 5, np.nan], np.float32), np.zeros(5, np.float32)
    kernels.lib.silu_times_all(
        *(ctypes.c_void_p(a.ctypes.data) for a in (special, factor, out)), ctypes.c_int64(5)
    )
    assert np.isnan(out[[0, 4]]).all() and out[1] == np.inf and (out[2:4] == 0).all()
