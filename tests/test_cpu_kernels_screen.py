"""The screened projection's kernels against numpy: bounds that hold, and the same first maximum.

In: heads that make it hard (ties, an ulp apart, outliers, numbers at both ends of float32).  The
reference is the product in float64 for bounds, ``numpy.argmax`` over the unscreened kernel's logits
for the choice.  Next file: ``test_screen.py`` (whole steps).
"""

from __future__ import annotations

from typing import Any, Protocol

import ml_dtypes
import numpy as np
import pytest
from cpu_harness import Batch, Kernels, floats, kernels_for
from test_cpu_kernels_linear import BF16, F32, bundle, packed, to_bf16
from test_domain_ops import execute
from zerolayer.compiler.passes.screen import encode
from zerolayer.targets import formats

#: the exact kernel: name, weight format, how it takes the activations
EXACT = [("bf16", "BF16", BF16), ("float", "BF16", BF16), ("float", "BF16", F32),
         ("float", "F16", F32), ("float", "F32", F32)]  # fmt: skip
SCREENED = Batch(screened=True)


@pytest.fixture(scope="session", params=["zen4", "v4", "v3"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_for(request.param)


def stored(fmt: str, w: Any) -> tuple[Any, Any]:
    """``w`` rounded to a plain format: raw uint8 [N, row_bytes], and its values as float32."""
    dtype = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[fmt]
    with np.errstate(over="ignore"):
        raw = np.ascontiguousarray(w.astype(dtype))
    return raw.view(np.uint8).reshape(len(w), -1), raw.astype(np.float32)


class Head:
    """A projection, its copy, and the kernels over both."""

    def __init__(self, kernels: Kernels, exact: tuple[str, str, int], w: Any) -> None:
        self.kernels, (self.form, self.fmt, self.kind) = kernels, exact
        raw, self.w = stored(self.fmt, w)
        self.n, self.k = w.shape
        self.packed = packed(self.fmt, raw)
        copy, self.norms = encode(self.w)
        self.copy = packed("Q8_0", copy)
        self.values = formats.dequantize("Q8_0", copy)

    def bounds(self, x: Any, threads: int = 1) -> tuple[Any, Any]:
        """[R, G] each: the largest that an output of a group can be, and must be."""
        groups = -(-self.n // 16)
        out = np.full((len(x), 2, groups), np.nan, np.float32)
        arrays = [x, self.copy, self.norms, out]
        ints = [self.n, self.k, self.kind]
        self.kernels.call("head_bounds", len(x), arrays, ints, batch=SCREENED, threads=threads)
        return out[:, 0], out[:, 1]

    def logits(self, x: Any) -> Any:
        """All of them, by the kernel that knows no bounds."""
        out = np.full((len(x), self.n), np.nan, np.float32)
        name = "linear_bf16" if self.form == "bf16" else f"linear_float_{self.fmt}"
        ints = [self.n, self.k] if self.form == "bf16" else [self.n, self.k, self.kind]
        self.kernels.call(name, len(x), [x, self.packed, None, out], ints)
        return out

    def screened(self, x: Any, bounds: Any, threads: int = 1, batch: Batch = SCREENED) -> Any:
        out = np.full((len(x), self.n), np.nan, np.float32)
        both = np.ascontiguousarray(np.stack(bounds, axis=1))
        name = "screened_bf16" if self.form == "bf16" else f"screened_float_{self.fmt}"
        ints = [self.n, self.k] if self.form == "bf16" else [self.n, self.k, self.kind]
        arrays = [x, self.packed, both, out]
        self.kernels.call(name, len(x), arrays, ints, batch=batch, threads=threads)
        return out


def first_maximum(logits: Any) -> Any:
    """The step's rule: the lowest id of the largest logit, NaN below everything."""
    return np.argmax(np.where(np.isnan(logits), -np.inf, logits), axis=1)


class Screened(Protocol):
    """What a projection's test needs, whatever its weights are."""

    def logits(self, x: Any) -> Any: ...

    def bounds(self, x: Any, threads: int = 1) -> tuple[Any, Any]: ...

    def screened(self, x: Any, bounds: Any, threads: int = 1) -> Any: ...


def check(head: Screened, x: Any, most: float = 1.0) -> None:
    """The screened logits choose as all logits do; those that are there have the same bits, the
    others cannot win; at most ``most`` of them are there."""
    exact = head.logits(x)
    for threads in (1, 2):
        bounds = head.bounds(x, threads)
        found = head.screened(x, bounds, threads)
        left = found.view(np.uint32) != exact.view(np.uint32)
        assert (found[left] == -np.inf).all()
        assert np.array_equal(first_maximum(found), first_maximum(exact))
        best = np.where(np.isnan(exact), -np.inf, exact).max(axis=1, keepdims=True)
        ties = exact == best
        assert not (left & ties & (best > -np.inf)).any()  # every one that equals the largest
        assert (~left).mean() <= most


def gaussian(rng: np.random.Generator, n: int, k: int) -> Any:
    return floats(rng, n, k) * np.float32(0.02)


def hard(rng: np.random.Generator, n: int, k: int) -> tuple[Any, Any, Any, Any]:
    """Activations [3, K], the same with outliers; weights [N, K], the same with rows that tie."""
    x = floats(rng, 3, k)
    outliers = x.copy()
    outliers[:, ::64] *= 20
    w = gaussian(rng, n, k)
    ties = w.copy()
    ties[[5, 700, 1202]] = x[0] * np.float32(0.5)  # the same row in three groups
    return x, outliers, w, ties


@pytest.mark.parametrize("exact", EXACT, ids=lambda e: "-".join(map(str, e)))
def test_the_choice_is_that_of_all_logits(kernels: Kernels, exact: tuple[str, str, int]) -> None:
    """1 to 8 rows, sizes that are not whole groups of 16."""
    rng = np.random.default_rng(1)
    for n, k in ((1, 32), (17, 64), (3001, 576), (517, 2048)):
        head = Head(kernels, exact, gaussian(rng, n, k))
        for rows in (1, 2, 3, 5, 8):
            check(head, floats(rng, rows, k))


def test_few_groups_are_left(kernels: Kernels) -> None:
    """Of Gaussian logits a few per cent, of one that stands out its group alone."""
    rng = np.random.default_rng(2)
    w = gaussian(rng, 16000, 1024)
    head = Head(kernels, EXACT[0], w)
    x = floats(rng, 1, 1024)
    check(head, x, most=0.05)
    check(head, (w[777] * 50)[None], most=16 / 16000)


@pytest.mark.parametrize("exact", EXACT, ids=lambda e: "-".join(map(str, e)))
def test_hard_heads(kernels: Kernels, exact: tuple[str, str, int]) -> None:
    rng = np.random.default_rng(3)
    n, k = 1203, 256
    x, outliers, w, ties = hard(rng, n, k)
    ulp = ties.copy()
    step = {"BF16": 2**16, "F16": 2**13, "F32": 1}[exact[1]]  # the last bit of the format
    some = np.where(rng.random((2, k)) < 0.05, np.uint32(step), np.uint32(0)).astype(np.uint32)
    ulp[700] = (ulp[700].view(np.uint32) + some[0]).view(np.float32)
    ulp[1202] = (ulp[1202].view(np.uint32) - some[1]).view(np.float32)
    negative = -np.abs(w) - np.float32(0.01)
    for name, head in {
        "ties": ties, "an ulp apart": ulp, "zero rows": np.where(np.arange(n)[:, None] % 7, w, 0),
        "all zero": np.zeros_like(w), "all the same": np.tile(w[:1], (n, 1)),
    }.items():  # fmt: skip
        for activations in (x, outliers, -x, np.zeros_like(x)):
            check(Head(kernels, exact, head), activations)
        assert name
    check(
        Head(kernels, exact, negative), np.abs(x)
    )  # the padding of the last group is 0, above all
    for scale in (1e-30, 1e-36, 1e-41, 1e30):
        check(Head(kernels, exact, w * np.float32(scale)), x)
        check(Head(kernels, exact, w), x * np.float32(scale))
        check(Head(kernels, exact, w * np.float32(scale)), x * np.float32(min(scale, 1e8)))


@pytest.mark.parametrize("exact", EXACT, ids=lambda e: "-".join(map(str, e)))
def test_numbers_that_are_none(kernels: Kernels, exact: tuple[str, str, int]) -> None:
    """NaN and infinity in activations or weights: what all logits say, bit for bit."""
    rng = np.random.default_rng(4)
    n, k = 403, 96
    w = gaussian(rng, n, k)
    for value in (np.nan, np.inf, -np.inf):
        x = floats(rng, 4, k)
        x[1, 5], x[2, :] = value, value
        check(Head(kernels, exact, w), x)
        broken = w.copy()
        broken[17, 3], broken[400, :] = value, value
        check(Head(kernels, exact, broken), floats(rng, 4, k))
    huge = w.copy()
    huge[9] = np.float32(3e38) * np.sign(w[9])  # sums that overflow
    check(Head(kernels, exact, huge), floats(rng, 2, k) * np.float32(100))


@pytest.mark.parametrize("exact", EXACT, ids=lambda e: "-".join(map(str, e)))
def test_no_logit_leaves_its_bounds(kernels: Kernels, exact: tuple[str, str, int]) -> None:
    """A head of one row has the bounds of that row, so these are tested without the rows beside it:
    around the kernel's logit and around the exact product, and no wider than derived."""
    rng = np.random.default_rng(5)
    for case in range(60):
        k = int(rng.choice([32, 64, 576, 2080]))
        w = floats(rng, 1, k) * np.float32(10.0 ** rng.uniform(-6, 4))
        x = floats(rng, 8, k) * (10.0 ** rng.uniform(-6, 6, (8, 1))).astype(np.float32)
        if case % 3 == 1:  # a few columns carry all
            w[:, rng.integers(0, k, 2)] *= 300
            x[:, rng.integers(0, k, 2)] *= 300
        if case % 3 == 2:  # what the copy misses, aligned with the activations
            w = np.sign(x[:1]) * (np.abs(w).max() * (rng.integers(0, 127, (1, k)) + 0.5) / 127)
        head = Head(kernels, exact, np.clip(w, -6e4, 6e4).astype(np.float32))  # F16 holds them
        upper, lower = head.bounds(x)
        read = (to_bf16(x) if head.kind == BF16 else x).astype(np.float64)
        true = read @ head.w.astype(np.float64).T
        for value in (head.logits(x), true):
            assert (value <= upper).all() and (value >= lower).all()
        q, scale, _ = bundle(x)
        lost = np.linalg.norm(read - q * np.repeat(scale.astype(np.float64), 32, axis=1), axis=1)
        size, row = np.linalg.norm(read, axis=1), head.w.astype(np.float64)
        error = np.linalg.norm(row - head.values)
        n = (2 * k + k / 32 + 16) * 2.0**-24
        gamma = n / (1 - n)
        derived = (size + lost) * (1 + gamma) * error
        derived += (lost + gamma * (size + lost)) * np.linalg.norm(row)
        width = (upper - lower)[:, 0].astype(np.float64) / 2
        assert (width >= derived).all()
        assert (width <= derived * 1.001 + np.abs(true[:, 0]) * 2.0**-20 + 1e-30).all()


def test_bounds_of_rows_do_not_depend_on_their_company(kernels: Kernels) -> None:
    rng = np.random.default_rng(6)
    head = Head(kernels, EXACT[0], gaussian(rng, 203, 160))
    x = floats(rng, 8, 160)
    together = np.stack(head.bounds(x, 3), axis=1)
    for i in range(8):
        assert np.array_equal(np.stack(head.bounds(x[i : i + 1]), axis=1)[0], together[i])


@pytest.mark.parametrize("exact", EXACT[::2], ids=lambda e: "-".join(map(str, e)))
def test_a_step_that_is_not_screened_has_all_logits(
    kernels: Kernels, exact: tuple[str, str, int]
) -> None:
    """Any number of rows, whatever the bounds hold; and the bounds are not made."""
    rng = np.random.default_rng(7)
    head = Head(kernels, exact, gaussian(rng, 203, 160))
    x = floats(rng, 19, 160)
    nothing = np.full((19, 13), np.nan, np.float32)
    found = head.screened(x, (nothing, nothing), 2, Batch())
    assert np.array_equal(found, head.logits(x))
    out = np.full((19, 26), 7, np.float32)
    head.kernels.call("head_bounds", 19, [x, head.copy, head.norms, out], [203, 160, head.kind])
    assert (out == 7).all()


def test_the_norms_of_a_copy() -> None:
    """Not below the exact ones, and hardly above; infinite where Q8_0 cannot hold the row."""
    rng = np.random.default_rng(8)
    w = floats(rng, 40, 96) * np.float32(10) ** rng.integers(-30, 6, (40, 1)).astype(np.float32)
    w[3], w[4, 7], w[5, 8], w[6, 9] = 0, np.nan, np.inf, 1e30
    copy, norms = encode(w)
    values = formats.dequantize("Q8_0", copy).astype(np.float64)
    for i in range(40):
        if i in (4, 5, 6):
            assert (values[i] == 0).all() and (norms[:, i] == np.inf).all()
            continue
        row = w[i].astype(np.float64)
        for norm, want in ((norms[0, i], row - values[i]), (norms[1, i], row)):
            exact = np.sqrt((want**2).sum())
            assert exact <= norm <= exact * (1 + 1e-5) + 1e-44


@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_the_definition_of_the_bounds_is_what_the_kernel_finds(kernels: Kernels, kind: str) -> None:
    """The operator's body in onnxruntime, on a vocabulary that is not whole groups."""
    rng = np.random.default_rng(9)
    w = gaussian(rng, 203, 160)
    head = Head(kernels, EXACT[0] if kind == "bf16" else EXACT[4], w)
    x = floats(rng, 5, 160)
    copy, norms = encode(head.w)
    (found,) = execute(f"HeadBounds_Q8_0_{kind}", {"x": x, "weight": copy, "norms": norms})
    assert np.allclose(found, np.concatenate(head.bounds(x), axis=1), rtol=1e-4, atol=1e-5)
