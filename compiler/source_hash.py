"""SHA-256 of a model's file, begun before the compiler itself is imported.

In: the path on the command line.  Out: digest and size.  Next file: ``frontends/sources.py``.

Hashing 100 MB takes as long as importing the graph library, and neither needs the other; hashlib
lets other threads run meanwhile.  Standard library alone, so that it can begin first.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

_CHUNK = 1 << 20


class _Hashing:
    """One file on its way; ``error`` is what kept it from being read."""

    def __init__(self, path: Path) -> None:
        self.digest, self.size = hashlib.sha256(), 0
        self.error: OSError | None = None
        self._path = path
        self._thread = threading.Thread(target=self._run, name="source-hash", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    self.digest.update(chunk)
                    self.size += len(chunk)
        except OSError as error:
            self.error = error

    def result(self) -> tuple[str, int]:
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.digest.hexdigest(), self.size


_begun: dict[Path, _Hashing] = {}


def begin(path: Path) -> None:
    """Starts on ``path`` where it is a file; what is wrong with it is told by :func:`file_hash`."""
    if path.is_file() and path not in _begun:
        _begun[path] = _Hashing(path)


def file_hash(path: Path) -> tuple[str, int]:
    """SHA-256 in hexadecimal and size in bytes of ``path``.  Raises OSError."""
    return (_begun.pop(path, None) or _Hashing(path)).result()
