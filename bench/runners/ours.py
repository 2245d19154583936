"""Measures an artifact through its own loader; see ``common.py`` for what goes in and out.

Runs in a plain Python, with nothing but the artifact on the path, as a deployment host does.
``--calls`` adds the nanoseconds of each kernel call of a decode step and of a prefill step,
``--steps`` the microseconds of the prompts and of a decode step inside the kernels, the loader's
Python left out.
"""

from __future__ import annotations

import time
import zipimport
from array import array

import common

OPTIONS = common.arguments()


def use(artifact: str) -> None:
    """Makes the loader importable as ``python3 FILE`` does, by the artifact's ``__main__``."""
    archive = zipimport.zipimporter(artifact)
    spec = type(zipimport.__spec__)("artifact", archive)  # type: ignore[arg-type, unused-ignore]
    code = archive.get_code("__main__")
    exec(code, {"__name__": spec.name, "__loader__": archive, "__spec__": spec})


use(OPTIONS.model)

TYPE_CHECKING = False
if TYPE_CHECKING:  # the loader in the artifact is a copy of this one
    from collections.abc import Sequence
    from typing import Any

    from zerolayer.runtime_stub.session import Session
    from zerolayer.runtime_stub.step import Pace, SamplingParams, StepBatch
else:
    from zerolayer_stub.session import Session
    from zerolayer_stub.step import Pace, SamplingParams, StepBatch

ROW = (SamplingParams(), 0, array("i"))


class Runner:
    """Sequences with their own blocks, straight through the driver."""

    def __init__(self, session: Session, options: Any) -> None:
        limits = session.limits()
        self.limit = min(512, limits.max_tokens)
        each = session.memory.blocks_for(options.prompt + options.new)
        self.engine = session.start(each * options.batch, options.threads)
        #: the blocks of each sequence, more than it needs before its last token
        self.tables = [array("i", range(each * s, each * (s + 1))) for s in range(options.batch)]

    def prefill(self, sequences: Sequence[Sequence[int]], timed: bool = False) -> list[int]:
        """The next token of each sequence."""
        out: list[int] = []
        for step in common.chunks(sequences, self.limit):
            batch = StepBatch()
            for s, at, part in step:
                end = at + len(part)
                row = ROW if end == len(sequences[s]) else None
                batch.add(array("i", part), at, self.tables[s], row)
            out += self.engine.step(batch, timed=timed)[: len(batch.rows)]
        return out

    def batch(self, tokens: Sequence[int], position: int) -> StepBatch:
        """One token of each sequence."""
        batch = StepBatch()
        for s, token in enumerate(tokens):
            batch.add(array("i", (token,)), position, self.tables[s], ROW)
        return batch

    def step(self, tokens: Sequence[int], position: int, timed: bool = False) -> Sequence[int]:
        """One more token of each sequence."""
        return self.engine.step(self.batch(tokens, position), timed=timed)

    def decode(self, tokens: Sequence[int], position: int, steps: int) -> list[Sequence[int]]:
        """``steps`` more tokens of each sequence, as many to a call as ``generate`` makes."""
        return Pace().decode(
            self.engine.decode,
            lambda now, done, _count: self.batch(now, position + done),
            tokens,
            steps,
        )


class Stopwatch:
    """Nanoseconds of each call of a function."""

    def __init__(self, function: Any) -> None:
        self.function, self.ns = function, array("q")

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter_ns()
        out = self.function(*args)
        self.ns.append(time.perf_counter_ns() - start)
        return out


def median_calls(runs: list[list[int]]) -> list[int]:
    """Median nanoseconds of each call."""
    return [sorted(column)[len(column) // 2] for column in zip(*runs, strict=True)]


def timed_calls(runner: Runner, options: Any, tokens: list[int]) -> dict[str, list[int]]:
    """Nanoseconds of each call, in the manifest's order."""
    prefill, decode = [], []
    prompt = common.prompts(options)[0][: runner.limit]
    for _ in range(5):
        runner.prefill([prompt], timed=True)
        prefill.append(list(runner.engine.call_ns))
    for _ in range(15):
        runner.step(tokens, options.prompt, timed=True)
        decode.append(list(runner.engine.call_ns))
    return {"prefill_ns": median_calls(prefill), "decode_ns": median_calls(decode)}


def main() -> None:
    session = Session(OPTIONS.model)
    session.require_host()
    runner = Runner(session, OPTIONS)
    runner.prefill([common.prompt_ids(common.SHORT_PROMPT, 0, OPTIONS.vocabulary)])
    first = common.since_start()
    watch = Stopwatch(runner.engine.code.lib.zl_step)
    if OPTIONS.steps:
        runner.engine.code.lib.zl_step = watch
    prompts = common.prompts(OPTIONS)
    start = time.perf_counter()
    tokens = runner.prefill(prompts)
    prefill = time.perf_counter() - start
    ids, prefill_steps = [tokens[0]], len(watch.ns)
    drawn = common.drawn(OPTIONS)
    start = time.perf_counter()
    if drawn or OPTIONS.steps:
        for i in range(OPTIONS.new):
            fed = [drawn[i]] * OPTIONS.batch if drawn else tokens
            tokens = list(runner.step(fed, OPTIONS.prompt + i))
            ids.append(tokens[0])
    else:
        ids += [chosen[0] for chosen in runner.decode(tokens, OPTIONS.prompt, OPTIONS.new)]
    decode = time.perf_counter() - start
    more: dict[str, Any] = timed_calls(runner, OPTIONS, tokens) if OPTIONS.calls else {}
    if OPTIONS.steps:
        steps = sorted(watch.ns[prefill_steps:])
        more["step_us"] = steps[len(steps) // 2] / 1e3
        more["prefill_us"] = sum(watch.ns[:prefill_steps]) / 1e3
    common.report("", first_token_s=first, prefill_s=prefill, decode_s=decode, ids=ids, **more)


main()
