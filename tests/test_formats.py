"""Block formats against the ``gguf`` package's independent numpy implementation."""

from __future__ import annotations

import time
from typing import cast

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError
from zerolayer.targets import formats
from zerolayer.targets.formats import (
    FILE_FORMATS,
    FORMATS,
    PLAIN,
    PLAIN_FILE_FORMATS,
    QUANTIZE_SCHEMES,
)

BLOCKS = sorted(FILE_FORMATS)
QUANTIZERS = ("Q4_0", "Q4_1", "Q8_0")


def random_raw(name: str, rows: int, blocks: int, seed: int = 0) -> formats.U8:
    """Random bytes: every code and every scale, NaN and infinite ones too, occurs."""
    size = (rows, blocks * FORMATS[name].block_bytes)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def reference(name: str, raw: formats.U8) -> formats.F32:
    with np.errstate(all="ignore"):
        return cast(formats.F32, gguf.dequantize(raw, gguf.GGMLQuantizationType[name]))


def same_bits(a: formats.F32, b: formats.F32) -> bool:
    """Equal bit for bit, except that any NaN equals any NaN."""
    nan = np.isnan(a) & np.isnan(b)
    return bool((nan | (a.view(np.uint32) == b.view(np.uint32))).all())


def canonical_zero(a: formats.F32) -> formats.F32:
    """-0.0 as 0.0: the reference subtracts a product where another order of terms gives 0."""
    result: formats.F32 = np.add(a, np.float32(0))
    return result


@pytest.mark.parametrize("name", BLOCKS)
def test_sizes_are_ggmls(name: str) -> None:
    elems, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    fmt = FORMATS[name]
    assert (fmt.block_elems, fmt.block_bytes) == (elems, size)
    assert formats.row_bytes(name, 3 * elems) == 3 * size
    assert fmt.bits_per_weight == pytest.approx(8 * size / elems)


@pytest.mark.parametrize("name", BLOCKS)
def test_dequantize_is_bit_exact(name: str) -> None:
    raw = random_raw(name, 64, 5)
    assert same_bits(formats.dequantize(name, raw), reference(name, raw))


@pytest.mark.parametrize("name", sorted(PLAIN_FILE_FORMATS))
def test_plain_formats_widen(name: str) -> None:
    raw = np.random.default_rng(1).integers(0, 256, (5, 64 * PLAIN[name]), dtype=np.uint8)
    want = reference(name, raw)
    assert same_bits(formats.dequantize(name, raw), want.reshape(5, 64))


@pytest.mark.parametrize("name", BLOCKS)
def test_components_satisfy_the_documented_identity(name: str) -> None:
    """w = scale[g] * (code - zero_point) + min[g], evaluated in float64, rounded once."""
    raw = random_raw(name, 32, 3, seed=2)
    c = formats.unpack(name, raw)
    fmt = c.format
    assert c.codes.dtype == np.uint8 and int(c.codes.max()) == 2**fmt.code_bits - 1
    assert c.d.dtype == np.float16 and c.d.shape == (32, 3)
    assert (c.scales is not None) == fmt.sub_scales
    codes = c.codes.reshape(32, -1, fmt.group)
    with np.errstate(all="ignore"):
        scale = c.d.astype(np.float64)
        if c.scales is not None:
            scale = np.repeat(scale, c.scales.shape[1] // 3, axis=1) * c.scales
        w = codes.astype(np.float64) - fmt.zero_point
        if name == "IQ4_NL":
            w = formats.IQ4_NL_VALUES.astype(np.float64)[codes]
        w = w * scale[:, :, None]
        if c.m is not None:
            low = c.m.astype(np.float64)
            if c.mins is not None:
                low = -np.repeat(low, c.mins.shape[1] // 3, axis=1) * c.mins
            w = w + low[:, :, None]
        got = w.reshape(32, -1).astype(np.float32)
    assert same_bits(canonical_zero(got), canonical_zero(reference(name, raw)))


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "IQ4_NL"])
def test_group_scales_and_mins_fold_the_zero_point_exactly(name: str) -> None:
    """scale * code + (min - scale * zero_point) has the same bits: the docstring's claim."""
    raw = random_raw(name, 16, 4, seed=3)
    c = formats.unpack(name, raw)
    fmt = c.format
    with np.errstate(all="ignore"):
        scale = c.group_scales()
        mins = c.group_mins()
        low = -scale * np.float32(fmt.zero_point) if mins is None else mins
        codes = c.codes.reshape(16, -1, fmt.group).astype(np.float32)
        got = (codes * scale[:, :, None] + low[:, :, None]).reshape(16, -1)
    want = reference(name, raw)
    finite = np.isfinite(want)  # an infinite scale times a zero code is NaN either way or not
    assert np.array_equal(got[finite], want[finite])
    assert finite.mean() > 0.9


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantize_writes_ggmls_bytes(name: str) -> None:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((64, 256)) * rng.choice([1e-6, 1.0, 300.0], (64, 1))).astype("f4")
    x[0] = 0.0
    x[1, :32] = 7.5
    x[2, 5] = -0.0
    want = gguf.quantize(x, gguf.GGMLQuantizationType[name])
    assert np.array_equal(formats.quantize(name, x), want)


