"""The same tokens, and the same bits of every logit, whatever a sequence is computed beside.

In: artifacts, compiled as a user would.  Each precision that a target knows (activations, KV cache)
is run alone and in every other company: other chunks of the prompt, other threads, other blocks,
other sequences that came earlier or later.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cli_run import zerolayer
from tiny_models import VOCAB, make_model
from zerolayer.runtime_stub.container import open_artifact
from zerolayer.runtime_stub.detect import host_facts
from zerolayer.runtime_stub.driver_cpu import CodeObject, CpuEngine
from zerolayer.runtime_stub.errors import UsageError, ZerolayerError
from zerolayer.runtime_stub.requires import compare
from zerolayer.runtime_stub.scheduler import Scheduler
from zerolayer.runtime_stub.session import Session
from zerolayer.runtime_stub.step import Limits, Pace, SamplingParams, StepBatch
from zerolayer.targets.facts import load_target

F32 = npt.NDArray[np.float32]
KV_BLOCKS = 320
NEW = 5  # tokens after the prompt
SEEDED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=7)

# (model, overrides, prompt tokens): attention over several spans of positions, which threads share,
# with grouped heads; a window that moves through chunks of 64, with norms of heads; logits through
# a cap
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", {"max_position_embeddings": 1400, "num_hidden_layers": 2}, 1100),
    "llama-32": (
        "llama",
        {"max_position_embeddings": 1400, "num_hidden_layers": 2, "head_dim": 32},
        1100,
    ),
    "gemma3": ("gemma3", {"max_position_embeddings": 400, "sliding_window": 70}, 203),
    "gemma2": ("gemma2", {"max_position_embeddings": 400, "sliding_window": 90}, 150),
}
# (model, activations, options of compile)
PRECISIONS = [
    ("llama", "int8", ("--quantize", "int4")),
    ("llama", "bf16", ("--quantize", "bf16")),
    ("llama", "f32", ()),
    ("llama-32", "int8", ("--quantize", "int4", "--kv-dtype", "q8_0")),
    ("llama-32", "f32", ("--kv-dtype", "q8_0")),
    ("gemma3", "int8", ("--quantize", "int8")),
    ("gemma2", "bf16", ("--quantize", "int4", "--fusion", "balanced")),
    ("gemma2", "int8", ("--quantize", "int4", "--fusion", "conservative")),
]
TARGETS = ["x86-64-v3", "zen4"]
#: for which one and two tokens read two streams of weights, as on zen3
STREAMS = """name: streams
family: cpu
extends: x86-64-v3
facts:
  stream_prefetch_bytes: {value: 1536, unit: byte, source: a test}
  weight_streams: {value: 2, unit: streams, source: a test}
"""


@dataclass(frozen=True)
class Compiled:
    """An artifact and the prompt that is looked at."""

    path: Path
    prompt: list[int]
    vocab: int


def tokens(count: int, seed: int) -> list[int]:
    """Ids without the special ones."""
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, (case, overrides, _count) in MODELS.items():
        (root / name).mkdir()
        make_model(case, root / name, **overrides)
    return {name: root / name for name in MODELS}


@pytest.fixture(
    scope="module",
    params=[(t, *p) for t in TARGETS for p in PRECISIONS]
    + [("streams", *p) for p in PRECISIONS if p[:2] in (("llama", "int8"), ("llama", "bf16"))],
    ids=lambda p: "-".join((p[0], p[1], p[2], *(o for o in p[3] if o[:2] != "--"))),
)
def compiled(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Compiled:
    target, model, activations, options = request.param
    if target == "streams":
        file = tmp_path_factory.mktemp("target") / "streams.yaml"
        file.write_text(STREAMS)
        target = str(file)
    missing = compare(load_target(target).requires.as_dict(), host_facts())
    if missing:
        pytest.skip(f"this host cannot execute {target} code: {missing[0]}")
    out = tmp_path_factory.mktemp("out") / "model.zla"
    done = zerolayer(
        "compile", models[model], "--target", target, "--activations", activations, *options,
        "--no-verify", "-o", out,
    )  # fmt: skip
    assert done.code == 0, done.err
    return Compiled(out, tokens(MODELS[model][2], 1), VOCAB)


@contextlib.contextmanager
def engine(path: Path, threads: int = 2, dirty: bool = False) -> Iterator[CpuEngine]:
    """The artifact's kernels over its weights; ``dirty``: a pool whose every number is NaN."""
    artifact = open_artifact(str(path))
    weights, offset = artifact.map_weights()
    code = CodeObject(artifact.member(artifact.manifest["code"]["path"]))
    size = artifact.manifest["memory"]["weights_bytes"]
    with CpuEngine(code, weights, offset, size, kv_blocks=KV_BLOCKS, n_threads=threads) as run:
        if dirty:
            import ctypes

            ctypes.memset(run._kv_address, 0xFF, KV_BLOCKS * code.info.kv_block_bytes)
        yield run


