"""The command ``bench``: where the time goes, from process start to each kernel call.

In: a :class:`Session`.  Out: load phases, time to the first token, prefill and decode rates, time
per kernel call against the manifest's prediction.  Next file: ``driver_cpu.py`` (``timed`` steps).

The first token is the real one: process start, loading, the tokenizer where the artifact has one, a
short prompt.  Rates are the best of ``--repeat`` runs: a shared machine only ever adds time.
"""

from __future__ import annotations

import sys
import time
from array import array

from .errors import UsageError
from .generate import RUNNING
from .options import Option, integer
from .session import since_process_start
from .step import SamplingParams, StepBatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .driver_cpu import CpuEngine
    from .options import Values
    from .session import Session

OPTIONS = [
    Option(("-p", "--prompt-tokens"), "prefill length, default 512", integer(1), metavar="N"),
    Option(("-n", "--new-tokens"), "decode steps, default 64", integer(1), metavar="N"),
    Option(("--batch",), "sequences decoded together, default 1", integer(1), metavar="N"),
    Option(("--repeat",), "default 3", integer(1, 1000), metavar="N"),
    *RUNNING,
]
_PROMPT = "The capital of France is"


class _Runner:
    """Sequences of equal length straight through the driver."""

    def __init__(self, engine: CpuEngine, block_size: int, blocks_each: int, chunk: int) -> None:
        self.engine = engine
        self.block_size = block_size
        self.blocks_each = blocks_each
        self.chunk = chunk
        self.greedy = SamplingParams()
        self.empty: array[int] = array("i")

    def blocks(self, sequence: int, positions: int) -> array[int]:
        first = sequence * self.blocks_each
        return array("i", range(first, first + -(-positions // self.block_size)))

    def prefill(self, ids: array[int], timed: bool = False) -> tuple[int, list[list[int]]]:
        """One sequence in chunks; (next token, nanoseconds per call of each chunk)."""
        times: list[list[int]] = []
        token = 0
        for start in range(0, len(ids), self.chunk):
            part = ids[start : start + self.chunk]
            last = start + len(part) == len(ids)
            batch = StepBatch()
            row = (self.greedy, 0, self.empty) if last else None
            batch.add(part, start, self.blocks(0, start + len(part)), row)
            out = self.engine.step(batch, timed=timed)
            token = out[0] if last else token
            if timed:
                times.append(self.engine.call_ns)
        return token, times

    def decode(self, tokens: list[int], position: int, timed: bool = False) -> list[int]:
        """One token of each sequence, all at ``position``."""
        batch = StepBatch()
        for s, token in enumerate(tokens):
            blocks = self.blocks(s, position + 1)
            batch.add(array("i", (token,)), position, blocks, (self.greedy, 0, self.empty))
        return self.engine.step(batch, timed=timed)


def run_bench(session: Session, values: Values, as_json: bool) -> dict[str, Any]:
    """Returns what ``--json`` prints."""
    session.require_host()
    limits = session.limits()
    n_new = values["new_tokens"] or 64
    batch = values["batch"] or 1
    context = session.context(values["max_context"])
    n_prompt = min(values["prompt_tokens"] or 512, max(1, context - n_new - 1))
    if n_prompt + n_new >= context:
        raise UsageError(f"{n_new} new tokens do not fit a context of {context}", where="bench")
    if batch > min(limits.max_seqs, limits.max_logit_rows, limits.max_tokens):
        raise UsageError(
            f"--batch {batch}: one step has at most "
            f"{min(limits.max_seqs, limits.max_logit_rows, limits.max_tokens)} sequences"
        )
    each = session.memory.blocks_for(n_prompt + n_new + 1)
    session.memory.require(each * batch * limits.block_size, session.path)
    threads, why = session.threads(values["threads"])
    engine = session.start(each * batch, threads, values["pin"])
    runner = _Runner(engine, limits.block_size, each, limits.max_tokens)
    first = _first_token(session, runner)
    repeat = values["repeat"] or 3
    ids = array("i", ((i * 7919 + 13) % session.vocab_size for i in range(n_prompt)))
    prefill, token = _best_prefill(runner, ids, repeat)
    decode = _best_decode(runner, [token] * batch, n_prompt, n_new, repeat)
    calls = session.entry_point("step").get("calls") or []
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
            "tokens_per_second": round(n_prompt / prefill, 2),
        },
        "decode": {
            "sequences": batch,
            "steps": n_new,
            "ms_per_step": round(decode / n_new * 1e3, 4),
            "tokens_per_second": round(batch * n_new / decode, 2),
        },
        "predicted_decode_tokens_per_second": (session.manifest.get("roofline") or {}).get(
            "tokens_per_second"
        ),
        "decode_calls": _calls(
            session, calls, _timed_decode(runner, token, n_prompt, batch), batch
        ),
        "prefill_calls": _calls(
            session, calls, _timed_prefill(runner, ids), min(n_prompt, runner.chunk)
        ),
    }
    if not as_json:
        _print(data)
    return data


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


def _best_prefill(runner: _Runner, ids: array[int], repeat: int) -> tuple[float, int]:
    best, token = float("inf"), 0
    for _ in range(repeat):
        start = time.perf_counter()
        token, _times = runner.prefill(ids)
        best = min(best, time.perf_counter() - start)
    return best, token


def _best_decode(
    runner: _Runner, tokens: list[int], position: int, steps: int, repeat: int
) -> float:
    best = float("inf")
    for _ in range(repeat):
        current = tokens
        start = time.perf_counter()
        for i in range(steps):
            current = runner.decode(current, position + i)
        best = min(best, time.perf_counter() - start)
    return best


def _timed_decode(runner: _Runner, token: int, position: int, batch: int) -> list[int]:
    """The median nanoseconds of each call over some steps."""
    runs = []
    for _ in range(9):
        runner.decode([token] * batch, position, timed=True)
        runs.append(runner.engine.call_ns)
    return [sorted(column)[len(column) // 2] for column in zip(*runs)]  # noqa: B905 (Python 3.9)


def _timed_prefill(runner: _Runner, ids: array[int]) -> list[int]:
    """The nanoseconds of each call for the first chunk, the least of three runs."""
    runs = [runner.prefill(ids[: runner.chunk], timed=True)[1][0] for _ in range(3)]
    return [min(column) for column in zip(*runs)]  # noqa: B905 (Python 3.9)


def _predicted(session: Session) -> dict[str, float]:
    """Nanoseconds of each call of a one-token step, as predicted from the target's facts: all of
    the target's cores and bandwidth, whatever this host has."""
    rows = (session.manifest.get("roofline") or {}).get("calls") or []
    return {
        str(row["name"]): float(row["ns"])
        for row in rows
        if isinstance(row, dict) and "name" in row and isinstance(row.get("ns"), (int, float))
    }


def _calls(
    session: Session, calls: list[dict[str, Any]], times: list[int], rows: int
) -> list[dict[str, Any]]:
    """Calls grouped over layers: time, share, bytes, bandwidth, part of the predicted speed."""
    predicted = _predicted(session) if rows == 1 else {}  # the prediction is for one token
    groups: dict[str, dict[str, Any]] = {}
    for call, ns in zip(calls, times):  # noqa: B905 (Python 3.9)
        layer = call.get("layer")
        name = str(call.get("name"))
        place = name.replace(f"layers.{layer}.", "layers.*.") if layer is not None else name
        group = groups.setdefault(
            place, {"call": place, "op": call.get("op"), "count": 0, "ns": 0, "bytes": 0,
                    "flops": 0, "predicted_ns": 0.0}
        )  # fmt: skip
        scale = call["rows"] if isinstance(call.get("rows"), int) else rows
        if call.get("rows") in ("R", "S"):
            scale = 1
        group["count"] += 1
        group["ns"] += ns
        group["bytes"] += call.get("weight_bytes", 0)
        group["bytes"] += call.get("activation_bytes_per_row", 0) * scale
        group["flops"] += call.get("flops_per_row", 0) * scale
        group["predicted_ns"] += predicted.get(name, 0.0)
    total = sum(g["ns"] for g in groups.values()) or 1
    out = []
    for group in groups.values():
        ns = max(group["ns"], 1)
        group["share"] = round(group["ns"] / total, 4)
        group["gb_per_second"] = round(group["bytes"] / ns, 3)
        group["gflops"] = round(group["flops"] / ns, 3)
        wanted = group.pop("predicted_ns")
        group["percent_of_roofline"] = round(100 * wanted / ns, 1) if wanted else None
        out.append(group)
    return sorted(out, key=lambda g: -g["ns"])


def _print(data: dict[str, Any]) -> None:
    write = sys.stdout.write
    write(f"{data['model']} on {data['host']}, target {data['target']}, ")
    write(f"{data['threads']} threads ({data['threads_why']})\n\n")
    write(f"process start to first token  {data['process_start_to_first_token_ms']} ms\n")
    for name, ms in data["load"].items():
        write(f"  {name[:-3].ljust(26)}  {ms:.1f} ms\n")
    prefill, decode = data["prefill"], data["decode"]
    write(f"prefill {prefill['tokens']} tokens: {prefill['tokens_per_second']:.1f} tokens/s\n")
    write(f"decode {decode['sequences']} x {decode['steps']} tokens: ")
    write(f"{decode['tokens_per_second']:.1f} tokens/s ({decode['ms_per_step']:.2f} ms per step)\n")
    for title in ("decode_calls", "prefill_calls"):
        write(f"\n{title.replace('_', ' ').ljust(40)}  count      us  share    GB/s  roofline\n")
        for g in data[title]:
            percent = g["percent_of_roofline"]
            write(f"{g['call'][:40].ljust(40)}  {g['count']:5d}  {g['ns'] / 1e3:6.0f}  ")
            write(f"{100 * g['share']:4.1f}%  {g['gb_per_second']:6.2f}  ")
            write("       -\n" if percent is None else f"{percent:7.1f}%\n")
    predicted = data["predicted_decode_tokens_per_second"]
    if isinstance(predicted, (int, float)):
        write(f"\nroofline: the speed beside what is predicted for all of {data['target']}: ")
        write(f"at most {predicted:,.0f} tokens/s decode\n")
