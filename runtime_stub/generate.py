"""The command ``generate``.

In: a :class:`Session`, option values.  Out: text (or token ids) on stdout, one JSON object with
``--json``.  Next file: ``scheduler.py``.
"""

from __future__ import annotations

import sys
import time

from .errors import InputFileError, ResourceError, UsageError
from .options import PROFILE, THREADS, Option, integer, number, size, token_ids, word
from .step import SamplingParams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Callable, Optional

    from .options import Values
    from .profile import Profile
    from .progress import Progress
    from .scheduler import Scheduler, Sequence
    from .session import Session
    from .stream import TextStream

DEFAULT_NEW_TOKENS = 256
MAX_PROMPT_BYTES = 64 << 20
MAX_PROMPTS = 100_000

SAMPLING = [
    Option(("--temperature",), "0 is greedy", number(0, 100), metavar="X"),
    Option(("--top-k",), "keep the K likeliest tokens; 0: all", integer(0, (1 << 31) - 1),
           metavar="K"),
    Option(("--top-p",), "keep the likeliest tokens up to this probability", number(0, 1),
           metavar="P"),
    Option(("--min-p",), "drop tokens less likely than this times the likeliest", number(0, 1),
           metavar="P"),
    Option(("--repetition-penalty",), "above 1: repeat less", number(0.01, 100), metavar="X"),
]  # fmt: skip
_SEED, _SEED_HELP = integer(0, (1 << 64) - 1), "same seed, same text (default: random)"
SEED = Option(("--seed",), _SEED_HELP, _SEED, metavar="N")
_SEEDS = Option(
    ("--seed",),
    f"{_SEED_HELP}; with --prompts-file each next prompt's is one more",
    _SEED,
    metavar="N",
)
RUNNING = [
    THREADS,
    Option(("--pin",), "keep each thread on its CPU"),
    Option(("--max-context",), "tokens of prompt and answer together", integer(2), metavar="N"),
    Option(("--kv-memory",), "memory for the KV cache, like 512M", size, metavar="SIZE"),
]  # fmt: skip
GENERATE = [
    Option(("-n", "--max-new-tokens"), f"default {DEFAULT_NEW_TOKENS}", integer(1), metavar="N"),
    Option(("--raw",), "go on with the prompt itself, without the chat template"),
    Option(("--system",), "system message for the chat template", word, metavar="TEXT"),
    Option(("--tokens",), "the prompt as token ids; ids come back", token_ids, metavar="1,2,3"),
    Option(("--prompts-file",), "one prompt per line (.jsonl: strings or {\"prompt\":..} or "
           "{\"tokens\":[..]}); all run together", word, metavar="FILE"),
    *SAMPLING,
    _SEEDS,
    Option(("--stop",), "end before this text (may be repeated)", word, metavar="TEXT", many=True),
    Option(("--ignore-eos",), "do not end at the model's end-of-text token"),
    Option(("--no-stream",), "print when finished, not as it comes"),
    PROFILE,
    *RUNNING,
]  # fmt: skip


class Prompt:
    """One request: token ids, the text they came from (None when ids were given), and for messages
    where it was given."""

    def __init__(self, ids: list[int], text: Optional[str], where: str) -> None:
        self.ids = ids
        self.text = text
        self.where = where
        self.seed: Optional[int] = None
        self.stream: Optional[TextStream] = None
        self.sequence: Optional[Sequence] = None


def sampling_from(session: Session, values: Values) -> SamplingParams:
    """The model's own defaults (or greedy), replaced by what was asked for."""
    settings = (session.manifest.get("tokenizer") or {}).get("generation") or {}
    chosen: dict[str, Any] = {}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        asked = values[name]
        value = settings.get(name) if asked is None else asked
        if isinstance(value, (int, float)):
            chosen[name] = int(value) if name == "top_k" else float(value)
    seed = values["seed"]
    if chosen.get("temperature", 0.0) <= 0:
        _note_unused(values)
    if seed is None and chosen.get("temperature", 0.0) > 0:
        import os

        seed = int.from_bytes(os.urandom(4), "little")
    return SamplingParams(seed=seed or 0, **chosen)


