"""A projection of Q8_0 taken apart for screening: its halves, and what bounds the lower one.

In: the projection's weight, as the file stores it.  Out: its upper and lower bits as weights of
their own, and the two vectors of ``SplitBounds``.  Next file: ``templates/cpu/zl_screen_split.h``,
which derives the bound that they are for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from zerolayer.targets import formats

from .edit import bundle, domain_base, lazy_initializer, operands
from .options import Head

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

SPLIT, HIGH, LOW = "Q8_0", "Q8_HIGH", "Q8_LOW"
#: elements looked at together: bounds the memory of float64
_CHUNK_ELEMENTS = 1 << 21
#: rows whose columns are measured
_SAMPLE = 4096
#: a column counts as at least this share of the largest
_LEAST = 2.0**-10
#: bytes of a stored weight that are kept between its readers
_KEPT_BYTES = 64 << 20


class _Stored:
    """The weight's bytes for the four values that are made from them: loaded once, where they are
    few enough to keep until the last has them (a requantized weight is made when it is loaded)."""

    def __init__(self, tensor: ir.TensorProtocol, readers: int) -> None:
        self._tensor, self._readers = tensor, readers
        self._lock, self._served = threading.Lock(), set[str]()
        self._kept: npt.NDArray[np.generic] | None = None

    def take(self, reader: str) -> npt.NDArray[np.generic]:
        with self._lock:
            raw = self._kept
            if raw is None:
                raw = self._tensor.numpy()
            self._served.add(reader)
            done = len(self._served) == self._readers
            self._kept = raw if raw.nbytes <= _KEPT_BYTES and not done else None
            if done:
                self._served.clear()
            return raw


def split_values(
    weight: ir.Value, head: Head, gain: F32 | None
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Q8_HIGH and Q8_LOW [N, row_bytes] of ``weight``, float32 [N] the norms of Q8_LOW's rows
    divided by the spread, float32 [K] the spread.  ``gain``: :func:`gain_before`."""
    assert weight.const_value is not None
    stored = _Stored(weight.const_value, 4)

    def load_half(format: str) -> F32 | U8:
        out = np.empty((head.rows, formats.row_bytes(format, head.columns)), np.uint8)
        for start, raw in _rows(stored.take(format), head):
            out[start : start + len(raw)] = formats.part_of_q8_0(format, raw)
        return out

    @cache
    def the_spread() -> F32:
        return spread_of(stored.take("spread"), gain)

    def load_norms() -> F32 | U8:
        rows = _rows(stored.take("norms"), head)
        return np.concatenate([low_norms(some, the_spread()) for _, some in rows])

    made: list[tuple[str, Callable[[], F32 | U8], str, str]] = [
        ("high", partial(load_half, HIGH), HIGH, "upper six bits of Q8_0"),
        ("low", partial(load_half, LOW), LOW, "lower two bits of Q8_0"),
        ("norms", load_norms, "F32", "norms of the lower bits for screening"),
        ("spread", the_spread, "F32", "weights of the columns in these norms"),
    ]
    values = []
    for what, load, format, transform in made:
        value = ir.Value(name=f"{weight.name}.{what}")
        dtype, shape = ir.DataType.UINT8, [head.rows, 0]
        if format == "F32":
            dtype, shape = ir.DataType.FLOAT, [head.rows if what == "norms" else head.columns]
        else:
            shape[1] = formats.row_bytes(format, head.columns)
        notes = made_from(weight, head, format, transform)
        lazy_initializer(value, partial(_tensor, load, value.name or ""), dtype, shape, notes)
        values.append(value)
    high, low, norms, spread = values
    return high, low, norms, spread


def _tensor(load: Callable[[], F32 | U8], name: str) -> ir.TensorProtocol:
    return ir.Tensor(load(), name=name)


def made_from(weight: ir.Value, head: Head, format: str, transform: str) -> dict[str, str]:
    """What the manifest says of a value made from ``weight``, after what became of that before."""
    before = weight.metadata_props
    steps = [before["transform"]] if "transform" in before else []
    return {
        "source": before.get("source", weight.name or ""),
        "source_format": before.get("source_format", head.format),
        "format": format,
        "transform": "; ".join([*steps, transform]),
    }


