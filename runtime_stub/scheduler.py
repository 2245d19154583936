"""The scheduler: many sequences through one ragged step, within a fixed pool of KV blocks.

In: prompts as token ids, a ``step`` callable (``StepBatch`` -> next token per logit row), a
``decode`` callable if the driver has it (several steps).  Out: tokens, one callback per token.
Next file: ``step.py`` (the batch), ``blocks.py`` (the pool).
It knows nothing of drivers, text or sockets: the command line and a server use the same object.

Each step is filled in this order:

1. Sequences that need one token (decode), least recently served first.
2. Prefill, in chunks, least recently served first.  A quarter of the step is kept for it while
   there is any, so a crowd of decoding sequences cannot hold up a new prompt.
3. Waiting sequences are admitted strictly in order of arrival, as long as the pool has blocks for
   the whole prompt and one spare per running sequence.

When a running sequence needs a block and none is left, the youngest sequence that is younger than
it is preempted: its blocks are released and it waits, at its place by arrival, to be computed again
from its tokens (prompt and generated).  The oldest sequence is never preempted, so work always
gets done.  A draw depends on (seed, index of the token) only, so preemption does not change the
tokens.

Where all sequences decode and nothing waits, one call makes several steps, as many as fit in about
a fortieth of a second (``Pace``).  What a callback ends was computed a few tokens further; these
are dropped.  The tokens are those of single steps.

Full blocks are shared between sequences with the same beginning, also after they ended, until their
memory is needed.
"""

from __future__ import annotations

import heapq
from array import array

from .blocks import ROOT, BlockPool
from .errors import ResourceError, UsageError
from .step import NO_IDS, Limits, Pace, SamplingParams, StepBatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as SequenceOf
    from typing import Optional

    from .step import DecodeFunction, StepFunction

    #: called with each new token; returning True ends the sequence (a stop string)
    OnToken = Callable[["Sequence", int], Optional[bool]]

WAITING = "waiting"
RUNNING = "running"
FINISHED = "finished"


class Sequence:
    """One request.  Read ``tokens``, ``output``, ``state``, ``finish_reason``, ``stopped_by``.

    ``finish_reason`` is ``stop``, ``length`` or ``cancelled``; ``stopped_by`` says more: ``eos``,
    ``stop_string``, ``max_tokens``, ``context``, ``cancelled``.  An end-of-text token is not part
    of ``output``.
    """

    def __init__(
        self,
        number: int,
        prompt: SequenceOf[int],
        *,
        sampling: SamplingParams,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        on_token: Optional[OnToken],
    ) -> None:
        self.number = number  # order of arrival
        self.tokens: array[int] = array("i", prompt)
        self.n_prompt = len(self.tokens)
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.stop_ids = stop_ids
        self.on_token = on_token
        self.state = WAITING
        self.finish_reason = ""
        self.stopped_by = ""
        self.blocks: array[int] = array("i")
        self.n_computed = 0  # positions whose KV is in the blocks
        self.n_shared = 0  # prompt positions found in shared blocks when last admitted
        self.preemptions = 0
        self.last_served = 0  # number of the step
        self._published = 0  # full blocks made known
        self._chain = ROOT  # serial of the last of them

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.n_prompt :].tolist()

    @property
    def remaining(self) -> int:
        """Tokens not yet computed: 1 while decoding."""
        return len(self.tokens) - self.n_computed

    @property
    def finished(self) -> bool:
        return self.state == FINISHED


