"""The CPU driver against ``loader_engine.c``: the ABI around a model that is a hash."""

from __future__ import annotations

import ctypes
import mmap
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loader_fake
import pytest
from zerolayer.runtime_stub import driver_cpu
from zerolayer.runtime_stub.buffer import ReadOnlyBuffer
from zerolayer.runtime_stub.dlopen import LoadablePath
from zerolayer.runtime_stub.driver_cpu import CodeObject, CpuEngine, Memory
from zerolayer.runtime_stub.errors import (
    HardwareMismatchError,
    IntegrityError,
    ResourceError,
    UnsupportedError,
    UsageError,
    ZerolayerError,
)
from zerolayer.runtime_stub.scheduler import Scheduler
from zerolayer.runtime_stub.step import Limits, SamplingParams, StepBatch

ABI = Path(__file__).parent.parent / "templates" / "cpu" / "zl_abi.h"
WEIGHTS = bytes([loader_fake.WEIGHT_BYTE]) * 256
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def code_bytes() -> bytes:
    return loader_fake.engine_code()


@pytest.fixture
def engine(code_bytes: bytes) -> Iterator[CpuEngine]:
    with CpuEngine(CodeObject(code_bytes), WEIGHTS, 0, 256, kv_blocks=20) as e:
        yield e


def batch_of(*chunks: tuple[list[int], int, list[int], bool], params: SamplingParams = GREEDY) -> StepBatch:  # fmt: skip  # noqa: E501
    batch = StepBatch()
    for tokens, first, blocks, row in chunks:
        history = array("i", tokens)
        batch.add(history, first, array("i", blocks), (params, 0, history) if row else None)
    return batch


def test_structures_mirror_the_header(code_bytes: bytes) -> None:
    """Sizes and offsets as the C compiler lays them out."""
    expected = list[int]()
    for structure in loader_fake.STRUCTURES.values():
        expected.append(ctypes.sizeof(structure))
        expected += [getattr(structure, field[0]).offset for field in structure._fields_]
    with LoadablePath("layout", code_bytes) as path:
        values = (ctypes.c_ulong * len(expected)).in_dll(ctypes.CDLL(path), "layout")
    assert list(values) == expected
    text = ABI.read_text()
    assert f"ZL_ABI_VERSION {driver_cpu.ABI_VERSION}u" in text
    codes = {int(n) for n in re.findall(r"ZL_[A-Z_]+ = (\d+)", text)}
    assert codes == {0, *driver_cpu._STATUS}


def test_ragged_steps_are_the_reference(engine: CpuEngine) -> None:
    a, b = [5, 6, 7], list(range(20))
    out = engine.step(batch_of((a, 0, [3], True), (b[:16], 0, [1], False)))
    assert out == loader_fake.expected(a, 1)
    out = engine.step(batch_of((b[16:], 16, [1, 19], True), ([out[0]], 3, [3], True)))
    assert out == [loader_fake.expected(b, 1)[0], loader_fake.expected(a, 2)[1]]
    assert engine.step(batch_of((a, 0, [2], False))) == []


def test_sampling_fields_arrive(engine: CpuEngine) -> None:
    params = SamplingParams(temperature=1.0, seed=2**63 + 5)
    assert engine.step(batch_of(([1, 2], 0, [0], True), params=params)) == loader_fake.expected(
        [1, 2], 1, seed=2**63 + 5
    )
    penalty = SamplingParams(repetition_penalty=1.5)
    with_history = engine.step(batch_of(([1, 2], 0, [0], True), params=penalty))
    assert with_history != engine.step(batch_of(([1, 2], 0, [0], True)))


