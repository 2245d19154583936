"""Builds the CPU kernel templates into a small library per instruction-set level and calls them.

In: templates/cpu/*.h. Out: :func:`build` and :class:`Kernels` (numpy arrays in, numpy arrays
out). Next file: ``test_cpu_kernels_linear.py``.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
TEMPLATES = HERE.parent / "templates" / "cpu"
FLAGS = ("-std=c11", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function")


def host_flags() -> frozenset[str]:
    """CPU flags of this machine as Linux names them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":")[1].split())
    return frozenset()


_ZEN4 = frozenset({"avx512_vnni", "avx512bw", "avx512_bf16"})
_V3 = frozenset({"avx2", "fma", "f16c"})
#: the tile instructions in C, in code for zen4 or, where that does not run, for x86-64-v3: how the
#: kernels for AMX run without AMX
_TILES = ("znver4", _ZEN4) if host_flags() >= _ZEN4 else ("x86_64_v3", _V3)
#: level -> compiler arguments, CPU flags the host needs to run it
LEVELS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "zen4": (("-mcpu=znver4", "-O3"), _ZEN4),
    "amx": ((f"-mcpu={_TILES[0]}", "-O3", '-DZL_TILE_MODEL="tile_model.h"'), _TILES[1]),
    "v4": (("-mcpu=x86_64_v4", "-O3"), frozenset({"avx512bw", "avx512dq", "avx512vl"})),
    "v3": (("-mcpu=x86_64_v3", "-O3"), _V3),
    "ubsan": (
        ("-mcpu=znver4", "-O1", "-fsanitize=undefined", "-fsanitize-trap=undefined"),
        _ZEN4,
    ),
    # one and two tokens read two streams of weights and ask for them ahead, as on zen3
    "streams": (("-mcpu=x86_64_v3", "-O3", "-DZL_STREAMS=2", "-DZL_STREAM_BYTES=1024"), _V3),
    # the same, and many tokens ask for the next outputs' weights, as with VNNI
    "ubsan-v3": (
        (
            "-mcpu=x86_64_v3",
            "-O1",
            "-fsanitize=undefined",
            "-fsanitize-trap=undefined",
            "-DZL_STREAMS=2",
            "-DZL_STREAM_BYTES=1536",
            "-DZL_ASK_TOKENS=32",
        ),
        _V3,
    ),
    "ubsan-amx": (
        (
            f"-mcpu={_TILES[0]}",
            "-O1",
            "-fsanitize=undefined",
            "-fsanitize-trap=undefined",
            '-DZL_TILE_MODEL="tile_model.h"',
        ),
        _TILES[1],
    ),
}
_BUILDS = tempfile.TemporaryDirectory(prefix="zl-kernels-")  # removed when the process ends
KV_BLOCK_BYTES = 1 << 16
SCRATCH_BYTES = 1 << 21
SLOTS_BYTES = 1 << 16

BLOCK = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
)  # fmt: skip
PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Instance:
    """An exported kernel: ``consts`` are C texts; ``i`` and ``d`` stand for a value given per
    call."""

    name: str
    header: str
    function: str
    pointers: int
    consts: tuple[str, ...]


