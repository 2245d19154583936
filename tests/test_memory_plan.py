"""The memory plan, against the verifier and against an execution that really uses the bytes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerolayer.compiler.memory import PlanError, check_plan, memory_need, plan
from zerolayer.targets.program import (
    Buffer,
    BufferKind,
    EntryPoint,
    KernelCall,
    KvLayout,
    Program,
)


def call(
    name: str,
    inputs: list[str],
    outputs: list[str],
    phase: int,
    aliases: tuple[tuple[str, str], ...] = (),
) -> KernelCall:
    return KernelCall(
        name, "Op", "row", tuple(inputs), tuple(outputs), (), 1, phase, aliases=aliases
    )


def activation(name: str, nbytes: int) -> Buffer:
    return Buffer(name, BufferKind.ACTIVATION, "u8", (nbytes,), nbytes)


def program(buffers: list[Buffer], calls: list[KernelCall], **changes: object) -> Program:
    entry = EntryPoint("step", ("x",), ("logits",), tuple(calls))
    base = Program(
        "m",
        (
            Buffer("x", BufferKind.INPUT, "f32", (1,), 4),
            Buffer("logits", BufferKind.OUTPUT, "f32", (8,), 32),
            *buffers,
        ),
        (entry,),
        (),
        "balanced",
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def chain() -> Program:
    return program(
        [activation(n, 1000) for n in "abc"],
        [
            call("0", ["x"], ["a"], 0),
            call("1", ["a"], ["b"], 1),
            call("2", ["b"], ["c"], 2),
            call("3", ["c"], ["logits"], 3),
        ],
    )


def test_a_chain_needs_two_buffers() -> None:
    planned = plan(chain())
    check_plan(planned)
    assert planned.workspace_bytes == 2 * 1024
    assert planned.buffer("a").offset == planned.buffer("c").offset
    assert planned.buffer("a").offset != planned.buffer("b").offset


def test_calls_of_one_phase_do_not_share() -> None:
    p = plan(
        program(
            [activation(n, 64) for n in "abcd"],
            [
                call("0", ["x"], ["a"], 0),
                call("1", ["a"], ["b"], 1),
                call("2", ["a"], ["c"], 1),
                call("3", ["b", "c"], ["d"], 2),
                call("4", ["d"], ["logits"], 3),
            ],
        )
    )
    check_plan(p)
    assert len({p.buffer(n).offset for n in "abc"}) == 3


def test_a_tap_lives_one_phase_longer() -> None:
    p = chain()
    without = plan(p).workspace_bytes
    tapped = plan(replace(p, taps=("a", "b")))
    check_plan(tapped)
    # a is copied during phase 1, b during phase 2: each still beside what those phases touch
    assert tapped.workspace_bytes == without
    dead = program(
        [activation("a", 64), activation("b", 64), activation("t", 64)],
        [
            call("0", ["x"], ["t", "a"], 0),
            call("1", ["a"], ["b"], 1),
            call("2", ["b"], ["logits"], 2),
        ],
        taps=("t",),
    )
    planned = plan(dead)
    check_plan(planned)
    assert len({planned.buffer(n).offset for n in "abt"}) == 3


def test_in_place_aliases_share() -> None:
    p = plan(
        program(
            [activation("a", 640), activation("b", 640)],
            [
                call("0", ["x"], ["a"], 0),
                call("1", ["a"], ["b"], 1, (("b", "a"),)),
                call("2", ["b"], ["logits"], 2),
            ],
        )
    )
    check_plan(p)
    assert p.buffer("a").offset == p.buffer("b").offset


def test_an_alias_whose_input_is_read_later_is_refused() -> None:
    p = plan(
        program(
            [activation("a", 640), activation("b", 640)],
            [
                call("0", ["x"], ["a"], 0),
                call("1", ["a"], ["b"], 1, (("b", "a"),)),
                call("2", ["b", "a"], ["logits"], 2),
            ],
        )
    )
    with pytest.raises(PlanError, match="reads a"):
        check_plan(p)


def test_weights_are_aligned_and_in_order() -> None:
    weights = [
        Buffer(f"w{i}", BufferKind.WEIGHT, "u8", (n,), n) for i, n in enumerate([100, 64, 1])
    ]
    p = plan(replace(chain(), buffers=(*weights, *chain().buffers)))
    assert [p.buffer(f"w{i}").offset for i in range(3)] == [0, 128, 192]
    assert p.weights_bytes == 256
    check_plan(p)


def test_memory_need() -> None:
    kv = KvLayout(16, 16 * 1000, "f16")
    p = replace(plan(chain()), kv=kv, bounds=(("B", 1000),), weights_bytes=1 << 20)
    need = memory_need(p, sizes=(1 << 20, (1 << 20) + 2048 + 16 * 1000 * 3 + 5, 1 << 40))
    assert need.kv_bytes_per_token == 1000
    assert [c for _, c in need.contexts] == [0, 48, 16000]
    shorter = memory_need(
        p, 15990, sizes=(1 << 40,)
    )  # blocks are whole, the model's context is not
    assert shorter.contexts == ((1 << 40, 15990),)


# --- damage: every plan that the verifier accepts is executable ---------------------------------


@st.composite
def programs(draw: st.DrawFn) -> Program:
    n = draw(st.integers(1, 25))
    values = ["x"]
    calls: list[KernelCall] = []
    buffers: list[Buffer] = []
    phase_of = {"x": -1}
    last_use: dict[str, int] = {}
    for i in range(n):
        inputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
        outputs = [f"v{i}_{j}" for j in range(draw(st.integers(1, 3)))]
        phase = max(phase_of[v] for v in inputs) + 1 + draw(st.integers(0, 2))
        for v in inputs:
            last_use[v] = max(last_use.get(v, -1), phase)
        for o in outputs:
            phase_of[o] = phase
            buffers.append(activation(o, draw(st.integers(1, 2000))))
        values += outputs
        calls.append(call(str(i), inputs, outputs, phase))
    end = max(c.phase for c in calls) + 1
    calls.append(call("end", [values[-1]], ["logits"], end))
    calls.sort(key=lambda c: c.phase)
    taps = draw(st.lists(st.sampled_from(values[1:]), max_size=3, unique=True))
    by_phase: dict[int, str] = {}
    for t in taps:
        by_phase.setdefault(phase_of[t], t)
    return program(buffers, calls, taps=tuple(by_phase.values()))


def execute(p: Program, seed: int) -> None:
    """Runs the calls of each phase in random order on real bytes: every read must find the pattern
    that was written, byte for byte."""
    rng = random.Random(seed)
    memory = bytearray(p.workspace_bytes)
    pattern = {b.name: bytes([i % 255 + 1]) * b.nbytes for i, b in enumerate(p.buffers)}
    by_name = {b.name: b for b in p.buffers}
    (entry,) = p.entry_points

    def place(name: str) -> slice | None:
        b = by_name[name]
        if b.kind is BufferKind.INPUT:
            return None
        assert b.offset is not None
        return slice(b.offset, b.offset + b.nbytes)

    def read(name: str) -> None:
        s = place(name)
        assert s is None or memory[s] == pattern[name], name

    pending: list[str] = []
    for phase in sorted({c.phase for c in entry.calls}):
        calls = [c for c in entry.calls if c.phase == phase]
        rng.shuffle(calls)
        for c in calls:
            for n in c.inputs:
                assert n is not None
                read(n)
            for n in c.outputs:
                s = place(n)
                assert s is not None
                memory[s] = pattern[n]
        for n in pending:  # copied during this phase, at the latest at its end
            read(n)
        pending = [n for c in calls for n in c.outputs if n in p.taps]
    for n in (*pending, "logits"):
        read(n)


@given(programs(), st.integers(0, 1 << 30))
def test_random_programs(p: Program, seed: int) -> None:
    planned = plan(p)
    check_plan(planned)
    execute(planned, seed)
    total = sum(-(-b.nbytes // 64) * 64 for b in p.buffers if b.kind is not BufferKind.INPUT)
    assert planned.workspace_bytes <= total


@given(programs(), st.data())
def test_a_damaged_plan_is_refused_or_harmless(p: Program, data: st.DataObject) -> None:
    planned = plan(p)
    moved = data.draw(st.sampled_from([b.name for b in planned.buffers if b.offset is not None]))
    offset = data.draw(st.integers(-2, planned.workspace_bytes // 64 + 2)) * 64
    damaged = replace(
        planned,
        buffers=tuple(replace(b, offset=offset) if b.name == moved else b for b in planned.buffers),
    )
    try:
        check_plan(damaged)
    except PlanError:
        return
    for seed in range(3):
        execute(damaged, seed)


@pytest.mark.parametrize(
    ("change", "expect"),
    [
        ({"offset": 8}, "multiple of 64"),
        ({"offset": -64}, "multiple of 64"),
        ({"offset": None}, "multiple of 64"),
        ({"offset": 1 << 20}, "beyond the workspace"),
    ],
)
def test_bad_offsets(change: dict[str, object], expect: str) -> None:
    planned = plan(chain())
    damaged = replace(
        planned,
        buffers=tuple(
            replace(b, **change) if b.name == "b" else b  # type: ignore[arg-type]
            for b in planned.buffers
        ),
    )
    with pytest.raises(PlanError, match=expect):
        check_plan(damaged)


def test_phases_must_ascend() -> None:
    planned = plan(chain())
    (entry,) = planned.entry_points
    swapped = replace(entry, calls=(entry.calls[1], entry.calls[0], *entry.calls[2:]))
    with pytest.raises(PlanError):
        check_plan(replace(planned, entry_points=(swapped,)))
