"""Packages that only some of the scripts need: asked for when they are used, so that ``--help``
works without them, and named with the command that installs them.

In: a module's name.  Out: the module, or the end of the script with one line.  Last file.
"""

from __future__ import annotations

import importlib
from typing import Any


def need(name: str) -> Any:
    """The module.  Raises SystemExit with what to install when it is not there."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        raise SystemExit(
            f"error: no module {e.name}; in a clone of the repository: pip install -e .[dev,bench]"
        ) from None


class _Late:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(need(self._name), attribute)


def late(name: str) -> Any:
    """Stands for the module, which is imported when the first attribute is asked for."""
    return _Late(name)
