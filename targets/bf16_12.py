"""BF16_12: a matrix of bf16 in 12 bits a weight, none of them changed.

In: the elements of 16 rows as a file stores them, ``uint8 [N, 2 K]``, little-endian bf16.  Out:
whether they can be written so (:func:`holds`), and their bytes in the ``rows16`` layout
(:func:`pack`).  Next file: ``templates/cpu/zl_bf16_12.h``, which reads them.

A bf16 number is a sign, eight bits of exponent and seven of fraction.  The weights of a matrix have
few exponents, each half as frequent as the next larger: the entropy of a trained matrix's is below
three bits, which is what lossless compression of such weights lives on (Zhang et al., "70% Size,
100% Accuracy: Lossless LLM Compression for Efficient GPU Inference via Dynamic-Length Float",
2025).  Here every weight has the same length, so that kernels need no search for where one begins:
the upper byte (sign, seven bits of exponent) is a code of 4 bits, the lower byte is kept.

A group is 16 rows:

    u8[16]             the upper bytes that are most frequent in the group
    u8[entries][4]     exceptions, the numbers with another upper byte: block (u16), weight in the
                       block (0..127), upper byte; in order; block 65535 ends them
    zeros              up to 64 (1 + ceil(K / 1024)) bytes
    K / 8 blocks       of 16 rows x 8 columns: 64 bytes of codes, 128 of lower bytes

A block is four vectors of 16 rows x 2 columns, each as BF16 has them (``cpu_layouts.py``).  The
64 lower bytes at 64 (1 + h) belong to vectors 2 h and 2 h + 1, in quarters: the first eight numbers
of vector 2 h, the first eight of vector 2 h + 1, the second eight of vector 2 h, and so on: what a
processor's instruction that interleaves bytes within quarters puts back.  Codes are in the same
order, those of h = 0 in the low nibbles, those of h = 1 in the high ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

ROWS = 16
COLUMNS = 8  # of a block
_TABLE = 16
_BLOCK = 192
_END = 0xFFFF
_ENTRY = 4


def header_bytes(k: int) -> int:
    """Bytes of a group of ``k`` columns before its first block."""
    return 64 * (1 + -(-k // 1024))


def group_bytes(k: int) -> int:
    """Bytes of 16 rows of ``k`` columns."""
    return header_bytes(k) + k // COLUMNS * _BLOCK


def most_exceptions(k: int) -> int:
    """How many exceptions a group of ``k`` columns can have: one weight in 340 at 576 columns, in
    1,000 of many."""
    return (header_bytes(k) - _TABLE) // _ENTRY - 1


def whole_rows(k: int) -> str:
    """Why rows of ``k`` columns cannot be written so; empty when they can."""
    if k % COLUMNS:
        return f"rows of {k} are not whole blocks of {COLUMNS}"
    return "" if k // COLUMNS < _END else f"rows of {k} have more than {_END} blocks"


def holds(raw: U8) -> bool:
    """Whether every group of ``raw`` uint8 [N, 2 K] (N of any number) has few enough exceptions."""
    k = raw.shape[1] // 2
    if whole_rows(k):
        return False
    most = most_exceptions(k)
    for group in _groups(raw):
        counts = np.bincount(group.reshape(-1)[1::2], minlength=256)
        if group.size // 2 - int(np.partition(counts, -_TABLE)[-_TABLE:].sum()) > most:
            return False
    return True


def pack(raw: U8) -> U8:
    """``raw`` uint8 [N, 2 K] -> uint8 [ceil(N / 16) groups, group_bytes]; missing rows are zero.

    Raises ValueError for what :func:`holds` refuses.
    """
    n, k = raw.shape[0], raw.shape[1] // 2
    if why := whole_rows(k):
        raise ValueError(why)
    out = np.zeros((-(-n // ROWS), group_bytes(k)), np.uint8)
    for to, group in zip(out, _groups(raw), strict=True):
        _pack_group(group, to)
    return out


def _groups(raw: U8) -> Iterator[U8]:
    """Sixteen rows at a time, the last ones with zero rows after them."""
    for start in range(0, len(raw), ROWS):
        rows = raw[start : start + ROWS]
        if len(rows) < ROWS:
            rows = np.concatenate([rows, np.zeros((ROWS - len(rows), raw.shape[1]), np.uint8)])
        yield np.ascontiguousarray(rows)


def _pack_group(group: U8, to: U8) -> None:
    k = group.shape[1] // 2
    pairs = group.view("<u4").reshape(4, 4, k // COLUMNS, 2, 2)  # quarter, row, block, h, vector
    numbers = np.ascontiguousarray(pairs.transpose(2, 3, 0, 4, 1)).view("<u2")
    numbers = numbers.reshape(-1, 2, 64)  # block, h, place
    upper = (numbers >> 8).astype(np.uint8)
    counts = np.bincount(upper.reshape(-1), minlength=256)
    # the most frequent, the smaller of two that are as frequent
    table = np.sort(np.argsort(-counts, kind="stable")[:_TABLE])
    code_of = np.full(256, _TABLE, np.uint8)
    code_of[table] = np.arange(_TABLE, dtype=np.uint8)
    codes = code_of[upper]
    to[:_TABLE] = table
    where = np.nonzero(codes.reshape(-1) == _TABLE)[0]
    entries = _exceptions(where, upper.reshape(-1)[where])
    if len(where) > most_exceptions(k):
        raise ValueError(f"{len(where)} exceptions, {most_exceptions(k)} have room")
    to[_TABLE : _TABLE + entries.size] = entries.reshape(-1)
    codes &= np.uint8(_TABLE - 1)
    blocks = to[header_bytes(k) :].reshape(-1, _BLOCK)
    blocks[:, :64] = codes[:, 0] | (codes[:, 1] << np.uint8(4))
    blocks[:, 64:] = numbers.astype(np.uint8).reshape(-1, 128)


def _exceptions(where: npt.NDArray[np.intp], upper: U8) -> U8:
    """[entries, 4], the last one of which is the end."""
    block, place = np.divmod(where, 128)
    h, quarter, vector, number = place // 64, place // 16 % 4, place // 8 % 2, place % 8
    weight = 64 * h + 32 * vector + 8 * quarter + number
    order = np.lexsort((weight, block))
    out = np.zeros((len(where) + 1, _ENTRY), np.uint8)
    out[:-1, 0], out[:-1, 1] = (block & 255)[order], (block >> 8)[order]
    out[:-1, 2], out[:-1, 3] = weight[order], upper[order]
    out[-1, :2] = 255
    return out
