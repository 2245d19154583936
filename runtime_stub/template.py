"""The chat template that travels in the artifact, compiled by the vendored Jinja2.

In: the source of ``chat_template.jinja``.  Out: a template object.  Next file: ``text.py``.

The template runs in Jinja2's immutable sandbox with the settings that the authors of templates test
with: trim_blocks, lstrip_blocks, loop controls, ``raise_exception``, ``strftime_now``, a ``tojson``
that does not escape HTML.
"""

from __future__ import annotations

import sys

from .errors import UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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
