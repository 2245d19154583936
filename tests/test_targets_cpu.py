"""The CPU family's builds: the same bytes everywhere, what a host may load, and right results."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from program_cases import (
    LIMITS,
    TINY,
    engine,
    packed_weights,
    small,
    step_program,
    tiny_decoder,
    zig_cache,
)
from zerolayer.compiler.graph.execute import Executable
from zerolayer.compiler.lower import LowerOptions, lower
from zerolayer.compiler.memory import check_plan, plan
from zerolayer.runtime_stub import driver_cpu
from zerolayer.runtime_stub.errors import ResourceError, UnsupportedError, ZerolayerError
from zerolayer.runtime_stub.step import LogitRow, SamplingParams, StepBatch
from zerolayer.targets import cpu, cpu_compile, cpu_rows, families, formats, roofline
from zerolayer.targets.elf import read_shared_object
from zerolayer.targets.facts import Target, load_target, resolve_host
from zerolayer.targets.injection import read_note
from zerolayer.targets.program import BufferKind, Program

HOST = small(resolve_host())
GREEDY = (SamplingParams(), 0, array("i"))

Built = tuple[ir.Model, Program, families.Binaries]


def build(activations: str, fusion: str, target: Target = HOST) -> Built:
    graph, program = step_program(tiny_decoder(), target, activations, fusion)
    return graph, program, cpu.build(program, target, work_dir=zig_cache())


@pytest.fixture(scope="module")
def f32() -> Built:
    return build("f32", "balanced")


@pytest.fixture(scope="module")
def aggressive() -> Built:
    return build("int8", "aggressive")


# --- the build ----------------------------------------------------------------------------------


def test_same_bytes_in_another_folder(f32: Built, tmp_path: Path) -> None:
    again = cpu.build(f32[1], HOST, work_dir=tmp_path / "elsewhere")
    assert again.files == f32[2].files
    text = f32[2].files[f32[2].entry]
    for trace in (b"/tmp", b"/home", b"module.c", str(Path.cwd()).encode()):
        assert trace not in text


def test_what_a_host_loads(f32: Built) -> None:
    found = cpu_compile.check_object(f32[2].files[f32[2].entry], HOST)
    assert set(found.needed) <= {"libc.so.6", "libm.so.6", "libpthread.so.0"}
    assert found.exports == cpu_compile.EXPORTS
    assert ".note.zerolayer" in found.sections and ".symtab" not in found.sections


def test_other_objects_are_refused(f32: Built) -> None:
    data = bytearray(f32[2].files[f32[2].entry])
    data[18] = 183  # e_machine: AArch64
    with pytest.raises(cpu_compile.BuildError, match="machine 183"):
        cpu_compile.check_object(bytes(data), HOST)
    import numpy.linalg._umath_linalg as extension

    other = Path(str(extension.__file__)).read_bytes()
    with pytest.raises(cpu_compile.BuildError, match=r"needs|exports"):
        cpu_compile.check_object(other, HOST)


def test_the_compiler_gets_exactly_the_targets_features() -> None:
    flags = cpu_compile.cpu_flag(load_target("zen4"))
    mcpu = next(f for f in flags if f.startswith("-mcpu="))
    assert mcpu.startswith("-mcpu=x86_64_v4+") and "+avx512vnni" in mcpu and "amx" not in mcpu
    assert not any("native" in f for f in flags) and "x86_64-linux-gnu.2.17" in flags
    assert "vnni" not in " ".join(cpu_compile.cpu_flag(load_target("x86-64-v3")))


def test_rendered_c_has_no_warnings(aggressive: Built, tmp_path: Path) -> None:
    source = aggressive[2].files[f"kernels/{HOST.name}.c"]
    (tmp_path / "module.c").write_bytes(source)
    done = subprocess.run(
        [sys.executable, "-m", "ziglang", "cc", *cpu_compile.cpu_flag(HOST), "-O0", "-o", "m.so",
         "-Wall", "-Wextra", "-Werror", "-Wno-unused-command-line-argument",
         "-Wno-unused-function", "-Wno-unused-const-variable", "module.c"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def listed(kernel: Any, what: str) -> dict[str, Any]:
    """Entries of a kernel's record (facts, derived, constants) by name."""
    return {entry["name"]: entry for entry in kernel[what]}


