"""Products of bf16 weights, on every instruction-set level, against numpy.

The reference multiplies the same bf16 numbers in float64. A sum of K products takes K roundings, so
it errs by at most K x 2^-24 of the sum of magnitudes, whatever the instruction does in between.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_harness import FLAGS, LEVELS, TEMPLATES, Kernels, floats, host_flags, kernels_for
from test_cpu_kernels_linear import ACT, activation, bundle, packed, to_bf16, weights
from zerolayer.targets import cpu_rows
from zerolayer.targets.facts import load_target
from zerolayer.targets.kernels import KernelQuery, select

#: outputs and columns: odd, not multiples of 16 or 32, a power of two (cache sets), one of each
SHAPES = [(16, 1), (1, 32), (17, 33), (40, 45), (33, 576), (96, 160), (5, 1026), (48, 2048)]
ROWS = (*range(1, 10), 12, 15, 16, 19)
OPS = ("Linear", "LinearAdd", "ActLinear", "GatedLinear", "GatedLinearQuantizeInt8", "QkvRopeCache")


@pytest.fixture(scope="session", params=["zen4", "v4", "v3"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_for(request.param)


def bf16(rng: np.random.Generator, n: int, k: int) -> tuple[Any, Any]:
    """Packed weights and their values."""
    raw, w = weights(rng, "BF16", n, k)
    return packed("BF16", raw), w.astype(np.float64)


def limit(x: Any, w: Any) -> Any:
    """The largest error of the products of x and w, and of one addition."""
    return (x.shape[1] + 2) * 2.0**-24 * (np.abs(x) @ np.abs(w).T + 1)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear(kernels: Kernels, n: int, k: int) -> None:
    """Every number of rows, with and without a bias; memory ends where the arrays end."""
    rng = np.random.default_rng(1)
    w, value = bf16(rng, n, k)
    guarded = Kernels(kernels.path, guard=True)
    for t in ROWS:
        x = floats(rng, t, k)
        bias = floats(rng, n) if t % 2 else None
        out = np.full((t, n), np.nan, np.float32)
        guarded.call("linear_bf16", t, [x, w, bias, out], [n, k])
        rounded = to_bf16(x).astype(np.float64)
        want = rounded @ value.T + (0 if bias is None else bias)
        worst = limit(rounded, value) + (0 if bias is None else 2.0**-24 * np.abs(bias))
        assert (np.abs(out - want) <= worst).all(), t


@pytest.mark.parametrize("t", [1, 2, 7, 11, 19])
def test_fused_forms(kernels: Kernels, t: int) -> None:
    """LinearAdd (in place too), ActLinear, GatedLinear and its quantizing form."""
    rng = np.random.default_rng(2)
    n, k = 96, 93
    (wg, g), (wu, u) = bf16(rng, n, k), bf16(rng, n, k)
    x, bg, bu, residual = floats(rng, t, k), floats(rng, n), floats(rng, n), floats(rng, t, n)
    rounded = to_bf16(x).astype(np.float64)
    gate, up = rounded @ g.T + bg, rounded @ u.T + bu
    eg, eu = limit(rounded, g), limit(rounded, u)
    out = residual.copy()
    kernels.call("linear_add_bf16", t, [x, wg, out, bg, out], [n, k])
    assert (np.abs(out - (residual + gate)) <= eg + 2.0**-22 * (np.abs(gate) + 8)).all()
    for name, act in ACT.items():
        kernels.call("act_linear_bf16", t, [x, wg, bg, out], [n, k, act])
        # an activation's slope is at most 1.13, its own error below 2e-6 of the result
        slack = 1.13 * eg + 4e-6 * (np.abs(gate) + 1)
        assert (np.abs(out - activation(name, gate)) <= slack).all(), name
        kernels.call("gated_bf16", t, [x, wg, wu, bg, bu, out], [n, k, act])
        want = activation(name, gate) * up
        slack = slack * (np.abs(up) + eu) + np.abs(activation(name, gate)) * eu
        assert (np.abs(out - want) <= slack + 1e-6 * np.abs(want)).all(), name
        q = np.zeros((t, n), np.int8)
        scale, sums = np.zeros((t, n // 32), np.float32), np.zeros((t, n // 16), np.float32)
        arrays = [x, wg, wu, bg, bu, q, scale, sums]
        kernels.call("gated_quantize_bf16", t, arrays, [n, k, act])
        for got, expected in zip((q, scale, sums), bundle(out), strict=True):
            assert (got == expected).all(), name


@pytest.mark.parametrize(("n", "k", "t"), [(40, 77, 19), (80, 4096, 75)])
def test_rows_do_not_depend_on_the_batch_or_the_threads(
    kernels: Kernels, n: int, k: int, t: int
) -> None:
    """To the bit, within a register tile and across token tiles (32 tokens at K = 4096)."""
    rng = np.random.default_rng(3)
    w, _ = bf16(rng, n, k)
    x = floats(rng, t, k)
    alone = np.zeros((t, n), np.float32)
    for i in range(t):
        kernels.call("linear_bf16", 1, [x[i : i + 1], w, None, alone[i : i + 1]], [n, k])
    for threads in (1, 2, 3, 7):
        out = np.zeros((t, n), np.float32)
        kernels.call("linear_bf16", t, [x, w, None, out], [n, k], threads=threads)
        assert (out == alone).all(), threads


@pytest.mark.parametrize(("format", "k"), [("BF16", 1027), ("BF16_12", 1032)])
def test_levels_agree_to_the_bit(format: str, k: int) -> None:
    """One chain of fused multiply-adds, odd column first, is what vdpbf16ps does too."""
    rng = np.random.default_rng(4)
    n, t = 40, 27
    w = packed(format, weights(rng, "BF16", n, k)[0])
    x = floats(rng, t, k)
    results = set()
    for level in ("zen4", "v4", "v3"):
        if LEVELS[level][1] <= host_flags():
            out = np.zeros((t, n), np.float32)
            kernels_for(level).call(f"linear_{format.lower()}", t, [x, w, None, out], [n, k])
            results.add(out.tobytes())
    assert len(results) == 1


def test_infinity_and_nan_stay_in_their_row(kernels: Kernels) -> None:
    rng = np.random.default_rng(5)
    n, k, t = 32, 70, 9
    w, _ = bf16(rng, n, k)
    x = floats(rng, t, k)
    clean = np.zeros((t, n), np.float32)
    kernels.call("linear_bf16", t, [x, w, None, clean], [n, k])
    x[3, 5], x[6, 69] = np.nan, np.inf
    out = np.zeros((t, n), np.float32)
    kernels.call("linear_bf16", t, [x, w, None, out], [n, k])
    assert np.isnan(out[3]).all() and not np.isfinite(out[6]).any()
    rest = [i for i in range(t) if i not in (3, 6)]
    assert (out[rest] == clean[rest]).all()


@pytest.mark.parametrize("target", ["zen4", "x86-64-v4", "x86-64-v3"])
@pytest.mark.parametrize("op", OPS)
def test_the_table_chooses_them_for_bf16_alone(target: str, op: str) -> None:
    """bf16 weights with bf16 activations; f32 activations and other weights keep float32."""
    found = load_target(target)
    weights_of = 3 if op == "QkvRopeCache" else 2 if op.startswith("Gated") else 1
    constants = (("N", 64), ("K", 64), ("head_dim", 64), ("block_size", 16))
    for formats, kind, wanted in (
        (("BF16",) * weights_of, "bf16", "_bf16"),
        (("BF16",) * weights_of, "f32", "_float"),
        (("F16",) * weights_of, "bf16", "_float"),
    ):
        query = KernelQuery(op, formats, kind, constants)
        row = select(cpu_rows.ROWS, query, found.features, found.name)
        assert row.function.endswith(wanted)
        assert row.features <= found.features
        if target == "zen4" and wanted == "_bf16":
            assert "avx512bf16" in row.features


def test_the_hot_loop_is_the_instruction(tmp_path: Path) -> None:
    """Two groups by 8 tokens: 16 products a pair of columns, and nothing is spilled."""
    source, target = tmp_path / "hot.c", tmp_path / "hot.o"
    source.write_text(
        '#include "zl_linear_bf16.h"\n'
        "void hot(const zl_pair *x, const uint8_t *const *w, zl_turn turn, float *o) {\n"
        "  v16f acc[2][8];\n  zl_dot_bf16(ZL_FMT_BF16, 2, 8, x, 576, w, 36864, turn, acc);\n"
        "  memcpy(o, acc, sizeof acc);\n}\n"
    )
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu"]
    command += ["-mcpu=znver4", "-O3", "-fPIC", *FLAGS, "-I", str(TEMPLATES)]
    subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True)
    text = subprocess.run(
        ["objdump", "-d", str(target)], capture_output=True, text=True, check=True
    ).stdout
    assert sum("vdpbf16ps" in line and "zmm" in line for line in text.splitlines()) == 16
    assert not any("zmm" in line and "(%rsp" in line for line in text.splitlines())