def _instances() -> list[Instance]:
    out: list[Instance] = []
    for f in (*BLOCK, "Q8_HIGH", "Q8_LOW"):
        fmt = f"ZL_FMT_{f}"
        out.append(
            Instance(f"linear_int8_{f}", "zl_linear_int8.h", "zl_linear_int8", 6, ("i", "i", fmt))
        )
    for f in (*BLOCK, *PLAIN):
        fmt = f"ZL_FMT_{f}"
        out.append(
            Instance(
                f"linear_float_{f}", "zl_linear_float.h", "zl_linear_float", 4, ("i", "i", fmt, "i")
            )
        )
        out.append(Instance(f"embed_{f}", "zl_embed.h", "zl_embed", 3, ("i", "d", fmt)))
    q41, f16 = "ZL_FMT_Q4_1", "ZL_FMT_F16"
    out += [
        Instance("linear_add_int8", "zl_linear_int8.h", "zl_linear_add_int8", 7, ("i", "i", q41)),
        Instance(
            "act_linear_int8", "zl_linear_int8.h", "zl_act_linear_int8", 6, ("i", "i", "i", q41)
        ),
        Instance("gated_int8", "zl_linear_int8.h", "zl_gated_linear_int8", 8, ("i", "i", "i", q41)),
        Instance(
            "gated_quantize_int8",
            "zl_linear_int8.h",
            "zl_gated_linear_quantize_int8",
            10,
            ("i", "i", "i", q41),
        ),
        *(
            Instance(
                f"{kind}_int8_{f}", "zl_linear_int8.h", function, pointers, (*ints, f"ZL_FMT_{f}")
            )
            for f in ("Q8_0", "Q6_K")
            for kind, function, pointers, ints in (
                ("linear_add", "zl_linear_add_int8", 7, ("i", "i")),
                ("act_linear", "zl_act_linear_int8", 6, ("i", "i", "i")),
                ("gated", "zl_gated_linear_int8", 8, ("i", "i", "i")),
                ("gated_quantize", "zl_gated_linear_quantize_int8", 10, ("i", "i", "i")),
            )
        ),
        Instance(
            "linear_add_float", "zl_linear_float.h", "zl_linear_add_float", 5, ("i", "i", f16, "i")
        ),
        Instance(
            "act_linear_float",
            "zl_linear_float.h",
            "zl_act_linear_float",
            4,
            ("i", "i", "i", f16, "i"),
        ),
        Instance(
            "gated_float",
            "zl_linear_float.h",
            "zl_gated_linear_float",
            6,
            ("i", "i", "i", f16, "i"),
        ),
        Instance(
            "gated_quantize_float",
            "zl_linear_float.h",
            "zl_gated_linear_quantize_float",
            8,
            ("i", "i", "i", f16, "i"),
        ),
        Instance(
            "qkv_int8",
            "zl_qkv.h",
            "zl_qkv_rope_cache_int8",
            21,
            (*("i",) * 6, "d", "i", "i", q41, q41, q41),
        ),
        Instance(
            "qkv_int8_mixed",
            "zl_qkv.h",
            "zl_qkv_rope_cache_int8",
            21,
            (*("i",) * 6, "d", "i", "i", "ZL_FMT_Q4_K", "ZL_FMT_Q8_0", "ZL_FMT_Q6_K"),
        ),
        Instance(
            "qkv_float",
            "zl_qkv.h",
            "zl_qkv_rope_cache_float",
            19,
            (*("i",) * 6, "d", "i", "i", f16, f16, f16, "i"),
        ),
        *(
            Instance(
                f"{name}_bf16{bits}",
                "zl_linear_bf16.h",
                f"zl_{function}_bf16",
                pointers,
                (*consts, f"ZL_FMT_BF16{bits}"),
            )
            for bits in ("", "_12")
            for name, function, pointers, consts in (
                ("linear", "linear", 4, ("i", "i")),
                ("linear_add", "linear_add", 5, ("i", "i")),
                ("act_linear", "act_linear", 4, ("i", "i", "i")),
                ("gated", "gated_linear", 6, ("i", "i", "i")),
                ("gated_quantize", "gated_linear_quantize", 8, ("i", "i", "i")),
            )
        ),
        *(
            Instance(
                f"qkv_bf16{bits}",
                "zl_qkv.h",
                "zl_qkv_rope_cache_bf16",
                19,
                (*("i",) * 6, "d", "i", "i", f"ZL_FMT_BF16{bits}"),
            )
            for bits in ("", "_12")
        ),
        Instance("head_bounds", "zl_screen.h", "zl_head_bounds", 4, ("i", "i", "i")),
        Instance("screened_bf16", "zl_screen.h", "zl_screened_linear_bf16", 4, ("i", "i")),
        *(
            Instance(
                f"screened_float_{f}",
                "zl_screen.h",
                "zl_screened_linear_float",
                4,
                ("i", "i", f"ZL_FMT_{f}", "i"),
            )
            for f in PLAIN
        ),
        Instance("split_bounds_int8", "zl_screen_split.h", "zl_split_bounds_int8", 7, ("i", "i")),
        Instance("split_int8", "zl_screen_split.h", "zl_screened_split_linear_int8", 7, ("i", "i")),
        Instance("split_embed", "zl_embed.h", "zl_split_embed", 4, ("i", "d")),
        Instance("quantize", "zl_norm.h", "zl_quantize_int8", 4, ("i",)),
        Instance("rms_norm", "zl_norm.h", "zl_rms_norm", 3, ("i", "d")),
        Instance("layer_norm", "zl_norm.h", "zl_layer_norm", 4, ("i", "d")),
        Instance("rms_norm_quantize", "zl_norm.h", "zl_rms_norm_quantize", 5, ("i", "d")),
        Instance("layer_norm_quantize", "zl_norm.h", "zl_layer_norm_quantize", 6, ("i", "d")),
        Instance("head_norm", "zl_norm.h", "zl_head_norm", 3, ("i", "i", "d")),
        Instance("rope_table", "zl_rope.h", "zl_rope_table", 4, ("i", "d")),
        Instance("rope", "zl_rope.h", "zl_rope", 4, ("i", "i", "i", "i")),
        Instance("cache_write", "zl_attention.h", "zl_cache_write", 6, ("i",) * 5),
        Instance(
            "attention",
            "zl_attention.h",
            "zl_paged_attention",
            7,
            ("i", "i", "i", "d", "d", "i", "i", "i"),
        ),
        Instance(
            "attention_quantize",
            "zl_attention.h",
            "zl_paged_attention_quantize",
            9,
            ("i", "i", "i", "d", "d", "i", "i", "i"),
        ),
        *(
            Instance(n, "zl_elementwise.h", f"zl_{n}", 3, ("i", "i"))
            for n in ("add", "sub", "mul", "div")
        ),
        Instance("swish", "zl_elementwise.h", "zl_swish", 2, ("i", "d")),
        Instance("gelu", "zl_elementwise.h", "zl_gelu", 2, ("i", "i")),
        Instance("softcap", "zl_elementwise.h", "zl_softcap", 2, ("i", "d")),
        Instance("gather", "zl_elementwise.h", "zl_gather", 3, ("i",)),
        Instance("gather_int8", "zl_elementwise.h", "zl_gather_int8", 7, ("i",)),
        *(
            Instance(n, "zl_elementwise.h", f"zl_{f}", 2, ("i",))
            for n, f in (
                ("relu", "relu"),
                ("tanh", "tanh_rows"),
                ("sigmoid", "sigmoid_rows"),
                ("softmax", "softmax"),
            )
        ),
        Instance("argmax_part", "zl_sample.h", "zl_argmax_part", 2, ("i",)),
        Instance("sample", "zl_sample.h", "zl_sample", 4, ("i",)),
    ]
    return out


