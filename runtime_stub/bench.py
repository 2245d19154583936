"""The command ``bench``: where the time goes, from process start to each kernel call.

In: a :class:`Session`.  Out: load phases, time to the first token, prefill and decode rates, where
the time of a step goes against what this host can do, with ``--profile`` a trace of these steps.
Next file: ``laps.py`` (traced steps).

The first token is the real one: process start, loading, the tokenizer where the artifact has one, a
short prompt.  Rates are the best of ``--repeat`` runs, as a shared machine only ever adds time; the
slowest are told too, because their distance is how far to trust a difference.
"""

from __future__ import annotations

import sys
import time
from array import array

from .errors import ResourceError, UsageError
from .generate import RUNNING, count_of, profile_from
from .laps import Recorder
from .options import PROFILE, Option, integer
from .phases import WAITING, Table
from .session import since_process_start
from .step import Pace, SamplingParams, StepBatch
from .work import group_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Optional

    from .ceilings import Ceilings
    from .driver_cpu import CpuEngine
    from .laps import Step
    from .options import Values
    from .session import Session

OPTIONS = [
    Option(
        ("-p", "--prompt-tokens"),
        "prefill length, default 512 or what fits",
        integer(1),
        metavar="N",
    ),
    Option(("-n", "--new-tokens"), "decode steps, default 64", integer(1), metavar="N"),
    Option(("--batch",), "sequences decoded together, default 1", integer(1), metavar="N"),
    Option(("--repeat",), "default 3", integer(1, 1000), metavar="N"),
    Option(("--no-ceilings",), "do not measure what this host can do"),
    PROFILE,
    *RUNNING,
]
_PROMPT = "The capital of France is"
_DEFAULT_PROMPT = 512
#: above these the host had other work: of a step spent waiting; between two equal measurements
_WAITED, _SPREAD = 0.2, 1.3
#: and percent of a ceiling that no cache explains
_ABOVE = 110