def _note_unused(values: Values) -> None:
    """One line on stderr for options that only matter where tokens are drawn."""
    names = ("top_k", "top_p", "min_p", "seed")
    unused = [f"--{n.replace('_', '-')}" for n in names if values[n] is not None]
    if unused:
        what = f"{', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect"
        why = "without --temperature" if values["temperature"] is None else "at --temperature 0"
        sys.stderr.write(f"note: {what}: {why} the likeliest token is taken\n")


def stops_from(session: Session, stops: list[str], ids_only: bool) -> tuple[list[str], list[int]]:
    """(stop strings, stop ids): a stop string that is a special token stops by its id."""
    if not stops:
        return [], []
    if ids_only:
        raise UsageError("--stop needs text, --tokens gives only ids", next_step="drop one of them")
    if "" in stops:
        raise UsageError("--stop '' would end at once", next_step="give it some text")
    ids = [session.codec().special_id(s) for s in stops]
    texts = [s for s, i in zip(stops, ids) if i is None]  # noqa: B905 (Python 3.9)
    return texts, [i for i in ids if i is not None]


# prompts ----------------------------------------------------------------------------------------


def _read(path: str, what: str) -> str:
    """A whole text file, or stdin for ``-``."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with open(path, "rb") as f:
                data = f.read(MAX_PROMPT_BYTES + 1)
    except OSError as e:
        raise InputFileError(f"cannot read {what}: {e.strerror}", where=path) from None
    except ValueError as e:
        raise UsageError(f"cannot read {what}: {e}") from None
    if len(data) > MAX_PROMPT_BYTES:
        raise InputFileError(f"{what} has more than {MAX_PROMPT_BYTES} bytes", where=path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        raise UsageError(
            f"{what} is not valid UTF-8 (byte {e.start}, line {line})", where=path
        ) from None


def _from_text(session: Session, text: str, values: Values, where: str) -> Prompt:
    if not text:
        raise UsageError("the prompt is empty", where=where, next_step="give some text")
    codec = session.codec()
    if values["raw"] or not codec.has_template:
        if values["system"] is not None:
            raise UsageError("--system needs the chat template", next_step="drop --raw or --system")
        return Prompt(codec.encode(text, raw=True), text, where)
    messages = [{"role": "user", "content": text}]
    if values["system"] is not None:
        messages.insert(0, {"role": "system", "content": values["system"]})
    return Prompt(codec.encode(codec.render(messages), raw=False), text, where)


def _from_ids(session: Session, ids: list[int], where: str) -> Prompt:
    if not ids:
        raise UsageError("the prompt is empty", where=where, next_step="give at least one id")
    for i in ids:
        if type(i) is not int or not 0 <= i < session.vocab_size:
            raise UsageError(
                f"token id {str(i)[:30]} is outside the vocabulary of {session.vocab_size}",
                where=where,
            )
    return Prompt(ids, None, where)


def _check_keys(item: object, where: str) -> None:
    """Nothing in a line of a prompts file is passed over."""
    if not isinstance(item, dict):
        return
    unknown = [key for key in item if key not in ("prompt", "tokens")]
    if unknown:
        raise InputFileError(
            f"unknown key {unknown[0]!r}", where=where, next_step="known: prompt, tokens"
        )
    if len(item) > 1:
        raise InputFileError("both prompt and tokens", where=where, next_step="give one of them")


def _from_file(session: Session, path: str, values: Values) -> list[Prompt]:
    text = _read(path, "the prompts file")
    prompts: list[Prompt] = []
    for number_, full_line in enumerate(text.split("\n"), 1):
        line = full_line[:-1] if full_line.endswith("\r") else full_line
        if not line.strip():
            continue
        where = f"{path}:{number_}"
        if len(prompts) == MAX_PROMPTS:
            raise UsageError(f"more than {MAX_PROMPTS} prompts", where=where)
        if not path.endswith(".jsonl"):
            prompts.append(_from_text(session, line, values, where))
            continue
        import json

        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise InputFileError(f"not JSON: {e}", where=where) from None
        _check_keys(item, where)
        if isinstance(item, dict) and isinstance(item.get("tokens"), list):
            prompts.append(_from_ids(session, item["tokens"], where))
            continue
        prompt = item.get("prompt") if isinstance(item, dict) else item
        if not isinstance(prompt, str):
            raise InputFileError(
                'neither a string nor {"prompt": ...} nor {"tokens": [...]}', where=where
            )
        prompts.append(_from_text(session, prompt, values, where))
    if not prompts:
        raise UsageError("the prompts file has no prompt", where=path)
    return prompts


def prompts_from(session: Session, values: Values) -> list[Prompt]:
    """The requests that the command line asks for, exactly one source of them."""
    sources = [bool(values.positional), values["tokens"] is not None]
    sources.append(values["prompts_file"] is not None)
    if sum(sources) > 1 or len(values.positional) > 1:
        raise UsageError(
            "more than one prompt",
            where="generate",
            next_step="quote the prompt, or give one of PROMPT, --tokens, --prompts-file",
        )
    if values["tokens"] is not None:
        return [_from_ids(session, values["tokens"], "--tokens")]
    if values["prompts_file"] is not None:
        return _from_file(session, values["prompts_file"], values)
    if not values.positional and sys.stdin is not None and sys.stdin.isatty():
        raise UsageError("no prompt", where="generate", next_step="see generate --help")
    text = values.positional[0] if values.positional else "-"
    if text == "-":
        text = _read("-", "the prompt")
    return [_from_text(session, text, values, "generate")]


# generate ---------------------------------------------------------------------------------------


def writer(enabled: bool) -> Optional[Callable[[str], None]]:
    if not enabled:
        return None

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    return write


def _submit(
    session: Session,
    scheduler: Scheduler,
    prompts: list[Prompt],
    *,
    values: Values,
    sampling: SamplingParams,
    live: bool,
) -> None:
    """Queues every prompt; text or ids are written as they come when ``live``."""
    ids_only = all(p.text is None for p in prompts)
    texts, stop_ids = stops_from(session, values["stop"], ids_only)
    eos = () if values["ignore_eos"] else session.eos_ids
    count = values["max_new_tokens"] or DEFAULT_NEW_TOKENS
    for number_, prompt in enumerate(prompts):
        params = _seeded(sampling, number_)
        prompt.seed = params.seed if params.temperature > 0 else None
        on_token: Any = None
        if prompt.text is not None:
            from .stream import TextStream

            stream = TextStream(
                session.codec().decode, context=prompt.ids, stops=texts, write=writer(live)
            )
            prompt.stream = stream
            on_token = push_to(stream)
        elif live:
            on_token = _write_id
        try:
            prompt.sequence = scheduler.add(
                prompt.ids,
                sampling=params,
                max_new_tokens=count,
                stop_ids=(*eos, *stop_ids),
                on_token=on_token,
            )
        except ResourceError as e:  # --kv-memory holds less than the model's context
            plan = session.memory
            least = plan.blocks_for(len(prompt.ids) + 1) * plan.block_bytes
            step = f"shorten the prompt or use --kv-memory {least} or more"
            raise ResourceError(e.what, where=prompt.where, next_step=step) from None


def _seeded(sampling: SamplingParams, number_: int) -> SamplingParams:
    """The sampling of a prompt: equal prompts of a file draw different texts."""
    settings = sampling.as_dict()
    settings["seed"] = (sampling.seed + number_) % (1 << 64)
    return SamplingParams(**settings)  # type: ignore[arg-type]


def push_to(stream: TextStream) -> Callable[[Sequence, int], bool]:
    return lambda _sequence, token: stream.push(token)


def _write_id(sequence: Sequence, token: int) -> None:
    first = len(sequence.tokens) == sequence.n_prompt + 1
    sys.stdout.write(f"{token}" if first else f",{token}")
    sys.stdout.flush()


def progress_of(sequences: list[Sequence], live: bool) -> Optional[Progress]:
    """A :class:`Progress`; None where stderr is no terminal; the module is loaded only then."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from .progress import Progress

    return Progress(sequences, live)


