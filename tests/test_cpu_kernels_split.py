"""A projection of Q8_0 in two parts: its kernels against numpy.

In: heads that make it hard (ties, rows apart by their lower bits alone, outliers, scales at both
ends of float16 and none at all).  The reference is the product in float64 for logits and bounds,
and ``numpy.argmax`` over all logits for the choice.  Next file: ``test_screen.py`` (whole steps).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_harness import Batch, Kernels, floats, kernels_for
from test_cpu_kernels_linear import bundle, expand, packed
from test_cpu_kernels_screen import SCREENED, check, gaussian, hard
from test_domain_ops import execute
from zerolayer.compiler.passes.screen_split import low_norms, spread_of
from zerolayer.targets import formats


@pytest.fixture(scope="session", params=["zen4", "v4", "v3"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_for(request.param)


def same_bits(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def halves(raw: Any) -> list[Any]:
    return [formats.part_of_q8_0(part, raw) for part in ("Q8_HIGH", "Q8_LOW")]


class Split:
    """A projection of Q8_0, its halves, and the kernels over them."""

    def __init__(self, kernels: Kernels, raw: Any, spread: Any = None) -> None:
        self.kernels, self.raw = kernels, raw
        self.n, self.k = len(raw), raw.shape[1] // 34 * 32
        self.halves = halves(raw)
        self.high, self.low = (
            packed(f, h) for f, h in zip(("Q8_HIGH", "Q8_LOW"), self.halves, strict=True)
        )
        self.spread = spread_of(raw, None) if spread is None else spread
        self.norms = low_norms(raw, self.spread)

    def bundle(self, x: Any) -> tuple[Any, Any, Any]:
        """NaN and infinity become what the kernel makes of them."""
        t, k = x.shape
        if np.isfinite(x).all():
            return bundle(x)
        q, scale = np.zeros((t, k), np.int8), np.zeros((t, k // 32), np.float32)
        sums = np.zeros((t, k // 16), np.float32)
        self.kernels.call("quantize", t, [x, q, scale, sums], [k])
        return q, scale, sums

    def bounds(self, x: Any, threads: int = 1) -> tuple[Any, Any]:
        """[R, G] each: the largest that an output of a group can be, and must be."""
        out = np.full((len(x), 2, -(-self.n // 16)), np.nan, np.float32)
        arrays = [*self.bundle(x), self.high, self.norms, self.spread, out]
        ints = [self.n, self.k]
        name = "split_bounds_int8"
        self.kernels.call(name, len(x), arrays, ints, batch=SCREENED, threads=threads)
        return out[:, 0], out[:, 1]

    def screened(self, x: Any, bounds: Any, threads: int = 1, batch: Batch = SCREENED) -> Any:
        out = np.full((len(x), self.n), np.nan, np.float32)
        both = np.ascontiguousarray(np.stack(bounds, axis=1))
        arrays = [*self.bundle(x), self.high, self.low, both, out]
        ints = [self.n, self.k]
        self.kernels.call("split_int8", len(x), arrays, ints, batch=batch, threads=threads)
        return out

    def logits(self, x: Any, threads: int = 1) -> Any:
        """All of them, whatever the bounds hold."""
        nothing = np.full((len(x), -(-self.n // 16)), np.nan, np.float32)
        return self.screened(x, (nothing, nothing), threads, Batch())

    def true(self, x: Any) -> Any:
        """The exact products of the int8 activations with Q8_0's values."""
        q, scale, _ = bundle(x)
        return expand(q, scale) @ formats.dequantize("Q8_0", self.raw).astype(np.float64).T


def quantized(w: Any) -> Any:
    return formats.quantize("Q8_0", w.astype(np.float32))


@pytest.mark.parametrize("n,k,rows", [(1, 32, 1), (17, 64, 3), (203, 576, 8), (70, 2048, 37)])
def test_all_logits(kernels: Kernels, n: int, k: int, rows: int) -> None:
    """Against the exact products, whoever computes them."""
    rng = np.random.default_rng(1)
    head, x = Split(kernels, quantized(gaussian(rng, n, k))), floats(rng, rows, k)
    found = head.logits(x)
    size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(
        formats.dequantize("Q8_0", head.raw), axis=1
    )
    assert (np.abs(found - head.true(x)) <= 1e-5 * size + 1e-30).all()
    assert same_bits(head.logits(x, 2), found)
    for i in range(rows):  # a row does not depend on its company
        assert same_bits(head.logits(x[i : i + 1])[0], found[i])