@pytest.mark.parametrize("name", QUANTIZERS)
@given(
    x=hnp.arrays(
        np.float32, (2, 32), elements=st.floats(-60000, 60000, width=32, allow_subnormal=True)
    )
)
def test_quantize_error_is_at_most_a_step(name: str, x: formats.F32) -> None:
    y = formats.dequantize(name, formats.quantize(name, x))
    step = {"Q4_0": 1 / 8, "Q4_1": 2 / 15, "Q8_0": 1 / 127}[name] * np.abs(x).max(axis=1)
    # half precision of scale and min: 2**-11 relative, or 2**-25 absolute, each times <= 15 or 128
    slack = np.abs(x).max(axis=1) / 256 + 128 * 2.0**-25
    assert (np.abs(y - x).max(axis=1) <= step + slack).all()


def squared_error(name: str, x: formats.F32) -> float:
    return float(((formats.dequantize(name, formats.quantize(name, x)) - x) ** 2).mean())


def test_the_int4_scheme_is_the_better_format() -> None:
    x = np.random.default_rng(5).standard_normal((256, 1024)).astype(np.float32)
    error = {n: squared_error(n, x) for n in QUANTIZERS}
    assert error["Q8_0"] < error["Q4_1"] < 0.86 * error["Q4_0"]
    shifted = np.abs(x) + 1
    skewed = {n: squared_error(n, shifted) for n in ("Q4_0", "Q4_1")}
    assert skewed["Q4_1"] < skewed["Q4_0"] / 4
    assert QUANTIZE_SCHEMES == {"int4": "Q4_1", "int8": "Q8_0"}


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_quantize_refuses_what_is_not_finite(bad: float) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, 3] = bad
    with pytest.raises(InputFileError, match="not finite"):
        formats.quantize("Q4_1", x)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantize_refuses_a_scale_beyond_half(name: str) -> None:
    x = np.full((1, 32), 3e38, np.float32)
    x[0, ::2] = -3e38
    with pytest.raises(InputFileError, match="65504"):
        formats.quantize(name, x)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(UnsupportedError, match="Q9_9"):
        formats.row_bytes("Q9_9", 32)
    with pytest.raises(UnsupportedError, match="Q6_K"):
        formats.quantize("Q6_K", np.zeros((1, 256), np.float32))
    for k in (0, -32, 33, 128):
        with pytest.raises(InputFileError, match="multiple of the block of 256"):
            formats.row_bytes("Q4_K", k)
    with pytest.raises(InputFileError, match="0 elements"):
        formats.row_bytes("F16", 0)
    for name in ("Q4_0", "F32"):
        with pytest.raises(InputFileError, match="multiple of"):
            formats.dequantize(name, np.zeros((1, 17), np.uint8))
        with pytest.raises(InputFileError, match="multiple of"):
            formats.dequantize(name, np.zeros((1, 0), np.uint8))
    with pytest.raises(ValueError, match="uint8"):
        formats.unpack("Q4_0", np.zeros((1, 18), np.int8))
    assert not formats.is_format("I8") and formats.is_format("BF16")


@pytest.mark.parametrize("name", BLOCKS)
def test_views_and_slices_unpack_alike(name: str) -> None:
    raw = random_raw(name, 8, 2, seed=6)
    whole = formats.dequantize(name, raw)
    read_only = raw.copy()
    read_only.setflags(write=False)
    assert same_bits(formats.dequantize(name, read_only), whole)
    assert same_bits(formats.dequantize(name, raw[1::3]), whole[1::3])
    assert formats.dequantize(name, raw[:0]).shape == (0, whole.shape[1])


def test_unpacking_keeps_up_with_smollm2() -> None:
    """134 million elements in about a second on a slow core: bounded here for an eighth of it."""
    for name in BLOCKS:
        raw = random_raw(name, 512, 32768 // FORMATS[name].block_elems)
        start = time.perf_counter()
        formats.unpack(name, raw)
        assert time.perf_counter() - start < 1.0, name


# --- Q8_0 taken apart -----------------------------------------------------------------------------


def test_the_halves_of_q8_0_add_up_to_it() -> None:
    """To the bit, for every code and finite scale; a half's values are what its bits say."""
    raw = random_raw("Q8_0", 64, 5)
    raw.reshape(64, 5, 34)[:, :, 1] &= 0xBF  # no exponent of infinity
    high, low = (formats.part_of_q8_0(part, raw) for part in ("Q8_HIGH", "Q8_LOW"))
    assert high.shape == (64, 5 * 26) and low.shape == (64, 5 * 10)
    both = formats.dequantize("Q8_HIGH", high) + formats.dequantize("Q8_LOW", low)
    assert same_bits(canonical_zero(both), canonical_zero(reference("Q8_0", raw)))
    blocks = raw.reshape(64, 5, 34)
    d = blocks[:, :, :2].copy().view("<f2").astype(np.float32)
    code = blocks[:, :, 2:].view(np.int8).astype(np.int32) + 128
    assert len(np.unique(code)) == 256
    upper, lower = d * (code // 4 * 4 - 126.5), d * (code % 4 - 1.5)
    for format, part, want in (("Q8_HIGH", high, upper), ("Q8_LOW", low, lower)):
        found = formats.dequantize(format, part)
        assert same_bits(found, want.astype(np.float32).reshape(64, 160))
        assert formats.row_bytes(format, 160) == part.shape[1]
