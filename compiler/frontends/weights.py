"""Named weights that stay in their file until they are written.

In: a region of a model file (a reader has already checked that it lies inside the file).
Out: :class:`Weight`, which every decoder frontend hands to ``decoder.py``, and its recorded
transforms.  Next file: ``decoder.py``.

A weight's tensor is computed each time it is asked for and never kept: a fresh memory map of just
its bytes, and at most one transformed copy, live as long as the caller holds the array.  So peak
memory is that of the largest tensor, whatever the size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError

#: formats whose elements are numbers on their own; every other format is a block format
PLAIN_FORMATS: dict[str, ir.DataType] = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
}

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Weight:
    """One weight of a model under its canonical name.

    ``shape`` is the logical shape (``[N, K]``: N outputs, K inputs; or ``[N]``).  ``tensor`` is
    FLOAT / FLOAT16 / BFLOAT16 of that shape, or for a block format UINT8 ``[N, row_bytes]`` holding
    the file's bytes.  ``source`` is the name in the file followed by the transforms applied to it,
    for example ``model.layers.0.self_attn.qkv_proj.weight[rows 0:3072]``.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    tensor: ir.TensorProtocol = field(compare=False, repr=False)
    source: str

    @property
    def is_plain(self) -> bool:
        """Whether an element can be read on its own (no blocks)."""
        return self.format in PLAIN_FORMATS

    @property
    def size(self) -> int:
        """The number of logical elements."""
        return math.prod(self.shape)

    def renamed(self, name: str) -> Weight:
        """The same weight under another canonical name."""
        return replace(self, name=name)

    def rows(self, start: int, stop: int, name: str) -> Weight:
        """Rows ``start:stop`` of the first axis (a part of a fused tensor), in any format."""
        if not self.shape or not 0 <= start < stop <= self.shape[0]:
            raise InputFileError(
                f"rows {start}:{stop} do not lie inside a tensor of shape {list(self.shape)}",
                where=self.source,
                next_step="the configuration and the weights disagree; fetch the model again",
            )
        base = self.tensor
        shape = (stop - start, *self.shape[1:])
        stored = (stop - start, *(int(d) for d in base.shape.numpy()[1:]))
        return Weight(
            name,
            self.format,
            shape,
            lazy_tensor(lambda: base.numpy()[start:stop], base.dtype, stored, name),
            f"{self.source}[rows {start}:{stop}]",
        )

    def transposed(self, name: str) -> Weight:
        """``[K, N]`` turned into ``[N, K]`` (GPT-2's Conv1D)."""
        self._needs_plain("transposed")
        base = self.tensor
        shape = self.shape[::-1]
        return Weight(
            name,
            self.format,
            shape,
            lazy_tensor(lambda: base.numpy().T, base.dtype, shape, name),
            f"{self.source}[transposed]",
        )

    def plus_one(self, name: str) -> Weight:
        """``1 + w`` in float32, the way gemma's norms multiply."""
        self._needs_plain("offset by one")
        base = self.tensor
        return Weight(
            name,
            "F32",
            self.shape,
            lazy_tensor(
                lambda: base.numpy().astype(np.float32) + np.float32(1),
                ir.DataType.FLOAT,
                self.shape,
                name,
            ),
            f"{self.source}[1 + w]",
        )

    def _needs_plain(self, verb: str) -> None:
        if not self.is_plain:
            raise UnsupportedError(
                f"a tensor of format {self.format} cannot be {verb} without requantizing it",
                where=self.source,
                next_step="convert the model from its original checkpoint again",
            )


def lazy_tensor(
    load: Callable[[], Array], dtype: ir.DataType, shape: tuple[int, ...], name: str
) -> ir.TensorProtocol:
    """A tensor of ``dtype`` and stored ``shape`` whose array ``load`` makes at every access."""
    return ir.LazyTensor(
        lambda: ir.Tensor(load(), dtype=dtype, name=name),
        dtype,
        ir.Shape(shape),
        cache=False,
        name=name,
    )


def mapped_tensor(
    path: Path, offset: int, dtype: ir.DataType, shape: tuple[int, ...], name: str
) -> ir.TensorProtocol:
    """A lazily mapped tensor: ``shape`` elements of ``dtype`` from byte ``offset`` of ``path``.

    The caller has checked that the region lies inside the file; a file that has become shorter
    since raises InputFileError instead of a bus error.
    """
    numpy_dtype = dtype.numpy()

    def load() -> Array:
        if math.prod(shape) == 0:
            return np.empty(shape, numpy_dtype)
        try:
            raw = np.memmap(path, np.uint8, "r", offset, (math.prod(shape) * numpy_dtype.itemsize,))
        except (OSError, ValueError) as error:
            raise InputFileError(
                f"cannot map {name}: {error}",
                where=str(path),
                next_step="the file changed while it was being read; run the command again",
            ) from error
        return raw.view(np.ndarray).view(numpy_dtype).reshape(shape)

    return lazy_tensor(load, dtype, shape, name)