def test_the_choice_is_that_of_all_logits(kernels: Kernels) -> None:
    """1 to 8 rows, sizes that are not whole groups of 16."""
    rng = np.random.default_rng(2)
    for n, k in ((1, 32), (17, 64), (3001, 576), (517, 2048)):
        head = Split(kernels, quantized(gaussian(rng, n, k)))
        for rows in (1, 2, 3, 5, 8):
            check(head, floats(rng, rows, k))


def test_few_groups_are_left(kernels: Kernels) -> None:
    """Of Gaussian logits a tenth, of one that stands out its group alone."""
    rng = np.random.default_rng(3)
    w = gaussian(rng, 16000, 1024)
    head = Split(kernels, quantized(w))
    check(head, floats(rng, 1, 1024), most=0.12)
    check(head, (w[777] * 50)[None], most=16 / 16000)


def test_hard_heads(kernels: Kernels) -> None:
    rng = np.random.default_rng(4)
    n, k = 1203, 256
    x, outliers, w, ties = hard(rng, n, k)
    near = quantized(ties)
    codes = near.reshape(n, -1, 34)[:, :, 2:]
    for row in (700, 1202):  # apart by some of the two lowest bits
        codes[row] = (codes[row] & 0xFC) | rng.integers(0, 4, codes[row].shape, dtype=np.uint8)
    some = np.where(np.arange(n)[:, None] % 7, w, 0)
    for raw in (quantized(ties), near, quantized(some), quantized(np.zeros_like(w)),
                quantized(np.tile(w[:1], (n, 1)))):  # fmt: skip
        for activations in (x, outliers, -x, np.zeros_like(x)):
            check(Split(kernels, raw), activations)
    negative = quantized(-np.abs(w) - np.float32(0.01))
    check(Split(kernels, negative), np.abs(x))
    for scale in (1e-30, 1e-36, 1e-41, 1e30, 1e36):
        check(Split(kernels, quantized(w)), x * np.float32(scale))
    for scale in (1e-5, 1e5):  # subnormal halves, large ones
        check(Split(kernels, quantized(w * np.float32(scale))), x)


def test_rows_that_only_the_lower_bits_tell_apart(kernels: Kernels) -> None:
    """The same upper bits and scales, so nothing can be left out; the longest rows that go."""
    rng = np.random.default_rng(10)
    for n, k in ((97, 64), (33, 65536)):
        raw = np.repeat(quantized(gaussian(rng, 1, k)), n, axis=0)
        codes = raw.reshape(n, -1, 34)[:, :, 2:]
        codes[:] = (codes & 0xFC) | rng.integers(0, 4, codes.shape, dtype=np.uint8)
        codes[70 % n] = codes[5]
        check(Split(kernels, raw), floats(rng, 3, k))
        head = Split(kernels, raw)
        x = np.repeat((codes[5].astype(int).reshape(1, -1) % 4 - 1.5), 2, axis=0)
        x = (x * np.array([[1.0], [-1.0]])).astype(np.float32)  # what the lower bits are worth most
        check(head, x)


def test_numbers_that_are_none(kernels: Kernels) -> None:
    """Scales and activations of NaN and infinity: what all logits say, bit for bit."""
    rng = np.random.default_rng(5)
    n, k = 403, 96
    raw = quantized(gaussian(rng, n, k))
    for value in (np.nan, np.inf, -np.inf):
        x = floats(rng, 4, k)
        x[1, 5], x[2, :] = value, value
        check(Split(kernels, raw), x)
        broken = raw.copy()
        blocks = broken.reshape(n, -1, 34)
        blocks[17, 1, :2] = np.array([value], "<f2").view(np.uint8)
        blocks[400, :, :2] = np.array([value], "<f2").view(np.uint8)
        head = Split(kernels, broken)
        assert np.isinf(head.norms[[17, 400]]).all() and (head.spread > 0).all()
        check(head, floats(rng, 4, k))
    huge = raw.copy()
    huge.reshape(n, -1, 34)[9, :, :2] = np.array([65504], "<f2").view(np.uint8)
    check(Split(kernels, huge), floats(rng, 2, k) * np.float32(3e33))


