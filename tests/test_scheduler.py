"""The scheduler against a model of a language model that reads only what is in the KV blocks.

The fake step stores (token, position) in block slots and computes the next token from *all* slots
of the sequence's table, so a wrong table, a lost or overwritten block or a stale share changes
tokens.
The expected tokens come from ``reference``, which has no blocks at all.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zerolayer.runtime_stub.blocks import ROOT, BlockPool
from zerolayer.runtime_stub.errors import ResourceError, UsageError
from zerolayer.runtime_stub.scheduler import Scheduler, Sequence
from zerolayer.runtime_stub.step import CALL_S, Limits, Pace, SamplingParams, StepBatch

VOCAB = 50


def rule(tokens: SequenceOf[int], seed: int, draw: int) -> int:
    """The fake model: the next token after ``tokens``."""
    text = ",".join(map(str, tokens)) + f"|{seed}|{draw}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % VOCAB


def reference(prompt: SequenceOf[int], n: int, seed: int = 0, stop: frozenset[int] = frozenset(),
              context: int = 1 << 30) -> list[int]:  # fmt: skip
    tokens, out = list(prompt), list[int]()
    while len(out) < n and len(tokens) < context:
        token = rule(tokens, seed, len(out))
        if token in stop:
            break
        tokens.append(token)
        out.append(token)
    return out


class FakeModel:
    """Checks every batch against the ABI's rules and keeps KV as (token, position) per slot."""

    def __init__(self, limits: Limits, n_blocks: int) -> None:
        self.limits = limits
        self.kv: list[Any] = [None] * (n_blocks * limits.block_size)
        self.tokens_computed = 0
        self.calls = 0  # of decode

    def copy_block(self, source: int, destination: int) -> None:
        size = self.limits.block_size
        self.kv[destination * size : (destination + 1) * size] = self.kv[
            source * size : (source + 1) * size
        ]

    def __call__(self, batch: StepBatch) -> list[int]:
        limits, size = self.limits, self.limits.block_size
        n_tokens, n_seqs = len(batch.tokens), len(batch.block_tables)
        assert 1 <= n_tokens <= limits.max_tokens
        assert 1 <= n_seqs <= limits.max_seqs
        assert len(batch.rows) <= limits.max_logit_rows
        assert len(batch.seq_starts) == n_seqs + 1
        assert batch.seq_starts[0] == 0
        assert batch.seq_starts[-1] == n_tokens == len(batch.positions)
        row_numbers = [r.row for r in batch.rows]
        assert row_numbers == sorted(set(row_numbers))
        owner: dict[int, int] = {}
        for s in range(n_seqs):
            first, last = batch.seq_starts[s], batch.seq_starts[s + 1]
            assert first < last
            positions = batch.positions[first:last].tolist()
            assert positions == list(range(positions[0], positions[0] + last - first))
            table = batch.block_tables[s]
            for i in range(first, last):
                slot = table[batch.positions[i] // size] * size + batch.positions[i] % size
                assert owner.setdefault(slot, s) == s, "two sequences write one slot"
                self.kv[slot] = (batch.tokens[i], batch.positions[i])
        self.tokens_computed += n_tokens
        out = []
        for row in batch.rows:
            s = next(
                k for k in range(n_seqs) if batch.seq_starts[k] <= row.row < batch.seq_starts[k + 1]
            )
            table, seen = batch.block_tables[s], []
            for position in range(batch.positions[row.row] + 1):
                token, at = self.kv[table[position // size] * size + position % size]
                assert at == position, "a slot holds another position"
                seen.append(token)
            assert seen == row.history.tolist(), "the KV is not the sequence's history"
            out.append(rule(seen, row.params.seed, row.draw))
        return out

    def decode(self, batch: StepBatch, steps: int, stop_ids: frozenset[int]) -> list[list[int]]:
        """Single steps, each fed with what the one before chose."""
        self.calls += 1
        n = len(batch.rows)
        assert len(batch.tokens) == len(batch.block_tables) == n
        tokens, histories = batch.tokens, [array("i", r.history) for r in batch.rows]
        out: list[list[int]] = []
        while len(out) < steps and stop_ids.isdisjoint(out[-1] if out else ()):
            step = StepBatch()
            for s, row in enumerate(batch.rows):
                assert len(batch.block_tables[s]) * self.limits.block_size >= (
                    batch.positions[s] + steps
                ), "no block for the last step"
                row_now = (row.params, row.draw + len(out), histories[s])
                place = batch.positions[s] + len(out)
                step.add(tokens[s : s + 1], place, batch.block_tables[s], row_now)
            out.append(self(step))
            tokens = array("i", out[-1])
            for history, token in zip(histories, tokens, strict=True):
                history.append(token)
        return out


class FixedPace(Pace):
    """So many steps a call."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.fixed = steps

    def steps(self, most: int, sequences: int) -> int:
        return min(self.fixed, most)


def make(
    n_blocks: int, copy: bool = True, steps: int = 0, **kw: int
) -> tuple[Scheduler, FakeModel]:
    """``steps``: of a call that decodes; 0: the driver makes single ones."""
    values = {"max_tokens": 16, "max_seqs": 4, "max_logit_rows": 4, "max_context": 64,
              "block_size": 4} | kw  # fmt: skip
    limits = Limits(**values)
    model = FakeModel(limits, n_blocks)
    copy_block, decode = model.copy_block if copy else None, model.decode if steps else None
    scheduler = Scheduler(limits, n_blocks, model, copy_block, decode)
    scheduler._pace = FixedPace(steps)
    return scheduler, model


def drain(scheduler: Scheduler) -> None:
    for _ in range(5000):
        if scheduler.idle:
            break
        scheduler.step()
        scheduler.pool.check()
        assert 0.0 <= scheduler.memory_fragmentation_score() <= 1.0
    assert scheduler.idle, "the scheduler does not come to an end"
    assert scheduler.pool.held == 0, "blocks leak"
    assert scheduler.pool.available == scheduler.pool.n_blocks


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=1, max_size=30),  # small alphabet: shared prefixes
        st.integers(1, 25),  # new tokens
        st.integers(0, 2),  # seed
        st.integers(0, 12),  # submitted after this many steps
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests,
    n_blocks=st.integers(9, 40),
    max_tokens=st.integers(1, 20),
    max_seqs=st.integers(1, 6),
    max_logit_rows=st.integers(1, 6),
    steps=st.sampled_from([0, 1, 2, 5, 100]),
)
def test_tokens_do_not_depend_on_scheduling(
    requests: list[tuple[list[int], int, int, int]],
    n_blocks: int,
    max_tokens: int,
    max_seqs: int,
    max_logit_rows: int,
    steps: int,
) -> None:
    scheduler, _ = make(
        n_blocks,
        steps=steps,
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        max_logit_rows=max_logit_rows,
    )
    stop = frozenset({7})
    todo = sorted(requests, key=lambda r: r[3])
    done: list[tuple[Sequence, list[int]]] = []
    for step in range(13):
        while todo and todo[0][3] <= step:
            prompt, n, seed, _ = todo.pop(0)
            seq = scheduler.add(
                prompt, sampling=SamplingParams(seed=seed), max_new_tokens=n, stop_ids=stop
            )
            done.append((seq, reference(prompt, n, seed, stop, scheduler.context_limit)))
        scheduler.step()
        scheduler.pool.check()
    drain(scheduler)
    for seq, expected in done:
        assert seq.output == expected
        assert seq.finished
        assert seq.finish_reason in ("stop", "length")


def test_preemption_gives_the_same_tokens_and_is_counted() -> None:
    scheduler, _ = make(10)  # 40 positions for three sequences that want 30 each
    seqs = [scheduler.add([i, i + 1], max_new_tokens=28) for i in range(3)]
    drain(scheduler)
    assert scheduler.n_preemptions > 0
    assert seqs[0].preemptions == 0, "the oldest is never preempted"
    for i, seq in enumerate(seqs):
        assert seq.output == reference([i, i + 1], 28)
        assert (seq.finish_reason, seq.stopped_by) == ("length", "max_tokens")


def test_chunked_prefill_goes_on_beside_decoding() -> None:
    scheduler, _ = make(40, max_tokens=8)
    short = scheduler.add([1], max_new_tokens=40)
    scheduler.step()
    long = scheduler.add(list(range(40)), max_new_tokens=1)
    before = len(short.output)
    while not long.finished:
        scheduler.step()
    assert len(short.output) - before >= 6, "the long prefill must not hold up the short sequence"
    assert long.output == reference(list(range(40)), 1)


def test_decoding_crowd_does_not_starve_a_prefill() -> None:
    scheduler, _ = make(64, max_tokens=4, max_seqs=5)
    for i in range(4):
        scheduler.add([i], max_new_tokens=50)
    for _ in range(3):
        scheduler.step()
    late = scheduler.add(list(range(12)), max_new_tokens=1)
    for _ in range(20):
        scheduler.step()
    assert late.finished
    drain(scheduler)


def test_admission_is_first_come_first_served() -> None:
    scheduler, _ = make(10, max_seqs=8)
    big = scheduler.add(list(range(30)), max_new_tokens=5)
    huge = scheduler.add(list(range(36)), max_new_tokens=2)
    small = scheduler.add([1], max_new_tokens=1)
    order: list[int] = []
    for seq in (big, huge, small):
        seq.on_token = lambda s, _t: order.append(s.number)
    drain(scheduler)
    assert order.index(huge.number) < order.index(small.number)


def test_prefix_sharing_saves_the_work() -> None:
    scheduler, model = make(40)
    prefix = list(range(20))
    first = scheduler.add([*prefix, 1], max_new_tokens=1)
    drain(scheduler)
    computed = model.tokens_computed
    second = scheduler.add([*prefix, 2], max_new_tokens=1)
    drain(scheduler)
    assert first.n_shared == 0
    assert second.n_shared == 20
    assert model.tokens_computed - computed == 1
    assert second.output == reference([*prefix, 2], 1)


@pytest.mark.parametrize("copy", [True, False])
def test_forks_share_and_diverge(copy: bool) -> None:
    scheduler, model = make(40, copy=copy)
    seq = scheduler.add([1, 2, 3, 4, 5, 6], max_new_tokens=12)
    for _ in range(4):
        scheduler.step()
    so_far = len(seq.output)
    held = scheduler.pool.held
    twin = scheduler.fork(seq, sampling=SamplingParams(seed=1))
    assert scheduler.pool.held == held, "a fork takes no block"
    drain(scheduler)
    assert seq.output == reference([1, 2, 3, 4, 5, 6], 12)
    expected = seq.output[:so_far]
    while len(expected) < 12:
        expected.append(rule([1, 2, 3, 4, 5, 6, *expected], 1, len(expected)))
    assert twin.output == expected
    assert model.tokens_computed <= 6 + 2 * 12 + 4


def test_several_steps_are_one_call_where_all_decode() -> None:
    scheduler, model = make(40, steps=5)
    seqs = [scheduler.add([i, i + 1], max_new_tokens=11) for i in range(2)]
    assert scheduler.step() == seqs, "prefill is a step"
    got = scheduler.step()
    assert got == seqs * 5, "each sequence as often as it got a token"
    assert (scheduler.n_steps, model.calls) == (6, 1)
    late = scheduler.add([9], max_new_tokens=2)
    assert late in scheduler.step(), "a prompt waits for one call"
    drain(scheduler)
    for i, seq in enumerate(seqs):
        assert seq.output == reference([i, i + 1], 11)
    assert late.output == reference([9], 2)
    assert scheduler.n_steps < 13 + 2


def test_the_end_of_one_sequence_ends_the_call() -> None:
    scheduler, model = make(40, steps=30, max_context=64)
    prompts = [[1, 2], [3, 4]]
    stop = reference(prompts[0], 9)[7]  # not chosen before
    assert reference(prompts[0], 30).index(stop) == 7
    seqs = [scheduler.add(p, max_new_tokens=40, stop_ids={stop}) for p in prompts]
    scheduler.step()
    scheduler.step()
    assert seqs[0].stopped_by == "eos"
    assert model.tokens_computed == 4 + 2 * 7, "what comes after the end is not computed"
    drain(scheduler)
    for prompt, seq in zip(prompts, seqs, strict=True):
        assert seq.output == reference(prompt, 40, stop=frozenset({stop}))


def test_a_callback_drops_what_the_call_computed_past_it() -> None:
    scheduler, _ = make(40, steps=9)
    seen: list[int] = []

    def on_token(seq: Sequence, token: int) -> bool:
        seen.append(token)
        return len(seq.output) == 4

    seq = scheduler.add([1], on_token=on_token)
    other = scheduler.add([2], max_new_tokens=20)
    scheduler.step()
    scheduler.step()
    assert seq.output == seen == reference([1], 4)
    assert (seq.finish_reason, seq.stopped_by) == ("stop", "stop_string")
    drain(scheduler)
    assert other.output == reference([2], 20)


@pytest.mark.parametrize("at", range(2, 8))
@pytest.mark.parametrize("length", [8, 20])  # 8: the parent ends in the call that it is forked in
@pytest.mark.parametrize("end_parent", [True, False])
def test_a_fork_amid_a_call_goes_on_from_what_was_handed_out(
    at: int, length: int, end_parent: bool
) -> None:
    scheduler, _ = make(60, steps=7)
    twins: list[Sequence] = []

    def on_token(seq: Sequence, _token: int) -> bool:
        if seq is parent and len(seq.output) == at:
            twins.append(scheduler.fork(seq, sampling=SamplingParams(seed=1)))
            return end_parent
        return False

    parent = scheduler.add([1, 2, 3], max_new_tokens=length, on_token=on_token)
    drain(scheduler)
    same = reference([1, 2, 3], length)
    assert parent.output == (same[:at] if end_parent else same)
    expected = same[:at]
    while len(expected) < length:
        expected.append(rule([1, 2, 3, *expected], 1, len(expected)))
    assert twins[0].output == expected
    known = [1, 2, 3, *same[:7]]
    again = scheduler.add(known, max_new_tokens=5)
    drain(scheduler)
    assert again.output == reference(known, 5), "a known block was written to"


@pytest.mark.parametrize("steps", [0, 7])
@pytest.mark.parametrize(("prompt", "blocks", "why"), [(3, 40, "max_tokens"), (14, 5, "context")])
def test_the_last_token_is_nothing_to_fork_from(
    steps: int, prompt: int, blocks: int, why: str
) -> None:
    """Neither by ``max_new_tokens`` nor by the context may a fork have one token more."""
    scheduler, _ = make(blocks, steps=steps, max_context=20)
    refused: list[int] = []

    def on_token(seq: Sequence, _token: int) -> bool:
        if len(seq.output) == 6:
            with pytest.raises(UsageError, match="last token"):
                scheduler.fork(seq)
            refused.append(len(seq.tokens))
        return False

    seq = scheduler.add(range(prompt), max_new_tokens=6 if prompt == 3 else 99, on_token=on_token)
    drain(scheduler)
    assert refused == [prompt + 6]
    assert (seq.stopped_by, seq.output) == (why, reference([*range(prompt)], 6))
    assert scheduler.pool.held == 0


def test_a_penalty_and_a_full_pool_are_single_steps() -> None:
    scheduler, model = make(40, steps=5)
    seq = scheduler.add([1], sampling=SamplingParams(repetition_penalty=1.1), max_new_tokens=6)
    drain(scheduler)
    assert model.calls == 0, "its history grows with each step"
    assert seq.output == reference([1], 6)
    scheduler, model = make(4, steps=9, max_context=16)
    seqs = [scheduler.add([i], max_new_tokens=7) for i in range(2)]  # 8 positions each, all of it
    drain(scheduler)
    assert (scheduler.n_preemptions, model.calls > 0) == (0, True)
    assert [s.output for s in seqs] == [reference([i], 7) for i in range(2)]


def test_the_pace_is_what_fits_in_a_call() -> None:
    pace = Pace()
    assert pace.steps(100, 1) == 1, "nothing is known yet"
    pace.took(1, CALL_S / 5.5)
    assert (pace.steps(100, 1), pace.steps(3, 1)) == (5, 3)
    assert pace.steps(100, 2) == 1, "nothing is known of two sequences"
    pace.took(5, 5 * CALL_S)
    assert pace.steps(100, 2) == 1
    pace.took(1, 0.0)  # a clock that did not move
    assert pace.steps(100, 2) == 100


def test_spare_blocks_of_one_sequence_pay_for_no_other() -> None:
    scheduler, _ = make(11, steps=20)
    stop = reference([2], 2)[1]
    a = scheduler.add([1], max_new_tokens=40)
    c = scheduler.add([2], max_new_tokens=40, stop_ids={stop})
    scheduler.step()  # blocks for 20 steps, of which the second ends the call
    assert (c.stopped_by, len(c.output), len(a.blocks)) == ("eos", 1, 5)
    prompt = [0, 1, 2, 3] * 4
    d = scheduler.add(prompt, max_new_tokens=12)
    drain(scheduler)
    assert a.output == reference([1], 40)
    assert d.output == reference(prompt, 12)


def test_spare_blocks_do_not_hide_that_a_copy_needs_one() -> None:
    scheduler, _ = make(5, steps=3)
    prompts = [[0, 1], [1, 1], [2]]
    stop = reference(prompts[2], 2)[1]
    seqs = [scheduler.add(p, max_new_tokens=6) for p in prompts[:2]]
    short = scheduler.add(prompts[2], max_new_tokens=6, stop_ids={stop})
    scheduler.step()
    scheduler.step()
    assert short.stopped_by == "eos"
    assert [(s.n_computed, len(s.blocks)) for s in seqs] == [(3, 2)] * 2, "a spare block each"
    twins = [scheduler.fork(s) for s in seqs]
    drain(scheduler)
    for prompt, seq, twin in zip(prompts, seqs, twins, strict=False):
        assert twin.output == seq.output == reference(prompt, 6)


@pytest.mark.parametrize("stop", [-1, 1 << 31, None, 2.0, "x", True])
def test_a_stop_id_is_a_token_id(stop: Any) -> None:
    scheduler, _ = make(5)
    with pytest.raises(UsageError, match="stop id"):
        scheduler.add([1], stop_ids=[stop])
    assert scheduler.idle


@pytest.mark.parametrize("steps", [0, 5])
def test_a_callback_that_raises_leaves_the_others_as_they_were(steps: int) -> None:
    scheduler, _ = make(40, steps=steps)

    def on_token(seq: Sequence, _token: int) -> bool:
        if len(seq.output) in (3, 9):
            raise RuntimeError("the reader is gone")
        return False

    seqs = [scheduler.add([i], max_new_tokens=9) for i in range(3)]
    seqs[1].on_token = on_token
    for _ in range(2):
        with pytest.raises(RuntimeError):
            drain(scheduler)
        scheduler.pool.check()
    drain(scheduler)
    assert [s.output for s in seqs] == [reference([i], 9) for i in range(3)]


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("other", [0, 2])  # served before, and after
def test_a_callback_forks_and_cancels_another_sequence(steps: int, other: int) -> None:
    scheduler, _ = make(60, steps=steps)
    twins: list[Sequence] = []
    handed: list[int] = []

    def on_token(seq: Sequence, _token: int) -> bool:
        if len(seq.output) == 3:
            handed.append(len(seqs[other].output))
            twins.append(scheduler.fork(seqs[other]))
            scheduler.cancel(seqs[other])
        return False

    seqs = [scheduler.add([i, i], max_new_tokens=9) for i in range(3)]
    seqs[1].on_token = on_token
    while not twins:
        got = scheduler.step()
    assert got.count(seqs[other]) <= got.count(seqs[1]), "a token after the end"
    assert seqs[other].output == reference([other, other], handed[0])
    drain(scheduler)
    assert twins[0].output == reference([other, other], 9)
    assert seqs[1].output == reference([1, 1], 9)


def test_a_call_ends_at_the_context_s_end() -> None:
    scheduler, _ = make(5, steps=7, max_context=20)  # whose blocks end there, too
    seq = scheduler.add([1, 2, 3])
    drain(scheduler)
    assert (len(seq.tokens), seq.finish_reason, seq.stopped_by) == (20, "length", "context")
    assert seq.output == reference([1, 2, 3], 17)


def test_another_sequence_s_stop_id_ends_the_call_and_nothing_else() -> None:
    scheduler, model = make(40, steps=30)
    want = reference([4], 20)
    seq = scheduler.add([4], max_new_tokens=20)
    other = scheduler.add([5], max_new_tokens=20, stop_ids={want[3]})
    drain(scheduler)
    assert seq.output == want
    assert other.output == reference([5], 20, stop=frozenset({want[3]}))
    assert model.calls >= 2


def test_callback_stops_and_cancel_releases() -> None:
    scheduler, _ = make(20)
    seq = scheduler.add([1], on_token=lambda s, _t: len(s.output) == 3)
    other = scheduler.add([2])
    for _ in range(5):
        scheduler.step()
    assert (seq.finish_reason, seq.stopped_by, len(seq.output)) == ("stop", "stop_string", 3)
    scheduler.cancel(other)
    assert other.finish_reason == "cancelled"
    drain(scheduler)


def test_context_limit_ends_a_sequence() -> None:
    scheduler, _ = make(40, max_context=20)
    seq = scheduler.add([1, 2, 3])
    drain(scheduler)
    assert (len(seq.tokens), seq.finish_reason, seq.stopped_by) == (20, "length", "context")


def test_a_failing_step_leaves_a_consistent_scheduler() -> None:
    scheduler, model = make(20, steps=3)
    seq = scheduler.add([1, 2, 3], max_new_tokens=4)
    good = scheduler._step

    def fail(*_arguments: Any) -> Any:
        raise ResourceError("no memory")

    scheduler._step = fail
    with pytest.raises(ResourceError):
        scheduler.step()
    scheduler.pool.check()
    scheduler._step = good
    scheduler.step()
    scheduler._decode = fail
    with pytest.raises(ResourceError):
        scheduler.step()
    scheduler.pool.check()
    scheduler._decode = model.decode
    drain(scheduler)
    assert seq.output == reference([1, 2, 3], 4)
    assert model.limits is scheduler.limits


def test_requests_that_can_never_run_are_refused_with_numbers() -> None:
    scheduler, _ = make(4)  # 16 positions
    with pytest.raises(UsageError, match="empty"):
        scheduler.add([])
    with pytest.raises(ResourceError, match=r"has 16 tokens, the context holds 16"):
        scheduler.add(list(range(16)))
    by_model, _ = make(40)
    with pytest.raises(UsageError, match=r"has 70 tokens, the context holds 64"):
        by_model.add(list(range(70)))
    with pytest.raises(ResourceError, match="KV pool"):
        BlockPool(0, 4)


def test_fragmentation_score_is_the_documented_formula() -> None:
    scheduler, _ = make(20)
    assert scheduler.memory_fragmentation_score() == 0.0
    scheduler.add([1, 2, 3, 4, 5], max_new_tokens=3)  # 5 positions in 2 blocks of 4
    scheduler.step()
    assert scheduler.memory_fragmentation_score() == pytest.approx(1 - 5 / 8)
    scheduler.step()
    assert scheduler.memory_fragmentation_score() == pytest.approx(1 - 6 / 8)


def test_block_pool_evicts_the_oldest_and_finds_only_exact_content() -> None:
    pool = BlockPool(2, 4)
    a, b = pool.allocate(), pool.allocate()
    serial = pool.publish(a, ROOT, b"aaaa")
    pool.publish(b, serial, b"bbbb")
    pool.release(b)
    pool.release(a)
    assert pool.find(ROOT, b"aaaa") == (a, serial)
    assert pool.find(ROOT, b"bbbb") is None
    assert pool.available == 2
    assert pool.allocate() == b, "the first released goes first"
    assert pool.find(serial, b"bbbb") is None
    with pytest.raises(ResourceError, match="all 2 KV blocks"):
        [pool.allocate() for _ in range(2)]
    pool.release(b)
    with pytest.raises(ValueError, match="more often"):
        pool.release(b)
