"""The artifact's command line.

In: ``argv``, the path of the artifact this loader lies in.  Out: an exit code (see ``errors.py``),
text on stdout, with ``--json`` one object on stdout's last line; messages go to stderr.  Next file:
``session.py``.

A user's mistake is one line on stderr and an exit code, never a traceback.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from .errors import (
    EXIT_HARDWARE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RESOURCES,
    UsageError,
    ZerolayerError,
)
from .options import Option, help_text, integer, parse, word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, Callable, Optional

    from .options import Values
    from .session import Session

    #: (session, options, --json?) -> (exit code, the JSON object)
    Command = Callable[[Session, Values, bool], "tuple[int, dict[str, Any]]"]

_JSON = Option(("--json",), "one JSON object on the last line of stdout")
_HELP = Option(("-h", "--help"), "this text")

#: name -> (usage, one line)
COMMANDS = {
    "info": ("info", "what this artifact is"),
    "check": ("check", "whether it can run here; allocates nothing"),
    "generate": ("generate [PROMPT | -]", "go on from a prompt"),
    "chat": ("chat", "talk; reads one message per line"),
    "verify": ("verify", "check every byte, then the golden prompts"),
    "bench": ("bench", "measure start, prefill, decode and each kernel"),
    "run": ("run --input NAME=FILE.npy ...", "run a graph that is not a language model"),
}


def main(
    argv: Optional[Sequence[str]] = None,
    artifact_path: Optional[str] = None,
    mask: Iterable[str] = (),
) -> int:
    """Runs one command.  ``mask`` hides CPU features, for tests that play a lesser machine."""
    args = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in args
    try:
        _standard_streams()
        code = _dispatch(args, artifact_path, mask)
        sys.stdout.flush()
        return code
    except ZerolayerError as e:
        return _fail(e, as_json)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop(1)
        return EXIT_OK
    except MemoryError:
        from .errors import ResourceError

        return _fail(ResourceError("out of memory", next_step="free memory"), as_json)
    except OSError as e:
        from .errors import ResourceError

        return _fail(ResourceError(f"the system refused: {e}"), as_json)
    except Exception as e:
        return _fail(_unexpected(e), as_json)


def _unexpected(error: Exception) -> ZerolayerError:
    """A fault of ours, in one line with its place."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        file = trace.tb_frame.f_code.co_filename.rpartition("/")[2]
        place = f" at {file}:{trace.tb_lineno}"
    return ZerolayerError(
        f"unexpected {type(error).__name__}: {error}{place}", next_step="report this as a bug"
    )


def _standard_streams() -> None:
    """Text is UTF-8 whatever the locale says; a closed stream is empty, or nowhere."""
    import os

    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="replace")


def _drop(descriptor: int) -> None:
    """Nobody takes what goes there: nothing more does, also not at the interpreter's exit."""
    import os

    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _fail(error: ZerolayerError, as_json: bool) -> int:
    try:
        sys.stdout.flush()
    except OSError:
        _drop(1)
    try:
        sys.stderr.write(f"error: {error.one_line()}\n")
        sys.stderr.flush()
    except OSError:
        _drop(2)
    if as_json:
        try:
            _print_json(error.as_dict())
            sys.stdout.flush()
        except OSError:
            _drop(1)
    return error.exit_code