@dataclass
class Guest:
    """A sequence among others: its tokens, its blocks, the step that it joins at."""

    tokens: list[int]
    blocks: Sequence[int]
    chunk: int
    joins: int = 0
    params: SamplingParams = SamplingParams()  # noqa: RUF009 (never changed)
    at: int = 0


def together(run: CpuEngine, guests: Sequence[Guest], vocab: int) -> tuple[list[int], F32]:
    """The first guest's next ``NEW`` tokens and their logits, all guests computed in turn."""
    size, limit = run.code.info.kv_block_size, run.code.info.max_tokens
    first = guests[0]
    out: list[int] = []
    rows: list[F32] = []
    step = 0
    while len(out) < NEW:
        batch, ends = StepBatch(), []
        for guest in guests:
            count = min(len(guest.tokens) - guest.at, guest.chunk, limit - len(batch.tokens))
            if step < guest.joins or count < 1:
                continue
            part = guest.tokens[guest.at : guest.at + count]
            last = guest.at + count == len(guest.tokens)
            draw = len(out) if guest is first else step
            used = -(-(guest.at + count) // size)
            row = (guest.params, draw, array("i")) if last else None
            batch.add(array("i", part), guest.at, array("i", guest.blocks[:used]), row)
            guest.at += count
            if last:
                ends.append(guest)
        step += 1
        if not batch.tokens:
            continue
        logits = np.zeros((max(1, len(ends)), vocab), np.float32)
        for guest, token, row_logits in zip(
            ends, run.step(batch, logits=logits), logits, strict=False
        ):
            guest.tokens = [*guest.tokens, token]
            if guest is first:
                out.append(token)
                rows.append(row_logits.copy())
    return out, np.stack(rows)


def company(count: int, used: int) -> list[Guest]:
    """Other sequences, of other lengths, that join at other steps."""
    lengths = (9, 64, 1, 200, 33, 70, 17)
    guests = []
    for i in range(count):
        blocks = range(used + 20 * i, used + 20 * (i + 1))
        guests.append(Guest(tokens(lengths[i], 10 + i), blocks, 1 + 13 * i, joins=(5 * i) % 4))
    return guests


def assert_same(got: tuple[list[int], F32], want: tuple[list[int], F32], where: str) -> None:
    """Token by token, bit by bit."""
    assert got[0] == want[0], where
    assert np.array_equal(got[1].view(np.uint32), want[1].view(np.uint32)), where


def test_no_bit_depends_on_the_company(compiled: Compiled) -> None:
    prompt, vocab = compiled.prompt, compiled.vocab
    n = len(prompt) + NEW
    used = -(-n // 16)
    with engine(compiled.path) as run:
        limit = run.code.info.max_tokens
        want = together(run, [Guest(prompt, range(used), limit)], vocab)
        assert np.isfinite(want[1]).all()
        # other chunks of the prompt: the tiles of tokens are others, and decode's path is taken
        for chunk in (1, 7, 33, 64, limit - 1):
            got = together(run, [Guest(prompt, range(used), chunk)], vocab)
            assert_same(got, want, f"chunks of {chunk}")
        # other blocks, in another order
        blocks = np.random.default_rng(3).permutation(KV_BLOCKS)[:used].tolist()
        got = together(run, [Guest(prompt, blocks, 100)], vocab)
        assert_same(got, want, "other blocks")
    for threads in (1, 2, 3):
        with engine(compiled.path, threads, dirty=True) as run:
            got = together(run, [Guest(prompt, range(used), limit)], vocab)
            assert_same(got, want, f"{threads} threads")
            for others in (1, 7):
                for joins in (0, 3):
                    first = Guest(prompt, range(used), 41, joins)
                    got = together(run, [first, *company(others, used)], vocab)
                    where = f"{threads} threads, {others} others, joined at step {joins}"
                    assert_same(got, want, where)


def test_a_seed_draws_the_same_tokens_in_any_company(compiled: Compiled) -> None:
    prompt, vocab = compiled.prompt[:90], compiled.vocab
    with engine(compiled.path, 1) as run:
        alone = together(run, [Guest(prompt, range(8), 512, params=SEEDED)], vocab)
    with engine(compiled.path, 3) as run:
        first = Guest(prompt, range(8, 16), 23, joins=2, params=SEEDED)
        others = company(7, 16)
        for i, guest in enumerate(others):
            guest.params = SamplingParams(temperature=0.5 + 0.1 * i, seed=i)
        assert_same(together(run, [first, *others], vocab), alone, "seeded")


class FourSteps(Pace):
    """A pace that no clock decides."""

    def steps(self, most: int, sequences: int) -> int:
        return min(4, most)


def test_the_scheduler_gives_a_prompt_the_same_tokens_alone_and_in_a_crowd(
    compiled: Compiled,
) -> None:
    session = Session(str(compiled.path))
    limits = session.limits()
    few = Limits(  # a step so small that prompts are cut, a pool so small that some are preempted
        max_tokens=48, max_seqs=8, max_logit_rows=8, max_context=limits.max_context,
        block_size=limits.block_size,
    )  # fmt: skip
    prompts = [tokens(n, 20 + n) for n in (90, 5, 61, 33, 120, 17, 64, 90)]
    prompts[7][:48] = prompts[0][:48]  # a shared beginning: found in blocks, not computed
    params = [SamplingParams(), SEEDED] * 4
    alone = []
    with engine(compiled.path, 1) as run:
        for prompt, sampling in zip(prompts, params, strict=True):
            scheduler = Scheduler(limits, KV_BLOCKS, run.step)
            alone.append(scheduler.add(prompt, sampling=sampling, max_new_tokens=80))
            scheduler.run()
    calls: list[int] = []  # steps of each
    with engine(compiled.path, 2) as run:

        def decode(batch: StepBatch, steps: int, stop_ids: frozenset[int]) -> list[list[int]]:
            calls.append(steps)
            return run.decode(batch, steps, stop_ids)

        scheduler = Scheduler(few, -(-300 // few.block_size), run.step, None, decode)
        scheduler._pace = FourSteps()
        crowd = []
        for prompt, sampling in zip(prompts, params, strict=True):
            crowd.append(scheduler.add(prompt, sampling=sampling, max_new_tokens=80))
            scheduler.step()
        scheduler.run()
    assert scheduler.n_preemptions > 0 and crowd[7].n_shared > 0
    assert len(calls) < sum(calls), "no call made several steps"
    assert [s.output for s in crowd] == [s.output for s in alone]


def test_several_steps_in_one_call_are_single_steps(compiled: Compiled) -> None:
    lengths, params = (37, 5, 64), (SamplingParams(), SEEDED, SEEDED)
    prompts = [tokens(n, 40 + n) for n in lengths]
    with engine(compiled.path, 2) as run:
        blocks = [array("i", range(9 * s, 9 * (s + 1))) for s in range(3)]

        def batch(done: int, last: Sequence[int]) -> StepBatch:
            out = StepBatch()
            for s, prompt in enumerate(prompts):
                part = array("i", [last[s]] if done else prompt)
                first = len(prompt) + done - 1 if done else 0
                out.add(part, first, blocks[s], (params[s], done, array("i")))
            return out

        single = [run.step(batch(0, ()))]
        for done in range(1, 21):
            single.append(run.step(batch(done, single[-1])))
        assert run.decode(batch(1, single[0]), 20) == single[1:]
        # the step that chooses a stop id is the last, whoever chose it
        for s in range(3):
            stop = frozenset({single[12][s]})
            end = next(i for i in range(1, 21) if not stop.isdisjoint(single[i]))
            assert run.decode(batch(1, single[0]), 20, stop) == single[1 : end + 1]
        assert run.decode(batch(1, single[0]), 20, frozenset({VOCAB + 5})) == single[1:]


def test_what_one_call_cannot_do_several_steps_of_is_refused(compiled: Compiled) -> None:
    with engine(compiled.path, 1) as run:
        blocks = array("i", range(3))
        room = 3 * run.code.info.kv_block_size

        def one(
            params: SamplingParams = SEEDED, prompt: tuple[int, ...] = (5,), at: int = 9
        ) -> StepBatch:
            batch = StepBatch()
            batch.add(array("i", prompt), at, blocks, (params, 0, array("i", [5])))
            return batch

        no_row = StepBatch()
        no_row.add(array("i", [5]), 9, blocks)
        penalty = SamplingParams(repetition_penalty=1.2)
        for refused in (one(prompt=(5, 6)), one(penalty), no_row):
            with pytest.raises(ZerolayerError, match="bad argument"):
                run.decode(refused, 3)
        with pytest.raises(ZerolayerError, match="bad argument"):
            run.decode(one(), 0)
        with pytest.raises(UsageError, match=r"vocabulary.*step 1 of 3|step 1 of 3.*vocabulary"):
            run.decode(one(prompt=(VOCAB,)), 3)
        with pytest.raises(ZerolayerError, match="KV block or position"):
            run.decode(one(at=room - 3), 4)
        assert len(run.decode(one(at=room - 3), 3)) == 3
        lib, handle = run.code.lib, run.handle
        for arguments in ((None, run._batch_ref), (handle, None)):
            assert lib.zl_decode(*arguments, run._decoding) == 1
        assert lib.zl_decode(handle, run._batch_ref, None) == 1


def test_it_is_promised_where_one_looks(compiled: Compiled) -> None:
    manifest = open_artifact(str(compiled.path)).manifest
    assert manifest["numerics"]["batch_invariant"] is True
    done = zerolayer("inspect", compiled.path, "--json")
    assert json.loads(done.out)["numerics"]["batch_invariant"] is True
