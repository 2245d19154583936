"""bf16 in 12 bits: the bytes against a reader written from the definition, the kernels against
those of bf16, whose products ``test_cpu_kernels_bf16.py`` compares with numpy."""

from __future__ import annotations

import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cpu_harness import FLAGS, TEMPLATES, Kernels, floats, kernels_for
from hypothesis import given, settings
from hypothesis import strategies as st
from program_cases import (
    TINY,
    engine,
    packed_weights,
    small,
    step_program,
    tiny_decoder,
    zig_cache,
)
from test_cpu_kernels_linear import ACT
from zerolayer.compiler.graph import domain
from zerolayer.compiler.passes import PassOptions, run_passes
from zerolayer.runtime_stub.step import SamplingParams, StepBatch
from zerolayer.targets import bf16_12, cpu, cpu_layouts, roofline
from zerolayer.targets.facts import load_target, resolve_host

U16 = npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]


def raw_of(bits: U16) -> U8:
    return np.ascontiguousarray(bits.astype("<u2")).view(np.uint8).reshape(len(bits), -1)


def trained(rng: np.random.Generator, n: int, k: int) -> U16:
    """Bits of weights with long tails: exact zeros, tiny and huge ones among them."""
    w = rng.standard_t(5, (n, k)).astype(np.float32) * 0.03
    w[rng.random((n, k)) < 1e-4] = 0.0
    w[rng.random((n, k)) < 2e-4] *= 2.0**-30
    w[rng.random((n, k)) < 1e-4] *= 2.0**40
    bits: U16 = (w.view(np.uint32) >> 16).astype(np.uint16)
    return bits


