"""The artifact's command line.

In: ``argv``, the path of the artifact this loader lies in.  Out: an exit code (see ``errors.py``),
text on stdout, with ``--json`` one object on stdout's last line; messages go to stderr.  Next file:
``session.py``.

A user's mistake is one line on stderr and an exit code, never a traceback.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from .errors import EXIT_OK, Interrupted, UsageError, ZerolayerError
from .options import Option, help_text, integer, parse, word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, Callable, Optional

    from .options import Values
    from .profile import Profile
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
    "bench": ("bench", "measure start, prefill, decode; where the time goes"),
    "run": ("run --input NAME=FILE.npy ...", "run a graph that is not a language model"),
}


class _Object:
    """The one of ``--json``: once begun, whatever happens later prints no second one."""

    begun = False


#: command -> the entry point that an artifact must have for it
_ENTRY = {"generate": "step", "chat": "step", "bench": "step", "run": "run"}


def main(
    argv: Optional[Sequence[str]] = None,
    artifact_path: Optional[str] = None,
    mask: Iterable[str] = (),
) -> int:
    """Runs one command.  ``mask`` hides CPU features, for tests that play a lesser machine."""
    args = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in args
    _Object.begun = False
    try:
        return _guarded(args, as_json, artifact_path, mask)
    except KeyboardInterrupt:
        return _interrupted(as_json)


def _guarded(
    args: list[str], as_json: bool, artifact_path: Optional[str], mask: Iterable[str]
) -> int:
    """A mistake becomes a line and an exit code; an interrupt stays one."""
    try:
        _standard_streams()
        code = _dispatch(args, artifact_path, mask)
        sys.stdout.flush()
        return code
    except ZerolayerError as e:
        return _fail(e, as_json)
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


def _interrupted(as_json: bool) -> int:
    """Whoever pressed the keys knows; whoever reads the object has to be told.  A second interrupt
    while that is written, because nobody reads, ends the waiting."""
    try:
        if as_json and not _Object.begun:
            return _fail(Interrupted("interrupted"), True)
        sys.stdout.flush()
    except (KeyboardInterrupt, OSError):
        _drop(1)
    return Interrupted.exit_code


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
    """The one object, if none was begun."""
    import json

    line = json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n"
    write = sys.stdout.write
    if not _Object.begun:
        _Object.begun = True
        write(line)


def applicable(path: Optional[str]) -> list[str]:
    """The commands that the artifact has; all where it cannot be read."""
    from .container import open_artifact

    try:
        with open_artifact(path or "") as artifact:
            entries = {e.get("name") for e in artifact.manifest.get("entry_points") or ()}
    except (ZerolayerError, OSError, AttributeError, TypeError):
        return list(COMMANDS)
    return [name for name in COMMANDS if name not in _ENTRY or _ENTRY[name] in entries]


def _overview(program: str, names: list[str]) -> str:
    lines = [f"usage: {program} COMMAND [options]", ""]
    for usage, text in (COMMANDS[name] for name in names):
        lines.append(f"  {usage.ljust(30)}  {text}")
    lines.append(f"  {'--version'.ljust(30)}  which model, target and build this is")
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
        context = Option(("--max-context",), "a context that must fit", integer(1), metavar="N")
        return [context, _JSON, _HELP]
    return [_JSON, _HELP]


def _dispatch(args: list[str], artifact_path: Optional[str], mask: Iterable[str]) -> int:
    from .container import running_artifact_path

    path = artifact_path or running_artifact_path()
    program = (path or "artifact").rpartition("/")[2]
    if not args or args[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview(program, applicable(path)) + "\n")
        return EXIT_OK if args else UsageError.exit_code
    if args[0] == "--version":
        return _version(args[1:], path)
    hidden = Option(("--mask-features",), "", word, metavar="A,B")
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(name, COMMANDS, 1)
        raise UsageError(
            f"unknown command {name!r}",
            where=program,
            next_step=f"did you mean {near[0]}?" if near else f"use {', '.join(applicable(path))}",
        )
    options = _options(name)
    values = parse(rest, [*options, hidden], name)
    if values["help"]:
        usage, text = COMMANDS[name]
        sys.stdout.write(help_text(f"{program} {usage} [options]", text, options) + "\n")
        return EXIT_OK
    if values.positional and name != "generate":
        raise UsageError(f"unexpected argument {values.positional[0]!r}", where=name)
    path = _inside(path)
    if values["mask_features"]:
        mask = [*mask, *values["mask_features"].split(",")]
    return _run(name, path, values, mask)


def _inside(path: Optional[str]) -> str:
    if path is None:
        raise UsageError("this loader does not lie in an artifact", next_step="run an artifact")
    return path


def _version(rest: list[str], path: Optional[str]) -> int:
    from .about import run_version

    values = parse(rest, [_JSON], "--version")
    if values.positional:
        raise UsageError(f"unexpected argument {values.positional[0]!r}", where="--version")
    code, data = run_version(_inside(path), bool(values["json"]))
    if values["json"]:
        _print_json(data)
    return code


def _run(name: str, path: str, values: Values, mask: Iterable[str]) -> int:
    from .session import Session

    as_json = bool(values["json"])
    with Session(path, mask, ahead=name in _ENTRY) as session:
        try:
            code, data = _command(name)(session, values, as_json)
            if not as_json:
                sys.stdout.flush()
        except (BrokenPipeError, KeyboardInterrupt):
            if session.profile is not None:
                session.profile.rescue()
            raise
        error = None if session.profile is None else _trace_error(session.profile)
        if error is not None and not as_json:
            raise error
        if error is not None:
            data["profile_error"] = error.as_dict()
            code = _fail(error, False)
    if as_json:
        _print_json(data)
    return code


def _trace_error(profile: Profile) -> Optional[ZerolayerError]:
    """Writes the trace; what went wrong with it does not take the result along."""
    try:
        profile.write()
    except ZerolayerError as e:
        return e
    except KeyboardInterrupt:
        return Interrupted("no trace was written: interrupted", where=profile.path)
    return None


def _command(name: str) -> Command:
    if name in ("info", "check"):
        from . import about

        return about.run_info if name == "info" else about.run_check
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
