"""Attention and writing the KV cache, against numpy.

References are float64.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import numpy as np
import pytest
from cpu_harness import KV_BLOCK_BYTES, Batch, Kernels, floats, kernels_for
from test_cpu_kernels_linear import F32, bundle, to_bf16

F16, KV_BF16, KV_Q8_0 = 1, 2, 3  # enum zl_kv_dtype


def q8_0(x: Any) -> Any:
    """What a q8_0 cache keeps: for 32 neighbours a scale of f16, codes of -127 .. 127 of it."""
    x = np.asarray(x, np.float32).reshape(-1, 32)
    scale = (np.abs(x).max(1) / np.float32(127)).astype(np.float16).astype(np.float32)[:, None]
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return np.rint(x * inverse).clip(-127, 127) * scale


def kv_bytes(dtype: int, elements: int) -> int:
    return elements * 34 // 32 if dtype == KV_Q8_0 else elements * (4 if dtype == F32 else 2)


#: largest error of a result of order 1, by what is rounded besides keys and values
CLOSE = {F32: 1e-5, F16: 1e-5, KV_BF16: 2**-8, KV_Q8_0: 2e-4}


@pytest.fixture(scope="session", params=["zen4", "v4", "v3"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_for(request.param)


@pytest.fixture(scope="session")
def bf16_kernels() -> Kernels:
    return kernels_for("zen4")


def make_batch(lengths: list[tuple[int, int]], block_size: int) -> tuple[Batch, int, int]:
    """Sequences of (context before, new tokens), blocks dealt out in reverse: batch, T, number of
    blocks."""
    starts = np.cumsum([0, *(n for _, n in lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(p, p + n) for p, n in lengths]).astype(np.int32)
    seqs = np.repeat(np.arange(len(lengths)), [n for _, n in lengths]).astype(np.int32)
    most = max(-(-(p + n) // block_size) for p, n in lengths)
    table = np.full((len(lengths), most), 2**30, np.int32)  # an unused entry must not be touched
    total = sum(-(-(p + n) // block_size) for p, n in lengths)
    at = total
    for s, (p, n) in enumerate(lengths):
        for b in range(-(-(p + n) // block_size)):
            at -= 1
            table[s, b] = at
    return Batch(seqs, positions, starts, table), len(positions), total


def fill_cache(
    k: Kernels,
    lengths: list[tuple[int, int]],
    block_size: int,
    blocks: Any,
    offset: int,
    x: list[Any],
    kvh: int,
    hd: int,
    role: int,
    dtype: int,
) -> None:
    """Writes whole contexts x[s] [context, kvh*hd] through CacheWrite."""
    whole, t, _ = make_batch([(0, p + n) for p, n in lengths], block_size)
    rows = np.concatenate(x)
    cache = blocks[offset:]
    k.call(
        "cache_write",
        t,
        [cache, rows, whole.positions, None, None, cache],
        [kvh, hd, block_size, role, dtype],
        batch=whole,
    )


def attention_reference(
    q: Any, k: Any, v: Any, p: int, scale: float, softcap: float, window: int, group: int
) -> Any:
    """One token: q [H, hd], k and v [context, kvh, hd]."""
    lo = max(0, p - window + 1) if window else 0
    out = np.zeros(q.shape)
    for h in range(q.shape[0]):
        s = k[lo : p + 1, h // group].astype(np.float64) @ q[h] * scale
        if softcap:
            s = softcap * np.tanh(s / softcap)
        e = np.exp(s - s.max())
        out[h] = (e / e.sum()) @ v[lo : p + 1, h // group].astype(np.float64)
    return out


def assert_alone_gives_the_same_bits(
    kernels: Kernels,
    batch: Batch,
    arrays: list[Any],
    ints: list[int],
    floats_: list[float],
    y: Any,
) -> None:
    """Each token of the batch alone on one thread, all of them on several: rows of ``y``."""
    for i in range(len(y)):
        s = int(batch.token_seq[i])
        one = Batch(
            np.zeros(1, np.int32),
            batch.positions[i : i + 1],
            np.array([0, 1], np.int32),
            np.ascontiguousarray(batch.block_table[s : s + 1]),
        )
        row = np.zeros((1, y.shape[1]), np.float32)
        q = np.ascontiguousarray(arrays[0][i : i + 1])
        operands = [q, *arrays[1:3], one.positions, None, None, row]
        kernels.call("attention", 1, operands, ints, floats_, one, threads=1)
        assert (row[0].view(np.uint32) == y[i].view(np.uint32)).all(), i
    for threads in (1, 2, 3, 4, 5, 16):  # tiles have fewer tokens where threads would have none
        threaded = np.zeros_like(y)
        kernels.call("attention", len(y), [*arrays, threaded], ints, floats_, batch, threads)
        assert (threaded.view(np.uint32) == y.view(np.uint32)).all(), threads


@pytest.mark.parametrize(
    ("heads", "kvh", "hd", "block_size", "window", "softcap", "dtype", "lengths"),
    [
        (9, 3, 64, 16, 0, 0.0, F16, [(0, 5), (70, 1), (129, 3)]),
        (9, 3, 64, 16, 0, 0.0, F16, [(50, 40), (1015, 20)]),
        (4, 4, 32, 32, 0, 0.0, F32, [(1030, 2), (0, 40)]),
        (8, 1, 96, 16, 20, 0.0, F16, [(100, 70)]),
        (2, 1, 24, 16, 0, 15.0, F32, [(17, 1), (0, 1), (63, 2)]),
        (6, 2, 40, 16, 65, 30.0, F16, [(200, 3)]),
        (2, 2, 256, 16, 0, 0.0, F16, [(20, 3)]),
        (6, 2, 32, 64, 70, 0.0, F32, [(200, 3), (127, 1)]),
        (3, 1, 160, 32, 0, 20.0, F16, [(127, 1), (300, 30)]),
        (7, 1, 128, 16, 0, 0.0, F16, [(191, 1), (64, 2)]),
        (9, 3, 64, 16, 0, 0.0, KV_Q8_0, [(0, 5), (70, 1), (129, 3)]),
        (9, 3, 64, 64, 0, 0.0, KV_Q8_0, [(50, 40), (1015, 20)]),
        (4, 4, 32, 32, 0, 0.0, KV_Q8_0, [(1030, 2), (0, 40)]),
        (8, 1, 96, 16, 20, 0.0, KV_Q8_0, [(100, 70)]),
        (6, 2, 32, 16, 65, 30.0, KV_Q8_0, [(200, 3)]),
        (2, 2, 256, 16, 0, 0.0, KV_Q8_0, [(20, 3)]),
        (4, 1, 128, 128, 0, 0.0, KV_Q8_0, [(300, 30), (700, 1)]),
        (2, 1, 64, 256, 0, 0.0, KV_Q8_0, [(300, 12)]),
        (1, 1, 512, 32, 0, 0.0, KV_Q8_0, [(130, 9)]),
    ],
)
def test_attention(
    kernels: Kernels,
    heads: int,
    kvh: int,
    hd: int,
    block_size: int,
    window: int,
    softcap: float,
    dtype: int,
    lengths: list[tuple[int, int]],
) -> None:
    rng = np.random.default_rng(5)
    batch, t, total = make_batch(lengths, block_size)
    blocks = np.full(total * KV_BLOCK_BYTES, 0xFF, np.uint8)  # NaN wherever nothing was written
    size = kv_bytes(dtype, kvh * hd * block_size)
    ks = [floats(rng, p + n, kvh * hd) for p, n in lengths]
    vs = [floats(rng, p + n, kvh * hd) for p, n in lengths]
    k_offset, v_offset = 64, 64 + size
    fill_cache(kernels, lengths, block_size, blocks, k_offset, ks, kvh, hd, 0, dtype)
    fill_cache(kernels, lengths, block_size, blocks, v_offset, vs, kvh, hd, 1, dtype)
    q = floats(rng, t, heads * hd)
    scale = 1 / math.sqrt(hd)
    y = np.full((t, heads * hd), np.nan, np.float32)
    ints = [heads, kvh, hd, window, block_size, dtype]
    arrays = [q, blocks[k_offset:], blocks[v_offset:], batch.positions, None, None]
    kernels.call("attention", t, [*arrays, y], ints, [scale, softcap], batch)
    kept = {F16: lambda x: x.astype(np.float16), F32: lambda x: x, KV_Q8_0: q8_0}[dtype]
    want = np.zeros((t, heads * hd))
    for i in range(t):
        s, p = int(batch.token_seq[i]), int(batch.positions[i])
        ck, cv = (kept(c[s]).reshape(-1, kvh, hd) for c in (ks, vs))
        one_q = q[i].reshape(heads, hd)
        answer = attention_reference(one_q, ck, cv, p, scale, softcap, window, heads // kvh)
        want[i] = answer.reshape(-1)
    if dtype == KV_Q8_0:  # a query and its probabilities have 16 bits
        assert np.abs(y - want).max() < CLOSE[dtype] and np.abs(y - want).mean() < 2e-5
    else:
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=2e-6)
    assert_alone_gives_the_same_bits(kernels, batch, arrays, ints, [scale, softcap], y)
    # a sequence's rows in another order
    starts = batch.seq_starts.tolist()
    parts = [a + rng.permutation(b - a) for a, b in itertools.pairwise(starts)]
    order = np.concatenate(parts)
    other = Batch(batch.token_seq, batch.positions[order], batch.seq_starts, batch.block_table)
    mixed = np.full_like(y, np.nan)
    kernels.call("attention", t, [q[order], *arrays[1:3], other.positions, None, None, mixed], ints,
                 [scale, softcap], other)  # fmt: skip
    assert (mixed == y[order]).all()
    if hd % 32 == 0:
        n = heads * hd
        got = [
            np.zeros((t, n), np.int8),
            np.zeros((t, n // 32), np.float32),
            np.zeros((t, n // 16), np.float32),
        ]
        kernels.call("attention_quantize", t, [*arrays, *got], ints, [scale, softcap], batch)
        for a, b in zip(got, bundle(y), strict=True):
            assert (a == b).all()


@pytest.mark.parametrize(
    ("heads", "kvh", "hd", "block_size", "window", "softcap", "lengths"),
    [
        (9, 3, 64, 32, 0, 0.0, [(0, 5), (70, 1), (129, 3)]),
        (9, 3, 64, 32, 0, 0.0, [(50, 40), (1015, 20)]),
        (4, 4, 32, 32, 0, 0.0, [(1030, 2), (0, 41)]),
        (8, 1, 96, 16, 20, 0.0, [(100, 70)]),
        (2, 1, 24, 16, 0, 15.0, [(17, 1), (0, 1), (63, 2)]),
        (6, 2, 40, 16, 65, 30.0, [(200, 3)]),
        (2, 2, 256, 16, 0, 0.0, [(20, 3)]),
        # whole chunks between two that queries attend to in part; tiles that fours do not fill,
        # elements that eights do not
        (9, 3, 64, 32, 200, 0.0, [(300, 70)]),
        (10, 2, 40, 16, 0, 30.0, [(130, 43), (1000, 30)]),
        # decoding of a batch, items that span sequences
        (9, 3, 64, 32, 0, 0.0, [(20 * i, 1) for i in range(16)]),
    ],
)
def test_attention_over_a_bf16_cache(
    bf16_kernels: Kernels,
    heads: int,
    kvh: int,
    hd: int,
    block_size: int,
    window: int,
    softcap: float,
    lengths: list[tuple[int, int]],
) -> None:
    """Queries (as exponents of 2), keys and values rounded to bf16; probabilities too (half a unit
    of 2^-8 each)."""
    kernels = bf16_kernels
    rng = np.random.default_rng(8)
    batch, t, total = make_batch(lengths, block_size)
    blocks = np.full(total * KV_BLOCK_BYTES, 0xFF, np.uint8)  # NaN wherever nothing was written
    ks = [floats(rng, p + n, kvh * hd) for p, n in lengths]
    vs = [floats(rng, p + n, kvh * hd) for p, n in lengths]
    k_offset, v_offset = 64, 64 + kvh * hd * block_size * 2
    fill_cache(kernels, lengths, block_size, blocks, k_offset, ks, kvh, hd, 0, KV_BF16)
    fill_cache(kernels, lengths, block_size, blocks, v_offset, vs, kvh, hd, 1, KV_BF16)
    q = floats(rng, t, heads * hd)
    scale = 1 / math.sqrt(hd)
    ints = [heads, kvh, hd, window, block_size, KV_BF16]
    arrays = [q, blocks[k_offset:], blocks[v_offset:], batch.positions, None, None]
    y = np.full((t, heads * hd), np.nan, np.float32)
    kernels.call("attention", t, [*arrays, y], ints, [scale, softcap], batch)
    want = np.zeros((t, heads * hd))
    for i in range(t):
        s, p = int(batch.token_seq[i]), int(batch.positions[i])
        ck, cv = (to_bf16(c[s]).reshape(-1, kvh, hd) for c in (ks, vs))
        one_q = to_bf16(q[i] * np.float32(scale * math.log2(math.e))).reshape(heads, hd)
        to_natural = math.log(2)
        answer = attention_reference(one_q, ck, cv, p, to_natural, softcap, window, heads // kvh)
        want[i] = answer.reshape(-1)
    assert np.abs(y - want).max() < 2**-8
    assert np.abs(y - want).mean() < 2**-11
    assert_alone_gives_the_same_bits(kernels, batch, arrays, ints, [scale, softcap], y)


def filled(
    kernels: Kernels, lengths: list[tuple[int, int]], ks: list[Any], vs: list[Any], ints: list[int]
) -> tuple[Batch, list[Any]]:
    """A batch over caches of these keys and values, and the operands from k_cache on."""
    _, kvh, hd, _, block_size, dtype = ints
    batch, _, total = make_batch(lengths, block_size)
    blocks = np.full(total * KV_BLOCK_BYTES, 0xFF, np.uint8)  # NaN wherever nothing was written
    k_offset, v_offset = 64, 64 + kv_bytes(dtype, kvh * hd * block_size)
    fill_cache(kernels, lengths, block_size, blocks, k_offset, ks, kvh, hd, 0, dtype)
    fill_cache(kernels, lengths, block_size, blocks, v_offset, vs, kvh, hd, 1, dtype)
    return batch, [blocks[k_offset:], blocks[v_offset:], batch.positions, None, None]


def of_dtype(dtype: int, level: str = "v3") -> Kernels:
    return kernels_for("zen4" if dtype == KV_BF16 else level)


#: a cache and the code that reads it; that of q8_0 is not the same source on all levels
CACHES = [(F32, "v3"), (F16, "v3"), (KV_BF16, "zen4")]
CACHES += [(KV_Q8_0, level) for level in ("v3", "v4", "zen4")]


#: one position, a chunk seen in part, whole chunks before one; few queries and many
EXTREMES = [[(0, 1)], [(0, 40)], [(200, 1)], [(200, 40)], [(1020, 30)]]


@pytest.mark.parametrize(("dtype", "level"), CACHES)
@pytest.mark.parametrize("lengths", EXTREMES)
@pytest.mark.parametrize("score", [-1.9e38, -3.3e38, 3.3e38])
def test_attention_of_huge_scores(
    dtype: int, level: str, lengths: list[tuple[int, int]], score: float
) -> None:
    """All scores of a query are the same finite number: the result is the mean of the values, here
    1. In bf16 scores are exponents of 2, larger by log2 e."""
    kernels, (p, n) = of_dtype(dtype, level), lengths[0]
    ints = [9, 3, 64, 0, 16, dtype]
    k = np.zeros((p + n, 3, 64), np.float32)
    k[:, :, 0] = 1
    batch, operands = filled(kernels, lengths, [k.reshape(p + n, -1)], [np.ones_like(k)], ints)
    q = np.zeros((n, 9, 64), np.float32)
    q[:, :, 0] = score / (math.log2(math.e) if dtype == KV_BF16 else 1)
    y = np.zeros((n, 9 * 64), np.float32)
    kernels.call("attention", n, [q, *operands, y], ints, [1.0, 0.0], batch)
    want = q8_0(np.ones(32))[0, 0] if dtype == KV_Q8_0 else 1.0
    assert np.abs(y - want).max() < (2e-5 if dtype == KV_Q8_0 else 1e-5)


@pytest.mark.parametrize(("dtype", "level"), CACHES)
@pytest.mark.parametrize("lengths", EXTREMES)
def test_nan_of_a_query_stays_there(dtype: int, level: str, lengths: list[tuple[int, int]]) -> None:
    kernels, (p, n) = of_dtype(dtype, level), lengths[0]
    ints, rng = [9, 3, 64, 0, 16, dtype], np.random.default_rng(3)
    ks, vs = [floats(rng, p + n, 3 * 64)], [floats(rng, p + n, 3 * 64)]
    batch, operands = filled(kernels, lengths, ks, vs, ints)
    q = floats(rng, n, 9, 64)
    want, got = np.zeros_like(q), np.zeros_like(q)
    kernels.call("attention", n, [q, *operands, want], ints, [0.125, 0.0], batch)
    q[n // 2, 4, 7] = np.nan
    kernels.call("attention", n, [q, *operands, got], ints, [0.125, 0.0], batch)
    assert np.isfinite(want).all() and np.isnan(got[n // 2, 4]).all()
    got[n // 2, 4] = want[n // 2, 4]
    assert (got.view(np.uint32) == want.view(np.uint32)).all()


def stored_q8(block: Any, head: int, at: int, hd: int, bs: int, role: int) -> tuple[Any, Any]:
    """Codes [hd / 32, 32] and scales of one position of a head in a layer's share of a block, by
    the layout that zl_attention_q8.h describes."""
    piece = block[(head * bs + at // 16 * 16) * hd // 16 * 17 :][: 17 * hd]
    codes = piece[: 16 * hd].view(np.int8)
    if role:
        codes = codes.reshape(8, hd, 2)[at % 16 // 2, :, at % 2]
    else:
        codes = codes.reshape(hd // 2, 16, 2)[:, at % 16].reshape(-1)
    scales = piece[16 * hd :].view(np.float16).reshape(hd // 32, 16)[:, at % 16]
    return codes.reshape(-1, 32), scales.astype(np.float32)


def test_what_a_q8_0_cache_keeps(kernels: Kernels) -> None:
    """Bytes of both layouts, rebuilt from the numbers that ``q8_0`` gives: large, small and
    denormal elements, zeros; a row of no numbers, or too large for a scale, has a scale of NaN."""
    rng, hd, kvh, bs, n = np.random.default_rng(2), 64, 2, 32, 40
    x = floats(rng, n, kvh, hd)
    x[1], x[2, 0], x[3, :, :32] = 0, 1e-6, 8e6
    x[4], x[5, 0] = np.linspace(-1.3e-5, 1.3e-5, hd), 1e-40  # scales that are denormal, or 0
    x[6, 0, 40], x[6, 1, 3], x[7, 0, 1], x[7, 1, 33] = np.nan, np.inf, -np.inf, 9e6
    for role in (0, 1):
        blocks = np.full(2 * KV_BLOCK_BYTES, 0xFF, np.uint8)
        fill_cache(kernels, [(0, n)], bs, blocks, 64, [x.reshape(n, -1)], kvh, hd, role, KV_Q8_0)
        for p, h in itertools.product(range(n), range(kvh)):
            block = blocks[(1 - p // bs) * KV_BLOCK_BYTES + 64 :]  # dealt out in reverse
            codes, scales = stored_q8(block, h, p % bs, hd, bs, role)
            row = x[p, h].reshape(-1, 32)
            fine = np.isfinite(row).all(1) & (np.abs(row).max(1) < 127 * 65504)
            assert (np.isnan(scales) == ~fine).all(), (p, h)
            row, scales = row[fine], scales[fine, None]
            kept = codes[fine] * scales
            assert (kept == q8_0(row)).all(), (role, p, h)
            # half a step, and what rounding the scale loses: the least one is 2^-24
            lost = 0.51 * scales + np.abs(row) * 2.0**-11 + (scales < 2.0**-14) * 127 * 2.0**-25
            assert (np.abs(kept - row) <= lost).all(), (role, p, h)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("role", [0, 1])
def test_who_attends_to_no_number_and_who_does_not(
    kernels: Kernels, role: int, bad: float, window: int
) -> None:
    """Keys or values of a later token, or before a window, that are no numbers change nothing; who
    attends to them gets NaN.  A q8_0 cache has them in a scale, which stands for 32 elements."""
    ints = [9, 3, 64, window, 16, KV_Q8_0]
    rng, n, at = np.random.default_rng(7), 30, 12
    kv, q = [floats(rng, n, 3 * 64) for _ in range(2)], floats(rng, n, 9 * 64)
    y = np.zeros((2, n, 9 * 64), np.float32)
    for i in range(2):
        kv[role][at, 5] = bad if i else kv[role][at, 5]
        batch, operands = filled(kernels, [(0, n)], kv[:1], kv[1:], ints)
        kernels.call("attention", n, [q, *operands, y[i]], ints, [0.125, 0.0], batch)
    others = [i for i in range(n) if i < at or (window and i >= at + window)]
    assert (y[0][others].view(np.uint32) == y[1][others].view(np.uint32)).all()
    attend = y[1][at : at + (window or n)].reshape(-1, 9, 64)[:, :3, :32]  # head 0's keys, values
    assert np.isfinite(y[0]).all() and np.isnan(attend).all()


@pytest.mark.parametrize("context", [40, 600, 3000])
def test_small_probabilities_beside_a_large_one(kernels: Kernels, context: int) -> None:
    """Thousands of positions that weigh 2e-6 of the first one each still add up: one scale for all
    of them would round every one to none.  Values: 1 at the first, -1 elsewhere."""
    ints = [3, 1, 32, 0, 16, KV_Q8_0]
    k = np.zeros((context, 32), np.float32)
    v = -np.ones((context, 32), np.float32)
    k[0, 0], v[0] = 1, 1
    batch, operands = filled(kernels, [(context - 1, 1)], [k], [v], ints)
    q = np.zeros((1, 3, 32), np.float32)
    q[:, :, 0] = 13
    y = np.zeros((1, 96), np.float32)
    kernels.call("attention", 1, [q, *operands, y], ints, [1.0, 0.0], batch)
    others = (context - 1) * math.exp(-13 * q8_0(np.eye(32)[0])[0, 0])
    want = (1 - others) / (1 + others) * q8_0(np.ones(32))[0, 0]
    chunk = min(context, 64) - 1  # beside the first in its chunk, where they are rounded to none
    assert np.abs(y - want).max() < 1e-5 + chunk * math.exp(-13)


@pytest.mark.parametrize(
    ("name", "level", "least"),
    [
        ("exp2_low_all", "zen4", -150),
        ("exp2_rough_all", "v3", -126),
        ("exp2_rough_all", "zen4", -126),
    ],
)
def test_powers_of_two(name: str, level: str, least: int) -> None:
    """The error that zl_attention_bf16.h and zl_math.h state for 2^x, x <= 0, where the
    result is normal; below ``least`` it is 0."""
    lib = kernels_for(level).lib

    def powers(x: Any) -> Any:
        x = np.asarray(x, np.float32)
        y = np.zeros_like(x)
        getattr(lib, name)(
            *(ctypes.c_void_p(a.ctypes.data) for a in (x, y)), ctypes.c_int64(x.size)
        )
        return y

    tiny = -np.logspace(-38, 0, 4001)
    x = np.concatenate([np.linspace(-126, 0, 1000003), np.linspace(-2, 0, 100003), tiny])
    x = x.astype(np.float32)
    want = np.exp2(x.astype(np.float64))
    assert (np.abs(powers(x) - want) / want).max() < 3e-6
    whole = -np.arange(1 - least)
    assert (powers(whole) == np.exp2(whole.astype(np.float64))).all()  # 2^0 too: 1
    low = np.array([-0.0, least - 0.5, -199.0, -1e30, -np.finfo(np.float32).max, -np.inf])
    assert (powers(low) == [1, 0, 0, 0, 0, 0]).all()
    nan = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(powers(nan)).all()