def test_float_kernels_record_no_tile_that_they_do_not_use(f32: Built) -> None:
    linear = next(k for k in f32[2].kernels if "LinearAdd" in str(k["kernel"]))
    assert "tile_tokens" not in listed(linear, "derived")


def test_the_note_is_the_record(aggressive: Built) -> None:
    _, program, binaries = aggressive
    note = read_note(binaries.files[binaries.entry])
    assert note["target"] == HOST.name
    assert note["kernels"] == [dict(k) for k in binaries.kernels]
    by_name = {str(k["kernel"]): k for k in binaries.kernels}
    module = listed(by_name["module"], "constants")
    assert module["ZL_WORKSPACE_BYTES"]["value"] == program.workspace_bytes
    linear = next(k for n, k in by_name.items() if "LinearAdd" in n)
    facts, derived = listed(linear, "facts"), listed(linear, "derived")
    l2 = next(f for f in HOST.facts if f.name == "l2_bytes")
    assert facts["l2_bytes"] == l2.as_dict()
    assert derived["tile_bytes"]["value"] == int(l2.value) // 2
    assert (
        f"#define ZL_TILE_BYTES {int(l2.value) // 2} "
        in binaries.files[f"kernels/{HOST.name}.c"].decode()
    )


@pytest.mark.parametrize(
    ("name", "ahead", "streams"), [("zen3", 1024, 2), ("x86-64-v3", 0, 1), ("zen4", 0, 1)]
)
def test_weights_of_one_token_are_read_as_the_target_says(
    name: str, ahead: int, streams: int
) -> None:
    target = small(load_target(name))
    _, program = step_program(tiny_decoder(), target, "int8", "aggressive")
    source, injection = cpu.render(program, target)
    assert f"#define ZL_STREAM_BYTES {ahead} " in source
    assert f"#define ZL_STREAMS {streams} " in source
    linear = next(k for k in injection.records() if "LinearAdd" in str(k["kernel"]))
    fact = listed(linear, "facts").get("stream_prefetch_bytes", {"value": 0})
    assert fact["value"] == ahead
    fact = listed(linear, "facts").get("weight_streams", {"value": 1})
    assert fact["value"] == streams


def test_a_child_may_leave_weights_to_the_machine(tmp_path: Path) -> None:
    fact = "stream_prefetch_bytes: {value: 0, unit: byte, source: a test}"
    file = tmp_path / "quiet.yaml"
    file.write_text(f"name: quiet\nfamily: cpu\nextends: zen3\nfacts:\n  {fact}\n")
    target = small(load_target(file))
    _, program = step_program(tiny_decoder(), target, "int8", "aggressive")
    assert "#define ZL_STREAM_BYTES 0 " in cpu.render(program, target)[0]


def test_a_hostile_model_name_stays_a_name() -> None:
    name = 'x*/ int main(void){} /*"\\\n#include "/etc/passwd"\n%s \u00e9'
    _, program = step_program(tiny_decoder(), HOST, "f32")
    source, _ = cpu.render(replace(program, model=name), HOST)
    lines = source.splitlines()
    assert not any(x.strip().startswith("#include") and "passwd" in x for x in lines)
    assert not any("int main" in x and "*/ int main" in x for x in lines)
    assert 'model = "' in source and "\\n#include" not in source.split(".model =")[1][:400]


def test_the_cache_is_asked_with_source_and_flags(f32: Built) -> None:
    seen: list[dict[str, Any]] = []

    def cache(parts: Any, make: Any) -> tuple[bytes, bool]:
        seen.append(dict(parts))
        return b"cached", True

    found = cpu.build(f32[1], HOST, cache=cache)
    assert found.files[found.entry] == b"cached"
    (parts,) = seen
    assert parts["source"].encode() == f32[2].files[f"kernels/{HOST.name}.c"]
    assert "-mcpu=" in parts["flags"]


def test_a_source_that_does_not_compile() -> None:
    with pytest.raises(cpu_compile.BuildError, match="error"):
        cpu_compile.compile_shared_object("int f(void) { return x; }", HOST, zig_cache())


