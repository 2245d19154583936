"""The command ``chat``: a conversation on the terminal, or one message per line of a pipe.

In: a :class:`Session`, option values.  Out: answers on stdout as they come.  Next file:
``scheduler.py``, whose shared prefixes make each turn cost only its new tokens.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from .errors import UsageError
from .generate import (
    MAX_PROMPT_BYTES,
    RUNNING,
    SAMPLING,
    SEED,
    count_of,
    note_cut,
    progress_of,
    push_to,
    sampling_from,
    stops_from,
    writer,
)
from .options import Option, integer, word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

    from .options import Values
    from .scheduler import Scheduler
    from .session import Session

OPTIONS = [
    Option(("-n", "--max-new-tokens"), "per answer; default: the context", integer(1), metavar="N"),
    Option(("--system",), "system message", word, metavar="TEXT"),
    *SAMPLING,
    SEED,
    Option(("--stop",), "end before this text (may be repeated)", word, metavar="TEXT", many=True),
    *RUNNING,
]

_CHAT_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def run_chat(session: Session, values: Values, as_json: bool) -> dict[str, Any]:
    """``chat``: reads a line, streams the answer, until the end of input."""
    session.require_host()
    context = session.context(values["max_context"])
    codec = session.codec()
    if not codec.has_template:
        codec.render([])  # raises with the next step
    sampling = sampling_from(session, values)
    if values["max_context"] is None and values["kv_memory"] is None:
        context = max(1, min(context, session.memory.largest_context))
    blocks = session.kv_blocks(context, context, context, values["kv_memory"])
    threads, why = session.threads(values["threads"])
    scheduler = session.scheduler(blocks, threads, pin=values["pin"], max_context=context)
    texts, stop_ids = stops_from(session, values["stop"], False)
    request = {
        "sampling": sampling,
        "max_new_tokens": values["max_new_tokens"] or 1 << 30,
        "stop_ids": (*session.eos_ids, *stop_ids),
    }
    interactive = sys.stdin.isatty()
    if interactive:
        name = session.manifest.get("model", {}).get("name")
        team = f"{count_of(threads, 'thread')} ({why})"
        sys.stderr.write(f"{name}\ncontext {scheduler.context_limit}, {team}\n")
        sys.stderr.write(_CHAT_HELP + "\n")
    system = [{"role": "system", "content": values["system"]}] if values["system"] else []
    history = list(system)
    turns = 0
    while True:
        line = _next_line(interactive)
        if line is None or line.strip() == "/exit":
            break
        if line.strip() == "/help" and interactive:
            sys.stderr.write(_CHAT_HELP + "\n")
            continue
        if line.strip() == "/reset":
            history = list(system)
            continue
        if not line.strip():
            continue
        history.append({"role": "user", "content": line})
        try:
            answer = _answer(
                session, scheduler, history, request=request, stops=texts, quiet=as_json
            )
        except UsageError as e:
            history.pop()
            if not interactive:
                raise
            sys.stderr.write(f"{e.one_line()} (/reset starts again)\n")
            continue
        history.append({"role": "assistant", "content": answer})
        turns += 1
    return {
        "messages": history,
        "turns": turns,
        "threads": threads,
        "sampling": sampling.as_dict(),
        "scheduler": scheduler.stats(),
        "timings": session.timings.as_dict(),
    }


def _next_line(interactive: bool) -> Optional[str]:
    if not interactive:
        line = sys.stdin.buffer.readline(MAX_PROMPT_BYTES)
        if not line:
            return None
        try:
            return line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as e:
            raise UsageError(f"the message is not valid UTF-8 (byte {e.start})") from None
    with suppress(ImportError):
        import readline  # noqa: F401 (line editing, where there is one)
    try:
        return input("> ")
    except EOFError:
        sys.stderr.write("\n")
        return None


def _answer(
    session: Session,
    scheduler: Scheduler,
    history: list[dict[str, str]],
    *,
    request: dict[str, Any],
    stops: list[str],
    quiet: bool,
) -> str:
    """One answer, streamed.  Ctrl-C ends it and keeps what there is."""
    from .stream import TextStream

    codec = session.codec()
    ids = codec.encode(codec.render(history), raw=False)
    stream = TextStream(codec.decode, context=ids, stops=stops, write=writer(not quiet))
    sequence = scheduler.add(ids, on_token=push_to(stream), **request)
    progress = progress_of([sequence], not quiet)
    try:
        while not sequence.finished:
            if progress is not None:
                progress.update()
            scheduler.step()
    except KeyboardInterrupt:
        scheduler.cancel(sequence)
    finally:
        if progress is not None:
            progress.clear()
    text = stream.finish()
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
        note_cut(int(sequence.stopped_by == "context"), 1, scheduler.context_limit)
    return text
