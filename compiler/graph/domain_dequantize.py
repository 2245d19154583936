"""Bodies of ``Dequantize_F``: what a weight format's bytes mean, in standard integer operators.

In: raw bytes ``uint8 [N, row_bytes]``.  Out: ``float32 [N, K]``; K follows from ``row_bytes``.
Next file: ``domain_ops.py``.  ``targets/formats.py`` computes the same with numpy; the two are
compared in the tests, and both with the format's own reference.

Letters are those of the formats' definition: ``d`` scale, ``m`` or ``dmin`` minimum (all float16),
``qs`` packed codes, ``qh`` their high bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from zerolayer.targets import formats as weight_formats

from .function_body import FLOAT, INT64, UINT8, UINT32, Body, Val

_IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def dequantize(body: Body, format: str, w: Val) -> Val:
    """Append the float32 view of a weight: raw bytes of a block format, or a plain tensor."""
    if format in weight_formats.PLAIN:
        return w if format == "F32" else body.op("Cast", w, to=int(FLOAT))
    block_bytes, decode = BLOCK_FORMATS[format]
    blocks = w.reshape(0, -1, block_bytes)  # [N, K / block, bytes]
    return decode(body, blocks).reshape(w.dim(0), -1)


def _half(b: Body, blocks: Val, offset: int) -> Val:
    """float16 at a byte offset of every block as float32 [N, nb, 1].

    A finite half is ``+-mantissa * 2**(max(exponent, 1) - 25)`` with the hidden bit added for
    exponent > 0; the power comes from a table, so every step is exact.
    """
    low = blocks.slice(offset, offset + 1, 2).cast(UINT32)
    bits = low | (blocks.slice(offset + 1, offset + 2, 2).cast(UINT32) << 8)
    exponent = (bits >> 10) & 31
    fraction = bits & 1023
    hidden = b.where(exponent.compare("Greater", 0), 1024, 0, UINT32)
    powers = b.const([2.0 ** (max(e, 1) - 25) for e in range(31)] + [float("inf")])
    magnitude = (fraction + hidden).cast(FLOAT) * powers.gather(exponent.cast(INT64))
    special = b.op("And", exponent.compare("Equal", 31), fraction.compare("Greater", 0))
    sign = b.where((bits >> 15).compare("Equal", 1), -1.0, 1.0)
    return b.where(special, float("nan"), sign * magnitude)


def _nibbles(b: Body, qs: Val) -> Val:
    """[N, nb, 16] bytes -> [N, nb, 32] codes: low nibbles, then high nibbles."""
    return b.concat([qs & 15, qs >> 4], 2)


def _fifth_bits(b: Body, qh: Val) -> Val:
    """[N, nb, 4] bytes -> [N, nb, 32], bit j of the little-endian word moved to value 16."""
    bits = (qh.unsqueeze(3) >> b.const(list(range(8)), UINT8)) & 1
    return bits.reshape(0, 0, 32) << 4


def _q4_0(b: Body, x: Val) -> Val:
    return _half(b, x, 0) * (_nibbles(b, x.slice(2, 18, 2)).cast(FLOAT) - 8.0)


def _q4_1(b: Body, x: Val) -> Val:
    return _half(b, x, 0) * _nibbles(b, x.slice(4, 20, 2)).cast(FLOAT) + _half(b, x, 2)


def _q5_0(b: Body, x: Val) -> Val:
    q = _nibbles(b, x.slice(6, 22, 2)) | _fifth_bits(b, x.slice(2, 6, 2))
    return _half(b, x, 0) * (q.cast(FLOAT) - 16.0)


def _q5_1(b: Body, x: Val) -> Val:
    q = _nibbles(b, x.slice(8, 24, 2)) | _fifth_bits(b, x.slice(4, 8, 2))
    return _half(b, x, 0) * q.cast(FLOAT) + _half(b, x, 2)


def _signed(b: Body, bytes_: Val) -> Val:
    """Two's complement bytes as float32."""
    value = bytes_.cast(FLOAT)
    return b.where(bytes_.compare("Greater", 127), value - 256.0, value)


def _q8_0(b: Body, x: Val) -> Val:
    return _half(b, x, 0) * _signed(b, x.slice(2, 34, 2))


def _two_bits(b: Body, x: Val) -> Val:
    """[N, nb, 8] bytes -> [N, nb, 32] codes: byte i % 8, at bit 2 (i / 8)."""
    return ((x.unsqueeze(2) >> b.const([[0], [2], [4], [6]], UINT8)) & 3).reshape(0, 0, 32)


def _q8_high(b: Body, x: Val) -> Val:
    q = (_nibbles(b, x.slice(2, 18, 2)) << 2) | (_two_bits(b, x.slice(18, 26, 2)) << 6)
    return _half(b, x, 0) * (q.cast(FLOAT) - 126.5)


def _q8_low(b: Body, x: Val) -> Val:
    return _half(b, x, 0) * (_two_bits(b, x.slice(2, 10, 2)).cast(FLOAT) - 1.5)


def _iq4_nl(b: Body, x: Val) -> Val:
    codes = _nibbles(b, x.slice(2, 18, 2)).cast(INT64)
    return _half(b, x, 0) * b.const([float(v) for v in _IQ4_NL]).gather(codes)


