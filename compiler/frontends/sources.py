"""Identity of the input files of a model, and the licenses that lie beside them.

In: paths.  Out: :class:`SourceFile` records and license texts for the manifest.  Next file:
``hf.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

from zerolayer.compiler.source_hash import file_hash
from zerolayer.runtime_stub.errors import InputFileError

from .config import SourceFile

_MAX_LICENSE_BYTES = 1 << 20
_LICENSE_STEMS = ("license", "licence", "notice", "copying", "use_policy")


def source_file(path: Path) -> SourceFile:
    """Name, SHA-256 and size of ``path``, read in small pieces.  Raises InputFileError."""
    try:
        digest, size = file_hash(path)
    except OSError as error:
        raise InputFileError(
            f"cannot be read: {error}",
            where=str(path),
            next_step="check the file and its permissions",
        ) from error
    return SourceFile(path.name, digest, size)


def find_licenses(directory: Path) -> tuple[tuple[str, bytes], ...]:
    """(name, text) of the license files in ``directory``, sorted by name."""
    found: list[tuple[str, bytes]] = []
    for path in sorted(directory.iterdir()):
        stem = path.name.lower().split(".")[0]
        if stem in _LICENSE_STEMS and path.is_file() and path.stat().st_size <= _MAX_LICENSE_BYTES:
            found.append((path.name, path.read_bytes()))
    return tuple(found)


def model_name(text: str) -> str:
    """``text`` as a model name: lower case letters, digits, dots and dashes only."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())[:80].strip("-.") or "model"
