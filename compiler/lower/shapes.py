"""Dimensions of a program: numbers, bounded symbols, and products of symbols.

In: shapes of graph values.  Out: :class:`Dimensions`, which knows every symbol's bound.  Next file:
``weights.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

import onnx_ir as ir
from zerolayer.runtime_stub.errors import UnsupportedError
from zerolayer.targets.program import Dim

#: symbol of the KV pool's size: the host's choice, so it has no bound and sizes nothing
SLOTS = "slots"
#: what a graph may call a dimension; derived symbols (``batch*seq``) are made of such names
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class Dimensions:
    """``fixed`` bounds the symbols of a step; ``bound_of`` is asked for others, and None refuses
    them."""

    def __init__(self, fixed: dict[str, int], bound_of: Callable[[str], int] | None) -> None:
        self._bounds = dict(fixed)
        self._products: dict[str, int] = {}
        self._bound_of = bound_of

    @property
    def bounds(self) -> tuple[tuple[str, int], ...]:
        """Plain symbols in order of appearance, then derived ones (``S+1``, ``batch*seq``)."""
        return (*self._bounds.items(), *self._products.items())

    @property
    def plain(self) -> tuple[str, ...]:
        """The symbols that are not made of others, in order of appearance."""
        return tuple(self._bounds)

    def shape(self, value: ir.Value, place: str) -> tuple[Dim, ...]:
        """The shape of a value.  Raises UnsupportedError when a part of it is not known."""
        if value.shape is None:
            raise UnsupportedError(f"the shape of {value.name} is not known", where=place)
        return tuple(self._dim(d, value, place) for d in value.shape)

    def _dim(self, dim: int | ir.SymbolicDim, value: ir.Value, place: str) -> Dim:
        if isinstance(dim, int):
            if dim < 1:
                raise UnsupportedError(f"{value.name} has a dimension of {dim}", where=place)
            return dim
        name = dim.value
        if not isinstance(name, str) or not name:
            raise UnsupportedError(f"a dimension of {value.name} is not known", where=place)
        if self._bound_of is not None and (name == SLOTS or not _PLAIN_NAME.fullmatch(name)):
            raise UnsupportedError(
                f"{value.name} has a dimension called {name[:60]!r}, which is not a plain name",
                where=place,
                next_step="export the model with symbolic dimensions named like batch or seq_len",
            )
        if name not in self._bounds and name != SLOTS:
            if self._bound_of is None:
                raise UnsupportedError(
                    f"{value.name} has the unknown dimension {name}", where=place
                )
            self._bounds[name] = self._bound_of(name)
        return name

    def rows(self, shape: tuple[Dim, ...]) -> Dim:
        """The product of all dimensions but the last: a number, a symbol or a product symbol."""
        lead = [d for d in shape[:-1] if d != 1]
        symbols = sorted(d for d in lead if isinstance(d, str))
        number = math.prod(d for d in lead if isinstance(d, int))
        if not symbols:
            return number
        if number == 1 and len(symbols) == 1:
            return symbols[0]
        name = "*".join([*([str(number)] if number != 1 else []), *symbols])
        self._products[name] = number * math.prod(self._bounds[s] for s in symbols)
        return name

    def bound(self, dim: Dim) -> int:
        """The largest value of a dimension."""
        if isinstance(dim, int):
            return dim
        return self._bounds[dim] if dim in self._bounds else self._products[dim]

    def size(self, shape: Iterable[Dim]) -> int:
        """Elements of a shape at the bounds."""
        return math.prod(self.bound(d) for d in shape)