def test_a_cache_s_full_disk_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compiler's words for it are those of a file system that filled up while it worked."""
    full = "error: unable to write cached ZIR code for x.zig to y: NoSpaceLeft"
    run, places = subprocess.run, []

    def fake(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        place = Path(options["env"]["ZIG_GLOBAL_CACHE_DIR"]).parent
        places.append(place)
        if place == tmp_path or everywhere:
            return subprocess.CompletedProcess(command, 1, "", full)
        return run(["true"], check=False, capture_output=True, text=True)

    monkeypatch.setattr(subprocess, "run", fake)
    everywhere = False
    with pytest.raises(FileNotFoundError):  # `true` wrote no object: it came so far
        cpu_compile.compile_shared_object("", HOST, tmp_path)
    assert places[0] == tmp_path and len(places) == 2
    everywhere = True
    with pytest.raises(ResourceError, match="free disk space or set TMPDIR") as caught:
        cpu_compile.compile_shared_object("", HOST, tmp_path)
    assert caught.value.where == str(places[-1].parent)


def test_families() -> None:
    assert families.family("cpu").rows is cpu_rows.ROWS
    with pytest.raises(UnsupportedError, match="cuda"):
        families.family("cuda")


# --- results ------------------------------------------------------------------------------------


def reference(tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logits [T, vocab] of the float32 frontend graph, by onnxruntime."""
    feeds = {
        "tokens": np.array(tokens, np.int64),
        "positions": np.arange(len(tokens), dtype=np.int64),
    }
    return np.asarray(Executable(tiny_decoder()).run(feeds)["logits"])


A = [5, 17, 3, 80, 44, 2, 91, 33, 60, 11, 7, 7, 19, 23, 50, 51, 52, 53, 54, 55, 1, 9]
B = [90, 12, 64, 3, 3, 8]


def steps(run: driver_cpu.CpuEngine) -> list[np.ndarray[Any, Any]]:
    """A in chunks of 20 and 2, B beside them in chunks of 3, 1, 2: each chunk's last logits."""
    out = []
    blocks_a, blocks_b = array("i", [7, 3]), array("i", [5])
    for (a0, a1), (b0, b1) in [((0, 20), (0, 3)), ((20, 20), (3, 4)), ((20, 22), (4, 6))]:
        batch = StepBatch()
        if a1 > a0:
            batch.add(array("i", A[a0:a1]), a0, blocks_a, GREEDY)
        batch.add(array("i", B[b0:b1]), b0, blocks_b, GREEDY)
        logits = np.zeros((len(batch.rows), TINY.vocab_size), np.float32)
        chosen = run.step(batch, logits=logits)
        assert chosen == [int(r.argmax()) for r in logits]
        out += list(logits)
    return out


def test_ragged_batches_equal_the_float32_graph(f32: Built) -> None:
    graph, program, binaries = f32
    weights = packed_weights(graph, program)
    with engine(binaries.files[binaries.entry], weights, program, 2) as run:
        got = steps(run)
    a, b = reference(A), reference(B)
    expected = [a[19], b[2], b[3], a[21], b[5]]
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-4)


def test_threads_and_batches_do_not_change_a_bit(aggressive: Built) -> None:
    graph, program, binaries = aggressive
    weights = packed_weights(graph, program)
    results = []
    for threads in (1, 2, 3):
        with engine(binaries.files[binaries.entry], weights, program, threads) as run:
            results.append(np.stack(steps(run)))
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])
    # int8 activations: near the float32 graph, far from noise
    a = reference(A)
    assert np.corrcoef(results[0][0], a[19])[0, 1] > 0.99


def test_taps_and_times(f32: Built) -> None:
    graph, program, binaries = f32
    weights = packed_weights(graph, program)
    batch = StepBatch()
    batch.add(array("i", B), 0, array("i", [2]))
    batch.rows += [LogitRow(r, GREEDY[0], 0, array("i")) for r in range(len(B))]  # R = T
    taps = np.zeros((3, len(B), 64), np.float32)
    with engine(binaries.files[binaries.entry], weights, program) as run:
        run.step(batch, taps=taps, timed=True)
        assert len(run.call_ns) == len(program.entry_points[0].calls) and min(run.call_ns) > 0
    embed = graph.graph.initializers["embed.weight"].const_value
    assert embed is not None
    raw = np.ascontiguousarray(embed.numpy())
    table = formats.dequantize("Q4_1", raw) if raw.dtype == np.uint8 else raw
    np.testing.assert_array_equal(taps[0], np.asarray(table)[B])
    assert np.isfinite(taps).all() and np.abs(taps[2] - taps[1]).max() > 0


