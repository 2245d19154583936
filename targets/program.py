"""The program: what lowering hands to a target family and what the artifact's manifest describes.

In: nothing.  Out: frozen records for buffers, kernel calls and entry points.  Next file:
``kernels.py`` (how a call's kernel is chosen).

This is the border between ``compiler`` and ``targets``: both import it, so it lives below both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

#: A dimension is a number or a symbol bounded by ``Program.bounds``.  Symbols of a language model's
#: step: T tokens, S sequences, R rows that want logits, B block-table columns.
Dim: TypeAlias = "int | str"
Constant: TypeAlias = "int | float | str"


class BufferKind(str, Enum):
    WEIGHT = "weight"  # offset into the weights region of the artifact
    ACTIVATION = "activation"  # offset into the workspace, chosen by the memory plan
    KV = "kv"  # offset inside one KV block; the block id is added at run time
    INPUT = "input"  # pointer given by the caller, row-major
    OUTPUT = "output"  # pointer given by the caller, row-major; a step's also has a place in the
    # workspace, for a caller who passes none


#: bytes per element; packed weights have dtype "u8" and one dimension (their size in bytes)
DTYPE_BYTES = {
    "f32": 4, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "i32": 4, "i64": 8, "bool": 1, "f64": 8,
}  # fmt: skip

#: a cache's Q8_0: codes of a byte, a scale of two for 32 elements of a position
KV_Q8_0 = "q8_0"


def kv_bytes(dtype: str, elements: int) -> int:
    """Bytes of ``elements`` of a KV cache, whole groups of 32 where it is q8_0."""
    return elements // 32 * 34 if dtype == KV_Q8_0 else elements * DTYPE_BYTES[dtype]


#: operators that read the rows of a table that tokens name, not all of it
EMBEDS = frozenset({"Embed", "SplitEmbed"})
#: operators that copy rows, named by a list of indices, of a value
PICKS = frozenset({"Gather", "GatherInt8"})
#: operators that say which outputs can be a row's largest, for a greedy step alone
BOUNDS = frozenset({"HeadBounds", "SplitBounds"})
#: operators of which a greedy step computes the few outputs that can be the largest
SCREENED = frozenset({"ScreenedLinear", "ScreenedSplitLinear"})


@dataclass(frozen=True)
class Buffer:
    """A named piece of memory.  ``nbytes`` is its size at the program's bounds.

    Weights: ``source`` is the graph initializer (or initializers) it is packed from, ``layout`` the
    packed layout's name and ``logical_shape``/``format`` what it means before packing.
    """

    name: str
    kind: BufferKind
    dtype: str
    shape: tuple[Dim, ...]
    nbytes: int
    offset: int | None = None
    layout: str = "row_major"
    source: tuple[str, ...] = ()
    format: str = ""
    logical_shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class KernelCall:
    """One kernel launch.

    ``flops`` and ``activation_bytes`` are per row; an attention's flops are per row and position of
    context, and the KV that it reads is not in its bytes.  Neither is what a cache level holds:
    ``roofline.py`` decides what reaches memory.

    ``op`` is the graph operator, ``row`` the id of the kernel-table row that implements it.
    ``inputs`` / ``outputs`` are buffer names in the operator's order, ``None`` for an absent
    optional input.  ``constants`` are what is baked in (attributes and static sizes), sorted by
    name. ``rows`` is the symbol that the call iterates over (its leading dimension).  Calls with
    the same ``phase`` are independent and need no barrier between them.  ``aliases`` lists (output,
    input) pairs written in place.
    """

    name: str
    op: str
    row: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    constants: tuple[tuple[str, Constant], ...]
    rows: Dim
    phase: int
    layer: int | None = None
    aliases: tuple[tuple[str, str], ...] = ()
    flops: int = 0  # per row of ``rows``
    weight_bytes: int = 0  # read once per call
    activation_bytes: int = 0  # read + written, per row


@dataclass(frozen=True)
class EntryPoint:
    """``step`` (language models) or ``run`` (everything else)."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: tuple[KernelCall, ...]


@dataclass(frozen=True)
class KvLayout:
    """Paged KV: a block holds ``block_size`` positions of every layer, ``block_bytes`` in all."""

    block_size: int
    block_bytes: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_size


@dataclass(frozen=True)
class Program:
    """Everything a family needs to build binaries.  ``workspace_bytes`` is set by the memory plan.

    ``bounds`` lists plain symbols in order of appearance and then derived ones, whose names say
    how: ``S+1``, ``batch*seq``.  The ``dims`` of ``zl_run`` are the plain ones, in this order.

    ``fusion`` is the fusion level: ``conservative`` and ``balanced`` fork and join the thread team
    (or launch) once per call; ``aggressive`` keeps one team through the whole entry point.
    """

    model: str
    buffers: tuple[Buffer, ...]
    entry_points: tuple[EntryPoint, ...]
    bounds: tuple[tuple[str, int], ...]
    fusion: str
    workspace_bytes: int = 0
    weights_bytes: int = 0
    kv: KvLayout | None = None
    vocab_size: int = 0
    hidden_size: int = 0
    n_layers: int = 0
    taps: tuple[str, ...] = ()  # residual-stream buffers after the embedding and after each layer

    def buffer(self, name: str) -> Buffer:
        """The buffer called ``name``; KeyError if there is none."""
        for b in self.buffers:
            if b.name == name:
                return b
        raise KeyError(name)

    @property
    def plain_symbols(self) -> tuple[str, ...]:
        """The symbols that are not made of others (``S+1``, ``batch*seq``), in the order of bounds:
        what ``zl_run`` takes."""
        return tuple(name for name, _ in self.bounds if not {"*", "+"} & set(name))

    def bound(self, dim: Dim) -> int:
        """The largest value of a dimension."""
        return dim if isinstance(dim, int) else dict(self.bounds)[dim]
