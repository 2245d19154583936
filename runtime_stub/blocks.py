"""The KV block pool: who holds which block, what can be shared, what can be had.

In: numbers of blocks.  Out: block ids with reference counts.  Next file: ``scheduler.py``.

A block is in exactly one state: *free*; *held* (reference count >= 1); or *cached* (count 0, but
its content is known and may be found again by prefix).  Cached blocks count as available: the
least recently released is taken when nothing is free.

A full block's content is identified exactly, not by a hash: by its tokens and the serial number of
the block before it.  Serial numbers are never reused, so an evicted parent makes its children
unreachable and they age out.
"""

from __future__ import annotations

from array import array

from .errors import ResourceError

ROOT = 0  # the serial before a sequence's first block


class BlockPool:
    """``n_blocks`` blocks of ``block_size`` positions each."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ResourceError(
                f"a KV pool of {n_blocks} blocks of {block_size} positions holds nothing",
                next_step="give it more memory (--kv-memory) or a larger --max-context",
            )
        self.n_blocks = n_blocks
        self.block_size = block_size
        self._free = list(range(n_blocks - 1, -1, -1))  # a stack: low ids first, recent ids again
        self._references = array("i", bytes(4 * n_blocks))
        self._cached: dict[int, None] = {}  # count 0 and published, oldest release first
        self._by_content: dict[tuple[int, bytes], tuple[int, int]] = {}  # -> block, serial
        self._content_of: dict[int, tuple[int, bytes]] = {}
        self._serial = ROOT

    @property
    def available(self) -> int:
        """Blocks that :meth:`allocate` can still give."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        """Blocks with a reference."""
        return self.n_blocks - self.available

    def references(self, block: int) -> int:
        return self._references[block]

    def blocks_for(self, positions: int) -> int:
        """Blocks that ``positions`` positions take."""
        return -(-positions // self.block_size)

    def allocate(self) -> int:
        """A block with one reference and unspecified content; ResourceError when none is left."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block = next(iter(self._cached))
            del self._cached[block]
            del self._by_content[self._content_of.pop(block)]
        else:
            raise ResourceError(f"all {self.n_blocks} KV blocks are in use")
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        """One more holder of a held or cached block."""
        if self._references[block] == 0:
            del self._cached[block]  # KeyError for a free block: a fault of the caller
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One holder less; the last one makes the block cached (if published) or free."""
        count = self._references[block]
        if count < 1:
            raise ValueError(f"KV block {block} is released more often than it is held")
        self._references[block] = count - 1
        if count == 1:
            if block in self._content_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int, parent: int, tokens: bytes) -> int:
        """Says that the full ``block`` holds ``tokens`` after ``parent``.  Returns its serial.

        When the same content is known already, that one stays the shared one.
        """
        key = (parent, tokens)
        known = self._by_content.get(key)
        if known is not None:
            return known[1]
        self._serial += 1
        self._by_content[key] = (block, self._serial)
        self._content_of[block] = key
        return self._serial

    def find(self, parent: int, tokens: bytes) -> tuple[int, int] | None:
        """(block, serial) that holds ``tokens`` after ``parent``, or None.  Takes no reference."""
        return self._by_content.get((parent, tokens))

    def check(self) -> None:
        """Raises AssertionError unless every block is in exactly one state (used by tests)."""
        held = {b for b in range(self.n_blocks) if self._references[b] > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (held & free or held & cached or free & cached), "a block is in two states"
        assert len(held) + len(free) + len(cached) == self.n_blocks, "a block is lost"
        assert not free & set(self._content_of), "a free block has content"
        for block, key in self._content_of.items():
            assert self._by_content[key][0] == block, "content and block disagree"
        assert len(self._by_content) == len(self._content_of)