def test_a_row_has_the_same_bits_whatever_other_rows_have_logits(aggressive: Built) -> None:
    """The last layer computes for rows with logits alone: all, some, one, or none of a step."""
    graph, program, binaries = aggressive
    weights = packed_weights(graph, program)
    of_b: dict[int, np.ndarray[Any, Any]] = {}
    with engine(binaries.files[binaries.entry], weights, program, 2) as run:
        for rows in ([0, 1, 2, 3, 4, 5], [1, 4], [5], []):
            batch = StepBatch()
            batch.add(array("i", B), 0, array("i", [5]))
            batch.rows += [LogitRow(r, GREEDY[0], 0, array("i")) for r in rows]
            logits = np.zeros((max(1, len(rows)), TINY.vocab_size), np.float32)
            run.step(batch, logits=logits if rows else None)
            for row, found in zip(rows, logits, strict=False):
                assert np.array_equal(of_b.setdefault(row, found), found)
        after = StepBatch()  # what a step without logits left in the cache
        after.add(array("i", [9]), len(B), array("i", [5]), GREEDY)
        run.step(after, logits=logits)
        whole = StepBatch()
        whole.add(array("i", [*B, 9]), 0, array("i", [6]), GREEDY)
        again = np.zeros_like(logits)
        run.step(whole, logits=again)
    assert len(of_b) == len(B) and np.array_equal(again, logits)


def test_arrays_that_do_not_fit_together_are_refused(f32: Built) -> None:
    graph, program, binaries = f32
    weights = packed_weights(graph, program)
    with engine(binaries.files[binaries.entry], weights, program) as run:
        for name in ("positions", "seq_starts"):
            batch = StepBatch()
            batch.add(array("i", B), 0, array("i", [2]), GREEDY)
            getattr(batch, name).pop()
            with pytest.raises(ZerolayerError, match="fit together"):
                run.step(batch)


def test_taps_without_every_row_are_refused(f32: Built) -> None:
    graph, program, binaries = f32
    weights = packed_weights(graph, program)
    with engine(binaries.files[binaries.entry], weights, program) as run:
        batch = StepBatch()
        batch.add(array("i", B), 0, array("i", [2]), GREEDY)
        with pytest.raises(ZerolayerError, match="bad argument"):
            run.step(batch, taps=np.zeros((3, len(B), 64), np.float32))
        batch.rows = [LogitRow(r, GREEDY[0], 0, array("i")) for r in (0, 0, 2, 3, 4, 5)]
        with pytest.raises(ZerolayerError, match="bad argument"):
            run.step(batch, taps=np.zeros((3, len(B), 64), np.float32))


def raw_step(run: driver_cpu.CpuEngine, **changes: Any) -> int:
    """A correct batch with fields replaced, straight through the ABI."""
    keep: dict[str, Any] = {
        "tokens": (1, 2, 3),
        "positions": (0, 1, 2),
        "seq_starts": (0, 3),
        "block_table": (0, 1),
        "logit_rows": (2,),
    }
    numbers: dict[str, Any] = {"n_tokens": 3, "n_seqs": 1, "max_blocks": 2, "n_logit_rows": 1}
    arrays = {}
    for name, default in keep.items():
        given = changes.get(name, default)
        arrays[name] = None if given is None else (ctypes.c_int32 * max(len(given), 1))(*given)
    batch = driver_cpu.Batch(
        **{n: changes.get(n, v) for n, v in numbers.items()},
        **{n: None if a is None else ctypes.addressof(a) for n, a in arrays.items()},
    )
    chosen = (ctypes.c_int32 * 8)()
    batch.next = ctypes.addressof(chosen)
    return int(run.code.lib.zl_step(run._engine, ctypes.byref(batch)))


