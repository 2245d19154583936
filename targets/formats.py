"""Block formats of weights: what the bytes of a quantized tensor mean.

In: raw bytes as a model file stores them, ``uint8 [N, row_bytes]``.  Out: ``float32 [N, K]``
(:func:`dequantize`), or the integers and half-precision scales themselves (:func:`unpack`) so that
a packer can keep a tensor at its bits.  Next file: a family's packer, such as ``cpu_layouts.py``.

A row of K elements is K / ``block_elems`` blocks in order.  For every format, with ``g`` the group
(``group`` consecutive elements) and ``b`` the block of an element,

    w = scale[g] * (code - zero_point) + min[g]                              (IQ4_NL: its table)

    format   code  zero  block group  scale[g]         min[g]
    Q4_0     0..15    8     32    32  d                0
    Q4_1     0..15    0     32    32  d                m
    Q5_0     0..31   16     32    32  d                0
    Q5_1     0..31    0     32    32  d                m
    Q8_0    0..255  128     32    32  d                0
    Q2_K      0..3    0    256    16  d * scales[g]    -(dmin * mins[g])    4-bit scales and mins
    Q3_K      0..7    4    256    16  d * scales[g]    0                    6-bit signed scales
    Q4_K     0..15    0    256    32  d * scales[g]    -(dmin * mins[g])    6-bit scales and mins
    Q5_K     0..31    0    256    32  d * scales[g]    -(dmin * mins[g])    6-bit scales and mins
    Q6_K     0..63   32    256    16  d * scales[g]    0                    8-bit signed scales
    IQ4_NL   0..15    -     32    32  d                0                    w = d * VALUES[code]
    Q8_HIGH  0..252 126.5   32    32  d                0                    codes are fours
    Q8_LOW    0..3  1.5     32    32  d                0

``d``, ``m`` and ``dmin`` are float16, one per block; ``scales`` and ``mins`` are integers, one per
group; VALUES is ``IQ4_NL_VALUES``.  Each product above has at most 24 significant bits (11 of a
half, 6 to 8 of a sub-scale, 2 to 8 of a code), so it is exact in float32 and only the final
addition rounds: fused multiply-add gives the same bits as multiply and add, and folding
``zero_point`` into ``min`` changes nothing.

Q8_HIGH and Q8_LOW are no file's: :func:`part_of_q8_0` makes them, the upper six and the lower two
bits of a Q8_0 code, each with the scale; their values add up to Q8_0's exactly.

BF16_12 is BF16, element for element, that a packer writes in 12 bits (``bf16_12.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class BlockFormat:
    """The geometry of one block format: ``block_elems`` elements in ``block_bytes`` bytes, codes of
    ``code_bits`` bits, one (sub-)scale for every ``group`` elements."""

    name: str
    block_elems: int
    block_bytes: int
    code_bits: int
    group: int
    zero_point: float = 0
    has_min: bool = False
    sub_scales: bool = False  # K-quants: integer scales per group under a half per block
    part_of: str = ""  # the format of files whose bits these are some of

    @property
    def bits_per_weight(self) -> float:
        return 8.0 * self.block_bytes / self.block_elems


FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        f.name: f
        for f in (
            BlockFormat("Q4_0", 32, 18, 4, 32, zero_point=8),
            BlockFormat("Q4_1", 32, 20, 4, 32, has_min=True),
            BlockFormat("Q5_0", 32, 22, 5, 32, zero_point=16),
            BlockFormat("Q5_1", 32, 24, 5, 32, has_min=True),
            BlockFormat("Q8_0", 32, 34, 8, 32, zero_point=128),
            BlockFormat("Q2_K", 256, 84, 2, 16, has_min=True, sub_scales=True),
            BlockFormat("Q3_K", 256, 110, 3, 16, zero_point=4, sub_scales=True),
            BlockFormat("Q4_K", 256, 144, 4, 32, has_min=True, sub_scales=True),
            BlockFormat("Q5_K", 256, 176, 5, 32, has_min=True, sub_scales=True),
            BlockFormat("Q6_K", 256, 210, 6, 16, zero_point=32, sub_scales=True),
            BlockFormat("IQ4_NL", 32, 18, 4, 32),
            BlockFormat("Q8_HIGH", 32, 26, 6, 32, zero_point=126.5, part_of="Q8_0"),
            BlockFormat("Q8_LOW", 32, 10, 2, 32, zero_point=1.5, part_of="Q8_0"),
        )
    }
)

FILE_FORMATS = tuple(name for name, f in FORMATS.items() if not f.part_of)
"""Block formats that a model file can have."""

PLAIN: Mapping[str, int] = MappingProxyType({"F32": 4, "F16": 2, "BF16": 2, "BF16_12": 2})
"""Unquantized formats and the bytes of one element before a packer has it."""

SAME_VALUES: Mapping[str, str] = MappingProxyType({"BF16_12": "BF16"})
"""A format that only a packer writes otherwise -> the one whose elements it has."""

PLAIN_FILE_FORMATS = tuple(name for name in PLAIN if name not in SAME_VALUES)
"""Unquantized formats that a model file can have."""

IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)
IQ4_NL_VALUES.setflags(write=False)

QUANTIZE_SCHEMES: Mapping[str, str] = MappingProxyType({"int4": "Q4_1", "int8": "Q8_0"})
"""``--quantize`` scheme -> block format.  int4 is Q4_1, not Q4_0: on normally distributed weights
its mean squared error is about a sixth lower for half a bit more, and a block whose values all have
one sign keeps all of its 16 levels (``test_formats.py`` measures both)."""


@dataclass(frozen=True)
class Components:
    """A tensor taken apart, nothing rounded.

    ``codes`` uint8 [N, K]; ``d`` float16 [N, K / block_elems]; ``m`` the same shape, the block's
    min (Q4_1, Q5_1) or min-scale ``dmin`` (Q2_K, Q4_K, Q5_K), else ``None``; ``scales`` int8
    [N, K / group] and ``mins`` int8 [N, K / group] for the formats that have them, else ``None``.
    """

    format: BlockFormat
    codes: U8
    d: F16
    m: F16 | None = None
    scales: I8 | None = None
    mins: I8 | None = None

    def group_scales(self) -> F32:
        """``scale[g]`` of the identity above, float32 [N, K / group], exact."""
        d = self.d.astype(np.float32)
        if self.scales is None:
            return d
        return _per_group(d, self.scales)

    def group_mins(self) -> F32 | None:
        """``min[g]`` of the identity above, float32 [N, K / group], exact; ``None`` = all zero."""
        if self.m is None:
            return None
        m = self.m.astype(np.float32)
        if self.mins is None:
            return m
        return -_per_group(m, self.mins)


def is_format(format: str) -> bool:
    """Whether ``format`` names a block format or a plain one."""
    return format in FORMATS or format in PLAIN


def row_bytes(format: str, k: int) -> int:
    """Bytes of one row of ``k`` elements.

    Raises :class:`InputFileError` when ``k`` is not a positive multiple of the block, and
    :class:`UnsupportedError` for an unknown format.
    """
    if format in PLAIN:
        if k < 1:
            raise InputFileError(f"a row of {k} elements", where=format)
        return k * PLAIN[format]
    fmt = _block_format(format)
    if k < 1 or k % fmt.block_elems:
        raise InputFileError(
            f"a row of {k} elements is not a positive multiple of the block of {fmt.block_elems}",
            where=format,
        )
    return k // fmt.block_elems * fmt.block_bytes


def dequantize(format: str, raw: U8) -> F32:
    """``raw`` uint8 [N, row_bytes] -> float32 [N, K], bit-exact to ggml's scalar code.

    Takes 4 bytes per element of memory plus about as much again while it runs: callers with large
    tensors pass slices of rows.
    """
    if format in PLAIN:
        return _dequantize_plain(format, raw)
    c = unpack(format, raw)
    fmt = c.format
    n, k = c.codes.shape
    grouped = c.codes.reshape(n, k // fmt.group, fmt.group)
    if format == "IQ4_NL":
        w = IQ4_NL_VALUES.astype(np.float32)[grouped]
    else:
        w = grouped.astype(np.float32)
        if fmt.zero_point:
            w -= np.float32(fmt.zero_point)
    with np.errstate(invalid="ignore", over="ignore"):
        w *= c.group_scales()[:, :, None]
        mins = c.group_mins()
        if mins is not None:
            w += mins[:, :, None]
    return w.reshape(n, k)


def unpack(format: str, raw: U8) -> Components:
    """``raw`` uint8 [N, row_bytes] of a block format -> :class:`Components` of the same bits.

    Raises :class:`InputFileError` when the rows are not whole blocks.
    """
    fmt = _block_format(format)
    _check_raw(format, raw, fmt.block_bytes)
    n = raw.shape[0]
    blocks = np.ascontiguousarray(raw).reshape(n, raw.shape[1] // fmt.block_bytes, fmt.block_bytes)
    return _UNPACK[format](fmt, blocks)


def quantize(format: str, x: F32) -> U8:
    """``x`` float32 [N, K] -> uint8 [N, row_bytes] in Q4_0, Q4_1 or Q8_0, as ggml's reference.

    Raises :class:`InputFileError` for values that are not finite or whose scale exceeds float16,
    and :class:`UnsupportedError` for other formats.
    """
    if format not in _QUANTIZE:
        raise UnsupportedError(
            f"no quantizer for {format!r}", next_step=f"choose one of {', '.join(_QUANTIZE)}"
        )
    if x.ndim != 2 or x.dtype != np.float32:
        raise ValueError(f"expected float32 [N, K], got {x.dtype} {x.shape}")
    n, k = x.shape
    size = row_bytes(format, k)
    fmt = FORMATS[format]
    if not np.isfinite(x).all():
        raise InputFileError("weights hold values that are not finite", where=format)
    blocks = np.ascontiguousarray(x).reshape(n * (k // fmt.block_elems), fmt.block_elems)
    with np.errstate(over="ignore", invalid="ignore"):  # _to_half refuses what overflows
        return _QUANTIZE[format](blocks).reshape(n, size)


# --- reading -----------------------------------------------------------------------------------


def _block_format(format: str) -> BlockFormat:
    fmt = FORMATS.get(format)
    if fmt is None:
        raise UnsupportedError(
            f"unknown block format {format!r}", next_step=f"supported: {', '.join(FILE_FORMATS)}"
        )
    return fmt


def _check_raw(format: str, raw: U8, unit: int) -> None:
    if raw.dtype != np.uint8 or raw.ndim != 2:
        raise ValueError(f"expected uint8 [N, row_bytes], got {raw.dtype} {raw.shape}")
    if raw.shape[1] == 0 or raw.shape[1] % unit:
        raise InputFileError(
            f"a row of {raw.shape[1]} bytes is not a positive multiple of {unit} bytes",
            where=format,
        )


def _dequantize_plain(format: str, raw: U8) -> F32:
    _check_raw(format, raw, PLAIN[format])
    rows = np.ascontiguousarray(raw)
    if format == "F32":
        return rows.view("<f4").astype(np.float32)
    if format == "F16":
        return rows.view("<f2").astype(np.float32)
    widened = rows.view("<u2").astype(np.uint32)
    widened <<= np.uint32(16)
    return widened.view(np.float32)


def _half(blocks: U8, offset: int) -> F16:
    """The float16 at ``offset`` of every block, [N, B]."""
    return np.ascontiguousarray(blocks[:, :, offset : offset + 2]).view("<f2")[:, :, 0]


def _per_group(d: F32, integers: I8) -> F32:
    """``d`` [N, B] times ``integers`` [N, G], each block's value over its G / B groups."""
    n, b = d.shape
    g = integers.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        product = d[:, :, None] * integers.reshape(n, b, g // b).astype(np.float32)
    return product.reshape(n, g)


def _flat(values: npt.NDArray[np.generic]) -> U8:
    """[N, B, ...] -> [N, everything else]."""
    n, *rest = values.shape
    return values.reshape(n, math.prod(rest))  # type: ignore[return-value]


def _nibbles(qs: U8) -> U8:
    """qs [N, B, 16] -> codes [N, B, 32]: element i is a low nibble, element i + 16 a high one.

    Eight bytes at a time: numpy takes as long for a short row as for a long one.
    """
    n, b, half = qs.shape
    words, each = qs.view(np.uint64).copy(), np.uint64(0x0F0F0F0F0F0F0F0F)
    codes = np.empty((n, b, 2, half // 8), dtype=np.uint64)
    np.bitwise_and(words, each, out=codes[:, :, 0])
    np.bitwise_and(words >> np.uint64(4), each, out=codes[:, :, 1])
    return codes.view(np.uint8).reshape(n, b, 2 * half)


def _fifth_bits(qh: U8) -> U8:
    """qh [N, B, 4], one bit per element from bit 0 up -> [N, B, 32] of 0 or 16."""
    bits = np.unpackbits(qh, axis=2, bitorder="little")
    bits <<= 4
    return bits


def _unpack_q4_0(fmt: BlockFormat, x: U8) -> Components:
    return Components(fmt, _flat(_nibbles(x[:, :, 2:])), _half(x, 0))


def _unpack_q4_1(fmt: BlockFormat, x: U8) -> Components:
    return Components(fmt, _flat(_nibbles(x[:, :, 4:])), _half(x, 0), m=_half(x, 2))


def _unpack_q5_0(fmt: BlockFormat, x: U8) -> Components:
    codes = _nibbles(x[:, :, 6:])
    codes |= _fifth_bits(x[:, :, 2:6])
    return Components(fmt, _flat(codes), _half(x, 0))


def _unpack_q5_1(fmt: BlockFormat, x: U8) -> Components:
    codes = _nibbles(x[:, :, 8:])
    codes |= _fifth_bits(x[:, :, 4:8])
    return Components(fmt, _flat(codes), _half(x, 0), m=_half(x, 2))


def _unpack_q8_0(fmt: BlockFormat, x: U8) -> Components:
    return Components(fmt, _flat(x[:, :, 2:] ^ np.uint8(0x80)), _half(x, 0))


def _crumbs(qs: U8) -> U8:
    """qs [N, B, 64] -> codes [N, B, 2, 4, 32]: 32 bytes hold four planes of two bits."""
    n, b, _ = qs.shape
    halves = qs.reshape(n, b, 2, 32)
    codes = np.empty((n, b, 2, 4, 32), dtype=np.uint8)
    for plane in range(4):
        np.right_shift(halves, 2 * plane, out=codes[:, :, :, plane])
    codes &= 3
    return codes


def _unpack_q2_k(fmt: BlockFormat, x: U8) -> Components:
    packed = x[:, :, :16]
    return Components(
        fmt,
        _flat(_crumbs(x[:, :, 16:80])),
        _half(x, 80),
        m=_half(x, 82),
        scales=_flat(packed & 15).view(np.int8),
        mins=_flat(packed >> 4).view(np.int8),
    )


def _unpack_q3_k(fmt: BlockFormat, x: U8) -> Components:
    codes = _crumbs(x[:, :, 32:96])
    hmask = x[:, :, :32]
    for plane in range(8):  # bit p of hmask[l] is the high bit of element 32 p + l
        codes[:, :, plane // 4, plane % 4] |= ((hmask >> plane) & 1) << 2
    packed = x[:, :, 96:108]
    low = np.concatenate([packed[:, :, :8] & 15, packed[:, :, :8] >> 4], axis=2)
    high = np.concatenate([(packed[:, :, 8:] >> (2 * i)) & 3 for i in range(4)], axis=2)
    scales = (low | (high << 4)).view(np.int8) - np.int8(32)
    return Components(fmt, _flat(codes), _half(x, 108), scales=_flat(scales).view(np.int8))


def _six_bit_scales(packed: U8) -> tuple[I8, I8]:
    """packed [N, B, 12] -> scales and mins, int8 [N, B * 8] of 0..63."""
    a, b, c = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=2)
    mins = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=2)
    return _flat(scales).view(np.int8), _flat(mins).view(np.int8)


def _nibble_planes(qs: U8) -> U8:
    """qs [N, B, 128] -> codes [N, B, 8, 32]: 32 low nibbles, then the same bytes' high nibbles."""
    n, b, _ = qs.shape
    quarters = qs.reshape(n, b, 4, 32)
    codes = np.empty((n, b, 4, 2, 32), dtype=np.uint8)
    np.bitwise_and(quarters, 15, out=codes[:, :, :, 0])
    np.right_shift(quarters, 4, out=codes[:, :, :, 1])
    return codes.reshape(n, b, 8, 32)


def _unpack_q4_k(fmt: BlockFormat, x: U8) -> Components:
    scales, mins = _six_bit_scales(x[:, :, 4:16])
    codes = _flat(_nibble_planes(x[:, :, 16:]))
    return Components(fmt, codes, _half(x, 0), m=_half(x, 2), scales=scales, mins=mins)


def _unpack_q5_k(fmt: BlockFormat, x: U8) -> Components:
    scales, mins = _six_bit_scales(x[:, :, 4:16])
    codes = _nibble_planes(x[:, :, 48:])
    qh = x[:, :, 16:48]
    for plane in range(8):  # bit p of qh[l] is the fifth bit of element 32 p + l
        codes[:, :, plane] |= ((qh >> plane) & 1) << 4
    return Components(fmt, _flat(codes), _half(x, 0), m=_half(x, 2), scales=scales, mins=mins)


def _unpack_q6_k(fmt: BlockFormat, x: U8) -> Components:
    n, b, _ = x.shape
    ql = x[:, :, :128].reshape(n, b, 2, 64)
    qh = x[:, :, 128:192].reshape(n, b, 2, 32)
    codes = np.empty((n, b, 2, 4, 32), dtype=np.uint8)
    np.bitwise_and(ql, 15, out=codes[:, :, :, :2].reshape(n, b, 2, 64))
    np.right_shift(ql, 4, out=codes[:, :, :, 2:].reshape(n, b, 2, 64))
    for plane in range(4):
        codes[:, :, :, plane] |= ((qh >> (2 * plane)) & 3) << 4
    scales = np.ascontiguousarray(x[:, :, 192:208])
    return Components(fmt, _flat(codes), _half(x, 208), scales=_flat(scales).view(np.int8))


def _two_bits(x: U8) -> U8:
    """[N, nb, 8] bytes -> [N, nb, 32] codes of two bits: element i of byte i % 8, at 2 (i / 8)."""
    words, each = x.view(np.uint64).copy(), np.uint64(0x0303030303030303)
    codes = np.empty((*x.shape[:2], 4), dtype=np.uint64)
    for i in range(4):
        np.bitwise_and(words[:, :, 0] >> np.uint64(2 * i), each, out=codes[:, :, i])
    return codes.view(np.uint8)


def _unpack_q8_high(fmt: BlockFormat, x: U8) -> Components:
    codes = (_nibbles(x[:, :, 2:18]) << np.uint8(2)) | (_two_bits(x[:, :, 18:]) << np.uint8(6))
    return Components(fmt, _flat(codes), _half(x, 0))


def _unpack_q8_low(fmt: BlockFormat, x: U8) -> Components:
    return Components(fmt, _flat(_two_bits(x[:, :, 2:])), _half(x, 0))


_UNPACK: Mapping[str, Callable[[BlockFormat, U8], Components]] = MappingProxyType(
    {
        "Q4_0": _unpack_q4_0,
        "Q4_1": _unpack_q4_1,
        "Q5_0": _unpack_q5_0,
        "Q5_1": _unpack_q5_1,
        "Q8_0": _unpack_q8_0,
        "Q2_K": _unpack_q2_k,
        "Q3_K": _unpack_q3_k,
        "Q4_K": _unpack_q4_k,
        "Q5_K": _unpack_q5_k,
        "Q6_K": _unpack_q6_k,
        "IQ4_NL": _unpack_q4_0,  # the same bytes; the codes index IQ4_NL_VALUES
        "Q8_HIGH": _unpack_q8_high,
        "Q8_LOW": _unpack_q8_low,
    }
)


# --- writing -----------------------------------------------------------------------------------


def _to_half(values: F32, format: str) -> U8:
    """[B] float32 -> the bytes of its float16, uint8 [B, 2]."""
    if values.size and not float(np.abs(values).max()) <= 65504.0:
        raise InputFileError(
            "a block's scale exceeds float16 (65504)", where=format, next_step="keep this tensor"
        )
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _inverse(d: F32) -> F32:
    """1 / d, and 0 where d is 0 (or so small that 1 / d overflows, which stores as d = 0)."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse: F32 = np.float32(1) / d
    inverse[~np.isfinite(inverse)] = 0
    return inverse


def _pack_nibbles(codes: U8) -> U8:
    """codes [B, 32] -> [B, 16], the inverse of :func:`_nibbles`."""
    packed: U8 = codes[:, :16] | (codes[:, 16:] << np.uint8(4))
    return packed


def _quantize_q4_0(x: F32) -> U8:
    at = np.abs(x).argmax(axis=1)
    extreme = x[np.arange(len(x)), at]  # signed: it maps to code 0, the one level that +7 lacks
    d = extreme / np.float32(-8)
    codes = np.minimum(np.trunc(x * _inverse(d)[:, None] + np.float32(8.5)), 15).astype(np.uint8)
    return np.concatenate([_to_half(d, "Q4_0"), _pack_nibbles(codes)], axis=1)


def _quantize_q4_1(x: F32) -> U8:
    low = x.min(axis=1)
    d = (x.max(axis=1) - low) / np.float32(15)
    scaled = (x - low[:, None]) * _inverse(d)[:, None]
    codes = np.minimum(np.trunc(scaled + np.float32(0.5)), 15).astype(np.uint8)
    halves = [_to_half(d, "Q4_1"), _to_half(low, "Q4_1")]
    return np.concatenate([*halves, _pack_nibbles(codes)], axis=1)


def _quantize_q8_0(x: F32) -> U8:
    d = np.abs(x).max(axis=1) / np.float32(127)
    scaled = x * _inverse(d)[:, None]
    size = np.abs(scaled)
    whole = np.floor(size)
    whole += np.floor(2 * (size - whole))  # half away from zero, as C's roundf
    codes = np.copysign(whole, scaled).astype(np.int8)
    return np.concatenate([_to_half(d, "Q8_0"), codes.view(np.uint8)], axis=1)


_QUANTIZE: Mapping[str, Callable[[F32], U8]] = MappingProxyType(
    {"Q4_0": _quantize_q4_0, "Q4_1": _quantize_q4_1, "Q8_0": _quantize_q8_0}
)


def _pack_two_bits(codes: U8) -> U8:
    """codes [.., 32] -> [.., 8], the inverse of :func:`_two_bits`."""
    part = [codes[..., 8 * i : 8 * i + 8] << np.uint8(2 * i) for i in range(4)]
    packed: U8 = part[0] | part[1] | part[2] | part[3]
    return packed


def part_of_q8_0(part: str, raw: U8) -> U8:
    """``raw`` uint8 [N, row_bytes] of Q8_0 -> the same rows in ``part``: Q8_HIGH or Q8_LOW."""
    blocks = raw.reshape(raw.shape[0], -1, FORMATS["Q8_0"].block_bytes)
    scale, codes = blocks[:, :, :2], blocks[:, :, 2:]
    if part == "Q8_LOW":
        bits = [_pack_two_bits(codes & np.uint8(3))]
    else:
        upper = (codes ^ np.uint8(128)) >> np.uint8(2)  # signed -> + 128
        nibbles = (upper[:, :, :16] & np.uint8(15)) | (upper[:, :, 16:] << np.uint8(4))
        bits = [nibbles, _pack_two_bits(upper >> np.uint8(4))]
    return np.concatenate([scale, *bits], axis=2).reshape(len(raw), -1)
