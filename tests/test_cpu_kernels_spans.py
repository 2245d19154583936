"""Attention of few tokens, whose contexts are cut in spans that threads share: against numpy, and
the same bits whoever computes what.

References are float64; ``slots_used`` of the library tells which way a call took.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_harness import SLOTS_BYTES, TEMPLATES, Batch, Kernels, floats
from test_cpu_kernels_attention import (
    CACHES,
    CLOSE,
    F16,
    KV_BF16,
    KV_Q8_0,
    attention_reference,
    filled,
    of_dtype,
    q8_0,
)
from test_cpu_kernels_linear import F32, bundle, to_bf16
from zerolayer.targets import cpu_rows

THREADS = (2, 3, 5, 16)


def slots_used(kernels: Kernels) -> int:
    """Whether spans met in the last call; -1: a counter was left that is not 0."""
    return ctypes.c_int.in_dll(kernels.lib, "slots_used").value


class Case:
    """Random keys, values and queries; each sequence's last ``n`` tokens are asked for."""

    def __init__(
        self,
        ints: list[int],
        lengths: list[tuple[int, int]],
        softcap: float = 0.0,
        level: str = "v3",
    ) -> None:
        self.ints, self.lengths, self.softcap = ints, lengths, softcap
        self.heads, self.kvh, self.hd, self.window, _, self.dtype = ints
        rng = np.random.default_rng(11)
        size = self.kvh * self.hd
        self.ks = [floats(rng, p + n, size) for p, n in lengths]
        self.vs = [floats(rng, p + n, size) for p, n in lengths]
        self.kernels = of_dtype(self.dtype, level)
        self.batch, self.operands = filled(self.kernels, lengths, self.ks, self.vs, ints)
        self.rows = sum(n for _, n in lengths)
        self.q = floats(rng, self.rows, self.heads * self.hd)
        self.scale = 1 / math.sqrt(self.hd)

    def run(self, threads: int, rows: slice = slice(None)) -> Any:
        """Attention of these rows (of one sequence, where not all of them)."""
        q = np.ascontiguousarray(self.q[rows])
        y = np.full(q.shape, np.nan, np.float32)
        positions = np.ascontiguousarray(self.batch.positions[rows])
        batch = self.batch
        if len(q) < self.rows:
            batch = Batch(
                np.zeros(len(q), np.int32),
                positions,
                np.array([0, len(q)], np.int32),
                self.batch.block_table[:1],
            )
        operands = [q, *self.operands[:2], positions, None, None, y]
        floats_ = [self.scale, self.softcap]
        self.kernels.call("attention", len(q), operands, self.ints, floats_, batch, threads)
        return y

    def want(self) -> Any:
        """The same by numpy, with what the cache keeps of keys and values."""
        kept = {
            F32: lambda x: x,
            F16: lambda x: x.astype(np.float16).astype(np.float32),
            KV_BF16: to_bf16,
            KV_Q8_0: q8_0,
        }[self.dtype]
        scale, q = self.scale, self.q
        if self.dtype == KV_BF16:  # queries are rounded as exponents of 2
            q, scale = to_bf16(q * np.float32(scale * math.log2(math.e))), math.log(2)
        out = []
        for i in range(self.rows):
            s, p = int(self.batch.token_seq[i]), int(self.batch.positions[i])
            k, v = (kept(x[s]).reshape(-1, self.kvh, self.hd) for x in (self.ks, self.vs))
            one = attention_reference(
                q[i].reshape(self.heads, self.hd), k, v, p, scale, self.softcap, self.window,
                self.heads // self.kvh,
            )  # fmt: skip
            out.append(one.reshape(-1))
        return np.stack(out)


def assert_same_bits(got: Any, want: Any, where: Any) -> None:
    assert (got.view(np.uint32) == want.view(np.uint32)).all(), where


@pytest.mark.parametrize(("dtype", "level"), CACHES)
@pytest.mark.parametrize("context", [1, 255, 256, 257, 511, 512, 513, 1024, 1025, 3000])
def test_one_token(dtype: int, level: str, context: int) -> None:
    """Right, and the same bits on any number of threads and as one of many tokens."""
    case = Case([9, 3, 64, 0, 16, dtype], [(max(0, context - 21), min(context, 21))], 0.0, level)
    many, want = case.run(2), case.want()
    assert np.abs(many - want).max() < CLOSE[dtype]
    last = slice(case.rows - 1, case.rows)
    for threads in (1, *THREADS):
        assert_same_bits(case.run(threads, last), many[last], threads)
        assert slots_used(case.kernels) == (threads > 1 and context > 256), threads