def gain_before(node: ir.Node) -> F32 | None:
    """The weights of the norm that makes the activations of ``node``, float32 [K]; None where
    something else makes them, or they are not known."""
    made = bundle(node)[0].producer()
    if made is not None and domain_base(made) == "QuantizeInt8":
        made = operands(made)["x"].producer()
    if made is None:
        return None
    weight: ir.Value | None
    if domain_base(made) in ("RmsNormQuantizeInt8", "LayerNormQuantizeInt8"):
        weight = operands(made)["weight"]
    elif made.domain == "" and made.op_type in ("RMSNormalization", "LayerNormalization"):
        weight = made.inputs[1]
    else:
        return None
    tensor = weight.const_value if weight is not None else None
    return None if tensor is None else np.asarray(tensor.numpy(), np.float32).reshape(-1)


def _rows(raw: npt.NDArray[np.generic], head: Head) -> Iterator[tuple[int, U8]]:
    """(first row, some rows of the stored weight), all in order."""
    step = max(1, _CHUNK_ELEMENTS // head.columns)
    for start in range(0, head.rows, step):
        yield start, np.asarray(raw[start : start + step], np.uint8)


def spread_of(raw: npt.NDArray[np.generic], gain: F32 | None) -> F32:
    """The positive numbers s of the bound |l.x| <= |l / s| |s x|, float32 [K].

    Any are right.  Near 1 / sqrt(x) the bound is close, and an activation is large where the norm's
    gain is and, as far as can be told without running the model, where the projection's columns
    are: of SmolLM2's groups 0.5 % are left to compute with these, 1.4 % with all s the same, and in
    contexts of random tokens 14 % and 92 %.
    """
    block = formats.FORMATS[SPLIT]
    step = -(-len(raw) // _SAMPLE)
    squares = np.zeros(raw.shape[1] // block.block_bytes * block.block_elems)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(raw), 64 * step):
            some = np.asarray(raw[start : start + 64 * step : step], np.uint8)
            for row in formats.dequantize(SPLIT, some).astype(np.float64):
                squares += row * row  # row by row: the same bits whatever numpy's sums are like
        size = np.sqrt(squares)
        if gain is not None:
            size = size * np.abs(gain.astype(np.float64))
    size = np.where(np.isfinite(size), size, 0.0)
    top = float(size.max())
    if not top > 0:
        return np.ones(size.shape, np.float32)
    spread: F32 = (1.0 / np.sqrt(np.maximum(size / top, _LEAST))).astype(np.float32)
    return spread


def low_norms(raw: U8, spread: F32) -> F32:
    """float32 [N]: the Euclidean norms of the rows of Q8_LOW divided by ``spread``, not below the
    exact ones; infinite where one is not a number."""
    block = formats.FORMATS[SPLIT]
    blocks = np.ascontiguousarray(raw).reshape(len(raw), -1, block.block_bytes)
    d = blocks[:, :, :2].copy().view("<f2")[:, :, 0].astype(np.float64)
    low = np.ascontiguousarray(blocks[:, :, 2:].reshape(len(raw), -1).T) & np.uint8(3)  # [K, N]
    by = 1.0 / spread.astype(np.float64)
    square = np.array([2.25, 0.25, 0.25, 2.25])  # (code - 1.5) ** 2
    norm = np.zeros(len(raw))
    with np.errstate(invalid="ignore", over="ignore"):
        for b in range(d.shape[1]):  # column by column: the same bits whatever vectors numpy has
            part = np.zeros(len(raw))
            for k in range(b * block.block_elems, (b + 1) * block.block_elems):
                part += (square * (by[k] * by[k]))[low[k]]
            norm += part * (d[:, b] * d[:, b])
        above = np.nextafter(
            (np.sqrt(norm) * (1 + 2.0**-20)).astype(np.float32), np.float32(np.inf)
        )
    norms: F32 = np.where(np.isnan(above), np.float32(np.inf), above)
    return norms
