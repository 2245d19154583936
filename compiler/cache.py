"""The compile cache: built kernels, keyed by everything that went into them.

In: the parts of a key (sources, flags, target, tool versions) and a function that builds.  Out: the
built bytes, from the user's cache directory when they were built before.  Next file:
``driver.py``.

A cache may cost time, never correctness: an entry is used only when its own hash is right, it is
written to a temporary name and renamed, and a directory that cannot be used turns the cache off
with a visible note.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata, resources
from pathlib import Path

#: bump when the meaning of an entry changes; part of every key
FORMAT_VERSION = 1
#: least recently used entries beyond this are deleted
MAX_BYTES = 1 << 30
#: how long to wait for another process that builds the same entry before building it here too
LOCK_TIMEOUT_S = 600.0

_MAGIC = b"ZLCACHE\x01"
_HEADER = struct.Struct("<8s32sQ")  # magic, sha256 of payload, payload length
_ROOM = 1 << 20  # bytes that a usable folder takes: a code object's, and what its compiler keeps
_TOOLS = ("zerolayer", "ziglang")  # distributions whose version is part of every key


def cache_home() -> Path:
    """The directory that holds everything zerolayer keeps for this user between runs.

    ``$XDG_CACHE_HOME/zerolayer``, else ``~/.cache/zerolayer``; a relative XDG_CACHE_HOME is
    ignored, as its specification demands.
    """
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if xdg.startswith("/") else Path("~/.cache").expanduser()
    return base / "zerolayer"


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


@functools.cache
def tool_versions() -> Mapping[str, str]:
    """The versions that every key holds: cache format, compiler, and the tools that emit code."""
    versions = {"cache-format": str(FORMAT_VERSION)}
    for name in _TOOLS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


@functools.cache
def compiler_digest() -> str:
    """A hash of the compiler's own sources: a changed compiler trusts no earlier verdict."""
    digest = hashlib.sha256()
    pending = [
        resources.files(f"zerolayer.{name}") for name in ("compiler", "targets", "runtime_stub")
    ]
    while pending:
        for entry in sorted(pending.pop().iterdir(), key=lambda e: e.name):
            if entry.is_dir():
                pending.append(entry)
            elif entry.name.endswith(".py"):
                digest.update(entry.name.encode() + b"\0" + entry.read_bytes() + b"\0")
    return digest.hexdigest()


