"""The third-party parts of an artifact, taken from the build environment.

In: the target's CPU architecture.  Out: :class:`Vendor`: the members under ``vendor/`` (the
compiled module of ``tokenizers``, pure-Python Jinja2 and MarkupSafe), their licences, and where
each came from, pinned by hash.  Next file: ``loader_sources.py``.

``vendor/`` inside the artifact is put on ``sys.path`` for the two pure packages; the compiled
module is opened through an anonymous memory file.  Without them the loader takes and gives token
ids.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import platform
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zerolayer.runtime_stub.errors import InputFileError, ResourceError, UnsupportedError

VENDOR_LIMIT = 12_000_000
#: where the compiled module is in the artifact, whatever the wheel calls it
TOKENIZERS_MEMBER = "vendor/tokenizers/tokenizers.abi3.so"

_ELF_MACHINE = {"x86_64": 62, "aarch64": 183}
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_ELF_SEGMENT = struct.Struct("<IIQQQQQQ")


@dataclass(frozen=True)
class VendorPackage:
    """Where a package came from.  ``files`` are (member, SHA-256 of the installed file)."""

    name: str
    version: str
    license: str
    wheel_tags: tuple[str, ...]
    min_python: str
    min_glibc: str  # "" for pure Python
    files: tuple[tuple[str, str], ...]
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        """The manifest's form."""
        return {
            "name": self.name,
            "version": self.version,
            "license": self.license,
            "wheel_tags": list(self.wheel_tags),
            "min_python": self.min_python,
            "min_glibc": self.min_glibc,
            "files": [{"name": n, "source_sha256": h} for n, h in self.files],
            "note": self.note,
        }


@dataclass(frozen=True)
class Vendor:
    """Members to add to the artifact (``vendor/..`` and ``licenses/..``) and their origin."""

    members: tuple[tuple[str, bytes], ...]
    packages: tuple[VendorPackage, ...]


def collect_vendor(arch: str) -> Vendor:
    """The vendor members for a target CPU (``x86_64``).

    Raises UnsupportedError when the build environment has no wheel for ``arch``, InputFileError
    when a package is missing or is not what its wheel recorded, ResourceError above VENDOR_LIMIT.
    """
    if arch != platform.machine():
        raise UnsupportedError(
            f"the artifact's tokenizer must be a {arch} module, and this machine installs "
            f"{platform.machine()} wheels",
            where="vendor/tokenizers",
            next_step=f"compile for this target on a {arch} machine",
        )
    members: dict[str, bytes] = {}
    packages = (
        _package("tokenizers", _is_compiled, lambda _: TOKENIZERS_MEMBER, members),
        _package("jinja2", _is_pure("jinja2"), lambda n: f"vendor/{n}", members),
        _package("markupsafe", _is_pure("markupsafe"), lambda n: f"vendor/{n}", members),
    )
    check_elf_arch(members[TOKENIZERS_MEMBER], arch, TOKENIZERS_MEMBER)
    members[TOKENIZERS_MEMBER] = strip_elf(members[TOKENIZERS_MEMBER])
    size = sum(len(data) for name, data in members.items() if name.startswith("vendor/"))
    if size > VENDOR_LIMIT:
        raise ResourceError(
            f"the vendored packages take {size} bytes, over the limit of {VENDOR_LIMIT}",
            where="vendor/",
            next_step="install another release of tokenizers",
        )
    return Vendor(tuple(sorted(members.items())), packages)


def _is_compiled(name: str) -> bool:
    return re.fullmatch(r"tokenizers/tokenizers\.abi3\.so", name) is not None


def _is_pure(package: str) -> Callable[[str], bool]:
    return lambda name: re.fullmatch(rf"{package}/[a-z_]+\.py", name) is not None


