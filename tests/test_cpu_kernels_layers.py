"""Norms, rope, KV cache, elementwise kernels and embedding, against numpy.

References are float64.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import numpy as np
import pytest
from cpu_harness import BLOCK, KV_BLOCK_BYTES, PLAIN, Batch, Kernels, floats, has, kernels_for
from test_cpu_kernels_attention import F16, KV_Q8_0, make_batch, stored_q8
from test_cpu_kernels_linear import (
    BF16,
    F32,
    bundle,
    expand,
    packed,
    to_bf16,
    weights,
)


@pytest.fixture(scope="session", params=["zen4", "v4", "v3"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_for(request.param)


@pytest.mark.parametrize("fmt", [*BLOCK, *PLAIN])
def test_embed(kernels: Kernels, fmt: str) -> None:
    rng = np.random.default_rng(1)
    c = 256 if fmt not in PLAIN else 37
    raw, w = weights(rng, fmt, 35, c)
    tokens = np.array([0, 34, 15, 16, 16], np.int32)
    y = np.zeros((5, c), np.float32)
    kernels.call(f"embed_{fmt}", 5, [tokens, packed(fmt, raw), y], [c], [1.0])
    assert (y == w[tokens]).all()  # decoding is exact
    kernels.call(f"embed_{fmt}", 5, [tokens, packed(fmt, raw), y], [c], [16.0])
    assert (y == w[tokens] * 16).all()


@pytest.mark.parametrize("c", [32, 96, 576, 2048])
@pytest.mark.parametrize("t", [1, 3])
def test_norms_and_quantize(kernels: Kernels, c: int, t: int) -> None:
    rng = np.random.default_rng(2)
    x, w, b = floats(rng, t, c) * 3 + 1, floats(rng, c), floats(rng, c)
    x64 = x.astype(np.float64)
    rms = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + 1e-5) * w
    centred = x64 - x64.mean(axis=1, keepdims=True)
    layer = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * w
    y = np.zeros_like(x)
    q, s, u = (
        np.zeros((t, c), np.int8),
        np.zeros((t, c // 32), np.float32),
        np.zeros((t, c // 16), np.float32),
    )
    for name, inputs, want in [
        ("rms_norm", [x, w], rms),
        ("layer_norm", [x, w, b], layer + b),
        ("layer_norm", [x, w, None], layer),
    ]:
        kernels.call(name, t, [*inputs, y], [c], [1e-5])
        np.testing.assert_allclose(y, want, rtol=2e-6, atol=2e-6)
        kernels.call(f"{name}_quantize", t, [*inputs, q, s, u], [c], [1e-5])
        for got, expected in zip((q, s, u), bundle(y), strict=True):
            assert (got == expected).all()
    kernels.call("quantize", t, [x, q, s, u], [c])
    assert (np.abs(expand(q, s) - x) <= np.repeat(s, 32, axis=1) * 0.5000001).all()
    hd = 32
    kernels.call("head_norm", t, [x, w, y], [c // hd, hd], [1e-6])
    heads = x64.reshape(t, -1, hd)
    want = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + 1e-6) * w[:hd]
    np.testing.assert_allclose(y, want.reshape(t, c), rtol=2e-6, atol=2e-6)


def test_norms_of_widths_that_are_not_vectors(kernels: Kernels) -> None:
    rng = np.random.default_rng(3)
    for c in (1, 15, 17, 63, 65, 100):
        x, w = floats(rng, 3, c), floats(rng, c)
        y = np.zeros_like(x)
        kernels.call("layer_norm", 3, [x, w, None, y], [c], [1e-5])
        x64 = x.astype(np.float64)
        centred = x64 - x64.mean(axis=1, keepdims=True)
        np.testing.assert_allclose(
            y, centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * w, atol=5e-5
        )


def test_quantize_of_extremes(kernels: Kernels) -> None:
    """All zero, one value, denormals, infinity and NaN: no trap, q within int8."""
    x = np.zeros((6, 32), np.float32)
    x[1, 5] = -3
    x[2] = 1e-45
    x[3, 0] = 190e-45
    x[4, 0], x[5, 1] = np.inf, np.nan
    q, s, u = np.zeros((6, 32), np.int8), np.zeros((6, 1), np.float32), np.zeros((6, 2), np.float32)
    kernels.call("quantize", 6, [x, q, s, u], [32])
    assert (q[0] == 0).all() and s[0, 0] == 0 and (u[0] == 0).all()
    assert q[1, 5] == -127 and (np.delete(q[1], 5) == 0).all()
    assert np.isinf(s[4, 0]) and np.isnan(s[5, 0]) and (q[4:] == 0).all()
    assert (np.abs(q.astype(int)) <= 127).all()
    wide = np.ones((1, 256), np.float32)  # eight blocks at once
    wide[0, 40], wide[0, 255], wide[0, 96] = np.nan, -np.inf, 3e38
    q, s, u = np.zeros((8, 32), np.int8), np.zeros((8, 1), np.float32), np.zeros((8, 2), np.float32)
    kernels.call("quantize", 1, [wide, q, s, u], [256])
    assert np.isnan(s[1, 0]) and np.isinf(s[7, 0]) and (q[[1, 7]] == 0).all()
    assert (q[[0, 2, 4, 5, 6]] == 127).all() and q[3, 0] == 127 and (q[3, 1:] == 0).all()


def rope_reference(x: Any, cos: Any, sin: Any, rd: int, interleaved: bool) -> Any:
    """x [T, heads, hd]."""
    out = x.astype(np.float64).copy()
    c, s = cos[:, None, :].astype(np.float64), sin[:, None, :].astype(np.float64)
    i, j = (
        (slice(0, rd, 2), slice(1, rd, 2))
        if interleaved
        else (slice(0, rd // 2), slice(rd // 2, rd))
    )
    a, b = x[..., i], x[..., j]
    out[..., i], out[..., j] = a * c - b * s, a * s + b * c
    return out


def test_rope_table_is_right_for_large_angles(kernels: Kernels) -> None:
    positions = np.array([0, 1, 7, 8191, 131071, 1048575, 2**31 - 1], np.int32)
    inv = (10000.0 ** -(np.arange(32) / 32)).astype(np.float32)
    c, s = np.zeros((7, 32), np.float32), np.zeros((7, 32), np.float32)
    kernels.call("rope_table", 7, [positions, inv, c, s], [64], [1.5])
    angles = positions.astype(np.float32)[:, None] * inv
    # math.cos of a double is correct to half an ulp of a double for any argument
    want_c = np.vectorize(math.cos)(angles.astype(np.float64)).astype(np.float32) * np.float32(1.5)
    want_s = np.vectorize(math.sin)(angles.astype(np.float64)).astype(np.float32) * np.float32(1.5)
    assert (np.abs(c - want_c) <= 1.2e-7 * np.abs(want_c) + 1e-30).all()
    assert (np.abs(s - want_s) <= 1.2e-7 * np.abs(want_s) + 1e-30).all()


@pytest.mark.parametrize(("hd", "rd"), [(64, 64), (64, 16), (24, 24), (80, 32)])
@pytest.mark.parametrize("interleaved", [0, 1])
def test_rope(kernels: Kernels, hd: int, rd: int, interleaved: int) -> None:
    rng = np.random.default_rng(4)
    x, cos, sin = floats(rng, 3, 5 * hd), floats(rng, 3, rd // 2), floats(rng, 3, rd // 2)
    y = np.zeros_like(x)
    kernels.call("rope", 3, [x, cos, sin, y], [5, hd, rd, interleaved])
    want = rope_reference(x.reshape(3, 5, hd), cos, sin, rd, bool(interleaved)).reshape(3, -1)
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
    kernels.call("rope", 3, [x, cos, sin, x], [5, hd, rd, interleaved])  # in place
    assert (x == y).all()


@pytest.fixture(scope="session")
def qkv_kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_for(request.param)


@pytest.mark.parametrize(
    ("qkv_kernels", "name"),
    [
        (level, name)
        for level in ("zen4", "amx", "v4", "v3")
        for name in ("qkv_int8", "qkv_int8_mixed", "qkv_float", "qkv_bf16", "qkv_bf16_12")
        if has(level, name)
    ],
    indirect=["qkv_kernels"],
)
@pytest.mark.parametrize(
    ("hd", "rd", "interleaved", "norm", "bias", "dtype"),
    [
        (64, 64, 0, 0, 1, F16),
        (64, 64, 0, 1, 1, KV_Q8_0),
        (32, 16, 0, 1, 0, F16),
        (48, 48, 1, 0, 0, F16),
        (512, 64, 0, 0, 0, F16),
    ],
)
def test_qkv_rope_cache(
    qkv_kernels: Kernels,
    name: str,
    hd: int,
    rd: int,
    interleaved: int,
    norm: int,
    bias: int,
    dtype: int,
) -> None:
    """The fused kernel equals its parts: projections, head norm, rope, and what CacheWrite would
    store."""
    kernels = qkv_kernels
    rng = np.random.default_rng(6)
    heads, kvh, k, bs, lengths = 6, 2, 256, 16, [(0, 43), (30, 1), (5, 119)]
    batch, t, total = make_batch(lengths, bs)
    fmts = (
        ("Q4_K", "Q8_0", "Q6_K")
        if "mixed" in name
        else ("Q4_1",) * 3
        if "int8" in name
        else ("BF16" if name.startswith("qkv_bf16") else "F16",) * 3
    )
    sizes = (heads * hd, kvh * hd, kvh * hd)
    ws = [weights(rng, f, n, k) for f, n in zip(fmts, sizes, strict=True)]
    biases = [floats(rng, n) if bias else None for n in sizes]
    norms = [floats(rng, hd) if norm else None for _ in range(2)]
    x = floats(rng, t, k)
    kind = [BF16] if name == "qkv_float" else []
    a: list[Any] = list(bundle(x)) if "int8" in name else [x]
    value = expand(a[0], a[1]) if "int8" in name else to_bf16(x).astype(np.float64)
    cos, sin = floats(rng, t, rd // 2), floats(rng, t, rd // 2)
    # K and V in pools of their own
    caches = [np.zeros(total * KV_BLOCK_BYTES, np.uint8) for _ in range(2)]
    q = np.zeros((t, heads * hd), np.float32)
    kernels.call(
        name,
        t,
        [
            *a,
            *(
                packed("BF16_12" if name.endswith("12") else f, w[0])
                for f, w in zip(fmts, ws, strict=True)
            ),
            *biases,
            *norms,
            cos,
            sin,
            caches[0],
            caches[1],
            batch.positions,
            None,
            None,
            q,
            caches[0],
            caches[1],
        ],
        [k, heads, kvh, hd, rd, interleaved, bs, dtype, *kind],
        [1e-6],
        batch,
    )
    parts = []
    for i, n in enumerate((heads, kvh, kvh)):
        b = biases[i]
        y = (value @ ws[i][1].astype(np.float64).T + (0 if b is None else b)).reshape(t, n, hd)
        w = norms[i] if i < 2 else None
        if w is not None:
            y = y / np.sqrt((y**2).mean(axis=2, keepdims=True) + 1e-6) * w
        parts.append(
            (rope_reference(y, cos, sin, rd, bool(interleaved)) if i < 2 else y).reshape(t, -1)
        )
    np.testing.assert_allclose(q, parts[0], rtol=1e-4, atol=2e-4)
    for role in (0, 1):
        want = np.zeros_like(caches[role])
        rows = parts[1 + role].astype(np.float32)
        arrays = [want, rows, batch.positions, None, None, want]
        kernels.call("cache_write", t, arrays, [kvh, hd, bs, role, dtype], batch=batch)
        got, expected = caches[role], want
        if dtype == KV_Q8_0:  # codes and scales of every position, a code's step apart at most
            pairs = []
            for cache in (got, expected):
                blocks = cache.reshape(total, KV_BLOCK_BYTES)
                places = itertools.product(range(total), range(kvh), range(bs))
                parts_ = [stored_q8(blocks[b], h, at, hd, bs, role) for b, h, at in places]
                pairs.append(tuple(np.stack(x) for x in zip(*parts_, strict=True)))
            (codes, scales), (codes_, scales_) = pairs
            np.testing.assert_allclose(scales, scales_, rtol=2e-3)
            assert np.abs(codes.astype(int) - codes_).max() <= 1 and codes_.any()
            continue
        np.testing.assert_allclose(
            got.view(np.float16).astype(np.float32),
            expected.view(np.float16).astype(np.float32),
            rtol=2e-3,
            atol=1e-3,
        )


def test_cache_offsets_are_64_bit(kernels: Kernels) -> None:
    """A block id whose byte offset exceeds 32 bits: the pool is a sparse mapping of 8 GiB."""
    import mmap

    block = 3 * 2**31 // KV_BLOCK_BYTES
    pool = mmap.mmap(
        -1, (block + 1) * KV_BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    )  # MAP_NORESERVE
    blocks = np.frombuffer(pool, np.uint8)
    batch = Batch(
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
        np.array([0, 1], np.int32),
        np.array([[block]], np.int32),
    )
    x = np.arange(1, 17, dtype=np.float32)[None]
    kernels.call(
        "cache_write",
        1,
        [blocks, x, batch.positions, None, None, blocks],
        [1, 16, 16, 1, F32],
        batch=batch,
    )
    assert (blocks[block * KV_BLOCK_BYTES :][:64].view(np.float32) == x).all()
    y = np.zeros((1, 16), np.float32)
    k = blocks  # one position: its value is the answer whatever the score
    kernels.call(
        "attention",
        1,
        [x, k, k, batch.positions, None, None, y],
        [1, 1, 16, 0, 16, F32],
        [1.0, 0.0],
        batch,
    )
    np.testing.assert_allclose(y, x, rtol=1e-6)


def test_elementwise(kernels: Kernels) -> None:
    rng = np.random.default_rng(7)
    for rows, c in [(1, 1), (3, 17), (5, 64), (2, 33)]:
        a, b, row, one = (
            floats(rng, rows, c),
            floats(rng, rows, c) + 3,
            floats(rng, c) + 4,
            floats(rng, 1) + 5,
        )
        for name, f in [
            ("add", np.add),
            ("sub", np.subtract),
            ("mul", np.multiply),
            ("div", np.divide),
        ]:
            for mode, left, right in [
                (0, a, b),
                (1, one, b),
                (2, a, one),
                (3, row, b),
                (4, a, row),
            ]:
                y = np.zeros((rows, c), np.float32)
                kernels.call(name, rows, [left, right, y], [c, mode])
                assert (y == f(left, right)).all(), (name, mode)
        y = np.zeros((rows, c), np.float32)
        x = a * 4
        x64 = x.astype(np.float64)
        kernels.call("softmax", rows, [x, y], [c])
        e = np.exp(x64 - x64.max(axis=1, keepdims=True))
        np.testing.assert_allclose(y, e / e.sum(axis=1, keepdims=True), rtol=1e-6)
        kernels.call("softcap", rows, [x, y], [c], [3.0])
        np.testing.assert_allclose(y, 3 * np.tanh(x64 / 3), rtol=1e-6)
        kernels.call("swish", rows, [x, y], [c], [1.7])
        np.testing.assert_allclose(y, x64 / (1 + np.exp(-1.7 * x64)), rtol=2e-6)
        index = rng.integers(0, rows, 4).astype(np.int32)
        y = np.zeros((4, c), np.float32)
        kernels.call("gather", 4, [a, index, y], [c])
        assert (y == a[index]).all()
        if c % 32 == 0:
            bundle: list[Any] = [
                rng.integers(-127, 128, (rows, c)).astype(np.int8),
                rng.standard_normal((rows, c // 32)).astype(np.float32),
                rng.standard_normal((rows, c // 16)).astype(np.float32),
            ]
            picked = [np.zeros((4, *x.shape[1:]), x.dtype) for x in bundle]
            kernels.call("gather_int8", 4, [*bundle, index, *picked], [c])
            assert all((got == x[index]).all() for got, x in zip(picked, bundle, strict=True))


def ulps(got: Any, want: Any) -> Any:
    """Error in units of the last place of float32 (of the smallest normal number below it)."""
    spacing = np.spacing(np.maximum(np.abs(want), 2.0**-126).astype(np.float32)).astype(np.float64)
    return np.abs(got.astype(np.float64) - want) / spacing


def everything() -> Any:
    """Floats over the whole range, every sign and exponent."""
    bits = np.arange(0, 2**32, 20011, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    return np.concatenate(
        [
            x[np.isfinite(x)],
            np.linspace(-110, 110, 100001, dtype=np.float32),
            np.linspace(-1, 1, 20001, dtype=np.float32),
        ]
    )


def test_exp_has_the_same_bits_on_every_level() -> None:
    """One instruction scales by 2^n where there is one, two multiplications elsewhere."""
    values = [everything(), np.array([np.inf, -np.inf, -0.0, 89.4, 88.8, -103.9], np.float32)]
    x = np.concatenate([*values, np.float32(-87.4) - np.arange(20000, dtype=np.float32) / 1000])
    seen = []
    for level in ("zen4", "v4", "v3"):
        y = np.zeros_like(x)
        kernels_for(level).lib.exp_all(
            ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(x.size)
        )
        seen.append(y.tobytes())
    assert seen[0] == seen[1] == seen[2]


def test_elementary_functions(kernels: Kernels) -> None:
    """The errors that zl_math.h states."""
    x = everything()
    x64 = x.astype(np.float64)
    y = np.zeros_like(x)
    kernels.lib.exp_all(
        ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(x.size)
    )
    with np.errstate(over="ignore", under="ignore"):
        want = np.exp(x64)
        finite = want < 3.4028235e38
        assert ulps(y[finite], want[finite]).max() <= 2
        assert (y[want > 3.4028236e38] == np.inf).all()
        n = x.size

        def call(name: str, *ints: int) -> None:
            kernels.call(name, 1, [x, y], [n, *ints])

        call("tanh")
        assert ulps(y, np.tanh(x64)).max() <= 4
        call("sigmoid")
        normal = x64 > -88
        assert ulps(y[normal], 1 / (1 + np.exp(-x64[normal]))).max() <= 4
        call("relu")
        assert (y == np.maximum(x, 0)).all()
        near = np.abs(x64) < 30
        call("gelu", 3)
        cdf = np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)))(x64[near])
        assert ulps(y[near], x64[near] * cdf).max() <= 16
        call("gelu", 2)
        u = np.sqrt(2 / np.pi) * (x64[near] + 0.044715 * x64[near] ** 3)
        want = 0.5 * x64[near] * (1 + np.tanh(u))
        np.testing.assert_allclose(y[near], want, rtol=1e-5, atol=1e-7)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
    y = np.zeros_like(special)
    kernels.lib.exp_all(
        ctypes.c_void_p(special.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(5)
    )
    assert np.isnan(y[0]) and y[1] == np.inf and (y[2:] == [0, 1, 1]).all()
