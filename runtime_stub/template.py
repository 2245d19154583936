"""The chat template that travels in the artifact, compiled by the vendored Jinja2.

In: the source of ``chat_template.jinja``.  Out: a template object.  Next file: ``text.py``.

The template runs in Jinja2's immutable sandbox with the settings that the authors of templates test
with: trim_blocks, lstrip_blocks, loop controls, ``raise_exception``, ``strftime_now``, a ``tojson``
that does not escape HTML.  The sandbox bounds what it may touch, :func:`bounded` what it may use.
"""

from __future__ import annotations

import sys

from .errors import InputFileError, UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")

#: a real template takes some milliseconds and megabytes
LIMIT_SECONDS = 10.0
LIMIT_BYTES = 1 << 30


class _TooLong(BaseException):
    """Raised into a render that does not end; nothing inside Jinja2 catches it."""


def bounded(work: Callable[[], T], where: str, seconds: float = LIMIT_SECONDS) -> T:
    """``work()``; InputFileError when it takes longer than ``seconds`` or LIMIT_BYTES of address
    space: a template is a program, and it comes with the model."""
    import _thread
    from contextlib import suppress

    ended, turn = _thread.allocate_lock(), _thread.allocate_lock()
    ended.acquire()
    me, done = _thread.get_ident(), False

    def watch() -> None:
        if not ended.acquire(timeout=seconds):
            with turn:
                if not done:
                    _raise_in(me, _TooLong)

    ours, before = _limit_memory()
    try:
        try:
            with suppress(RuntimeError):  # no thread to be had: run without the clock
                _thread.start_new_thread(watch, ())
            return work()
        finally:
            with turn:
                done = True
                _raise_in(me, None)  # also takes back what has not arrived yet
            ended.release()
    except _TooLong:
        what = f"the chat template does not end within {seconds:g} s"
    except MemoryError:
        if not ours:
            raise
        what = f"the chat template takes more than {LIMIT_BYTES >> 20} MiB of memory"
    finally:
        if ours:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, before)
    raise InputFileError(what, where=where, next_step="use generate --raw")


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    import ctypes

    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(error) if error is not None else None
    )


def _limit_memory() -> tuple[bool, tuple[int, int]]:
    """(whether the address space is limited by us now, the limits before)."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", "rb") as f:
            now = int(f.read().split()[0]) * resource.getpagesize()
        limit = now + LIMIT_BYTES
        if any(0 <= b < limit for b in before):  # there is a tighter one
            return False, before
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    except (OSError, ValueError, IndexError):
        return False, before
    return True, before


def compile_template(source: str, artifact_path: str) -> Any:
    """A Jinja2 template object for a chat template's source."""
    environment = _environment(artifact_path)
    return environment.from_string(source)


def _vendored_jinja(artifact_path: str) -> None:
    """Makes ``import jinja2.x`` find the vendored one, without running ``jinja2/__init__.py``: that
    imports twice as much as a template needs.  Only inside a running artifact, where nobody else
    uses Jinja2."""
    from types import ModuleType

    from .container import running_artifact_path

    if "jinja2" in sys.modules or running_artifact_path() is None:
        return
    vendor = artifact_path + "/vendor"
    sys.path.insert(0, vendor)
    package = ModuleType("jinja2")
    package.__path__ = [vendor + "/jinja2"]
    sys.modules["jinja2"] = package


def _environment(artifact_path: str) -> Any:
    _vendored_jinja(artifact_path)
    try:
        from jinja2 import exceptions, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as e:
        raise UnsupportedError(
            f"the artifact carries no usable Jinja2 for its chat template: {e}",
            where=artifact_path,
            next_step="use generate --raw",
        ) from None

    class Generation(Extension):
        """``{% generation %}`` marks the model's own words for training; here it is transparent."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise exceptions.TemplateError(message)

    def strftime_now(form: str) -> str:
        from datetime import datetime

        return datetime.now().strftime(form)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        import json

        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
