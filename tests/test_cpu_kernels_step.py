"""What surrounds the kernels of a step: the thread team, validation of a batch, sampling; and the
kernel table."""

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
from cpu_harness import INSTANCES, LEVELS, TEMPLATES, Kernels, floats, host_flags, library
from zerolayer.targets import cpu_rows
from zerolayer.targets.program import Constant


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    level = "zen4" if LEVELS["zen4"][1] <= host_flags() else "v3"
    return Kernels(library(level))


class Sampling(ctypes.Structure):
    _fields_ = (
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("repetition_penalty", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("n_history", ctypes.c_int32),
        ("history", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("draw", ctypes.c_uint64),
    )


class Info(ctypes.Structure):
    _fields_ = (
        ("abi_version", ctypes.c_uint32),
        ("info_bytes", ctypes.c_uint32),
        ("target", ctypes.c_char_p),
        ("model", ctypes.c_char_p),
        ("weights_bytes", ctypes.c_uint64),
        ("workspace_bytes", ctypes.c_uint64),
        ("kv_block_bytes", ctypes.c_uint64),
        ("kv_block_size", ctypes.c_int32),
        ("max_tokens", ctypes.c_int32),
        ("max_seqs", ctypes.c_int32),
        ("max_logit_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("n_layers", ctypes.c_int32),
        ("n_taps", ctypes.c_int32),
        ("n_calls", ctypes.c_int32),
    )


class CBatch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("n_seqs", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("n_logit_rows", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("seq_starts", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("logit_rows", ctypes.c_void_p),
        ("sampling", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("taps", ctypes.c_void_p),
        ("call_ns", ctypes.c_void_p),
    )


def sample(
    k: Kernels, logits: Any, settings: list[dict[str, Any]] | None = None, threads: int = 3
) -> Any:
    """Argmax shares, then one token per row."""
    rows, vocab = logits.shape
    parts = np.zeros((rows, threads, 2), np.int32)
    keep: list[Any] = []
    array = None
    if settings is not None:
        raw = (Sampling * rows)()
        for s, given in zip(raw, settings, strict=True):
            s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.top_k = 0, 1, 0, 1, 0
            for name, value in given.items():
                if name == "history":
                    keep.append(np.array(value, np.int32))
                    s.history, s.n_history = keep[-1].ctypes.data, len(value)
                else:
                    setattr(s, name, value)
        array = np.frombuffer(raw, np.uint8)
    k.call("argmax_part", rows, [logits, parts], [vocab], threads=threads)
    out = np.full(rows, -1, np.int32)
    k.call("sample", rows, [logits, parts, array, out], [vocab], threads=threads)
    return out


def test_greedy(kernels: Kernels) -> None:
    """The lowest id wins ties; NaN never wins; any vocabulary size and thread count."""
    rng = np.random.default_rng(1)
    for vocab in (1, 2, 15, 16, 33, 1000):
        logits = np.round(floats(rng, 5, vocab) * 3)  # many ties
        for threads in (1, 2, 7):
            assert (sample(kernels, logits, threads=threads) == logits.argmax(axis=1)).all()
    logits = floats(rng, 6, 100)
    logits[0, :90] = np.nan
    logits[1] = np.nan
    logits[2] = -np.inf
    logits[3, [7, 70]] = np.inf
    logits[4, 0] = np.nan
    got = sample(kernels, logits)
    assert got[0] == 90 + logits[0, 90:].argmax() and got[1] == 0 and got[2] == 0 and got[3] == 7
    assert got[4] == 1 + logits[4, 1:].argmax()


def kept(logits: Any, s: dict[str, Any]) -> Any:
    """The distribution that zl_abi.h describes, by sorting, in float64."""
    x = logits.astype(np.float64).copy()
    for i in set(s.get("history", [])):
        p = s.get("repetition_penalty", 1)
        x[i] = x[i] / p if x[i] > 0 else x[i] * p
    p = np.exp((x - x.max()) / s["temperature"])
    order = np.lexsort((np.arange(p.size), -p))
    if s.get("top_k", 0) > 0:
        order = order[: s["top_k"]]
    if s.get("top_p", 1) < 1:
        mass = np.cumsum(p[order]) / p[order].sum()
        order = order[: int(np.searchsorted(mass, s["top_p"])) + 1]
    order = order[p[order] >= s.get("min_p", 0) * p[order].max()]
    out = np.zeros_like(p)
    out[order] = p[order]
    return out / out.sum()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {
            "temperature": 0.9,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.05,
            "repetition_penalty": 1.5,
            "history": [3, 3, 17],
        },
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.0},
    ],
)
def test_sampling_distribution(kernels: Kernels, settings: dict[str, Any]) -> None:
    """Only tokens that survive the filters are drawn, as often as they should be; the draw is a
    function of (seed, draw)."""
    rng = np.random.default_rng(2)
    vocab, draws = 300, 2000
    logits = floats(rng, vocab) * 2
    want = kept(logits, settings)
    rows = np.tile(logits, (draws, 1))
    got = sample(kernels, rows, [{**settings, "seed": 7, "draw": i} for i in range(draws)])
    counts = np.bincount(got, minlength=vocab)
    assert (counts[want == 0] == 0).all()
    deviation = np.abs(counts - draws * want) / np.sqrt(draws * want * (1 - want) + 1)
    assert deviation.max() < 5
    assert (
        sample(kernels, rows, [{**settings, "seed": 7, "draw": i} for i in range(draws)], threads=1)
        == got
    ).all()
    if (want > 0).sum() > 3:
        assert (
            sample(kernels, rows, [{**settings, "seed": 8, "draw": i} for i in range(draws)]) != got
        ).any()


def test_sampling_ties_and_extremes(kernels: Kernels) -> None:
    logits = np.zeros((64, 50), np.float32)
    one = [{"temperature": 1.0, "top_k": 3, "seed": i} for i in range(64)]
    assert set(sample(kernels, logits, one).tolist()) == {0, 1, 2}  # equal tokens: lowest ids
    one = [{"temperature": 1.0, "top_p": 0.099, "seed": i} for i in range(64)]
    assert set(sample(kernels, logits, one).tolist()) == {0, 1, 2, 3, 4}
    logits[:, 9] = np.inf
    assert set(sample(kernels, logits, one).tolist()) == {9}
    logits[:] = np.nan
    assert set(sample(kernels, logits, one).tolist()) == {0}
    logits = np.tile(np.array([1.0, 3.0, 2.9, -5.0], np.float32), (64, 1))
    assert set(
        sample(kernels, logits, [{"temperature": 1e-30, "seed": i} for i in range(64)]).tolist()
    ) == {1}
    greedy = [{"repetition_penalty": 2.0, "history": [1]}] * 64
    assert set(sample(kernels, logits, greedy).tolist()) == {2}
    # logits one ulp apart have one probability, but only one is the largest
    close = np.full((1, 70), -1, np.float32)
    close[0, 3], close[0, 68] = 0.1, np.nextafter(np.float32(0.1), np.float32(1))
    assert sample(kernels, close, greedy[:1]).tolist() == [68]


def test_uniform_is_splitmix64(kernels: Kernels) -> None:
    """Pinned: artifacts must draw the same numbers on every machine and in every version."""
    uniform = kernels.lib.uniform
    uniform.restype, uniform.argtypes = ctypes.c_double, (ctypes.c_uint64, ctypes.c_uint64)
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, draw in [(0, 0), (1, 0), (2**64 - 1, 2**64 - 1), (7, 123456789)]:
        want = (mix((mix((seed + golden) & mask) + (draw + 1) * golden) & mask) >> 11) * 2.0**-53
        assert uniform(seed, draw) == want
    values = np.array([uniform(3, i) for i in range(4000)])
    assert values.min() >= 0 and values.max() < 1 and abs(values.mean() - 0.5) < 0.02


OK, BAD_ARGUMENT, OVER_LIMIT, BAD_TOKEN, BAD_BLOCK = range(5)


def good() -> dict[str, Any]:
    return {
        "tokens": [1, 2, 3, 4, 5],
        "positions": [0, 1, 2, 40, 41],
        "seq_starts": [0, 3, 5],
        "blocks": [[0, -1, -1], [5, 6, 7]],
        "rows": [2, 4],
        "history": [],
        "max_blocks": None,
        "next": True,
    }


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, OK),
        ({"rows": [], "next": False}, OK),
        ({"rows": [4, 2]}, BAD_ARGUMENT),
        ({"rows": [5]}, BAD_ARGUMENT),
        ({"rows": [-1]}, BAD_ARGUMENT),
        ({"rows": [0, 1, 2, 3]}, OVER_LIMIT),
        ({"next": False}, BAD_ARGUMENT),
        ({"tokens": [1, 2, 100, 4, 5]}, BAD_TOKEN),
        ({"tokens": [1, 2, -1, 4, 5]}, BAD_TOKEN),
        ({"positions": [0, 1, -1, 40, 41]}, BAD_BLOCK),
        ({"positions": [0, 1, 2, 40, 48]}, BAD_BLOCK),
        ({"positions": [0, 1, 2, 40, 2**31 - 1]}, BAD_BLOCK),
        ({"positions": [0, 1, 16, 40, 41]}, BAD_BLOCK),
        ({"blocks": [[0, -1, -1], [5, 8, 7]]}, BAD_BLOCK),
        ({"blocks": [[0, -1, -1], [-5, 6, 7]]}, BAD_BLOCK),
        ({"seq_starts": [0, 6, 5]}, BAD_ARGUMENT),
        ({"seq_starts": [1, 3, 5]}, BAD_ARGUMENT),
        ({"seq_starts": [0, 3, 4]}, BAD_ARGUMENT),
        ({"seq_starts": [0, -2147483648, 5]}, BAD_ARGUMENT),
        ({"seq_starts": [0, 1, 2, 3, 4, 5], "blocks": [[0] * 3] * 5}, OVER_LIMIT),
        ({"tokens": [1] * 9, "positions": [0] * 9, "seq_starts": [0, 9]}, OVER_LIMIT),
        ({"tokens": [], "positions": [], "seq_starts": [0]}, BAD_ARGUMENT),
        ({"max_blocks": -1}, BAD_ARGUMENT),
        ({"history": [100]}, BAD_TOKEN),
        ({"history": [-1]}, BAD_TOKEN),
        ({"tokens": None}, BAD_ARGUMENT),
        ({"positions": None}, BAD_ARGUMENT),
        ({"blocks": None}, BAD_ARGUMENT),
    ],
)
def test_validation(kernels: Kernels, change: dict[str, Any], status: int) -> None:
    """Every bound of zl_abi.h, one broken at a time."""
    f = {**good(), **change}
    info = Info(vocab_size=100, kv_block_size=16, max_tokens=8, max_seqs=4, max_logit_rows=3)
    keep: list[Any] = []

    def pointer(values: Any) -> int | None:
        if values is None:
            return None
        keep.append(np.array(values, np.int32))
        return int(keep[-1].ctypes.data)

    rows = f["rows"]
    sampling = (Sampling * max(1, len(rows)))()
    if f["history"]:
        sampling[0].history, sampling[0].n_history = pointer(f["history"]), len(f["history"])
    batch = CBatch(
        n_tokens=5 if f["tokens"] is None else len(f["tokens"]),
        n_seqs=len(f["seq_starts"]) - 1,
        max_blocks=3 if f["max_blocks"] is None else f["max_blocks"],
        n_logit_rows=len(rows),
        tokens=pointer(f["tokens"]),
        positions=pointer(f["positions"]),
        seq_starts=pointer(f["seq_starts"]),
        block_table=pointer(f["blocks"]),
        logit_rows=pointer(rows),
        sampling=ctypes.addressof(sampling),
        next=pointer([0] * 3) if f["next"] else None,
    )
    call = kernels.lib.validate
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
    assert call(ctypes.byref(info), 8, ctypes.byref(batch)) == status
    assert call(None, 8, ctypes.byref(batch)) == BAD_ARGUMENT
    assert call(ctypes.byref(info), 8, None) == BAD_ARGUMENT


