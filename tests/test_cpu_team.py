"""The thread team: every item taken once, waits that teach, shares read ahead; eight blocks as one.

The C side is team_checks.c; what is right comes from counting and from numpy.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program_cases import small, step_program, tiny_decoder
from zerolayer.targets import cpu
from zerolayer.targets.facts import load_target
from zerolayer.targets.program import BufferKind

HERE = Path(__file__).parent
TEMPLATES = HERE.parent / "templates" / "cpu"


@pytest.fixture(scope="module", params=[("x86_64_v3", 1), ("x86_64_v3", 2), ("znver4", 1)])
def checks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checks for one instruction set that this machine has, and one or two streams."""
    flags = Path("/proc/cpuinfo").read_text()
    level, streams = request.param
    if level == "znver4" and "avx512_bf16" not in flags:
        pytest.skip("this machine cannot run zen4 code")
    out = tmp_path_factory.mktemp("team") / f"{level}-{streams}.so"
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu"]
    command += [f"-mcpu={level}", "-O2", "-std=gnu11", "-ffp-contract=off", "-pthread"]
    command += ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", str(TEMPLATES)]
    command += [f"-DZL_STREAMS={streams}"]
    command += [str(HERE / "team_checks.c"), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(out))


def pointer(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize(
    ("threads", "items", "calls"),
    [(1, 7, 1), (2, 0, 1), (2, 1, 2), (2, 36, 2), (3, 1000, 3), (5, 4, 2), (8, 61, 4)],
)
def test_every_item_is_taken_once_in_every_phase(
    checks: Any, threads: int, items: int, calls: int
) -> None:
    counts = np.zeros(calls * items, np.int64)
    phases, runs = 20, 4
    status = checks.deal(
        threads, ctypes.c_int64(items), calls, ctypes.c_int64(phases), ctypes.c_int64(runs),
        pointer(counts),
    )  # fmt: skip
    assert status == 0
    assert (counts == phases * runs).all()


def patience(checks: Any, few: bool) -> list[int]:
    seen = (ctypes.c_int32 * 3)()
    assert checks.patience(int(few), ctypes.c_int64(30_000), ctypes.c_int64(5000), seen) == 0
    return list(seen)


def test_a_late_thread_shortens_the_spin_and_quick_ones_lengthen_it(checks: Any) -> None:
    most, late, quick = patience(checks, True)
    if len(os.sched_getaffinity(0)) < 2:  # more threads than CPUs never spin
        assert (most, late, quick) == (0, 0, 0)
        return
    text = (TEMPLATES / "zl_team.h").read_text()
    least = int(re.findall(r"#define ZL_SPIN_LEAST (\d+)", text)[0])
    assert late == least < most
    assert least <= quick <= most


def test_long_phases_teach_nothing(checks: Any) -> None:
    assert len(set(patience(checks, False))) == 1


class Region(ctypes.Structure):
    _fields_ = (
        ("offset", ctypes.c_int64),
        ("item_bytes", ctypes.c_int64),
        ("first", ctypes.c_int32),
        ("items", ctypes.c_int32),
        ("total", ctypes.c_int32),
        ("phase", ctypes.c_int32),
        ("in_pairs", ctypes.c_int32),
    )


def regions_of(source: str) -> tuple[list[list[int]], list[list[int]]]:
    """The tables zl_regions and zl_phases of a rendered module."""
    tables = []
    for name in ("zl_regions", "zl_phases"):
        body = source.split(f"{name}[] = {{")[1].split("};", maxsplit=1)[0]
        tables.append(
            [
                [int(x) for x in re.findall(r"-?\d+", row)]
                for row in body.splitlines()
                if row.strip()
            ]
        )
    return tables[0], tables[1]


@pytest.mark.parametrize("activations", ["int8", "f32"])
def test_regions_are_the_matrices_in_the_order_of_use(activations: str) -> None:
    """Every packed matrix that a step reads whole, once; shares that add up to the matrix."""
    target = small(load_target("zen4"))
    _, program = step_program(tiny_decoder(), target, activations, "aggressive")
    regions, phases = regions_of(cpu.render(program, target)[0])
    buffers = {b.name: b for b in program.buffers}
    (entry,) = program.entry_points
    wanted = []
    for call in entry.calls:
        if call.op.startswith("Embed"):  # reads rows of its table
            continue
        for name in filter(None, call.inputs):
            b = buffers[name]
            if b.kind is BufferKind.WEIGHT and b.layout == "rows16":
                paired = activations == "int8" and not call.op.startswith("GatedLinear")
                wanted.append((b.offset, b.nbytes, call.phase, int(paired)))
    assert [(r[0], r[1] * r[3]) for r in regions] == [w[:2] for w in wanted]
    assert [r[6] for r in regions] == [w[3] for w in wanted]
    assert [w[2] for w in wanted] == sorted(w[2] for w in wanted)
    numbers = {p: i for i, p in enumerate(sorted({c.phase for c in entry.calls}))}
    assert [r[5] for r in regions] == [numbers[w[2]] for w in wanted]
    for number, phase in enumerate(phases):
        later = [i for i, r in enumerate(regions) if r[5] > number]
        assert phase[3] == (later[0] if later else 0)


def test_pairs_are_told_from_the_kernel() -> None:
    """What reads ahead has to deal as the kernel does (test_cpu_kernels_streams.py counts)."""
    rows = {r.function: r for r in cpu._BY_ID.values()}
    found = {
        function: cpu._in_pairs(rows[function], {"Q4_1"})
        for function in (
            "zl_linear_int8", "zl_linear_add_bf16", "zl_head_bounds", "zl_split_bounds_int8",
            "zl_qkv_rope_cache_int8", "zl_qkv_rope_cache_bf16", "zl_linear_float",
            "zl_gated_linear_int8", "zl_gated_linear_quantize_bf16", "zl_qkv_rope_cache_float",
        )
    }  # fmt: skip
    assert list(found.values()) == [True] * 6 + [False] * 4, found
    assert not cpu._in_pairs(rows["zl_qkv_rope_cache_int8"], {"Q4_K", "Q6_K"})


def test_a_thread_reads_its_own_share_ahead(checks: Any, request: pytest.FixtureRequest) -> None:
    """As zl_share deals it: a projection of 9 + 3 + 3 heads, then a matrix of 36 groups."""
    table = (Region * 4)(
        Region(1000, 10, 0, 9, 15, 2, 1), Region(1090, 10, 9, 3, 15, 2, 1),
        Region(1120, 10, 12, 3, 15, 2, 1), Region(5000, 100, 0, 36, 36, 4, 1),
    )  # fmt: skip
    out = (ctypes.c_int64 * 12)()

    def ahead(thread: int, threads: int, phase: int, next_: int, rows: int) -> list[int]:
        streams = checks.ahead(table, 4, thread, threads, phase, next_, ctypes.c_int64(rows), out)
        return list(out[: 2 * streams])

    assert ahead(0, 2, 1, 0, 3) == [1000, 1070]
    assert ahead(1, 2, 1, 0, 3) == [1070, 1090, 1090, 1120, 1120, 1150]
    assert ahead(2, 5, 3, 3, 3) == [5000 + 36 * 2 // 5 * 100, 5000 + 36 * 3 // 5 * 100]
    assert ahead(63, 64, 1, 0, 3) == [1140, 1150]  # 15 heads for 64 threads
    assert ahead(1, 64, 1, 0, 3) == []
    if request.node.callspec.params["checks"][1] == 1:
        for rows in (0, 1, 2):
            assert ahead(0, 2, 1, 0, rows) == [1000, 1070]
        return
    # two rows and one take the items in pairs: eight of heads, the last one alone, 18 of groups
    assert ahead(0, 2, 1, 0, 2) == [1000, 1040, 1080, 1090, 1090, 1120]
    assert ahead(1, 2, 1, 0, 2) == [1040, 1080, 1120, 1150]
    assert ahead(0, 2, 3, 3, 1) == [5000, 5900, 6800, 7700]
    assert ahead(1, 2, 3, 3, 1) == [5900, 6800, 7700, 8600]
    assert ahead(0, 2, 1, 0, 0) == [1000, 1070]
    # fewer than two pairs a thread: one by one
    assert ahead(0, 5, 1, 0, 1) == [1000, 1030]
    table[3].in_pairs = 0  # a call that never does
    assert ahead(0, 2, 3, 3, 1) == [5000, 6800]


def test_eight_blocks_are_quantized_as_one_is(checks: Any) -> None:
    """Bit for bit, and as the definition says: scale = max / 127, round half to even."""
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((8, 16)).astype(np.float32) for _ in range(2))
    a[1], b[1] = 0, 0
    a[2, 3] = np.nan
    b[3, 5] = -np.inf
    a[4] *= np.float32(1e-42)
    b[4] *= np.float32(1e-42)
    a[5] *= np.float32(1e37)
    a[6, :] = np.arange(16, dtype=np.float32) + np.float32(0.5)
    b[6, :] = 127
    one: Any = [np.zeros((8, 32), np.int8), np.zeros(8, np.float32), np.zeros((8, 2), np.float32)]
    eight: Any = [np.zeros_like(x) for x in one]
    checks.quantize(pointer(a), pointer(b), *map(pointer, one), *map(pointer, eight))
    for x, y in zip(one, eight, strict=True):
        assert x.tobytes() == y.tobytes()
    x = np.concatenate([a, b], axis=1)
    for row in (0, 1, 5, 6, 7):
        scale = np.abs(x[row]).max() / np.float32(127)
        inverse = np.float32(1) / scale if scale else np.float32(0)
        q = np.rint(x[row] * inverse).astype(np.int64)
        assert (one[0][row] == q).all()
        assert one[1][row] == scale
        assert (one[2][row] == scale * q.reshape(2, 16).sum(axis=1).astype(np.float32)).all()
    assert (one[0][4] == 0).all()  # below the normal range
    assert np.isnan(one[1][2]) and np.isinf(one[1][3])