def _run(session: Session, scheduler: Scheduler, progress: Optional[Progress]) -> dict[str, float]:
    """Steps to the end.  Prefill is the time up to the first token of any sequence."""
    session.timings.skip()
    start = time.perf_counter()
    first: Optional[float] = None
    generated = 0
    while not scheduler.idle:
        if progress is not None:
            progress.update()
        generated += len(scheduler.step())
        if first is None and generated:
            first = time.perf_counter()
            session.timings.mark("first_token")
    end = time.perf_counter()
    session.timings.mark("decode")
    first = end if first is None else first
    rate = (generated - 1) / (end - first) if generated > 1 and end > first else 0.0
    return {
        "first_token_ms": round((first - start) * 1e3, 3),
        "total_ms": round((end - start) * 1e3, 3),
        "decode_tokens_per_second": round(rate, 2),
    }


def _result(prompt: Prompt) -> dict[str, Any]:
    sequence = prompt.sequence
    assert sequence is not None
    output = sequence.output
    return {
        "prompt": prompt.text,
        "prompt_tokens": prompt.ids,
        "tokens": output,
        "text": prompt.stream.finish() if prompt.stream is not None else None,
        "finish_reason": sequence.finish_reason,
        "stopped_by": sequence.stopped_by,
        "seed": prompt.seed,
        "usage": _usage(len(prompt.ids), len(output)),
    }


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def profile_from(
    session: Session, values: Values, taken: Iterable[tuple[str, str]] = ()
) -> Optional[Profile]:
    """What ``--profile`` asks for, if it does; UsageError for a path that cannot be written."""
    if values["profile"] is None:
        return None
    from .profile import Profile

    return Profile(session, values["profile"], taken)