def test_team(kernels: Kernels) -> None:
    """No thread passes a barrier early; more threads than cores, pinned or not, finish."""
    errors = kernels.lib.team_errors
    errors.restype = ctypes.c_int64
    errors.argtypes = (
        ctypes.c_int32,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int32,
    )
    for threads, rounds, runs in [(1, 50, 3), (2, 500, 3), (5, 30, 2), (33, 5, 2)]:
        assert errors(threads, rounds, runs, None, 0) == 0
    cpus = np.array(sorted(os.sched_getaffinity(0)), np.int32)
    assert errors(3, 50, 2, cpus.ctypes.data, len(cpus)) == 0
    gone = np.array([1023, -5, 2**31 - 1], np.int32)  # a CPU that does not exist only loses the pin
    assert errors(4, 20, 2, gone.ctypes.data, 3) == 0
    assert errors(0, 1, 1, None, 0) == -1 and errors(2**31 - 1, 1, 1, None, 0) == -1


def test_rows_match_the_headers() -> None:
    """Every row's function exists in its header with one parameter per constant at its end, in
    that order."""
    text = {p.name: p.read_text() for p in TEMPLATES.glob("*.h")}
    same = {"activation_kind": "kind", "broadcast": "bc", "format_q": "format"}
    for row in cpu_rows.ROWS:
        found = re.search(rf"ZL_KERNEL void {row.function}\(([^)]*)\)", text[row.header])
        assert found, row.id
        names = [
            re.split(r"[ *]", p.strip())[-1] for p in found.group(1).replace("\n", " ").split(",")
        ]
        tail = names[len(names) - len(row.constants) :]
        for constant, name in zip(row.constants, tail, strict=True):
            assert name in (constant, same.get(constant)) or (constant, name) == (
                "broadcast",
                "broadcast",
            ), (row.id, constant, name)
        assert len({r.id for r in cpu_rows.ROWS}) == len(cpu_rows.ROWS)
    for values in cpu_rows.C_NAMES.values():
        for c in values.values():
            assert any(re.search(rf"\b{c}\b", t) for t in text.values()), c