def _print_json(data: dict[str, Any]) -> None:
    import json

    sys.stdout.write(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n")


def _overview(program: str) -> str:
    lines = [f"usage: {program} COMMAND [options]", ""]
    for usage, text in COMMANDS.values():
        lines.append(f"  {usage.ljust(30)}  {text}")
    lines += ["", f"{program} COMMAND --help shows the options of a command."]
    lines.append("exit codes: 0 ok, 2 usage, 3 bad input file, 4 unsupported, 5 hardware mismatch,")
    lines.append("6 integrity, 7 numerics, 8 out of memory or resources, 130 interrupted")
    return "\n".join(lines)


def _options(command: str) -> list[Option]:
    if command == "generate":
        from .generate import GENERATE

        return [*GENERATE, _JSON, _HELP]
    if command == "chat":
        from .chat import OPTIONS as CHAT

        return [*CHAT, _JSON, _HELP]
    if command == "verify":
        from .verify import OPTIONS as VERIFY

        return [*VERIFY, _JSON, _HELP]
    if command == "bench":
        from .bench import OPTIONS as BENCH

        return [*BENCH, _JSON, _HELP]
    if command == "run":
        from .run_graph import OPTIONS as RUN

        return [*RUN, _JSON, _HELP]
    if command == "check":
        context = Option(
            ("--max-context",), "a context that must fit", integer(1, 1 << 40), metavar="N"
        )
        return [context, _JSON, _HELP]
    return [_JSON, _HELP]


def _dispatch(args: list[str], artifact_path: Optional[str], mask: Iterable[str]) -> int:
    from .container import running_artifact_path

    path = artifact_path or running_artifact_path()
    program = (path or "artifact").rpartition("/")[2]
    if not args or args[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview(program) + "\n")
        return EXIT_OK if args else UsageError.exit_code
    hidden = Option(("--mask-features",), "", word, metavar="A,B")
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(name, COMMANDS, 1)
        raise UsageError(
            f"unknown command {name!r}",
            where=program,
            next_step=f"did you mean {near[0]}?" if near else f"use {', '.join(COMMANDS)}",
        )
    options = _options(name)
    values = parse(rest, [*options, hidden], name)
    if values["help"]:
        usage, text = COMMANDS[name]
        sys.stdout.write(help_text(f"{program} {usage} [options]", text, options) + "\n")
        return EXIT_OK
    if values.positional and name != "generate":
        raise UsageError(f"unexpected argument {values.positional[0]!r}", where=name)
    if path is None:
        raise UsageError("this loader does not lie in an artifact", next_step="run an artifact")
    if values["mask_features"]:
        mask = [*mask, *values["mask_features"].split(",")]
    return _run(name, path, values, mask)


def _run(name: str, path: str, values: Values, mask: Iterable[str]) -> int:
    from .session import Session

    as_json = bool(values["json"])
    with Session(path, mask) as session:
        code, data = _command(name)(session, values, as_json)
    if as_json:
        _print_json(data)
    return code


def _command(name: str) -> Command:
    if name == "info":
        return _info
    if name == "check":
        return _check
    if name == "verify":
        from .verify import run_verify

        return lambda s, v, j: (EXIT_OK, run_verify(s, v, j))
    if name == "bench":
        from .bench import run_bench

        return lambda s, v, j: (EXIT_OK, run_bench(s, v, j))
    if name == "run":
        from .run_graph import run_graph

        return lambda s, v, j: (EXIT_OK, run_graph(s, v, j))
    if name == "chat":
        from .chat import run_chat

        return lambda s, v, j: (EXIT_OK, run_chat(s, v, j))
    from .generate import run_generate

    return lambda s, v, j: (EXIT_OK, run_generate(s, v, j))


# info and check ---------------------------------------------------------------------------------


def _table(rows: Iterable[tuple[str, object]]) -> None:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        sys.stdout.write(f"{name.ljust(width)}  {value}\n")


def _info(session: Session, _values: Values, as_json: bool) -> tuple[int, dict[str, Any]]:
    from .memory import human

    manifest, memory = session.manifest, session.memory
    model = manifest.get("model", {})
    numerics = manifest.get("numerics") or {}
    options, tools = manifest.get("options") or {}, manifest.get("tools") or {}
    data: dict[str, Any] = {
        "path": session.path,
        "size_bytes": session.artifact.size,
        "digest": session.artifact.digest,
        "format": manifest.get("format"),
        "model": {k: v for k, v in model.items() if k != "config"},
        "target": {k: session.target.get(k) for k in ("name", "family", "description", "requires")},
        "limits": manifest.get("limits"),
        "memory": memory.as_dict(),
        "options": options,
        "inputs": manifest.get("inputs"),
        "tools": tools,
        "numerics": numerics.get("status"),
        "members": len(session.artifact.names),
        "text": bool(session.text_needs),
    }
    if not as_json:
        settings = {k: v for k, v in options.items() if k != "max_context"}  # in the context row
        if memory.block_size:
            shape = [("context", f"{memory.max_context} tokens")]
        else:
            shape = _inputs_outputs(session)
        _table(
            [
                ("model", f"{model.get('name')} ({model.get('parameters', 0):,} parameters)"),
                ("target", f"{session.target.get('name')}: {session.target.get('description')}"),
                ("file", f"{session.path} ({human(session.artifact.size)})"),
                ("digest", session.artifact.digest),
                ("options", ", ".join(f"{k}={v}" for k, v in settings.items())),
                ("memory", memory.breakdown()),
                *shape,
                ("numerics", numerics.get("status", "not run")),
                ("built with", ", ".join(f"{k} {v}" for k, v in tools.items())),
            ]
        )
    return EXIT_OK, data


def _inputs_outputs(session: Session) -> list[tuple[str, str]]:
    """What a graph reads and gives, by name, as ``run`` takes them."""
    from .run_graph import describe

    buffers = {b["name"]: b for b in session.manifest["buffers"]}
    entry = session.entry_point("run")
    return [
        (kind, ", ".join(f"{n} {describe(buffers.get(n, {}))}" for n in entry[kind]))
        for kind in ("inputs", "outputs")
    ]


def _check(session: Session, values: Values, as_json: bool) -> tuple[int, dict[str, Any]]:
    """Structure (done by opening), hardware, memory, Python; the first failure's exit code."""
    from .memory import human

    facts, memory = session.facts, session.memory
    mismatches = session.mismatches
    asked = values["max_context"] or 0
    too_long = bool(memory.block_size) and asked > memory.max_context
    fits = memory.fits and memory.largest_context >= min(asked, memory.max_context)
    threads, why = session.threads(None)
    features = _python_features(session)
    code = EXIT_HARDWARE if mismatches else (EXIT_OK if fits and not too_long else EXIT_RESOURCES)
    data = {
        "ok": code == EXIT_OK,
        "exit_code": code,
        "artifact": {"path": session.path, "digest": session.artifact.digest, "structure": "ok"},
        "target": session.target.get("name"),
        "mismatches": [m.as_dict() for m in mismatches],
        "host": facts.as_dict(),
        "memory": memory.as_dict(),
        "threads": threads,
        "threads_why": why,
        "python": features,
        "timings": session.timings.as_dict(),
    }
    if not as_json:
        rows: list[tuple[str, object]] = [
            ("artifact", f"structure ok, digest {session.artifact.digest[:16]}"),
            ("host", f"{facts.cpu_model or '?'}, {facts.arch}, {facts.libc}, {facts.kernel}"),
            ("hardware", f"matches {session.target.get('name')}"),
        ]
        if mismatches:
            rows[-1] = ("hardware", f"does not match {session.target.get('name')}:")
            rows += [("", _lack(m.name, m.need, m.have)) for m in mismatches]
        rows.append(("memory", f"{memory.breakdown()}; {human(memory.available)} available"))
        if memory.block_size:
            largest = f"largest that fits: {memory.largest_context} tokens"
            rows.append(("context", f"{largest}; the model's limit: {memory.max_context}"))
        if asked and (too_long or not fits):
            why_not = "the model has fewer" if too_long else "not enough memory"
            rows.append(("", f"{asked} tokens do not fit: {why_not}"))
        rows.append(("threads", f"{threads} ({why})"))
        rows.append(("python", f"{features['version']}, text: {features['text']}"))
        rows.append(("result", "can run here" if code == EXIT_OK else "cannot run here"))
        _table(rows)
    return code, data


def _lack(name: str, need: str, have: str) -> str:
    """One difference between what the target requires and the host."""
    return f"{name}: missing" if have == "no" else f"{name}: needs {need}, has {have}"


def _python_features(session: Session) -> dict[str, str]:
    """What this interpreter has of the things that the loader uses."""
    import os

    oldest = session.text_needs
    text = "token ids only (no tokenizer in the artifact)"
    if oldest:
        ok = sys.version_info[:2] >= tuple(int(p) for p in oldest.split(".") if p.isdigit())
        text = "yes" if ok else f"token ids only (the tokenizer needs Python {oldest})"
    return {
        "version": session.facts.python,
        "memfd": "yes" if hasattr(os, "memfd_create") else "no (a temporary directory is used)",
        "text": text,
    }
