"""Modules of other packages that are loaded when they are first used, not when they are imported.

In: nothing. Out: :func:`defer`, which ``compiler/__init__.py`` calls. Next file: ``cli.py``.

``onnx_ir`` imports sympy for arithmetic with symbolic dimensions. Compiling does none, and sympy
is a quarter of all that a compile has to import (0.45 of 1.9 s).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


class _Deferred(importlib.abc.MetaPathFinder):
    """Finds ``names`` as they are found anyway, but runs them at their first attribute."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None  # whoever else finds it
        spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def defer(*names: str) -> None:
    """Modules ``names`` are loaded at their first use from now on, unless they are already."""
    sys.meta_path.insert(0, _Deferred(frozenset(names)))