BF16_SCRATCH = "zl_bf16_tokens({format}, {k}) * zl_pair_stride({k}) * (int64_t)sizeof(zl_pair)"
#: where the room of two groups ends
SHORT_SCRATCH = "zl_bf16_room(&t, {format}, 2, {k}) - (char *)NULL + 64 * {k}"


@pytest.mark.parametrize(
    ("function", "header", "tokens", "cpu"),
    [
        (
            "zl_linear_float",
            "zl_linear_float.h",
            "zl_float_tokens({k}) * zl_padded_k({k}) * 4",
            "v3",
        ),
        ("zl_linear_bf16", "zl_linear_bf16.h", BF16_SCRATCH, "v3"),
        ("zl_linear_bf16", "zl_linear_bf16.h", BF16_SCRATCH, "v4+avx512bf16"),
        ("zl_linear_bf16", "zl_linear_bf16.h", SHORT_SCRATCH, "v3"),
        ("zl_linear_bf16", "zl_linear_bf16.h", SHORT_SCRATCH, "v4+avx512bf16"),
    ],
)
def test_scratch_agrees_with_the_kernels(
    tmp_path: Path, function: str, header: str, tokens: str, cpu: str
) -> None:
    """scratch_bytes is what the tile of tokens in the C code needs, and never less."""
    ks = [1, 31, 32, 576, 1536, 2048, 4096, 5000, 8192, 28672]
    source = tmp_path / "s.c"
    rows = [r for r in cpu_rows.ROWS if r.function == function]
    row = next(r for r in rows if ("avx512bf16" in r.features) == ("bf16" in cpu))
    format = "BF16_12" if tokens is SHORT_SCRATCH else "BF16"
    asked: list[dict[str, Constant]] = [{"K": k, "format": format} for k in ks]
    checks = "\n".join(
        f"  if ({tokens.format(k=c['K'], format='ZL_FMT_' + format)}"
        f" != {cpu_rows.scratch_bytes(row, c, 1 << 19)}) return 1;"
        for c in asked
    )
    source.write_text(
        f'#include "{header}"\nint main(void) {{\n  zl_task t = {{0}};\n  (void)t;\n'
        f"{checks}\n  return 0;\n}}\n"
    )
    program = tmp_path / "s"
    flags = [
        "-target",
        "x86_64-linux-gnu",
        f"-mcpu=x86_64_{cpu}",
        "-std=c11",
        "-O1",
        "-g0",
        "-I",
        str(TEMPLATES),
    ]
    subprocess.run(
        [sys.executable, "-m", "ziglang", "cc", *flags, str(source), "-o", str(program)], check=True
    )
    assert subprocess.run([str(program)], check=False).returncode == 0


@pytest.mark.parametrize("level", ["ubsan", "ubsan-v3", "ubsan-amx", "amx"])
def test_undefined_behaviour_and_bounds(level: str) -> None:
    """The kernel tests again in another process: built with the undefined-behaviour sanitizer (a
    trap ends the process), but for amx, whose build with it is slow,
    and every array ending at an inaccessible page (a read or write past the end does too)."""
    if not LEVELS[level][1] <= host_flags():
        pytest.skip(f"this machine cannot run {level}")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(here / "cpu_guard.py"), level],
        capture_output=True,
        text=True,
        check=False,
        cwd=here,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    assert len(INSTANCES) > 50