def _package(
    name: str,
    wanted: Callable[[str], bool],
    member: Callable[[str], str],
    members: dict[str, bytes],
) -> VendorPackage:
    """Adds a package's wanted files and its licence to ``members``."""
    try:
        dist = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise InputFileError(
            f"the package {name} is not installed", next_step=f"pip install {name}"
        ) from None
    files: list[tuple[str, str]] = []
    for entry in sorted(dist.files or (), key=str):
        relative = entry.as_posix()
        license_file = re.fullmatch(r"[^/]+\.dist-info/(?:licenses/)?(LICEN[CS]E[^/]*)", relative)
        if not wanted(relative) and license_file is None:
            continue
        data = Path(str(dist.locate_file(entry))).read_bytes()
        digest = hashlib.sha256(data)
        if entry.hash is not None and entry.hash.mode == "sha256":
            recorded = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode("ascii")
            if recorded != entry.hash.value:
                raise InputFileError(
                    f"{relative} differs from the record of the {name} wheel",
                    next_step=f"pip install --force-reinstall {name}",
                )
        if license_file is not None:
            members[f"licenses/{name}/{license_file.group(1)}"] = data
            continue
        members[member(relative)] = data
        files.append((member(relative), digest.hexdigest()))
    if not files:
        raise UnsupportedError(
            f"the installed {name} {dist.version} has not the files that an artifact needs",
            next_step=f"pip install --only-binary=:all: --force-reinstall {name}",
        )
    wheel = dist.read_text("WHEEL") or ""
    tags = tuple(sorted(re.findall(r"^Tag: (\S+)$", wheel, re.MULTILINE)))
    compiled = any(n.endswith(".so") for n, _ in files)
    if not any(n.startswith(f"licenses/{name}/") for n in members):
        members[f"licenses/{name}/METADATA"] = _license_lines(dist).encode("utf-8")
    return VendorPackage(
        name=name,
        version=dist.version,
        license=_license(dist),
        wheel_tags=tags if compiled else ("py3-none-any",),  # only the pure files were taken
        min_python=_min_python(dist),
        min_glibc=_min_glibc(tags) if compiled else "",
        files=tuple(files),
        note="section headers and symbols removed" if compiled else "",
    )


def _field(dist: importlib.metadata.Distribution, key: str) -> list[str]:
    return [str(value) for value in dist.metadata.get_all(key) or []]


def _license(dist: importlib.metadata.Distribution) -> str:
    """The SPDX expression, or the licence classifier of older metadata."""
    prefix = "License :: OSI Approved :: "
    found = _field(dist, "License-Expression")
    found += [v.removeprefix(prefix) for v in _field(dist, "Classifier") if v.startswith(prefix)]
    return found[0] if found else "see licenses/"


def _license_lines(dist: importlib.metadata.Distribution) -> str:
    """What a wheel without a licence file says about its licence."""
    kept = ("Name", "Version", "Summary", "Home-page", "Author", "License", "License-Expression")
    lines = [f"{key}: {value}" for key in kept for value in _field(dist, key)]
    lines += [f"Classifier: {v}" for v in _field(dist, "Classifier") if v.startswith("License")]
    return "\n".join(lines) + "\n"


def _min_python(dist: importlib.metadata.Distribution) -> str:
    match = re.search(r">=\s*(\d+\.\d+)", "".join(_field(dist, "Requires-Python")))
    return match.group(1) if match else "3.9"


def _min_glibc(tags: tuple[str, ...]) -> str:
    """From ``cp310-abi3-manylinux_2_17_x86_64``: the lowest glibc that the wheel runs on."""
    found = [re.search(r"manylinux_(\d+)_(\d+)_", t) for t in tags]
    versions = sorted((int(m.group(1)), int(m.group(2))) for m in found if m)
    return ".".join(map(str, versions[0])) if versions else ""


def check_elf_arch(data: bytes, arch: str, name: str) -> None:
    """Raises UnsupportedError unless ``data`` is a 64-bit little-endian ELF file for ``arch``."""
    good = len(data) >= _ELF_HEADER.size and data[:6] == b"\x7fELF\x02\x01"
    machine = _ELF_HEADER.unpack_from(data)[2] if good else None
    if machine is None or machine != _ELF_MACHINE.get(arch):
        raise UnsupportedError(
            f"not a {arch} module", where=name, next_step=f"install the {arch} wheel"
        )


def strip_elf(data: bytes) -> bytes:
    """A shared object without what lies behind its last segment: section headers and symbols.

    The dynamic loader reads segments only.  Returns ``data`` unchanged when a segment's bounds are
    not inside the file.
    """
    header = list(_ELF_HEADER.unpack_from(data))
    segments_at, entry_size, count = header[5], header[9], header[10]
    if entry_size != _ELF_SEGMENT.size or segments_at + count * entry_size > len(data):
        return data
    end = segments_at + count * entry_size
    for i in range(count):
        segment = _ELF_SEGMENT.unpack_from(data, segments_at + i * entry_size)
        end = max(end, segment[2] + segment[5])
    if end > len(data):
        return data
    header[6] = header[11] = header[12] = header[13] = 0  # section headers
    return _ELF_HEADER.pack(*header) + data[_ELF_HEADER.size : end]