@pytest.mark.parametrize(
    ("ints", "softcap", "lengths"),
    [
        # windows that begin inside a span, at its border, and leave one
        ([9, 3, 64, 300, 16, KV_BF16], 0.0, [(600, 1)]),
        ([9, 3, 64, 345, 16, F16], 0.0, [(600, 1)]),
        ([8, 2, 32, 60, 16, KV_BF16], 0.0, [(530, 1), (600, 1)]),
        ([9, 3, 64, 345, 16, KV_Q8_0], 0.0, [(600, 1)]),
        ([6, 1, 32, 0, 16, KV_Q8_0], 30.0, [(700, 1)]),
        ([8, 1, 64, 0, 32, KV_Q8_0], 0.0, [(3, 1), (1500, 1), (256, 1)]),
        # heads that vectors do not fill, capped scores
        ([6, 1, 40, 0, 16, KV_BF16], 30.0, [(700, 1)]),
        ([5, 5, 24, 0, 16, F32], 15.0, [(700, 1)]),
        # more heads to a KV head than a tile holds
        ([70, 1, 16, 0, 16, F16], 0.0, [(300, 1)]),
        ([70, 1, 16, 0, 16, KV_BF16], 0.0, [(1100, 1)]),
        # contexts of one span beside those of many; tokens of one sequence
        ([8, 1, 64, 0, 32, KV_BF16], 0.0, [(3, 1), (1500, 1), (256, 1)]),
        ([8, 1, 64, 0, 32, F16], 0.0, [(510, 3)]),
    ],
)
def test_few_tokens(ints: list[int], softcap: float, lengths: list[tuple[int, int]]) -> None:
    case = Case(ints, lengths, softcap)
    alone, want = case.run(1), case.want()
    assert slots_used(case.kernels) == 0
    assert np.abs(alone - want).max() < CLOSE[case.dtype]
    shared = 0
    for threads in THREADS:
        assert_same_bits(case.run(threads), alone, threads)
        assert slots_used(case.kernels) >= 0
        shared += slots_used(case.kernels)
    assert shared > 0 or ints[3] == 60  # a window of 60 is in one span


def test_too_few_slots() -> None:
    """Three contexts of 3000 positions are 63 slots of 1,088 bytes: heads are shared out."""
    case = Case([9, 3, 64, 0, 16, KV_BF16], [(2999, 1)] * 3)
    assert SLOTS_BYTES < 63 * 1088
    alone = case.run(1)
    for threads in (3, 5):
        assert_same_bits(case.run(threads), alone, threads)
        assert slots_used(case.kernels) == 0


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_many_calls_give_the_same_bits(threads: int) -> None:
    """More threads than CPUs, and whoever is last merges: never another bit, no counter left."""
    case = Case([6, 2, 32, 0, 16, KV_BF16], [(900, 1)])
    alone = case.run(1)
    for i in range(150):
        assert_same_bits(case.run(threads), alone, i)
        assert slots_used(case.kernels) == 1


def test_results_are_quantized_where_spans_meet() -> None:
    case = Case([9, 3, 64, 0, 16, KV_BF16], [(800, 1)])
    y, n = case.run(1), 9 * 64
    for threads in THREADS:
        got = [
            np.zeros((1, n), np.int8),
            np.zeros((1, n // 32), np.float32),
            np.zeros((1, n // 16), np.float32),
        ]
        case.kernels.call(
            "attention_quantize", 1, [case.q, *case.operands, *got], case.ints,
            [case.scale, 0.0], case.batch, threads,
        )  # fmt: skip
        assert slots_used(case.kernels) == 1
        for a, b in zip(got, bundle(y), strict=True):
            assert (a == b).all()


def test_slots_agree_with_the_kernels(tmp_path: Path) -> None:
    """slots_bytes is what all tokens need at the longest context, however heads are shared out, up
    to its most."""
    row = next(r for r in cpu_rows.ROWS if r.op == "PagedAttention")
    checks = []
    for heads, kv, hd, tokens, positions in [
        (9, 3, 64, 16, 8192), (4, 4, 24, 1, 256), (4, 4, 24, 1, 257), (4, 4, 24, 3, 512),
        (70, 1, 16, 2, 513), (8, 1, 96, 4, 1024), (32, 8, 128, 1, 131072),
    ]:  # fmt: skip
        constants = {"num_heads": heads, "kv_num_heads": kv, "head_dim": hd}
        want = cpu_rows.slots_bytes(row, constants, tokens, positions)
        assert 0 < want <= cpu_rows.MOST_SLOTS
        checks.append(
            f"  if (need({heads}, {kv}, {hd}, {tokens}, {positions}) != {want}) return 1;"
        )
    assert cpu_rows.slots_bytes(row, constants, 512, 131072) == cpu_rows.MOST_SLOTS
    other = next(r for r in cpu_rows.ROWS if r.op == "CacheWrite")
    assert cpu_rows.slots_bytes(other, constants, 512, 131072) == 0
    source, program = tmp_path / "s.c", tmp_path / "s"
    source.write_text(
        '#include "zl_attention.h"\n'
        "static int64_t need(int64_t H, int64_t kv, int64_t hd, int64_t tokens,\n"
        "                    int64_t positions)\n"
        "{\n  zl_tiles w = {.H = H, .group = H / kv};\n"
        "  const int64_t spans = zl_span_of(positions - 1) + 1;\n"
        "  int64_t most = 0;\n"
        "  for (int64_t n = w.group < ZL_QUERIES ? w.group : ZL_QUERIES; ; n = (n + 1) / 2) {\n"
        "    zl_tiles_runs(&w, n);\n"
        "    const int64_t bytes = tokens * w.runs * spans * zl_slot_bytes(w.most, hd);\n"
        "    most = bytes > most ? bytes : most;\n"
        "    if (n == 1) return most < 16 << 20 ? most : 16 << 20;\n"
        "  }\n"
        "}\nint main(void) {\n" + "\n".join(checks) + "\n  return 0;\n}\n"
    )
    flags = ["-target", "x86_64-linux-gnu", "-mcpu=x86_64_v3", "-std=c11", "-O1", "-g0"]
    subprocess.run(
        [sys.executable, "-m", "ziglang", "cc", *flags, "-I", str(TEMPLATES), str(source),
         "-o", str(program)],
        check=True,
    )  # fmt: skip
    assert subprocess.run([str(program)], check=False).returncode == 0
