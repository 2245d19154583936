"""Compiling a CPU module: the command, and what is checked afterwards.

In: one self-contained C source and a target.  Out: the bytes of a shared object.  Next file:
``roofline.py``.

The compiler is clang in the ``ziglang`` wheel, which carries glibc 2.17's headers and stubs.  It
sees the source in an empty folder under a fixed name and an environment of its own, so that the
same source gives the same bytes on every machine.  The compile cache (the caller's) is keyed by
source and flags; zig's own cache only holds its start-up objects and may live anywhere.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from importlib import metadata, util
from pathlib import Path

from zerolayer.runtime_stub.errors import ResourceError, UnsupportedError, ZerolayerError

from .elf import EM_AARCH64, EM_X86_64, SharedObject, read_shared_object
from .facts import Target

GLIBC = "2.17"
EXPORTS = (
    "zl_create", "zl_decode", "zl_destroy", "zl_exact_groups", "zl_info", "zl_probe", "zl_run",
    "zl_step", "zl_trace",
)  # fmt: skip
_ALLOWED_LIBRARIES = (
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
)
_MACHINES = {"x86_64": EM_X86_64, "aarch64": EM_AARCH64}
TIMEOUT_S = 600


class BuildError(ZerolayerError):
    """The compiler refused what was rendered, or made an object that no host may load: a fault of
    zerolayer or of the installed compiler, never of the model."""

    kind = "build"


def cpu_flag(target: Target) -> tuple[str, ...]:
    """The flags that decide the code: exactly the target's features, nothing of this machine."""
    features = "".join(
        f"+{name.replace('.', '_').replace('-', '_')}" for name in sorted(target.requires.features)
    )
    return (
        "-target",
        f"{target.requires.arch}-linux-gnu.{GLIBC}",
        f"-mcpu={target.mcpu}{features}",
        "-std=gnu11",
        "-O3",
        "-g0",
        "-shared",
        "-fPIC",
        "-pthread",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-ffp-contract=off",
        "-fno-sanitize=undefined",
        "-fno-stack-protector",
        "-Wl,-s",
        "-Wl,--build-id=none",
        "-Wl,-z,noexecstack",
    )


def tool_versions() -> tuple[tuple[str, str], ...]:
    """Name and version of what emitted the code."""
    try:
        return (("ziglang", metadata.version("ziglang")),)
    except metadata.PackageNotFoundError:
        return ()


def compile_shared_object(source: str, target: Target, work_dir: Path | None = None) -> bytes:
    """The shared object of ``source``, checked.  ``work_dir`` holds zig's caches; where its disk is
    full, a temporary folder does.

    Raises UnsupportedError when there is no compiler, ResourceError when the temporary folder's
    disk is full, BuildError when the compiler fails.
    """
    zig = _zig()
    with tempfile.TemporaryDirectory(prefix="zerolayer-") as folder:
        place = Path(folder)
        try:
            (place / "module.c").write_text(source, "utf-8")
        except OSError as e:
            raise _no_room(place, e.strerror or str(e)) from None
        command = [str(zig), "cc", *cpu_flag(target), "-o", "module.so", "module.c"]
        done = _run(command, place, work_dir or place)
        if _is_full(done) and work_dir is not None:
            done = _run(command, place, place)
        if _is_full(done):
            raise _no_room(place, "No space left on device")
        if done.returncode != 0:
            lines = [
                x for x in done.stderr.splitlines() if "error" in x
            ] or done.stderr.splitlines()
            raise BuildError(
                f"the C compiler failed: {' / '.join(lines[:3])}", where=f"target {target.name}"
            )
        data = (place / "module.so").read_bytes()
    check_object(data, target)
    return data


def _run(command: list[str], place: Path, work_dir: Path) -> subprocess.CompletedProcess[str]:
    """The compiler in the folder ``place``, its caches in ``work_dir``."""
    try:
        return subprocess.run(
            command,
            cwd=place,
            env=_environment(work_dir),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"the C compiler took more than {TIMEOUT_S} s") from None
    except OSError as e:
        raise BuildError(f"the C compiler cannot be run: {e}") from None


def _is_full(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether it failed for want of disk space: zig's words or clang's."""
    said = ("NoSpaceLeft", "No space left", "DiskQuota", "Disk quota exceeded")
    return done.returncode != 0 and any(word in done.stderr for word in said)


def _no_room(place: Path, why: str) -> ResourceError:
    return ResourceError(
        f"the C compiler cannot write there: {why}",
        where=str(place.parent),
        next_step="free disk space or set TMPDIR to another folder",
    )


def _zig() -> Path:
    """The compiler's program, found without running Python once more."""
    spec = util.find_spec("ziglang")
    zig = Path(spec.origin).parent / "zig" if spec is not None and spec.origin else None
    if zig is None or not zig.is_file():
        raise UnsupportedError(
            "compiling CPU kernels needs the ziglang package", next_step="pip install ziglang"
        )
    return zig


def _environment(work_dir: Path) -> dict[str, str]:
    """Nothing that changes what clang does; zig's caches in a folder that can be written."""
    out = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "HOME": str(work_dir)}
    out["ZIG_GLOBAL_CACHE_DIR"] = str(work_dir / "zig")
    out["ZIG_LOCAL_CACHE_DIR"] = str(work_dir / "zig")
    return out


def check_object(data: bytes, target: Target) -> SharedObject:
    """Refuses an object that a host might not load: another machine or library, a newer glibc,
    a missing or an extra symbol.  Returns what was read."""
    found = read_shared_object(data, f"{target.name}.so")

    def refuse(what: str) -> BuildError:
        return BuildError(what, where=f"{target.name}.so")

    if found.machine != _MACHINES[target.requires.arch]:
        raise refuse(f"ELF machine {found.machine} is not {target.requires.arch}")
    for library in found.needed:
        if library not in _ALLOWED_LIBRARIES:
            raise refuse(f"it needs {library}")
    for version in found.versions:
        name, _, number = version.partition("_")
        if name != "GLIBC" or _number(number) > _number(GLIBC):
            raise refuse(f"it needs {version}, newer than GLIBC_{GLIBC}")
    if found.exports != EXPORTS:
        raise refuse(f"it exports {', '.join(found.exports)}, not {', '.join(EXPORTS)}")
    return found


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(p) if p.isdigit() else 1 << 30 for p in text.split("."))
