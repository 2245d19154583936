"""The memory plan: an offset for every buffer, from the lifetimes of a program's calls.

In: a lowered :class:`Program`.  Out: the same program with offsets, ``workspace_bytes`` and
``weights_bytes``.  Next file: ``check.py``, which verifies the plan and shares no code with it.

Calls of one phase run in any order or at once, so a buffer is live over whole phases: from the one
that writes it first to the one that uses it last, both included.  A tap is copied out by the phase
after the one that produced it.  Buffers tied by an in-place alias share one piece of memory, live
for as long as any of them.  Pieces are placed largest first, each at the lowest offset that is free
for its whole life.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from zerolayer.targets.program import Buffer, BufferKind, EntryPoint, Program

ALIGNMENT = 64


def align(n: int) -> int:
    """``n`` rounded up to ALIGNMENT."""
    return -(-n // ALIGNMENT) * ALIGNMENT


@dataclass
class _Piece:
    """Memory shared by the buffers ``names``, live in phases ``first``..``last``."""

    names: list[str]
    size: int
    first: int
    last: int
    offset: int = 0


def in_workspace(buffer: Buffer, entry: EntryPoint) -> bool:
    """Whether a buffer needs workspace: activations, and outputs of a ``step``, whose caller may
    pass no pointer."""
    if buffer.kind is BufferKind.ACTIVATION:
        return True
    return buffer.kind is BufferKind.OUTPUT and entry.name == "step"


def plan(program: Program) -> Program:
    """``program`` with every weight and workspace buffer placed.

    Weights are placed in the order of ``buffers`` (the order of first use), so that a step reads
    the file forwards.  Entry points use the workspace one at a time and share it.
    """
    offsets: dict[str, int] = {}
    workspace = 0
    for entry in program.entry_points:
        pieces = _pieces(program, entry)
        workspace = max(workspace, _place(pieces))
        for piece in pieces:
            offsets.update(dict.fromkeys(piece.names, piece.offset))
    weights = 0
    for b in program.buffers:
        if b.kind is BufferKind.WEIGHT:
            offsets[b.name] = weights
            weights += align(b.nbytes)
    buffers = tuple(
        replace(b, offset=offsets[b.name]) if b.name in offsets else b for b in program.buffers
    )
    return replace(
        program, buffers=buffers, workspace_bytes=align(workspace), weights_bytes=weights
    )


def _pieces(program: Program, entry: EntryPoint) -> list[_Piece]:
    size = {b.name: align(max(b.nbytes, 1)) for b in program.buffers if in_workspace(b, entry)}
    end = max((c.phase for c in entry.calls), default=0)
    spans: dict[str, list[int]] = {}
    for call in entry.calls:
        for name in (*call.inputs, *call.outputs):
            if name is not None and name in size:
                span = spans.setdefault(name, [call.phase, call.phase])
                span[0], span[1] = min(span[0], call.phase), max(span[1], call.phase)
    for name in program.taps:
        if name in spans:
            produced = min(c.phase for c in entry.calls if name in c.outputs)
            following = min((c.phase for c in entry.calls if c.phase > produced), default=end + 1)
            spans[name][1] = max(spans[name][1], following)
    for name in entry.outputs:
        if name in spans:
            spans[name][1] = max(spans[name][1], end + 1)
    pieces = []
    for names in _shared(spans, (pair for call in entry.calls for pair in call.aliases)):
        pieces.append(
            _Piece(
                names,
                max(size[n] for n in names),
                min(spans[n][0] for n in names),
                max(spans[n][1] for n in names),
            )
        )
    return pieces


def _shared(names: Iterable[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """``names`` grouped by the alias pairs, in order of first appearance."""
    root = {n: n for n in names}

    def find(n: str) -> str:
        while root[n] != n:
            root[n] = root[root[n]]
            n = root[n]
        return n

    for a, b in pairs:
        if a in root and b in root:
            root[find(a)] = find(b)
    groups: dict[str, list[str]] = {}
    for n in root:
        groups.setdefault(find(n), []).append(n)
    return list(groups.values())


def _place(pieces: list[_Piece]) -> int:
    """Sets every offset; returns the bytes used."""
    used = 0
    placed: list[_Piece] = []  # sorted by offset
    for piece in sorted(pieces, key=lambda p: (-p.size, p.first, p.names[0])):
        offset = 0
        for other in placed:
            if other.first > piece.last or other.last < piece.first:
                continue
            if other.offset - offset >= piece.size:
                break
            offset = max(offset, other.offset + other.size)
        piece.offset = offset
        at = next((i for i, p in enumerate(placed) if p.offset > offset), len(placed))
        placed.insert(at, piece)
        used = max(used, offset + piece.size)
    return used


@dataclass(frozen=True)
class MemoryNeed:
    """What a host must have.  ``contexts`` holds (memory bytes, largest context in tokens that fits
    beside weights and workspace); a context of 0 means that not even one KV block fits."""

    weights_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    kv_block_bytes: int
    contexts: tuple[tuple[int, int], ...]


GIB = 1 << 30
MEMORY_SIZES = tuple(GIB << i for i in range(10))  # 1 GiB .. 512 GiB


def memory_need(
    program: Program, max_context: int = 0, sizes: tuple[int, ...] = MEMORY_SIZES
) -> MemoryNeed:
    """The memory need of a planned program.  Contexts are capped by the program's own bound, whole
    blocks, and by ``max_context`` tokens, the model's, where that is not 0."""
    fixed = program.weights_bytes + program.workspace_bytes
    kv = program.kv
    if kv is None:
        return MemoryNeed(program.weights_bytes, program.workspace_bytes, 0, 0, ())
    longest = program.bound("B") * kv.block_size
    longest = min(longest, max_context or longest)
    contexts = tuple(
        (size, min(max(size - fixed, 0) // kv.block_bytes * kv.block_size, longest))
        for size in sizes
    )
    return MemoryNeed(
        program.weights_bytes, program.workspace_bytes, kv.bytes_per_token, kv.block_bytes, contexts
    )