def _crumbs(b: Body, qs: Val) -> Val:
    """[N, nb, 64] bytes -> 2-bit codes [N, nb, 2, 4, 32]: per 32 bytes, shifts 0 2 4 6."""
    shifts = b.const([[0], [2], [4], [6]], UINT8)
    return (qs.reshape(0, 0, 2, 1, 32) >> shifts) & 3


def _q2_k(b: Body, x: Val) -> Val:
    scales = x.slice(0, 16, 2)
    q = _crumbs(b, x.slice(16, 80, 2)).cast(FLOAT).reshape(0, 0, 16, 16)
    d = (_half(b, x, 80) * (scales & 15).cast(FLOAT)).unsqueeze(3)
    m = (_half(b, x, 82) * (scales >> 4).cast(FLOAT)).unsqueeze(3)
    return d * q - m


def _q3_k(b: Body, x: Val) -> Val:
    crumbs = _crumbs(b, x.slice(32, 96, 2))
    planes = b.const([[[1 << (4 * n + j)] for j in range(4)] for n in range(2)], UINT8)
    absent = (x.slice(0, 32, 2).reshape(0, 0, 1, 1, 32) & planes).compare("Equal", 0)
    q = crumbs.cast(FLOAT) - b.where(absent, 4.0, 0.0)
    low = x.slice(96, 104, 2)
    low = b.concat([low & 15, low >> 4], 2)  # [N, nb, 16]
    high = x.slice(104, 108, 2).unsqueeze(2) >> b.const([[0], [2], [4], [6]], UINT8)
    scales = (low | ((high & 3).reshape(0, 0, 16) << 4)).cast(FLOAT) - 32.0
    d = (_half(b, x, 108) * scales).unsqueeze(3)
    return d * q.reshape(0, 0, 16, 16)


def _six_bits(b: Body, packed: Val) -> tuple[Val, Val]:
    """12 bytes -> 8 scales and 8 mins of six bits, each float32 [N, nb, 8, 1]."""
    first, second, third = (packed.slice(4 * i, 4 * i + 4, 2) for i in range(3))
    scales = b.concat([first & 63, (third & 15) | ((first >> 6) << 4)], 2)
    mins = b.concat([second & 63, (third >> 4) | ((second >> 6) << 4)], 2)
    return scales.cast(FLOAT).unsqueeze(3), mins.cast(FLOAT).unsqueeze(3)


def _nibble_planes(b: Body, qs: Val) -> Val:
    """[N, nb, 128] bytes -> codes [N, nb, 8, 32]: per 32 bytes, low nibbles then high nibbles."""
    grouped = qs.reshape(0, 0, 4, 1, 32)
    return b.concat([grouped & 15, grouped >> 4], 3).reshape(0, 0, 8, 32)


def _k_affine(b: Body, x: Val, q: Val) -> Val:
    scales, mins = _six_bits(b, x.slice(4, 16, 2))
    d = _half(b, x, 0).unsqueeze(3) * scales
    m = _half(b, x, 2).unsqueeze(3) * mins
    return d * q.cast(FLOAT) - m


def _q4_k(b: Body, x: Val) -> Val:
    return _k_affine(b, x, _nibble_planes(b, x.slice(16, 144, 2)))


def _q5_k(b: Body, x: Val) -> Val:
    planes = b.const([[i] for i in range(8)], UINT8)
    high = (x.slice(16, 48, 2).unsqueeze(2) >> planes) & 1  # [N, nb, 8, 32]
    return _k_affine(b, x, _nibble_planes(b, x.slice(48, 176, 2)) | (high << 4))


def _q6_k(b: Body, x: Val) -> Val:
    ql = x.slice(0, 128, 2).reshape(0, 0, 2, 64)
    low = b.concat([ql & 15, ql >> 4], 3).reshape(0, 0, 2, 4, 32)
    shifts = b.const([[0], [2], [4], [6]], UINT8)
    high = (x.slice(128, 192, 2).reshape(0, 0, 2, 1, 32) >> shifts) & 3
    q = (low | (high << 4)).cast(FLOAT) - 32.0
    d = (_half(b, x, 208) * _signed(b, x.slice(192, 208, 2))).unsqueeze(3)
    return d * q.reshape(0, 0, 16, 16)


#: format -> (bytes of a block, decoder of [N, blocks, bytes] to [N, blocks, ...])
BLOCK_FORMATS: Mapping[str, tuple[int, Callable[[Body, Val], Val]]] = MappingProxyType(
    {
        "Q4_0": (18, _q4_0),
        "Q4_1": (20, _q4_1),
        "Q5_0": (22, _q5_0),
        "Q5_1": (24, _q5_1),
        "Q8_0": (34, _q8_0),
        "Q8_HIGH": (26, _q8_high),
        "Q8_LOW": (10, _q8_low),
        "Q2_K": (84, _q2_k),
        "Q3_K": (110, _q3_k),
        "Q4_K": (144, _q4_k),
        "Q5_K": (176, _q5_k),
        "Q6_K": (210, _q6_k),
        "IQ4_NL": (18, _iq4_nl),
    }
)
