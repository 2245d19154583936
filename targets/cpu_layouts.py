"""How CPU kernels want their weights: the ``rows16`` layout.

In: a tensor's bytes as the file stores them, ``uint8 [N, row_bytes]``. Out: :func:`packed_bytes`
and :func:`pack`, pure functions of those bytes. Next file: ``templates/cpu/zl_weights.h``, which
reads the layout.

Rows come in groups of 16, one row per 32-bit vector lane; N is padded to a multiple of 16 with
zero rows and nothing else is added: a packed tensor has the bits per weight of its file. A group
is contiguous and its blocks follow each other in K order, which is the order of use.

Inside a block of 32 columns the codes, unsigned, form 8 vectors of 64 bytes: byte ``4 r + i`` of
vector ``j`` is row ``r``, column ``4 j + i``, so one ``vpdpbusd`` with 4 broadcast activations
advances 16 rows by 4 columns. Codes narrower than a byte are stored as planes:

    nibbles  4 x 64 bytes: vector v holds code vector 2v in the low and 2v + 1 in the high nibble
    crumbs   2 x 64 bytes: vector v holds code vector 4v + i in bits 2i, 2i + 1
    bits     1 x 64 bytes: bit j of a byte belongs to code vector j

    format          one block of 16 rows (f16[16]: one half per row)
    Q4_0 IQ4_NL     d f16[16], nibbles                                              per 32 columns
    Q4_1            d f16[16], m f16[16], nibbles
    Q5_0            d f16[16], nibbles, bits (code bit 4)
    Q5_1            d f16[16], m f16[16], nibbles, bits (code bit 4)
    Q8_0            d f16[16], 8 x 64 bytes (q + 128)
    Q8_HIGH         d f16[16], nibbles (bits 2 to 5 of q + 128), crumbs (bits 6, 7)
    Q8_LOW          d f16[16], crumbs (bits 0, 1 of q + 128)
    Q4_K            d f16[16], dmin f16[16], scales, mins, 8 x nibbles               per 256 columns
    Q5_K            d f16[16], dmin f16[16], scales, mins, 8 x (nibbles, bits)
    Q6_K            d f16[16], scales i8[16 groups][16], 8 x (nibbles, crumbs (code bits 4, 5))
    Q2_K            d f16[16], dmin f16[16], u8[16 groups][16] (scale | min << 4), 8 x crumbs
    Q3_K            d f16[16], scales + 32, 8 x (crumbs, bits (code bit 2))

Six-bit sub-scales ``x[group][16 rows]`` are two planes: for G groups, G/2 x 16 bytes (low 4 bits
of group ``g`` in the low nibble, of group ``g + G/2`` in the high nibble), then G/4 x 16 bytes
(high 2 bits of group ``g`` at bit ``2 (g / (G/4))`` of row ``g % (G/4)``).

    F32, F16        [K][16] elements
    BF16            [ceil(K / 2)][16][2] elements: two columns per 32-bit lane; an odd
                    K gets a zero column
    BF16_12         bf16_12.py
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from zerolayer.runtime_stub.errors import UnsupportedError

from . import bf16_12, formats
from .formats import Components

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]

ROW_MAJOR = "row_major"
ROWS16 = "rows16"
LANES = 16
_ROWS_PER_CHUNK = 512  # bounds the memory of pack(); a multiple of LANES


def packed_bytes(layout: str, format: str, n: int, k: int) -> int:
    """Bytes of a weight ``[n, k]`` of ``format`` in ``layout``.

    Raises UnsupportedError for an unknown layout and what ``formats.row_bytes`` raises.
    """
    if layout == ROW_MAJOR:
        return n * formats.row_bytes(format, k)
    _check_layout(layout, format)
    if format == "BF16_12":
        return _padded(n) // LANES * bf16_12.group_bytes(k)
    if format == "BF16":
        k += k % 2
    return _padded(n) * formats.row_bytes(format, k)


def pack(layout: str, format: str, raw: U8) -> U8:
    """``raw`` uint8 [N, row_bytes] (for F32, F16 and BF16 the little-endian elements) in
    ``layout``.

    Returns uint8 [packed_bytes].  Deterministic; works on a bounded number of rows at a time.
    """
    if layout == ROW_MAJOR:
        return np.ascontiguousarray(raw).reshape(-1)
    _check_layout(layout, format)
    n, row_bytes = raw.shape
    group_bytes = _group_bytes(format, row_bytes)
    out = np.zeros(_padded(n) // LANES * group_bytes, dtype=np.uint8)
    for start in range(0, n, _ROWS_PER_CHUNK):
        rows = raw[start : start + _ROWS_PER_CHUNK]
        padded = np.zeros((_padded(len(rows)), row_bytes), dtype=np.uint8)
        padded[: len(rows)] = rows
        piece = _pack_groups(format, padded)
        at = start // LANES * group_bytes
        out[at : at + piece.size] = piece.reshape(-1)
    return out


def holds(format: str, raw: U8) -> bool:
    """Whether ``format`` can have the values of ``raw`` uint8 [N, row_bytes]: always, but for one
    that some values are too many for."""
    return bf16_12.holds(raw) if format == "BF16_12" else formats.is_format(format)


def _padded(n: int) -> int:
    return -(-n // LANES) * LANES


def _check_layout(layout: str, format: str) -> None:
    if layout != ROWS16 or not formats.is_format(format):
        raise UnsupportedError(
            f"no weight layout {layout} for {format} on CPU targets",
            next_step=f"layouts are {ROWS16} and {ROW_MAJOR}",
        )


def _group_bytes(format: str, row_bytes: int) -> int:
    if format == "BF16_12":
        return bf16_12.group_bytes(row_bytes // 2)
    if format == "BF16":
        row_bytes += row_bytes % 4  # the zero column of an odd K
    return LANES * row_bytes


def _pack_groups(format: str, raw: U8) -> U8:
    """[G * 16, row_bytes] -> [G, group bytes]."""
    groups = len(raw) // LANES
    if format == "BF16_12":
        return bf16_12.pack(raw)
    if format in formats.PLAIN:
        size = formats.PLAIN[format]
        elements = raw.reshape(groups, LANES, -1, size)  # [G, 16, K, size]
        if format == "BF16":
            if elements.shape[2] % 2:
                elements = np.pad(elements, ((0, 0), (0, 0), (0, 1), (0, 0)))
            elements = elements.reshape(groups, LANES, -1, 2 * size)
        return np.ascontiguousarray(elements.transpose(0, 2, 1, 3)).reshape(groups, -1)
    parts = formats.unpack(format, raw)
    blocks = _BLOCK_PARTS[format](parts)  # each [G, blocks, bytes]
    return np.concatenate(blocks, axis=2).reshape(groups, -1)


def _down(x: U8, bits: int) -> U8:
    out: U8 = np.right_shift(x, np.uint8(bits))
    return out


def _up(x: U8, bits: int) -> U8:
    out: U8 = np.left_shift(x, np.uint8(bits))
    return out


def _low(x: U8, bits: int) -> U8:
    out: U8 = np.bitwise_and(x, np.uint8((1 << bits) - 1))
    return out


def _words(codes: U8) -> U32:
    """[N, K] -> [N, K / 32, 8]: word j of a block has columns 4 j .. 4 j + 3."""
    return np.ascontiguousarray(codes).view(np.uint32).reshape(len(codes), -1, 8)


def _lanes(words: U32) -> U8:
    """[G * 16, KB, vectors] -> [G, KB, vectors * 64 bytes]: the rows of a group side by side."""
    n, blocks, vectors = words.shape
    lanes = words.reshape(n // LANES, LANES, blocks, vectors).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(lanes).view(np.uint8).reshape(n // LANES, blocks, vectors * 64)


def _plane(words: U32, bits: int, at: int = 0) -> U8:
    """``bits`` bits of each code, from bit ``at`` on, in a plane: [N, KB, 8] -> [G, KB, 64 * bits].

    Whole words are shifted: no bit that is kept leaves its byte.
    """
    mask = np.uint32(0x01010101 * ((1 << bits) - 1))
    part = (words >> np.uint32(at)) & mask
    apiece = 8 // bits
    out = part[:, :, 0::apiece].copy()
    for i in range(1, apiece):
        out |= part[:, :, i::apiece] << np.uint32(bits * i)
    return _lanes(out)


def _halves(x: npt.NDArray[np.float16]) -> U8:
    """[G * 16, KB] float16 -> [G, KB, 32 bytes]."""
    groups = x.shape[0] // LANES
    lanes = np.ascontiguousarray(x.reshape(groups, LANES, -1).transpose(0, 2, 1)).astype("<f2")
    return lanes.view(np.uint8).reshape(groups, -1, 32)


def _sub(x: npt.NDArray[np.int8], per_block: int) -> U8:
    """[G * 16, K / group] -> [G, superblocks, groups per block, 16 rows], as bytes."""
    groups = x.shape[0] // LANES
    lanes = x.astype(np.int8).reshape(groups, LANES, -1, per_block).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(lanes).view(np.uint8)


def _six_bits(x: U8) -> U8:
    """[G, SB, groups, 16] values below 64 -> [G, SB, groups * 12]."""
    half, quarter = x.shape[2] // 2, x.shape[2] // 4
    low = _low(x[:, :, :half], 4) | _up(_low(x[:, :, half:], 4), 4)
    high = np.zeros((*x.shape[:2], quarter, LANES), dtype=np.uint8)
    for i in range(4):
        high |= _up(_down(x[:, :, i * quarter : (i + 1) * quarter], 4), 2 * i)
    return np.concatenate([low, high], axis=2).reshape(*x.shape[:2], -1)


def _super(planes: list[U8]) -> U8:
    """Planes per 32 columns, interleaved, 8 blocks to the superblock: [G, SB, bytes]."""
    joined = np.concatenate(planes, axis=2)
    return joined.reshape(joined.shape[0], joined.shape[1] // 8, -1)


def _m(p: Components) -> U8:
    assert p.m is not None
    return _halves(p.m)


def _parts_small(p: Components) -> list[U8]:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL."""
    words = _words(p.codes)
    out = [_halves(p.d)]
    if p.m is not None:
        out.append(_m(p))
    out.append(_plane(words, 4))
    if p.format.code_bits == 5:
        out.append(_plane(words, 1, 4))
    return out