def test_no_logit_leaves_its_bounds(kernels: Kernels) -> None:
    """A head of one row has the bounds of that row: around the kernel's logit and the exact
    product, with any spread, and no wider than derived."""
    rng = np.random.default_rng(6)
    for case in range(60):
        k = int(rng.choice([32, 64, 576, 2080]))
        w = floats(rng, 1, k) * np.float32(10.0 ** rng.uniform(-4, 4))
        x = floats(rng, 8, k) * (10.0 ** rng.uniform(-6, 6, (8, 1))).astype(np.float32)
        raw = quantized(w)
        codes = raw.reshape(1, -1, 34)[:, :, 2:]
        if case % 3 == 1:  # a few columns carry all
            x[:, rng.integers(0, k, 2)] *= 300
        if case % 3 == 2:  # the lower bits, aligned with the activations
            up = (x[:1].reshape(1, -1, 32) > 0).astype(np.uint8) * 3
            codes[:] = (codes & 0xFC) | up
        spread = [None, np.ones(k, np.float32), 10 ** rng.uniform(-3, 3, k).astype(np.float32)]
        head = Split(kernels, raw, spread[case % 3 if case < 30 else 2])
        upper, lower = head.bounds(x)
        for value in (head.logits(x), head.true(x)):
            assert (value <= upper).all() and (value >= lower).all()
        q, scale, _ = bundle(x)
        by = head.spread.astype(np.float64)
        low = formats.dequantize("Q8_LOW", head.halves[1]).astype(np.float64)
        derived = np.linalg.norm(expand(q, scale) * by, axis=1) * np.linalg.norm(low / by)
        width = (upper - lower)[:, 0].astype(np.float64) / 2
        size = np.abs(head.true(x)[:, 0]) + derived
        assert (width >= derived * (1 - 1e-12)).all()
        assert (width <= derived * 1.001 + size * 2.0**-20 + 1e-30).all()


def test_the_spread_and_the_norms() -> None:
    """Positive and of float32 whatever the weights are; norms not below the exact ones."""
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 256, (5000, 3 * 34), dtype=np.uint8)
    raw.reshape(5000, 3, 34)[:, :, 1] &= 0xBF
    gain = floats(rng, 96)
    gain[3:6] = 0, np.nan, np.inf
    for g in (None, gain, np.zeros(96, np.float32)):
        spread = spread_of(raw, g)
        assert spread.dtype == np.float32 and ((spread >= 0.5) & (spread < 100)).all()
    assert np.array_equal(spread_of(raw * np.uint8(0), None), np.ones(96, np.float32))
    spread = spread_of(raw, gain)
    some = raw[:50]
    low = formats.dequantize("Q8_LOW", halves(some)[1]).astype(np.float64)
    exact = np.linalg.norm(low / spread, axis=1)
    norms = low_norms(some, spread)
    assert (norms >= exact).all() and (norms <= exact * (1 + 1e-5) + 1e-44).all()


def test_rows_of_the_table(kernels: Kernels) -> None:
    """To the bit those of Q8_0."""
    rng = np.random.default_rng(8)
    raw = quantized(gaussian(rng, 35, 160))
    high, low = halves(raw)
    tokens = np.array([0, 34, 15, 16, 16], np.int32)
    for scale in (1.0, 24.0, 0.1):
        y = np.zeros((5, 160), np.float32)
        arrays = [tokens, packed("Q8_HIGH", high), packed("Q8_LOW", low), y]
        kernels.call("split_embed", 5, arrays, [160], [scale])
        assert same_bits(y, formats.dequantize("Q8_0", raw)[tokens] * np.float32(scale))


def test_the_definitions_are_what_the_kernels_find(kernels: Kernels) -> None:
    """The operators' bodies in onnxruntime, on a vocabulary that is not whole groups."""
    rng = np.random.default_rng(9)
    head = Split(kernels, quantized(gaussian(rng, 203, 160)))
    x = floats(rng, 5, 160)
    q, scale, sums = bundle(x)
    high, low = head.halves
    acts = {"q": q, "scale": scale, "sums": sums}
    (found,) = execute(
        "SplitBounds_Q8_HIGH_int8",
        acts | {"weight": high, "norms": head.norms, "spread": head.spread},
    )
    assert np.allclose(found, np.concatenate(head.bounds(x), axis=1), rtol=1e-4, atol=1e-5)
    bounds = np.zeros((5, 26), np.float32)
    weights = {"weight_high": high, "weight_low": low}
    (found,) = execute(
        "ScreenedSplitLinear_Q8_HIGH_Q8_LOW_int8", acts | weights | {"bounds": bounds}
    )
    assert np.allclose(found, head.logits(x), rtol=1e-4, atol=1e-5)
    tokens = np.array([0, 202, 15], np.int64)
    (found,) = execute("SplitEmbed_Q8_HIGH_Q8_LOW", weights | {"tokens": tokens}, {"scale": 2.0})
    assert np.array_equal(found, formats.dequantize("Q8_0", head.raw)[tokens] * np.float32(2))