def test_scheduler_on_the_driver(code_bytes: bytes) -> None:
    limits = Limits(max_tokens=32, max_seqs=4, max_logit_rows=4, max_context=128, block_size=16)
    with CpuEngine(CodeObject(code_bytes), WEIGHTS, 0, 256, kv_blocks=9) as engine:
        scheduler = Scheduler(limits, 9, engine.step, engine.copy_block, engine.decode)
        prompts = [[i, i + 1] * (i + 1) for i in range(6)]
        seqs = [scheduler.add(p, max_new_tokens=40) for p in prompts]
        scheduler.run()
        assert [s.output for s in seqs] == [loader_fake.expected(p, 40) for p in prompts]
        assert scheduler.n_preemptions > 0
        scheduler = Scheduler(limits, 9, engine.step, engine.copy_block)
        twin = scheduler.add([1, 2, 3], max_new_tokens=30)
        for _ in range(5):
            scheduler.step()
        fork = scheduler.fork(twin)
        scheduler.run()
        assert fork.output == twin.output == loader_fake.expected([1, 2, 3], 30)


def test_several_steps_are_one_call(engine: CpuEngine) -> None:
    a, b = [5, 6, 7], [8] * 14
    first = engine.step(batch_of((a, 0, [3], True), (b, 0, [1, 2], True)))
    want = [list(t) for t in zip(*(loader_fake.expected(p, 7)[1:] for p in (a, b)), strict=True)]
    one, two = ([first[0]], 3, [3], True), ([first[1]], 14, [1, 2], True)
    assert engine.decode(batch_of(one, two), 6) == want
    assert all(want[3][1] not in step for step in want[:3])
    assert engine.decode(batch_of(one, two), 6, frozenset({want[3][1]})) == want[:4]
    assert engine.decode(batch_of(one, two), 6) == want, "the stop ids are forgotten"
    with pytest.raises(ZerolayerError, match="KV block"):
        engine.decode(batch_of(one), 14)  # position 16 is not in its block
    with pytest.raises(ZerolayerError, match="KV block"):
        engine.decode(batch_of(one, two), 14)  # nor beside a sequence with more blocks
    params = SamplingParams(temperature=1.0, seed=9)
    drawn = loader_fake.expected([1, 2], 6, seed=9)
    batch = batch_of(([1, 2], 0, [0], True), params=params)
    assert engine.step(batch) == drawn[:1]
    batch = StepBatch()
    batch.add(array("i", drawn[:1]), 2, array("i", [0]), (params, 1, array("i")))
    assert engine.decode(batch, 5) == [[token] for token in drawn[1:]]


def test_code_of_an_older_compiler_makes_one_step(code_bytes: bytes) -> None:
    old = CodeObject(loader_fake.engine_code("WITHOUT_TRACE"))
    with CpuEngine(old, WEIGHTS, 0, 256, kv_blocks=20) as engine:
        one_step = [loader_fake.expected([5, 6], 1)]
        assert engine.decode(batch_of(([5, 6], 0, [3], True)), 4) == one_step


def test_optional_outputs(engine: CpuEngine) -> None:
    logits = (ctypes.c_float * loader_fake.VOCAB)()
    taps = bytearray(4 * 3 * 2)
    one = batch_of(([1, 2, 3], 0, [0], True))
    token = engine.step(one, logits=logits, taps=taps, timed=True)[0]
    assert [i for i, v in enumerate(logits) if v] == [token]
    assert array("f", bytes(taps)).tolist() == [0, 1, 2, 3, 4, 5]
    assert engine.call_ns == [1000, 2000, 3000]
    with pytest.raises(UsageError, match="logits buffer has 4 bytes"):
        engine.step(batch_of(([1], 0, [0], True)), logits=bytearray(4))


def test_statuses_become_typed_errors(engine: CpuEngine, code_bytes: bytes) -> None:
    with pytest.raises(ResourceError, match="33 tokens"):
        engine.step(batch_of(([1] * 33, 0, [0, 1, 2], True)))
    with pytest.raises(UsageError, match="vocabulary"):
        engine.step(batch_of(([259], 0, [0], True)))
    with pytest.raises(ZerolayerError, match="KV block"):
        engine.step(batch_of(([1], 0, [20], True)))
    with pytest.raises(ZerolayerError, match="KV block"):
        engine.step(batch_of(([1], 16, [0], True)))
    with pytest.raises(ResourceError, match="threads"):
        CpuEngine(CodeObject(code_bytes), WEIGHTS, 0, 256, kv_blocks=1, n_threads=101)
    with pytest.raises(ZerolayerError, match="KV block"):
        engine.copy_block(0, 20)
    with pytest.raises(ZerolayerError, match="status 99"):
        driver_cpu.check_status(99, "here")


