"""sympy is loaded when dimensions are calculated with, not with ``onnx_ir``.

In: nothing. Out: :func:`install`, which ``compiler/__init__.py`` calls. Next file: ``cli.py``.

``onnx_ir`` imports sympy for arithmetic with symbolic dimensions. Compiling does none, and sympy
is a quarter of all that a compile has to import (0.45 of 1.9 s). While ``onnx_ir._core`` runs,
stand-ins have the names of the two modules; afterwards only ``onnx_ir`` knows them, and who else
imports sympy gets sympy. They are no :class:`importlib.util.LazyLoader`: its modules stay where
others find them half loaded, and two threads may load one twice.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

#: imported by MODULE at its top level, used in functions
DEFERRED = ("sympy", "onnx_ir._symbolic_shapes")
MODULE = "onnx_ir._core"


class _StandIn(ModuleType):
    """Asks the module of its name, which is imported the ordinary way."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:  # MODULE itself needs it
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        stand_ins = {n: _StandIn(n) for n in DEFERRED if n not in sys.modules}
        sys.modules.update(stand_ins)
        try:
            self._loader.exec_module(module)
        finally:
            for name, stand_in in stand_ins.items():
                if sys.modules.get(name) is stand_in:
                    del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """From now on; without effect where ``onnx_ir`` is imported already."""
    sys.meta_path.insert(0, _Finder())