def _parts_q8_0(p: Components) -> list[U8]:
    return [_halves(p.d), _lanes(_words(p.codes))]


def _parts_q8_high(p: Components) -> list[U8]:
    words = _words(p.codes)
    return [_halves(p.d), _plane(words, 4, 2), _plane(words, 2, 6)]


def _parts_q8_low(p: Components) -> list[U8]:
    return [_halves(p.d), _plane(_words(p.codes), 2)]


def _parts_q4_q5_k(p: Components) -> list[U8]:
    assert p.scales is not None and p.mins is not None
    words = _words(p.codes)
    planes = [_plane(words, 4)]
    if p.format.code_bits == 5:
        planes.append(_plane(words, 1, 4))
    return [
        _halves(p.d),
        _m(p),
        _six_bits(_sub(p.scales, 8)),
        _six_bits(_sub(p.mins, 8)),
        _super(planes),
    ]


def _parts_q6_k(p: Components) -> list[U8]:
    assert p.scales is not None
    words, scales = _words(p.codes), _sub(p.scales, 16)
    return [
        _halves(p.d),
        scales.reshape(*scales.shape[:2], -1),
        _super([_plane(words, 4), _plane(words, 2, 4)]),
    ]


def _parts_q2_k(p: Components) -> list[U8]:
    assert p.scales is not None and p.mins is not None
    both = _sub(p.scales, 16) | _up(_sub(p.mins, 16), 4)
    return [
        _halves(p.d),
        _m(p),
        both.reshape(*both.shape[:2], -1),
        _super([_plane(_words(p.codes), 2)]),
    ]


def _parts_q3_k(p: Components) -> list[U8]:
    assert p.scales is not None
    words = _words(p.codes)
    biased = (p.scales.astype(np.int16) + 32).astype(np.int8)
    return [
        _halves(p.d),
        _six_bits(_sub(biased, 16)),
        _super([_plane(words, 2), _plane(words, 1, 2)]),
    ]


_BLOCK_PARTS = {
    "Q4_0": _parts_small,
    "Q4_1": _parts_small,
    "Q5_0": _parts_small,
    "Q5_1": _parts_small,
    "IQ4_NL": _parts_small,
    "Q8_0": _parts_q8_0,
    "Q8_HIGH": _parts_q8_high,
    "Q8_LOW": _parts_q8_low,
    "Q4_K": _parts_q4_q5_k,
    "Q5_K": _parts_q4_q5_k,
    "Q6_K": _parts_q6_k,
    "Q2_K": _parts_q2_k,
    "Q3_K": _parts_q3_k,
}