def open_lock(path: Path, timeout_s: float) -> int | None:
    """Take the exclusive lock ``path``; the file descriptor that holds it, or None after a timeout.

    The kernel drops the lock with its holder, so a killed process never blocks another.  Close the
    descriptor to release.  Raises OSError when the file cannot be made.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
            continue
        except BaseException:
            os.close(fd)
            raise
        with contextlib.suppress(FileNotFoundError):
            there = path.stat()
            here = os.fstat(fd)
            if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
                return fd
        os.close(fd)  # pruned between open and lock: what we hold is no longer the lock


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` at ``path`` so that a reader sees all of it or nothing.  Raises OSError."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


class CompileCache:
    """A directory of built bytes, safe under concurrent builds.

    ``root`` defaults to :func:`cache_home` / ``kernels``; ``notify`` gets one line when the cache
    cannot be used (default: stderr).  ``enabled=False`` builds every time without a note.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        enabled: bool = True,
        max_bytes: int = MAX_BYTES,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        notify: Callable[[str], None] = _print_note,
    ) -> None:
        self.root = root if root is not None else cache_home() / "kernels"
        self.max_bytes = max_bytes
        self.lock_timeout_s = lock_timeout_s
        self.hits = 0
        self.misses = 0
        self._notify = notify
        self._enabled = enabled and self._usable()

    @property
    def enabled(self) -> bool:
        """Whether entries are kept; False after the directory turned out to be unusable."""
        return self._enabled

    @property
    def directory(self) -> Path | None:
        """Where tools may keep caches of their own beside the entries; None without a cache."""
        return self.root if self._enabled else None

    def _usable(self) -> bool:
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            info = self.root.stat()
            if info.st_uid not in {os.geteuid(), 0}:
                self._off(f"belongs to user {info.st_uid}")
                return False
            with tempfile.TemporaryFile(dir=self.root, prefix=".tmp-") as file:
                file.write(bytes(_ROOM))  # a full disk lets an empty file be made
                file.flush()
        except (OSError, RuntimeError) as e:  # RuntimeError: no home directory
            self._off(str(getattr(e, "strerror", None) or e))
            return False
        return True

    def _off(self, why: str) -> None:
        self._enabled = False
        self._notify(
            f"no compile cache: {self.root}: {why}; kernels are built again each time"
            " (set XDG_CACHE_HOME to a writable folder)"
        )

    @staticmethod
    def key(parts: Mapping[str, str | bytes]) -> str:
        """The hex key of ``parts`` plus :func:`tool_versions`.  Order does not matter, names do."""
        everything: dict[str, str | bytes] = {f"part:{k}": v for k, v in parts.items()}
        everything.update({f"tool:{k}": v for k, v in tool_versions().items()})
        digest = hashlib.sha256(b"zerolayer compile cache\n")
        for name in sorted(everything):
            value = everything[name]
            raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            for field in (name.encode("utf-8", "surrogatepass"), raw):
                digest.update(struct.pack("<Q", len(field)))
                digest.update(field)
        return digest.hexdigest()

    def _path(self, key: str) -> Path:
        return self.root / key[:2] / key

    def get(self, parts: Mapping[str, str | bytes]) -> bytes | None:
        """The bytes stored for ``parts``; None when there are none or they are damaged."""
        return self._read(self._path(self.key(parts))) if self._enabled else None

    def put(self, parts: Mapping[str, str | bytes], data: bytes) -> None:
        """Store ``data`` for ``parts``.  A disk that refuses turns the cache off, with a note."""
        if self._enabled:
            self._write(self._path(self.key(parts)), data)

    def get_or_build(
        self, parts: Mapping[str, str | bytes], build: Callable[[], bytes]
    ) -> tuple[bytes, bool]:
        """The bytes for ``parts`` and whether they came from the cache.

        Of several processes that ask for the same parts at once, one builds and the others wait for
        it (at most ``lock_timeout_s``).  What ``build`` raises goes to the caller, nothing is kept.
        """
        if not self._enabled:
            self.misses += 1
            return build(), False
        path = self._path(self.key(parts))
        found = self._read(path)
        if found is None:
            with self._locked(path):
                found = self._read(path)  # built by another process while this one waited
                if found is None:
                    self.misses += 1
                    data = build()
                    if self._enabled:
                        self._write(path, data)
                    return data, False
        self.hits += 1
        return found, True

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        fd: int | None = None
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            fd = open_lock(path.with_suffix(".lock"), self.lock_timeout_s)
        except OSError as e:
            self._off(str(e.strerror or e))
        try:
            yield
        finally:
            if fd is not None:
                os.close(fd)

    def _read(self, path: Path) -> bytes | None:
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        if len(raw) >= _HEADER.size:
            magic, digest, length = _HEADER.unpack_from(raw)
            data = raw[_HEADER.size :]
            if magic == _MAGIC and length == len(data) and hashlib.sha256(data).digest() == digest:
                with contextlib.suppress(OSError):
                    os.utime(path)  # recently used
                return data
        with contextlib.suppress(OSError):
            path.unlink()  # damaged: rebuilt by whoever asked
        return None

    def _write(self, path: Path, data: bytes) -> None:
        header = _HEADER.pack(_MAGIC, hashlib.sha256(data).digest(), len(data))
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(path, header + data)
        except OSError as e:
            self._off(str(e.strerror or e))
            return
        self.prune()

    def prune(self) -> None:
        """Delete the least recently used entries beyond ``max_bytes``, and old leftovers."""
        entries: list[tuple[int, int, Path]] = []
        leftover_before = time.time() - 24 * 3600
        for path in self.root.glob("??/*"):
            with contextlib.suppress(OSError):
                info = path.stat()
                if path.name.startswith(".tmp-"):  # a killed writer's
                    if info.st_mtime < leftover_before:
                        path.unlink()
                elif path.suffix == ".lock":
                    if info.st_mtime < leftover_before:
                        _unlink_free_lock(path)
                else:
                    entries.append((info.st_mtime_ns, info.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


def _unlink_free_lock(path: Path) -> None:
    """Delete a lock file that nobody holds, while holding it, so that its next user notices."""
    fd = open_lock(path, 0.0)
    if fd is not None:
        try:
            path.unlink()
        finally:
            os.close(fd)