BAD_ARGUMENT, OVER_LIMIT, BAD_TOKEN, BAD_BLOCK = 1, 2, 3, 4


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 0),
        ({"n_tokens": -1}, BAD_ARGUMENT),
        ({"n_tokens": 0}, BAD_ARGUMENT),
        ({"n_tokens": 1 << 30}, OVER_LIMIT),
        ({"n_seqs": 1 << 30}, OVER_LIMIT),
        ({"n_logit_rows": LIMITS["max_logit_rows"] + 1}, OVER_LIMIT),
        ({"max_blocks": 1 << 30}, OVER_LIMIT),
        ({"max_blocks": 0}, BAD_BLOCK),
        ({"tokens": (1, 97, 3)}, BAD_TOKEN),
        ({"tokens": (1, -1, 3)}, BAD_TOKEN),
        ({"tokens": None}, BAD_ARGUMENT),
        ({"positions": None}, BAD_ARGUMENT),
        ({"positions": (0, 1, 32)}, BAD_BLOCK),
        ({"positions": (0, 1, 2**31 - 1)}, BAD_BLOCK),
        ({"positions": (-1, 0, 1)}, BAD_BLOCK),
        ({"positions": (16, 17, 18), "block_table": (0, 24)}, BAD_BLOCK),
        ({"block_table": (-1, 0)}, BAD_BLOCK),
        ({"block_table": (2**31 - 1, 0)}, BAD_BLOCK),
        ({"seq_starts": (1, 3)}, BAD_ARGUMENT),
        ({"seq_starts": (0, 2)}, BAD_ARGUMENT),
        ({"seq_starts": (0, 2**31 - 1, 3), "n_seqs": 2, "max_blocks": 1}, BAD_ARGUMENT),
        ({"logit_rows": (3,)}, BAD_ARGUMENT),
        ({"logit_rows": (-1,)}, BAD_ARGUMENT),
        ({"logit_rows": None}, BAD_ARGUMENT),
        ({"n_logit_rows": 0, "logit_rows": None}, 0),
    ],
)
def test_hostile_batches(f32: Built, changes: dict[str, Any], status: int) -> None:
    graph, program, binaries = f32
    weights = packed_weights(graph, program)
    with engine(binaries.files[binaries.entry], weights, program) as run:
        found = raw_step(run, **changes)
        if changes == {"max_blocks": 1 << 30}:
            assert found in (
                OVER_LIMIT,
                BAD_BLOCK,
            )  # refused before or after the table is looked at
        else:
            assert found == status
        assert raw_step(run) == 0  # and the engine is still usable


def test_hostile_creation(f32: Built) -> None:
    code = driver_cpu.CodeObject(f32[2].files[f32[2].entry])
    out = ctypes.c_void_p()
    good = driver_cpu.CreateArgs(64, 1 << 40, 64, 1, 64, 1 << 40, 1, 0, None)
    for field, bad in [
        ("weights", None), ("weights", 65), ("weights_bytes", 5), ("kv", None), ("kv_blocks", 0),
        ("kv_blocks", 1 << 40), ("workspace", None), ("workspace_bytes", 5), ("n_threads", 0),
        ("n_threads", -1), ("n_threads", 1 << 30), ("n_cpus", -1), ("n_cpus", 5),
    ]:  # fmt: skip
        args = driver_cpu.CreateArgs.from_buffer_copy(good)
        setattr(args, field, bad)
        assert code.lib.zl_create(ctypes.byref(args), ctypes.byref(out)) == BAD_ARGUMENT, field
        assert not out.value
    assert code.lib.zl_create(None, ctypes.byref(out)) == BAD_ARGUMENT
    assert code.lib.zl_step(None, None) == BAD_ARGUMENT
    assert code.lib.zl_run(None, None, None, None, 0, None) == 7  # ZL_NO_ENTRY
    code.lib.zl_destroy(None)


# --- run graphs ---------------------------------------------------------------------------------


def value(name: str, shape: list[int | str]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))