#: fused int8 products of a format with signed codes and of one with scales of 16 columns
FUSED_FORMS = tuple(
    f"{kind}_int8_{f}"
    for f in ("Q8_0", "Q6_K")
    for kind in ("linear_add", "act_linear", "gated", "gated_quantize")
)
INSTANCES = {i.name: i for i in _instances()}


def has(level: str, name: str) -> bool:
    """Whether the library of ``level`` holds kernel ``name``: tiles change the int8 products only,
    and the sanitizer's build is slow."""
    if level == "amx":
        return "int8" in name or name == "cache_write"
    if level == "ubsan-v3":  # what has code of its own there
        return name.startswith(("linear_int8", "attention", "cache_write", "split")) or name in {
            *(f"linear_float_{f}" for f in ("F32", "F16", "BF16", "Q4_1", "Q6_K")),
            *("linear_bf16", "linear_bf16_12", "gated_float", "gated_quantize_float"),
            *("gated_int8", "gated_quantize_int8", "qkv_int8", "qkv_float", "qkv_bf16"),
            "head_bounds",
        }
    if level == "streams":
        return (
            name.startswith(("linear_int8", "split_"))
            or name.endswith(("bf16", "bf16_12"))
            or name in {"linear_add_int8", "act_linear_int8", "gated_int8", "gated_quantize_int8"}
            or name in {"qkv_int8", "qkv_int8_mixed", "head_bounds"}
        )
    if level == "ubsan-amx":
        return name in {"linear_int8_Q4_1", "linear_int8_Q8_0", "linear_int8_Q6_K"}
    if name.startswith(FUSED_FORMS) and level not in {"zen4", "v3"}:
        return False
    if level == "ubsan":
        if name.endswith("bf16_12"):
            return name == "linear_bf16_12"
        if name.startswith(("linear_int8", "linear_float", "screened_float", "embed")):
            return name.endswith(("Q4_1", "Q6_K", "BF16"))
        return name not in {"qkv_int8_mixed", "qkv_float"}
    return True


def source(level: str) -> str:
    """One C file that exports the instances as ``int name(state, rows, pointers, ints,
    doubles)``."""
    chosen = [i for i in INSTANCES.values() if has(level, i.name)]
    headers = sorted({i.header for i in chosen} | {"zl_validate.h", "zl_sample.h"})
    lines = [f'#include "{h}"' for h in headers] + ['#include "cpu_harness.h"']
    for x in chosen:
        args = [f"j->p[{n}]" for n in range(x.pointers)]
        ints = doubles = 0
        if x.name == "sample":
            args.append("t.scratch")
        for c in x.consts:
            if c == "i":
                args.append(f"j->i[{ints}]")
                ints += 1
            elif c == "d":
                args.append(f"j->d[{doubles}]")
                doubles += 1
            else:
                args.append(c)
        lines.append(
            f"static void {x.name}_fn(void *arg, int32_t thread) {{\n"
            "  job *j = arg;\n  zl_task t = j->base;\n  t.thread = thread;\n"
            "  t.scratch = j->scratch + (size_t)ZL_SCRATCH_BYTES * (size_t)thread;\n"
            f"  {x.function}(&t, j->rows, {', '.join(args)});\n}}\n"
            f"int k_{x.name}(const state *s, int64_t rows, void *const *p, const int64_t *i,\n"
            f"  const double *d) {{ return call({x.name}_fn, s, rows, p, i, d); }}"
        )
    return "\n".join(lines) + "\n"