def run_generate(session: Session, values: Values, as_json: bool) -> dict[str, Any]:
    """``generate``: returns what ``--json`` prints."""
    session.require_host()
    limits = session.limits()
    file = values["prompts_file"]
    taken = [] if file in (None, "-") else [("the prompts file", file)]
    profile = profile_from(session, values, taken)
    prompts = prompts_from(session, values)
    sampling = sampling_from(session, values)
    count = values["max_new_tokens"] or DEFAULT_NEW_TOKENS
    context = session.context(values["max_context"])
    for prompt in prompts:
        if len(prompt.ids) >= context:
            raise UsageError(
                f"the prompt has {len(prompt.ids)} tokens, the context holds {context} with at "
                "least one of them new",
                where=prompt.where,
                next_step="shorten the prompt",
            )
    lengths = sorted((min(context, len(p.ids) + count) for p in prompts), reverse=True)
    wanted = sum(
        session.memory.blocks_for(n) * limits.block_size for n in lengths[: limits.max_seqs]
    )
    blocks = session.kv_blocks(wanted, lengths[0], context, values["kv_memory"])
    threads, why = session.threads(values["threads"])
    scheduler = session.scheduler(
        blocks, threads, pin=values["pin"], max_context=context, profile=profile
    )
    live = len(prompts) == 1 and not as_json and not values["no_stream"]
    _submit(session, scheduler, prompts, values=values, sampling=sampling, live=live)
    progress = progress_of([p.sequence for p in prompts if p.sequence], live)
    try:
        speed = _run(session, scheduler, progress)
    except KeyboardInterrupt:
        if live:
            sys.stdout.write("\n")
        raise
    finally:
        if progress is not None:
            progress.clear()
    results = [_result(p) for p in prompts]
    if not as_json:
        _print_results(results, live)
        cut = sum(r["stopped_by"] == "context" for r in results)
        note_cut(cut, len(results), scheduler.context_limit)
    totals = [sum(r["usage"][k] for r in results) for k in ("prompt_tokens", "completion_tokens")]
    common: dict[str, Any] = {
        "model": session.manifest.get("model", {}).get("name"),
        "target": session.target.get("name"),
        "sampling": sampling.as_dict(),
        "threads": threads,
        "threads_why": why,
        "scheduler": scheduler.stats(),
        "profile": values["profile"],
        "timings": {**session.timings.as_dict(), **speed},
    }
    if values["prompts_file"] is not None:
        return {"results": results, "usage": _usage(*totals), **common}
    return {**results[0], **common}


def count_of(number_: int, what: str) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{number_} {what}{'' if number_ == 1 else 's'}"


def note_cut(cut: int, answers: int, context: int) -> None:
    """One line on stderr when the end of the context ended answers."""
    if cut:
        which = "the answer" if answers == 1 else f"{cut} of {answers} answers"
        sys.stderr.write(f"note: the context of {context} tokens ended {which}\n")


def _print_results(results: list[dict[str, Any]], live: bool) -> None:
    if live:
        sys.stdout.write("\n")
        return
    for i, result in enumerate(results):
        if len(results) > 1:
            sys.stdout.write(f"[{i + 1}] {result['prompt'] or ''}\n")
        text = result["text"]
        sys.stdout.write((",".join(map(str, result["tokens"])) if text is None else text) + "\n")