def test_run_entry() -> None:
    """y = softmax(gelu(x) + row * 2), z = relu(x), over [batch, seq, 24]."""
    x = value("x", ["batch", "seq", 24])
    row = np.linspace(-1, 1, 24, dtype=np.float32)
    weight = ir.Value(
        name="row",
        shape=ir.Shape([24]),
        type=ir.TensorType(ir.DataType.FLOAT),
        const_value=ir.Tensor(row),
    )
    shape: list[int | str] = ["batch", "seq", 24]

    def node(op: str, inputs: list[ir.Value], name: str, **attributes: Any) -> ir.Node:
        return ir.node(op, inputs, attributes=attributes, name=name, outputs=[value(name, shape)])

    gelu = node("Gelu", [x], "gelu")
    plus = node("Add", [gelu.outputs[0], weight], "plus")
    soft = node("Softmax", [plus.outputs[0]], "soft", axis=-1)
    relu = node("Relu", [x], "relu")
    graph = ir.Graph(
        [x], [soft.outputs[0], relu.outputs[0]], nodes=[gelu, plus, soft, relu],
        initializers=[weight], opset_imports={"": 24}, name="g",
    )  # fmt: skip
    model = ir.Model(graph, ir_version=10)
    program = plan(
        lower(model, None, HOST, LowerOptions(name="g", dims=(("batch", 3), ("seq", 50))))
    )
    check_plan(program)
    assert program.entry_points[0].name == "run"
    binaries = cpu.build(program, HOST, work_dir=zig_cache())
    given = np.random.default_rng(0).normal(size=(2, 7, 24)).astype(np.float32)
    y, z = np.zeros_like(given), np.zeros_like(given)
    with engine(binaries.files[binaries.entry], packed_weights(model, program), program, 2) as run:
        run.run([given], [y, z], [2, 7])
        for dims, status in (([2], 1), ([4, 7], 2), ([0, 7], 1), ([2, 51], 2)):
            sizes = (ctypes.c_int64 * len(dims))(*dims)
            one = (ctypes.c_void_p * 2)(given.ctypes.data, 0)
            assert run.code.lib.zl_run(run._engine, one, one, sizes, len(dims), None) == status
        assert run.code.lib.zl_step(run._engine, None) == 7
    expected = Executable(model).run({"x": given})
    np.testing.assert_allclose(y, expected["soft"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(z, expected["relu"])


# --- the prediction -----------------------------------------------------------------------------


def test_decode_is_predicted_at_memory_bandwidth() -> None:
    zen4 = small(load_target("zen4"))
    _, program = step_program(tiny_decoder(), zen4, "int8")
    one = roofline.predict(program, zen4, tokens=1, context=100)
    weights = sum(
        b.nbytes
        for b in program.buffers
        if b.kind is BufferKind.WEIGHT and b.name != "embed.weight"
    )
    assert one.weight_bytes == weights
    kv = (100 + 24) * 2 * 32 * 2  # positions of both layers, k and v, elements, bytes
    assert 1.0 <= one.seconds * 460.8e9 / (weights + kv) < 1.05  # the rest: the embedding's row
    many = roofline.predict(program, zen4, tokens=4000, sequences=4, context=100)
    assert any(c.bound == "compute" for c in many.calls)
    assert many.tokens_per_second > one.tokens_per_second
    assert [f["name"] for f in one.injected["facts"]]  # type: ignore[attr-defined]


#: what may not be in the machine code of a level: (registers, mnemonics)
ABOVE = {
    "x86-64-v3": r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|\{%k[1-7]\}|vpdpbusd|vdpbf16|tdpb",
    "x86-64-v4": r"vpdp|vdpbf16|vcvtne2?ps2bf16|vpermb|vpermi2b|vpermt2b|vpmultishift|tdpb",
    "zen4": r"tdpb|tileload|\bv(add|mul|fmadd\w*)ph\b|vpdpbssd",
}


@pytest.mark.parametrize("name", sorted(ABOVE))
def test_no_instruction_above_the_level(name: str, tmp_path: Path) -> None:
    target = small(load_target(name))
    binaries = build("int8", "balanced", target)[2]
    code = binaries.files[binaries.entry]
    (tmp_path / "m.so").write_bytes(code)
    objdump = shutil.which("objdump") or shutil.which("llvm-objdump")
    assert objdump, "install binutils: this test reads the machine code"
    listing = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", str(tmp_path / "m.so")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    lines = [x for x in listing.splitlines() if ":\t" in x]
    assert len(lines) > 1000
    found = [x for x in lines if re.search(ABOVE[name], x)]
    assert not found, found[:3]
    # and the level is used: its own matrix instruction is there
    used = {"x86-64-v3": "vpmaddubsw", "x86-64-v4": "%zmm", "zen4": "vpdpbusd"}[name]
    assert any(used in x for x in lines)
    assert read_shared_object(code).machine == 62


def test_a_constant_that_is_not_finite() -> None:
    _, program = step_program(tiny_decoder(), HOST, "f32")
    (entry,) = program.entry_points
    calls = tuple(
        replace(
            c, constants=tuple((n, float("inf") if n == "scale" else v) for n, v in c.constants)
        )
        for c in entry.calls
    )
    with pytest.raises(UnsupportedError, match="finite"):
        cpu.render(replace(program, entry_points=(replace(entry, calls=calls),)), HOST)