def kernels_for(level: str) -> Kernels:
    """The kernels of ``level``; skips the test where this machine cannot run them."""
    if not LEVELS[level][1] <= host_flags():
        pytest.skip(f"this machine cannot run {level}")
    return Kernels(library(level))


@functools.cache
def library(level: str) -> Path:
    """The library of ``level``, built once per process."""
    return build(level, Path(_BUILDS.name))


def build(level: str, directory: Path) -> Path:
    """The library of ``level``, compiled with the toolchain that targets use."""
    c_file, target = directory / f"{level}.c", directory / f"{level}.so"
    c_file.write_text(source(level))
    command = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        "x86_64-linux-gnu",
        *LEVELS[level][0],
    ]
    command += [
        *FLAGS,
        f"-DZL_KV_BLOCK_BYTES={KV_BLOCK_BYTES}LL",
        f"-DZL_SCRATCH_BYTES={SCRATCH_BYTES}",
        f"-DZL_SLOTS_BYTES={SLOTS_BYTES}",
    ]
    command += [
        "-g0",
        "-I",
        str(TEMPLATES),
        "-I",
        str(HERE),
        "-shared",
        "-fPIC",
        str(c_file),
        "-o",
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return target


class _State(ctypes.Structure):
    _fields_ = (
        ("n_threads", ctypes.c_int32),
        ("n_seqs", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("token_seq", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("seq_starts", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("screened", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Batch:
    """The state of a step; int32 arrays.  ``screened``: only the largest logits are asked for."""

    token_seq: Any = None
    positions: Any = None
    seq_starts: Any = None
    block_table: Any = None
    screened: bool = False


@dataclass
class Kernels:
    """Calls a built library.  With ``guard`` every array ends at an inaccessible page, so that a
    read or write
    past its end is a fault."""

    path: Path
    threads: int = 2
    guard: bool = False
    lib: ctypes.CDLL = field(init=False)

    def __post_init__(self) -> None:
        self.lib = ctypes.CDLL(str(self.path))

    def call(
        self,
        name: str,
        rows: int,
        arrays: Sequence[Any],
        ints: Sequence[int] = (),
        doubles: Sequence[float] = (),
        batch: Batch | None = None,
        threads: int | None = None,
    ) -> None:
        """Runs kernel ``name``; ``arrays`` are numpy arrays (written in place) or None."""
        assert len(arrays) == INSTANCES[name].pointers, name
        b = batch or Batch()
        guards: list[_Guarded] = []

        def address(a: Any) -> int | None:
            if a is None:
                return None
            assert a.flags.c_contiguous
            if not self.guard:
                return int(a.ctypes.data)
            for g in guards:  # the same array twice is the same memory
                if g.array is a:
                    return g.address
            guards.append(_Guarded(a))
            return guards[-1].address

        pointers = (ctypes.c_void_p * len(arrays))(*[address(a) for a in arrays])
        blocks = b.block_table.shape if b.block_table is not None else (0, 0)
        state = _State(
            threads or self.threads,
            blocks[0],
            blocks[1],
            address(b.token_seq),
            address(b.positions),
            address(b.seq_starts),
            address(b.block_table),
            b.screened,
        )
        i = (ctypes.c_int64 * (len(ints) + 1))(*[int(x) for x in ints])
        d = (ctypes.c_double * (len(doubles) + 1))(*doubles)
        status = getattr(self.lib, f"k_{name}")(
            ctypes.byref(state), ctypes.c_int64(rows), pointers, i, d
        )
        assert status == 0
        for g in guards:
            g.copy_back()


class _Guarded:
    """A copy of an array whose last byte is followed by a page that may not be touched."""

    def __init__(self, array: Any) -> None:
        self.array = array
        page = mmap.PAGESIZE
        self.size = int(array.nbytes)
        pages = -(-max(self.size, 1) // page)
        self.map = mmap.mmap(-1, (pages + 1) * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.address = base + pages * page - self.size
        ctypes.memmove(self.address, array.ctypes.data, self.size)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(base + pages * page), ctypes.c_size_t(page), 0) == 0

    def copy_back(self) -> None:
        if self.array.flags.writeable:
            ctypes.memmove(self.array.ctypes.data, self.address, self.size)


def floats(rng: np.random.Generator, *shape: int) -> Any:
    """Standard normal float32."""
    return rng.standard_normal(shape, dtype=np.float32)
