"""Which packed weights a program needs.

In: initializers as kernels ask for them (a format and a layout).  Out: one WEIGHT buffer for each
distinct (initializer, layout), in order of first use.  Next file: ``lower.py``.

A weight with a format goes to the kernel in the family's layout, at the bits of the file.  A vector
that a kernel wants as plain float32 (norm weights, biases, tables) has layout ``decoded_f32``: it
is decoded when the artifact is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir
from zerolayer.compiler.graph.domain import weight_shape
from zerolayer.runtime_stub.errors import UnsupportedError
from zerolayer.targets.program import Buffer, BufferKind

DECODED = "decoded_f32"
_PLAIN = {
    ir.DataType.FLOAT: "F32",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
}


def static_shape(value: ir.Value) -> tuple[int, ...]:
    """The shape of an initializer."""
    if value.shape is None or not all(isinstance(d, int) for d in value.shape):
        raise UnsupportedError(f"initializer {value.name} has no fixed shape")
    return tuple(int(d) for d in value.shape if isinstance(d, int))


class WeightBuffers:
    """Collects the weights of a program.  ``packed_bytes`` is the family's (layout, format, N,
    K)."""

    def __init__(self, packed_bytes: Callable[[str, str, int, int], int]) -> None:
        self._packed_bytes = packed_bytes
        self._buffers: dict[tuple[str, str], Buffer] = {}
        self._names: set[str] = set()

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(self._buffers.values())

    def logical_shape(self, value: ir.Value, format: str) -> tuple[int, ...]:
        """[N, K] of a stored weight of ``format``."""
        return tuple(
            int(d) for d in weight_shape(format, static_shape(value)) if isinstance(d, int)
        )

    def packed(self, value: ir.Value, format: str, layout: str, place: str) -> Buffer:
        """The matrix ``value`` of ``format`` in the family's ``layout``."""
        shape = self.logical_shape(value, format)
        if len(shape) != 2:
            raise UnsupportedError(
                f"weight {value.name} has {len(shape)} dimensions, not 2", where=place
            )
        return self._add(value, format, layout, shape, self._packed_bytes(layout, format, *shape))

    def decoded(self, value: ir.Value, format: str, place: str) -> Buffer:
        """``value`` as float32.  ``format`` is that of a view on it, or empty for its own type."""
        if not format:
            dtype = value.dtype
            if dtype not in _PLAIN:
                raise UnsupportedError(f"{value.name} has type {dtype}, not a float", where=place)
            format = _PLAIN[dtype]
        shape = self.logical_shape(value, format)
        return self._add(value, format, DECODED, shape, 4 * math.prod(shape))

    def _add(
        self, value: ir.Value, format: str, layout: str, shape: tuple[int, ...], nbytes: int
    ) -> Buffer:
        source = value.name or ""
        key = (source, layout)
        found = self._buffers.get(key)
        if found is not None:
            return found
        name = source if source not in self._names else f"{source}:{layout}"
        self._names.add(name)
        buffer = Buffer(
            name=name,
            kind=BufferKind.WEIGHT,
            dtype="f32" if layout == DECODED else "u8",
            shape=shape if layout == DECODED else (nbytes,),
            nbytes=nbytes,
            layout=layout,
            source=(source,),
            format=format,
            logical_shape=shape,
        )
        self._buffers[key] = buffer
        return buffer