class _Runner:
    """Sequences of equal length straight through the driver."""

    def __init__(self, engine: CpuEngine, block_size: int, blocks_each: int, chunk: int) -> None:
        self.engine = engine
        self.block_size = block_size
        self.blocks_each = blocks_each
        self.chunk = chunk
        self.greedy = SamplingParams()
        self.empty: array[int] = array("i")
        self.pace = Pace()

    def blocks(self, sequence: int, positions: int) -> array[int]:
        first = sequence * self.blocks_each
        return array("i", range(first, first + -(-positions // self.block_size)))

    def prefill_batch(self, ids: array[int], start: int, sequence: int = 0) -> StepBatch:
        """The chunk of ``sequence`` that begins at ``start``."""
        part = ids[start : start + self.chunk]
        last = start + len(part) == len(ids)
        batch = StepBatch()
        row = (self.greedy, 0, self.empty) if last else None
        batch.add(part, start, self.blocks(sequence, start + len(part)), row)
        return batch

    def prefill(self, ids: array[int], sequence: int = 0) -> int:
        """One sequence in chunks; its next token."""
        out: list[int] = []
        for start in range(0, len(ids), self.chunk):
            out = self.engine.step(self.prefill_batch(ids, start, sequence))
        return out[0]

    def decode_batch(self, tokens: Sequence[int], position: int, steps: int = 1) -> StepBatch:
        """One token of each sequence, all at ``position``; blocks for ``steps`` steps."""
        batch = StepBatch()
        for s, token in enumerate(tokens):
            blocks = self.blocks(s, position + steps)
            batch.add(array("i", (token,)), position, blocks, (self.greedy, 0, self.empty))
        return batch

    def decode(self, tokens: list[int], position: int, steps: int) -> None:
        """``steps`` more tokens of each sequence, as many to a call as ``generate`` makes."""
        self.pace.decode(
            self.engine.decode,
            lambda now, done, count: self.decode_batch(now, position + done, count),
            tokens,
            steps,
        )


def run_bench(session: Session, values: Values, as_json: bool) -> dict[str, Any]:
    """Returns what ``--json`` prints."""
    session.require_host()
    limits = session.limits()
    n_new = values["new_tokens"] or 64
    batch = values["batch"] or 1
    context = session.context(values["max_context"])
    n_prompt, notes = _prompt_length(values["prompt_tokens"], n_new, context)
    most = min(limits.max_seqs, limits.max_logit_rows, limits.max_tokens)
    if batch > most:
        raise UsageError(f"--batch {batch}: one step has at most {most} sequences")
    each = session.memory.blocks_for(n_prompt + n_new + 1)
    session.memory.require(each * batch * limits.block_size, session.path)
    threads, why = session.threads(values["threads"])
    profile = profile_from(session, values)
    engine = session.start(each * batch, threads, values["pin"])
    runner = _Runner(engine, limits.block_size, each, limits.max_tokens)
    calls = session.calls(engine, "step")
    first = _first_token(session, runner)
    repeat = values["repeat"] or 3
    ids = array("i", ((i * 7919 + 13) % session.vocab_size for i in range(n_prompt)))
    prefills, token = _prefills(runner, ids, repeat, batch)
    decodes = _decodes(runner, [token] * batch, n_prompt, n_new, repeat)
    prefill, decode = min(prefills), min(decodes)
    ceilings = None if values["no_ceilings"] else _ceilings(engine, notes)
    steps = _traced(runner, ids, token, batch)
    if ceilings is not None:  # before and after the steps: on a shared host bandwidth moves
        again = _ceilings(engine, [])
        if again is not None:
            ceilings.join(again)
    if profile is not None:
        profile.use(engine)
        profile.picked = True
        for step in steps:
            profile.add(step)
    data = {
        "model": session.manifest.get("model", {}).get("name"),
        "target": session.target.get("name"),
        "host": session.facts.cpu_model,
        "threads": threads,
        "threads_why": why,
        "process_start_to_first_token_ms": first,
        "load": session.timings.as_dict(),
        "prefill": {
            "tokens": n_prompt,
            "ms": round(prefill * 1e3, 3),
            "slowest_ms": round(max(prefills) * 1e3, 3),
            "tokens_per_second": round(n_prompt / prefill, 2),
        },
        "decode": {
            "sequences": batch,
            "steps": n_new,
            "ms_per_step": round(decode / n_new * 1e3, 4),
            "slowest_ms_per_step": round(max(decodes) / n_new * 1e3, 4),
            "tokens_per_second": round(batch * n_new / decode, 2),
        },
        "repeat": repeat,
        "predicted_decode_tokens_per_second": (session.manifest.get("roofline") or {}).get(
            "tokens_per_second"
        ),
        "notes": notes,
        "profile": values["profile"],
        "ceilings": None if ceilings is None else ceilings.as_dict(),
        **_tables(session, calls, steps, ceilings),
    }
    data["notes"] = _noted(data)
    if not as_json:
        _print(data)
    return data


def _prompt_length(asked: Optional[int], n_new: int, context: int) -> tuple[int, list[str]]:
    """(tokens of the prompt, notes): what was asked for, or as much of the default as fits.  One
    position is left over."""
    room = context - n_new - 1
    if room < 1:
        raise UsageError(
            f"-n {n_new} does not fit: with a prompt it is more than the context of {context}",
            where="bench",
            next_step=f"use -n {context - 2} or less" if context > 2 else "",
        )
    if asked is None:
        short = f"the prompt has {room} tokens, not {_DEFAULT_PROMPT}: the context is {context}"
        return min(_DEFAULT_PROMPT, room), [short] if room < _DEFAULT_PROMPT else []
    if asked > room:
        raise UsageError(
            f"-p {asked} with -n {n_new} is more than the context of {context}",
            where="bench",
            next_step=f"use -p {room} or less",
        )
    return asked, []


def _first_token(session: Session, runner: _Runner) -> float | None:
    """Milliseconds from process start to the first token of a short prompt."""
    if session.text_needs:
        ids = session.codec().encode(_PROMPT, raw=True)
    else:
        ids = [i % session.vocab_size for i in range(1, 6)]
    session.timings.skip()
    runner.prefill(array("i", ids[: runner.blocks_each * runner.block_size]))
    session.timings.mark("first_token")
    start = since_process_start()
    return None if start is None else round(start * 1e3, 1)


def _prefills(runner: _Runner, ids: array[int], repeat: int, batch: int) -> tuple[list[float], int]:
    """Seconds of one prompt, each time, and its next token; afterwards each sequence has it."""
    seconds, token = [], 0
    for _ in range(repeat):
        start = time.perf_counter()
        token = runner.prefill(ids)
        seconds.append(time.perf_counter() - start)
    for sequence in range(1, batch):  # decoding reads the keys and values of each
        runner.prefill(ids, sequence)
    return seconds, token


def _decodes(
    runner: _Runner, tokens: list[int], position: int, steps: int, repeat: int
) -> list[float]:
    """Seconds of ``steps`` steps, each time."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        runner.decode(tokens, position, steps)
        seconds.append(time.perf_counter() - start)
    return seconds


def _ceilings(engine: CpuEngine, notes: list[str]) -> Optional[Ceilings]:
    """Measured with the memory that is free now, beside weights and engine; None without it."""
    from .ceilings import measure
    from .detect import memory_facts

    try:
        found = measure(engine, memory_facts()[1])
    except ResourceError as e:
        notes.append(f"the ceilings are not measured: {e.what}")
        return None
    notes += [found.note] if found.note else []
    return found


def _traced(runner: _Runner, ids: array[int], token: int, batch: int) -> tuple[Step, Step]:
    """A step of the prompt's first chunk, the fastest of three, and of decoding, the median of
    nine: each a step as it was, so that its parts add up."""
    recorder = Recorder(runner.engine)
    recorder.start()
    chunk = runner.prefill_batch(ids, 0)
    prefill = [recorder.step(chunk)[1] for _ in range(3)]
    next_token = runner.decode_batch([token] * batch, len(ids))
    decode = [recorder.step(next_token)[1] for _ in range(9)]
    recorder.stop()
    prefill.sort(key=lambda s: s.end - s.begin)
    decode.sort(key=lambda s: s.end - s.begin)
    return prefill[0], decode[len(decode) // 2]


def _predicted(session: Session, calls: list[dict[str, Any]]) -> dict[str, float]:
    """Nanoseconds of the calls of a one-token step, over all layers, as predicted from the target's
    facts: all of the target's cores and bandwidth, whatever this host has."""
    groups = {str(call.get("name")): group_of(call) for call in calls}
    out: dict[str, float] = {}
    for row in (session.manifest.get("roofline") or {}).get("calls") or []:
        ns = row.get("ns") if isinstance(row, dict) else None
        group = groups.get(str(row["name"])) if ns is not None and "name" in row else None
        if isinstance(ns, (int, float)) and group is not None:
            out[group] = out.get(group, 0.0) + ns
    return out


def _tables(
    session: Session,
    calls: list[dict[str, Any]],
    steps: tuple[Step, Step],
    ceilings: Optional[Ceilings],
) -> dict[str, Any]:
    """``prefill_phases``, ``prefill_calls`` and the same of decode."""
    out: dict[str, Any] = {}
    for name, step in zip(("prefill", "decode"), steps):  # noqa: B905 (Python 3.9)
        table = Table(session.manifest, calls, step, ceilings)
        rows = table.calls_as_dicts()
        # the prediction is for one token
        predicted = _predicted(session, calls) if step.tokens == 1 else {}
        for row in rows:
            wanted = predicted.get(row["call"])
            percent = round(100 * wanted / max(row["wall_ns"], 1), 1) if wanted else None
            row["percent_of_roofline"] = percent
        out[f"{name}_phases"] = table.as_dict()
        out[f"{name}_calls"] = rows
    return out


def _noted(data: dict[str, Any]) -> list[str]:
    """What a reader of the figures has to know about them, also on stderr."""
    signs = []
    for step in ("decode", "prefill"):
        rows = data[f"{step}_phases"]["rows"]
        waited = sum(row["share"] for row in rows if row["phase"] == WAITING)
        if waited > _WAITED:
            signs.append(f"threads waited for {100 * waited:.0f}% of the {step} step")
        peak = max((r["percent_of_ceiling"] for r in rows if r["bound"] == "arithmetic"), default=0)
        if peak > _ABOVE:
            signs.append(f"{step} reached {peak:.0f}% of the arithmetic that was measured")
    spread = (data["ceilings"] or {}).get("spread", 1.0)
    if spread > _SPREAD:
        signs.append(f"a ceiling measured twice differed by {spread:.1f}x")
    prefill, decode = data["prefill"], data["decode"]
    for name, slow, fast in (
        ("prefill", prefill["slowest_ms"], prefill["ms"]),
        ("decode", decode["slowest_ms_per_step"], decode["ms_per_step"]),
    ):
        if slow > _SPREAD * fast:
            signs.append(f"the slowest {name} took {slow / fast:.1f} times as long as the fastest")
    found = [f"host busy, rates are not comparable: {', '.join(signs)}"] if signs else []
    notes = [*data["notes"], *found]
    for text in notes:
        sys.stderr.write(f"note: {text}\n")
    return notes


def _print(data: dict[str, Any]) -> None:
    write = sys.stdout.write
    write(f"{data['model']} on {data['host']}, target {data['target']}, ")
    write(f"{count_of(data['threads'], 'thread')} ({data['threads_why']})\n\n")
    write(f"process start to first token  {data['process_start_to_first_token_ms']} ms\n")
    for name, ms in data["load"].items():
        write(f"  {name[:-3].ljust(26)}  {ms:.1f} ms\n")
    prefill, decode = data["prefill"], data["decode"]
    write(f"prefill {prefill['tokens']} tokens: {prefill['tokens_per_second']:.1f} tokens/s")
    write(f" ({prefill['ms']:.1f} ms{_slowest(data, prefill['slowest_ms'], 1)})\n")
    write(f"decode {decode['sequences']} x {decode['steps']} tokens: ")
    write(f"{decode['tokens_per_second']:.1f} tokens/s ({decode['ms_per_step']:.2f} ms per step")
    write(f"{_slowest(data, decode['slowest_ms_per_step'], 2)})\n")
    for step in ("decode", "prefill"):
        phases = data[f"{step}_phases"]
        count = phases["tokens"]
        title = f"{step} step, {count_of(count, 'token')}"
        _print_table(title, phases["rows"], "phase")
        write(f"{'all'.ljust(34)}         {phases['step_ns'] / 1e3:8.1f}         ")
        write(f"{phases['step_ns'] / 1e3:8.1f}  {phases['bytes'] / 1e6:7.2f}  ")
        write(f"{phases['gb_per_second']:6.2f}")
        percent = phases["percent_of_ceiling"]
        write("\n" if percent is None else f"          {percent:5.1f}%\n")
        _print_table("kernels", data[f"{step}_calls"], "call")
    _print_ceilings(data)


def _slowest(data: dict[str, Any], ms: float, digits: int) -> str:
    """What stands behind the time of the fastest run."""
    return f", the slowest of {data['repeat']} {ms:.{digits}f}" if data["repeat"] > 1 else ""


def _print_table(title: str, rows: list[dict[str, Any]], label: str) -> None:
    """One line per row."""
    write = sys.stdout.write
    write(
        f"\n{title[:34].ljust(34)}  count        us  share   wall us       MB    GB/s   Gop/s"
        "  of ceiling\n"
    )
    for row in rows:
        write(f"{row[label][:34].ljust(34)}  {row['count'] or '':5}  {row['ns'] / 1e3:8.1f}  ")
        write(f"{100 * row['share']:4.1f}%")
        if row["count"]:
            write(f"  {row['wall_ns'] / 1e3:8.1f}  ")
            write(f"{row['bytes'] / 1e6:7.2f}  {row['gb_per_second']:6.2f}  ")
            write(f"{row['gop_per_second']:6.1f}")
        if row["percent_of_ceiling"] is not None:
            write(f"  {row['percent_of_ceiling']:5.1f}% {row['bound']}")
        write("\n")


def _print_ceilings(data: dict[str, Any]) -> None:
    write = sys.stdout.write
    found = data["ceilings"]
    if found is not None:
        write(f"\nceilings measured here with {data['threads']} threads: ")
        low, high = found["read_memory_range"]
        between = f"{low:.1f} to " if low < 0.9 * high else ""
        write(f"memory {between}{high:.1f} GB/s, ")
        write(f"cache {found['read_cache_gb_per_second']:.1f} GB/s")
        for kind in ("int8", "bf16", "f32"):
            if found[f"{kind}_gop_per_second"] is not None:
                write(f", {kind} {found[f'{kind}_gop_per_second']:.0f} Gop/s")
        write("\n")
    predicted = data["predicted_decode_tokens_per_second"]
    if isinstance(predicted, (int, float)):
        write(f"predicted for all of {data['target']}: ")
        write(f"at most {predicted:,.0f} tokens/s decode\n")
