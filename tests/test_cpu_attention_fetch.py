"""One token's attention asks for every line of the keys and values that it will read, before.

In: ``attention_fetch.c``, the kernel with each prefetch recorded.  The expected lines are computed
here from the cache's documented layout.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest
from cpu_harness import FLAGS, HERE, TEMPLATES

KV_HEADS, LINE, CHUNK = 2, 64, 64
F32, F16, Q8_0 = 0, 1, 3  # enum zl_kv_dtype


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("fetch") / "fetch.so"
    command = [
        sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu", "-mcpu=x86_64_v3",
        "-O1", "-g0", *FLAGS, "-I", str(TEMPLATES), "-shared", "-fPIC",
        str(HERE / "attention_fetch.c"), "-o", str(target),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return ctypes.CDLL(str(target))


class Cache:
    """A context's blocks, in reverse in the pool, and what lies where in it."""

    def __init__(self, context: int, head_dim: int, block_size: int, dtype: int) -> None:
        self.hd, self.bs, self.dtype = head_dim, block_size, dtype
        self.bytes = 4 if dtype == F32 else 2  # of an element; q8_0: of 34 for 32 elements
        self.head = block_size * head_dim * self.bytes
        if dtype == Q8_0:
            self.head = block_size * head_dim // 32 * 34
        self.context, self.blocks = context, -(-context // block_size)
        self.table = np.arange(self.blocks, dtype=np.int32)[::-1].copy()
        self.part = KV_HEADS * self.head  # K, or V, of a block
        raw = np.zeros(2 * self.part * self.blocks + LINE, np.uint8)
        self.raw = raw[-raw.ctypes.data % LINE :][: 2 * self.part * self.blocks]

    def lines(self, head: int, chunk: int) -> set[int]:
        """Lines, by offset in the pool, of a head's keys and values of the chunk's positions."""
        found: set[int] = set()
        for p in range(CHUNK * chunk, min(CHUNK * (chunk + 1), self.context)):
            block = int(self.table[p // self.bs]) * 2 * self.part
            base, at = block + head * self.head, p % self.bs
            if self.dtype == Q8_0:  # 16 positions are a piece that lies together
                piece = base + at // 16 * 17 * self.hd
                found |= {b + i for b in (piece, piece + self.part) for i in range(17 * self.hd)}
                continue
            piece = base + at // 16 * 16 * self.hd * self.bytes
            found |= {piece + (16 * d + at % 16) * self.bytes for d in range(self.hd)}
            row = base + self.part + at * self.hd * self.bytes
            found |= set(range(row, row + self.hd * self.bytes, self.bytes))
        return {at // LINE for at in found}

    def asked(self, lib: ctypes.CDLL, group: int = 3) -> list[int]:
        """Lines that are asked for, in order, by ``group`` query heads a KV head."""
        heads = group * KV_HEADS
        q, y = (np.ones(heads * self.hd, np.float32) for _ in range(2))
        to = np.zeros(1 << 16, np.int64)
        lib.attend.restype = ctypes.c_int64
        count = lib.attend(
            ctypes.c_void_p(self.raw.ctypes.data), ctypes.c_void_p(self.table.ctypes.data),
            ctypes.c_int32(self.blocks), ctypes.c_int32(self.context - 1), ctypes.c_int64(heads),
            ctypes.c_int64(KV_HEADS), ctypes.c_int64(self.hd), ctypes.c_int64(self.bs),
            ctypes.c_int(self.dtype), ctypes.c_void_p(q.ctypes.data),
            ctypes.c_void_p(y.ctypes.data), ctypes.c_void_p(to.ctypes.data),
            ctypes.c_int64(to.size),
        )  # fmt: skip
        assert 0 < count <= to.size and np.allclose(y, 0)
        return [int(at) // LINE for at in to[:count]]


@pytest.mark.parametrize("dtype", [F16, F32, Q8_0])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("context", [64, 80, 129, 176, 192, 300])
def test_every_line_is_asked_for(
    lib: ctypes.CDLL, context: int, block_size: int, dtype: int
) -> None:
    cache = Cache(context, 64, block_size, dtype)
    asked = cache.asked(lib)
    chunks = -(-context // CHUNK)
    for head in range(KV_HEADS):
        for chunk in range(chunks):
            first = head == 0 and chunk == 0  # nothing comes before it that could ask
            # over q8_0 a chunk that only just began has too few steps to ask for all of the next
            short = dtype == Q8_0 and chunk == 0 and context % CHUNK not in (0, 16, 48)
            if not first and not short:
                assert cache.lines(head, chunk) <= set(asked), (head, chunk)


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("head_dim", [48, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
def test_whoever_shares_the_keys_asks_for_all(
    lib: ctypes.CDLL, group: int, head_dim: int, dtype: int
) -> None:
    """Each number of queries has loops of its own; of more than four the first four ask."""
    for context in (129, 192):
        cache = Cache(context, head_dim, 32, dtype)
        asked = cache.asked(lib, group)
        chunks = -(-context // CHUNK)
        wanted = [cache.lines(h, c) for h in range(KV_HEADS) for c in range(chunks)]
        assert set.union(*wanted[1:]) <= set(asked)
        if context % CHUNK == 0:  # the last one has no next one
            others = [line for line in asked if line not in wanted[-1]]
            assert len(others) == len(set(others))


@pytest.mark.parametrize("dtype", [F16, Q8_0])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_no_line_is_asked_for_twice(lib: ctypes.CDLL, block_size: int, dtype: int) -> None:
    """Of whole chunks; the last one of all has no next one and asks for what it has."""
    cache = Cache(192, 64, block_size, dtype)
    asked = cache.asked(lib)
    last = cache.lines(KV_HEADS - 1, 2)
    others = [line for line in asked if line not in last]
    assert len(others) == len(set(others))
    expected = {x for h in range(KV_HEADS) for c in range(3) for x in cache.lines(h, c)}
    assert set(others) == expected - cache.lines(0, 0) - last