class Scheduler:
    """``n_blocks`` KV blocks, one ``step`` callable; ``copy_block(source, destination)`` if the
    driver has it (then a fork also shares its last, partly filled block until one side writes);
    ``decode`` if several steps may be one call."""

    def __init__(
        self,
        limits: Limits,
        n_blocks: int,
        step: StepFunction,
        copy_block: Optional[Callable[[int, int], None]] = None,
        decode: Optional[DecodeFunction] = None,
    ) -> None:
        self.limits = limits
        self.pool = BlockPool(n_blocks, limits.block_size)
        self._step = step
        self._copy_block = copy_block
        self._decode = decode
        self._pace = Pace()
        self._stop_ids = NO_IDS  # of all that decode together
        self._handing_out = False  # what a call computed: blocks hold more than their positions
        self._waiting: list[tuple[int, Sequence]] = []  # a heap by arrival
        self._running: list[Sequence] = []
        self._arrivals = 0
        self.n_steps = 0
        self.n_preemptions = 0

    # requests -----------------------------------------------------------------------------------

    @property
    def context_limit(self) -> int:
        """Tokens (prompt and generated) that one sequence can have here."""
        return min(self.limits.max_context, self.pool.n_blocks * self.limits.block_size)

    def add(
        self,
        prompt: SequenceOf[int],
        *,
        sampling: Optional[SamplingParams] = None,
        max_new_tokens: int = 1 << 30,
        stop_ids: Iterable[int] = (),
        on_token: Optional[OnToken] = None,
    ) -> Sequence:
        """Queue a request.  UsageError or ResourceError when it can never run."""
        if not len(prompt):
            raise UsageError("the prompt is empty", next_step="give at least one token")
        if max_new_tokens < 1:
            raise UsageError(f"{max_new_tokens} new tokens asked for, must be at least 1")
        ends = frozenset(stop_ids)
        for i in ends:
            if type(i) is not int or not 0 <= i < 1 << 31:
                raise UsageError(f"a stop id is {str(i)[:30]}, must be a token id")
        if len(prompt) >= self.context_limit:
            by_model = self.context_limit == self.limits.max_context
            kind: type[UsageError] | type[ResourceError] = UsageError if by_model else ResourceError
            raise kind(
                f"the prompt has {len(prompt)} tokens, the context holds {self.context_limit} "
                "with at least one of them new",
                next_step="shorten the prompt"
                if by_model
                else "shorten the prompt or give the KV pool more memory",
            )
        self._arrivals += 1
        seq = Sequence(
            self._arrivals,
            prompt,
            sampling=sampling or SamplingParams(),
            max_new_tokens=max_new_tokens,
            stop_ids=ends,
            on_token=on_token,
        )
        heapq.heappush(self._waiting, (seq.number, seq))
        return seq

    def fork(self, seq: Sequence, *, sampling: Optional[SamplingParams] = None) -> Sequence:
        """A second sequence that goes on from ``seq``'s tokens, sharing its blocks.  UsageError
        where there is nothing to go on to: ``seq`` has ended, or is being told its last token."""
        if seq.finished or self._full_by(seq):
            raise UsageError("a sequence that has its last token cannot be forked")
        self._arrivals += 1
        new = Sequence(
            self._arrivals,
            seq.tokens,
            sampling=sampling or seq.sampling,
            max_new_tokens=seq.max_new_tokens,
            stop_ids=seq.stop_ids,
            on_token=seq.on_token,
        )
        new.n_prompt = seq.n_prompt
        full = seq.n_computed // self.limits.block_size
        # a block that holds more than its sequence's positions is not one to go on from
        share_tail = self._copy_block is not None and not self._handing_out
        if seq.state != RUNNING or len(self._running) >= self.limits.max_seqs:
            heapq.heappush(self._waiting, (new.number, new))  # finds full blocks by prefix
            return new
        count = self.pool.blocks_for(seq.n_computed) if share_tail else full
        new.blocks = seq.blocks[:count]
        for block in new.blocks:
            self.pool.retain(block)
        new.n_computed = seq.n_computed if share_tail else full * self.limits.block_size
        new._published, new._chain = seq._published, seq._chain
        new.state = RUNNING
        new.last_served = seq.last_served
        self._running.append(new)
        return new

    def cancel(self, seq: Sequence) -> None:
        """End a sequence now and release its blocks."""
        if not seq.finished:
            self._finish(seq, "cancelled", "cancelled")

    @property
    def idle(self) -> bool:
        """Nothing is running or waiting."""
        return not self._running and not any(not s.finished for _, s in self._waiting)

    # one call -----------------------------------------------------------------------------------

    def step(self) -> list[Sequence]:
        """Runs one batch, or several decode steps.  Returns the sequences that got a token, in
        order and as often as they did (some may have finished)."""
        self._admit()
        plan = self._plan()
        if not plan:
            return []
        steps = self._steps(plan)
        batch = StepBatch()
        served: list[tuple[Sequence, int, bool]] = []  # and whether it gets a token
        for seq, count in plan:
            first = seq.n_computed
            row = None
            if count == seq.remaining:
                row = (seq.sampling, len(seq.tokens) - seq.n_prompt, seq.tokens)
            served.append((seq, count, row is not None))
            batch.add(seq.tokens[first : first + count], first, seq.blocks, row)
        chosen = [self._step(batch)] if not steps else self._decode_some(batch, steps, plan)
        got: list[Sequence] = []
        self._handing_out = True
        try:
            for tokens in chosen:
                self._hand_out(served, tokens, got)
        finally:
            self._handing_out = False
        return got

    def _hand_out(
        self,
        served: list[tuple[Sequence, int, bool]],
        tokens: SequenceOf[int],
        got: list[Sequence],
    ) -> None:
        """What one step computed.  A sequence has its positions just before its token: a callback
        that raises leaves those after it as they were before the step."""
        self.n_steps += 1
        rest = iter(tokens)
        for seq, count, gets_token in served:
            token = next(rest) if gets_token else None
            if seq.state != RUNNING:  # ended by an earlier token, or by another's callback
                continue
            seq.last_served = self.n_steps
            seq.n_computed += count
            self._publish(seq)
            if token is not None:
                got.append(seq)
                self._deliver(seq, token)

    def _steps(self, plan: list[tuple[Sequence, int]]) -> int:
        """Decode steps that ``decode`` may make of the plan, their blocks allocated; 0: the plan is
        for ``step``."""
        if self._decode is None or len(plan) < len(self._running):
            return 0
        if any(s.remaining != 1 or s.sampling.repetition_penalty != 1.0 for s, _ in plan):
            return 0
        if any(not s.finished for _, s in self._waiting):
            return 0
        most = min(
            min(s.n_prompt + s.max_new_tokens, self.context_limit) - len(s.tokens) for s, _ in plan
        )
        pool, steps = self.pool, self._pace.steps(most, len(plan))
        need = [max(0, pool.blocks_for(s.n_computed + steps) - len(s.blocks)) for s, _ in plan]
        if sum(need) > pool.available:  # as many as fit in the blocks that there are
            held = min(len(s.blocks) * pool.block_size - s.n_computed for s, _ in plan)
            return min(steps, held)
        for (seq, _), count in zip(plan, need):  # noqa: B905 (Python 3.9)
            for _ in range(count):
                seq.blocks.append(pool.allocate())
        return steps

    def _decode_some(
        self, batch: StepBatch, steps: int, plan: list[tuple[Sequence, int]]
    ) -> SequenceOf[SequenceOf[int]]:
        """``decode`` at its pace.  Any sequence's end of text ends the call."""
        assert self._decode is not None
        stop_ids = NO_IDS.union(*(s.stop_ids for s, _ in plan))
        if stop_ids != self._stop_ids:  # the driver knows these by the object
            self._stop_ids = stop_ids
        return self._pace.call(self._decode, batch, steps, self._stop_ids)

    def run(self) -> None:
        """Steps until everything has finished."""
        while not self.idle:
            self.step()

    def _plan(self) -> list[tuple[Sequence, int]]:
        """(sequence, tokens of it to compute) for the next step, blocks already allocated."""
        limits = self.limits
        order = sorted(self._running, key=lambda s: (s.last_served, s.number))
        decoding = [s for s in order if s.remaining == 1]
        prefilling = [s for s in order if s.remaining > 1]
        room = limits.max_tokens
        reserve = min(room // 4, sum(s.remaining for s in prefilling)) if prefilling else 0
        plan: list[tuple[Sequence, int]] = []
        planned: set[int] = set()
        rows = 0
        for seq in decoding + prefilling:
            budget = room - reserve if seq.remaining == 1 else room
            count = min(seq.remaining, budget)
            wants_row = count == seq.remaining
            if wants_row and rows == limits.max_logit_rows:
                count -= 1  # a prefill may go on without its last token
            if seq.state != RUNNING or count < 1 or len(plan) == limits.max_seqs:
                continue
            if not self._make_room(seq, count, planned):
                continue
            rows += count == seq.remaining
            room -= count
            plan.append((seq, count))
            planned.add(seq.number)
        return plan

    def _make_room(self, seq: Sequence, count: int, planned: set[int]) -> bool:
        """Blocks for ``count`` more positions, preempting younger sequences that are not planned
        yet.  False: not in this step."""
        pool = self.pool
        need = max(0, pool.blocks_for(seq.n_computed + count) - len(seq.blocks))
        first = seq.n_computed // pool.block_size
        copy = first < len(seq.blocks) and pool.references(seq.blocks[first]) > 1
        while pool.available < need + copy:
            younger = [
                s for s in self._running if s.number > seq.number and s.number not in planned
            ]
            if younger:
                self._preempt(max(younger, key=lambda s: s.number))
            else:
                if not planned and len(self._running) > 1:
                    self._preempt(seq)
                return False
        if copy and not self._own_tail(seq, first):
            return False
        for _ in range(need):
            seq.blocks.append(pool.allocate())
        return True

    def _own_tail(self, seq: Sequence, index: int) -> bool:
        """Copy-on-write: ``seq`` is about to write into a block that others hold too."""
        shared = seq.blocks[index]
        mine = self.pool.allocate()
        if self._copy_block is None:
            raise AssertionError("a partly filled block is shared without copy_block")
        self._copy_block(shared, mine)
        seq.blocks[index] = mine
        self.pool.release(shared)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._release(seq)
        seq.state = WAITING
        seq.preemptions += 1
        self.n_preemptions += 1
        heapq.heappush(self._waiting, (seq.number, seq))

    def _admit(self) -> None:
        pool = self.pool
        while self._waiting and len(self._running) < self.limits.max_seqs:
            seq = self._waiting[0][1]
            if seq.finished:
                heapq.heappop(self._waiting)
                continue
            self._attach_prefix(seq)
            need = pool.blocks_for(len(seq.tokens)) - len(seq.blocks)
            if pool.available < need + len(self._running):
                self._release(seq)
                return
            heapq.heappop(self._waiting)
            for _ in range(need):
                seq.blocks.append(pool.allocate())
            seq.state = RUNNING
            self._running.append(seq)

    def _attach_prefix(self, seq: Sequence) -> None:
        """Takes over known full blocks of the same beginning; one token is left to compute."""
        size = self.limits.block_size
        for start in range(0, (len(seq.tokens) - 1) // size * size, size):
            found = self.pool.find(seq._chain, seq.tokens[start : start + size].tobytes())
            if found is None:
                break
            self.pool.retain(found[0])
            seq.blocks.append(found[0])
            seq._chain = found[1]
            seq._published += 1
        seq.n_computed = seq.n_shared = seq._published * size

    def _publish(self, seq: Sequence) -> None:
        """Makes blocks that have become full known to later sequences."""
        size = self.limits.block_size
        while (seq._published + 1) * size <= seq.n_computed:
            at = seq._published
            tokens = seq.tokens[at * size : (at + 1) * size].tobytes()
            seq._chain = self.pool.publish(seq.blocks[at], seq._chain, tokens)
            seq._published += 1

    def _release(self, seq: Sequence) -> None:
        for block in reversed(seq.blocks):  # a chain's end ages out before its beginning
            self.pool.release(block)
        seq.blocks = array("i")
        seq.n_computed = seq._published = 0
        seq._chain = ROOT

    def _deliver(self, seq: Sequence, token: int) -> None:
        if token in seq.stop_ids:
            self._finish(seq, "stop", "eos")
            return
        seq.tokens.append(token)
        stop: Optional[bool] = False
        try:
            if seq.on_token is not None:
                stop = seq.on_token(seq, token)
        finally:  # also where it raises: the token is there
            self._end(seq, bool(stop))

    def _end(self, seq: Sequence, stop: bool) -> None:
        """After a token: whether it was the last."""
        if seq.finished:
            return  # cancelled by its own callback
        if stop:
            self._finish(seq, "stop", "stop_string")
        elif limit := self._full_by(seq):
            self._finish(seq, "length", limit)

    def _full_by(self, seq: Sequence) -> str:
        """What keeps a sequence from another token; empty while nothing does."""
        if len(seq.tokens) - seq.n_prompt >= seq.max_new_tokens:
            return "max_tokens"
        return "context" if len(seq.tokens) >= self.context_limit else ""

    def _finish(self, seq: Sequence, reason: str, stopped_by: str) -> None:
        if seq.state == RUNNING:
            self._running.remove(seq)
            self._release(seq)
        seq.state = FINISHED
        seq.finish_reason = reason
        seq.stopped_by = stopped_by

    # measures -----------------------------------------------------------------------------------

    def memory_fragmentation_score(self) -> float:
        """The part of held KV memory that holds no token: ``1 - used / (held * block_size)``.

        ``used`` counts filled positions, shared ones once; ``held`` blocks with a reference.
        Blocks are all alike, so there is no other kind of fragmentation.  0 when nothing is held.
        """
        held = self.pool.held
        if not held:
            return 0.0
        filled: dict[int, int] = {}
        size = self.limits.block_size
        for seq in self._running:
            for i, block in enumerate(seq.blocks):
                used = max(0, min(size, seq.n_computed - i * size))
                filled[block] = max(filled.get(block, 0), used)
        return 1.0 - sum(filled.values()) / (held * size)

    def stats(self) -> dict[str, float]:
        """Counters for a status display."""
        return {
            "running": len(self._running),
            "waiting": sum(not s.finished for _, s in self._waiting),
            "steps": self.n_steps,
            "preemptions": self.n_preemptions,
            "blocks": self.pool.n_blocks,
            "blocks_held": self.pool.held,
            "blocks_available": self.pool.available,
            "memory_fragmentation_score": self.memory_fragmentation_score(),
        }