def test_copy_block_and_run(engine: CpuEngine) -> None:
    engine.step(batch_of(([7, 8, 9], 0, [4], False)))
    engine.copy_block(4, 11)
    assert engine.step(batch_of(([1], 3, [11], True))) == loader_fake.expected([7, 8, 9, 1], 1)
    x, y = array("f", [1, 2.5]), array("f", [0, 0])
    engine.run([x], [y], [2])
    assert y.tolist() == [2, 5]
    with pytest.raises(UnsupportedError, match="entry point"):
        engine.run([], [], [])


def test_wrong_code_is_refused_before_use(code_bytes: bytes) -> None:
    with pytest.raises(UnsupportedError, match="ABI version 7, this loader speaks 1"):
        CodeObject(loader_fake.with_abi(code_bytes, 7))
    with pytest.raises(HardwareMismatchError, match="refuses"):
        CodeObject(b"\x7fELF nonsense")
    foreign = bytearray(code_bytes)
    foreign[18] = 183  # e_machine: aarch64
    with pytest.raises(HardwareMismatchError):
        CodeObject(bytes(foreign))
    code = CodeObject(code_bytes)
    with pytest.raises(IntegrityError, match="max_tokens = 33, the code object 32"):
        code.check_against({"max_tokens": 33})
    with pytest.raises(IntegrityError, match="256 bytes of weights, the file has 100"):
        CpuEngine(code, WEIGHTS, 0, 100, kv_blocks=1)
    with pytest.raises(IntegrityError, match="weights"):
        CpuEngine(code, WEIGHTS, 8, 256, kv_blocks=1)


def test_two_objects_loaded_one_after_the_other_are_two(code_bytes: bytes) -> None:
    """Descriptor numbers are reused; glibc must not take the second path for the first library."""
    first = CodeObject(code_bytes)
    with pytest.raises(UnsupportedError, match="ABI version 7"):
        CodeObject(loader_fake.with_abi(code_bytes, 7))
    assert first.info.abi_version == 1


def test_without_memfd_a_private_file_is_used_and_removed(
    code_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with LoadablePath("x", code_bytes, use_memfd=False) as path:
        assert Path(path).stat().st_mode & 0o777 == 0o700
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
        ctypes.CDLL(path)
    assert list(tmp_path.iterdir()) == []

    def forbidden(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", forbidden)
    assert CodeObject(code_bytes).info.max_tokens == 32
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ResourceError, match="memfd_create is forbidden"):
        CodeObject(code_bytes)


def test_the_engine_keeps_the_weights_mapped(code_bytes: bytes, tmp_path: Path) -> None:
    file = tmp_path / "w"
    file.write_bytes(WEIGHTS)
    with file.open("rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    engine = CpuEngine(CodeObject(code_bytes), mapped, 0, 256, kv_blocks=1)
    with pytest.raises(BufferError):
        mapped.close()
    engine.close()
    engine.close()
    mapped.close()


def test_memory_is_aligned_and_refused_with_numbers() -> None:
    for size in (1, 4096, 3 << 20):
        memory = Memory(size, "test")
        assert memory.address % (64 if size < 2 << 20 else 2 << 20) == 0
        ctypes.memset(memory.address, 1, size)
        memory.close()
    with pytest.raises(ResourceError, match=f"cannot allocate {1 << 60} bytes for the KV pool"):
        Memory(1 << 60, "KV pool")
    view = ReadOnlyBuffer(b"abc")
    assert ctypes.string_at(view.address, view.nbytes) == b"abc"
    view.close()