def read(packed: U8, n: int, k: int) -> U16:
    """The numbers of packed groups, one by one as ``bf16_12.py`` describes them."""
    out = np.zeros((-(-n // 16) * 16, k), np.uint16)
    header = 64 * (1 + -(-k // 1024))
    for g, group in enumerate(packed.reshape(-1, header + 24 * k)):
        data = group.tobytes()
        exceptions = {}
        for at in range(16, header, 4):
            block = data[at] | data[at + 1] << 8
            if block == 65535:
                break
            exceptions[block, data[at + 2]] = data[at + 3]
        for i in range(k // 8):
            block_at = header + 192 * i
            for weight in range(128):
                vector, number = divmod(weight, 32)
                half, quarter = vector // 2, number // 8
                place = 16 * quarter + 8 * (vector % 2) + number % 8
                code = data[block_at + place] >> (4 * half) & 15
                upper = exceptions.get((i, weight), data[code])
                lower = data[block_at + 64 + 64 * half + place]
                row, column = 16 * g + number // 2, 8 * i + 2 * vector + number % 2
                out[row, column] = upper << 8 | lower
    return out[:n]


@pytest.mark.parametrize(("n", "k"), [(16, 8), (1, 64), (17, 1024), (40, 1032), (32, 2056)])
def test_no_number_is_changed(n: int, k: int) -> None:
    bits = trained(np.random.default_rng(n), n, k)
    raw = raw_of(bits)
    assert bf16_12.holds(raw) and cpu_layouts.holds("BF16_12", raw)
    packed = cpu_layouts.pack("rows16", "BF16_12", raw)
    assert packed.nbytes == cpu_layouts.packed_bytes("rows16", "BF16_12", n, k)
    assert (read(packed, n, k) == bits).all()


def test_a_quarter_less() -> None:
    for n, k in ((576, 1536), (2048, 2048), (4096, 14336)):
        short, whole = (cpu_layouts.packed_bytes("rows16", f, n, k) for f in ("BF16_12", "BF16"))
        assert 0.75 < short / whole < 0.755


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 33), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_what_is_held_is_what_can_be_packed(seed: int, n: int, blocks: int, uppers: int) -> None:
    """Random bits with some number of upper bytes: kept to the bit, or refused by both."""
    rng = np.random.default_rng(seed)
    k = 8 * blocks
    share = rng.dirichlet(np.full(uppers, 0.3))
    upper = rng.choice(rng.permutation(256)[:uppers], (n, k), p=share)
    bits = (upper << 8 | rng.integers(0, 256, (n, k))).astype(np.uint16)
    raw = raw_of(bits)
    if bf16_12.holds(raw):
        assert (read(bf16_12.pack(raw).reshape(-1), n, k) == bits).all()
    else:
        with pytest.raises(ValueError, match="exceptions"):
            bf16_12.pack(raw)


def test_the_last_exception_has_room_and_one_more_has_not() -> None:
    k = 1024
    most = bf16_12.most_exceptions(k)
    assert most == (128 - 16) // 4 - 1
    bits = np.tile(np.arange(16, dtype=np.uint16) << 8, (16, k // 16))
    where = np.random.default_rng(0).permutation(16 * k)[: most + 1]
    bits.reshape(-1)[where[:-1]] = 0xFF80
    assert bf16_12.holds(raw_of(bits))
    assert (read(bf16_12.pack(raw_of(bits)).reshape(-1), 16, k) == bits).all()
    bits.reshape(-1)[where[-1]] = 0x7FC0
    assert not bf16_12.holds(raw_of(bits))


def test_shapes_that_have_no_blocks() -> None:
    raw = np.zeros((16, 2 * 12), np.uint8)
    assert bf16_12.whole_rows(12) and not bf16_12.holds(raw)
    with pytest.raises(ValueError, match="whole blocks"):
        bf16_12.pack(raw)
    assert "blocks" in bf16_12.whole_rows(8 * 65535) and not bf16_12.whole_rows(8 * 65534)


# --- kernels -------------------------------------------------------------------------------------


@pytest.fixture(scope="session", params=["zen4", "v4", "v3", "ubsan"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_for(request.param)


def both(rng: np.random.Generator, n: int, k: int) -> tuple[U8, U8]:
    raw = raw_of(trained(rng, n, k))
    return (
        cpu_layouts.pack("rows16", "BF16", raw),
        cpu_layouts.pack("rows16", "BF16_12", raw),
    )


@pytest.mark.parametrize(("n", "k"), [(16, 8), (1, 32), (33, 576), (40, 1032), (48, 2048)])
def test_linear(kernels: Kernels, n: int, k: int) -> None:
    """The bits of bf16 for every number of rows, on one and on three threads; memory ends where
    the arrays end."""
    rng = np.random.default_rng(1)
    whole, short = both(rng, n, k)
    guarded = Kernels(kernels.path, guard=True)
    for t in (*range(1, 10), 12, 15, 16, 19, 70):
        x = floats(rng, t, k)
        bias = floats(rng, n) if t % 2 else None
        want = np.zeros((t, n), np.float32)
        kernels.call("linear_bf16", t, [x, whole, bias, want], [n, k])
        for threads in (1, 3):
            out = np.full((t, n), np.nan, np.float32)
            guarded.call("linear_bf16_12", t, [x, short, bias, out], [n, k], threads=threads)
            assert out.tobytes() == want.tobytes(), (t, threads)


@pytest.mark.parametrize("level", ["zen4", "v4", "v3"])
@pytest.mark.parametrize("t", [1, 2, 7, 11, 19, 41])
def test_fused_forms(level: str, t: int) -> None:
    kernels = kernels_for(level)
    rng = np.random.default_rng(2)
    n, k = 96, 200
    (gate, gate_12), (up, up_12) = both(rng, n, k), both(rng, n, k)
    x, bg, bu, residual = floats(rng, t, k), floats(rng, n), floats(rng, n), floats(rng, t, n)
    cases: list[tuple[str, list[Any], list[Any], list[int]]] = [
        ("linear_add", [x, gate, residual, bg], [x, gate_12, residual, bg], [n, k])
    ]
    for act in ACT.values():
        cases += [
            ("act_linear", [x, gate, bg], [x, gate_12, bg], [n, k, act]),
            ("gated", [x, gate, up, bg, bu], [x, gate_12, up_12, bg, bu], [n, k, act]),
        ]
    for name, wide, narrow, ints in cases:
        want, out = np.zeros((t, n), np.float32), np.full((t, n), np.nan, np.float32)
        kernels.call(f"{name}_bf16", t, [*wide, want], ints)
        kernels.call(f"{name}_bf16_12", t, [*narrow, out], ints)
        assert out.tobytes() == want.tobytes(), name
    made = []
    for name, weights in (("bf16", (gate, up)), ("bf16_12", (gate_12, up_12))):
        q = np.zeros((t, n), np.int8)
        scale, sums = np.zeros((t, n // 32), np.float32), np.zeros((t, n // 16), np.float32)
        arrays = [x, *weights, bg, bu, q, scale, sums]
        kernels.call(f"gated_quantize_{name}", t, arrays, [n, k, ACT["silu"]])
        made.append((q.tobytes(), scale.tobytes(), sums.tobytes()))
    assert made[0] == made[1]


def test_the_hot_loop_shuffles_and_spills_nothing(tmp_path: Path) -> None:
    """One token: a block of 128 weights is two table look-ups, two pairs of interleaved bytes and
    four products."""
    source, target = tmp_path / "hot.c", tmp_path / "hot.o"
    source.write_text(
        '#include "zl_linear_bf16.h"\n'
        "void hot(const zl_pair *x, const uint8_t *const *w, float *o) {\n"
        "  v16f acc[1][8];\n  zl_turn turn = {0, 1, NULL};\n"
        "  zl_dot_bf16(ZL_FMT_BF16_12, 1, 1, x, 576, w, 13952, turn, acc);\n"
        "  memcpy(o, acc, 64);\n}\n"
    )
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu"]
    command += ["-mcpu=znver4", "-O3", "-fPIC", *FLAGS, "-I", str(TEMPLATES)]
    subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True)
    listing = subprocess.run(
        ["objdump", "-d", str(target)], capture_output=True, text=True, check=True
    ).stdout
    lines = [line for line in listing.splitlines() if "zmm" in line]
    count = {
        name: sum(name in line for line in lines) for name in ("vdpbf16ps", "vpshufb", "vpunpck")
    }
    assert count == {"vdpbf16ps": 4, "vpshufb": 2, "vpunpck": 4}


# --- the pass ------------------------------------------------------------------------------------


def shortened(options: dict[str, Any], model: Any) -> list[str]:
    found = run_passes(
        model,
        replace(
            PassOptions(activations="bf16", holds=cpu_layouts.holds, shorten=lambda _n: True),
            **options,
        ),
    )
    return [n.op_type for n in found.graph if "BF16" in n.op_type]


def test_products_are_shortened_and_what_an_embedding_shares_is_not() -> None:
    ops = shortened({}, tiny_decoder(replace(TINY, tied_embeddings=True), "BF16", head="BF16"))
    short = [o for o in ops if "BF16_12" in o]
    assert {domain.parse(o).base for o in short} == {"QkvRopeCache", "LinearAdd", "GatedLinear"}
    assert {o for o in ops if "BF16_12" not in o} == {"Embed_BF16", "Linear_BF16_bf16"}
    assert all(set(domain.parse(o).formats) == {"BF16_12"} for o in short)


def test_where_it_does_not_pay_or_fit_nothing_changes() -> None:
    for options in (
        {"shorten": lambda _n: False},
        {"holds": lambda _f, _raw: False},
        {"supports": lambda q: "no" if "BF16_12" in q.formats else None},
        {"activations": "f32"},
    ):
        assert not any("BF16_12" in o for o in shortened(options, tiny_decoder(TINY, "BF16")))


def test_it_pays_where_weights_come_from_memory() -> None:
    zen4 = load_target("zen4")
    cache = next(f.value for f in zen4.facts if f.name == "l3_bytes")
    assert not roofline.reads_memory(zen4, int(cache))
    assert roofline.reads_memory(zen4, int(cache) + 1)


def test_one_of_three_that_does_not_fit_keeps_all_three() -> None:
    """A kernel reads its weights in one format."""
    seen: list[int] = []

    def holds(_format: str, raw: U8) -> bool:
        seen.append(len(raw))
        return len(seen) != 2

    ops = shortened({"holds": holds}, tiny_decoder(TINY, "BF16"))
    mixed = [o for o in ops if len(set(domain.parse(o).formats)) > 1]
    assert not mixed and any("BF16_12" not in o and "Embed" not in o for o in ops)


def test_a_checked_pass_keeps_the_values_of_weights_encoded_before() -> None:
    """Shortening what was F32 or F16 in the file is held to the tolerance of a rearrangement."""
    options = PassOptions(
        quantize="bf16", activations="bf16", holds=cpu_layouts.holds, shorten=lambda _n: True
    )
    found = run_passes(tiny_decoder(TINY, "F32"), options, check=True)
    notes = [v.metadata_props for v in found.graph.initializers.values()]
    short = [n for n in notes if n.get("format") == "BF16_12"]
    assert short and {n["source_format"] for n in short} == {"F32"}
    assert all(n["transform"].startswith("quantized to BF16;") for n in short)


@pytest.mark.parametrize("fusion", ["conservative", "aggressive"])
def test_a_model_has_the_same_logits(fusion: str) -> None:
    """One token and many, on two threads; the file is smaller."""
    model, target = tiny_decoder(TINY, "BF16"), small(resolve_host())
    logits, sizes = [], []
    for shorten in (False, True):
        graph, program = step_program(model, target, "bf16", fusion, shorten=shorten)
        built = cpu.build(program, target, work_dir=zig_cache())
        run = engine(built.files[built.entry], packed_weights(graph, program), program, 2)
        out: list[bytes] = []
        for tokens in ([5], list(range(3, 40))):
            batch = StepBatch()
            blocks = array("i", range(6))
            batch.add(array("i", tokens), 0, blocks, (SamplingParams(), 0, array("i")))
            found = np.zeros((1, TINY.vocab_size), np.float32)
            run.step(batch, logits=found)
            out.append(found.tobytes())
        logits.append(out)
        sizes.append(program.weights_bytes)
        run.close()
    assert logits[0] == logits[1] and sizes[1] < sizes[0]
