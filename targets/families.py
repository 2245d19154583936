"""The target families: what each must offer, and where to find it.

In: a family's name.  Out: :class:`Family`.  Next file: the family's own module, for example
``cpu.py``. A new family is a module and an entry here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from zerolayer.runtime_stub.errors import UnsupportedError

from .facts import Target
from .kernels import KernelRow
from .program import Program

#: (parts of the key, function that builds) -> (bytes, whether they were there); compiler/cache.py
Cache = Callable[[Mapping[str, str | bytes], Callable[[], bytes]], tuple[bytes, bool]]


@dataclass(frozen=True)
class Binaries:
    """What a family builds.  ``files`` are paths in the artifact (``kernels/...``); ``entry``
    is the one the loader opens; ``kernels`` the injection records; ``tools`` names and versions."""

    files: Mapping[str, bytes]
    entry: str
    kernels: tuple[Mapping[str, object], ...]
    tools: tuple[tuple[str, str], ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict)


class Build(Protocol):
    """Builds the binaries of a planned program.  ``cache`` may be None; ``work_dir`` is where tools
    may keep their own caches, or None for their default."""

    def __call__(
        self,
        program: Program,
        target: Target,
        *,
        cache: Cache | None = None,
        work_dir: Path | None = None,
    ) -> Binaries: ...


@dataclass(frozen=True)
class Family:
    """``packed_bytes(layout, format, N, K)`` and ``pack(layout, format, raw)``, where raw is uint8
    ``[N, row_bytes]`` as in the model file, are the weight layouts of ``rows``;
    ``holds(format, raw)`` says whether a format that is the family's own can have these values."""

    name: str
    rows: tuple[KernelRow, ...]
    packed_bytes: Callable[[str, str, int, int], int]
    pack: Callable[[str, str, Any], Any]
    holds: Callable[[str, Any], bool]
    build: Build


_MODULES = {"cpu": "cpu"}


def family(name: str) -> Family:
    """The family called ``name``.  Raises UnsupportedError for one that this version cannot
    build."""
    module = _MODULES.get(name)
    if module is None:
        raise UnsupportedError(
            f"target family {name} has no code generator in this version",
            next_step=f"families are: {', '.join(sorted(_MODULES))}",
        )
    found = importlib.import_module(f".{module}", __package__).FAMILY
    assert isinstance(found, Family)
    return found
