"""Does this host have what the artifact was compiled for?

In: :class:`HostFacts` and the manifest's ``target`` (``name`` and ``requires``).  Out: a list of
:class:`Mismatch`, or HardwareMismatchError naming both sides.  Next file: ``driver_cpu.py``.

Keys of ``requires``: ``arch`` (``x86_64``, ``aarch64``), ``system`` (``Linux``), ``features`` (LLVM
names, all needed), ``sve_vector_bits`` (exact: the code was compiled for one length),
``max_page_size`` (bytes: sections of the file are aligned to it), ``min_page_size``, ``min_glibc``
(``2.17``), ``limits`` (least values of facts by name: ``cores``, ``memory_bytes``).  A key that
this loader does not know is a mismatch: a requirement is never skipped.
"""

from __future__ import annotations

from .errors import HardwareMismatchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .detect import HostFacts

#: what the host has of a feature that its operating system does not let this process use
WITHHELD = "withheld by the kernel"


class Mismatch:
    """One unmet requirement: its name, what is needed, what the host has."""

    __slots__ = ("have", "name", "need")

    def __init__(self, name: str, need: str, have: str) -> None:
        self.name = name
        self.need = need
        self.have = have

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "need": self.need, "have": self.have}

    def __repr__(self) -> str:
        return f"{self.name}: need {self.need}, have {self.have}"


def compare(requires: Mapping[str, object], facts: HostFacts) -> list[Mismatch]:
    """Every unmet requirement, in the order of ``requires``; empty when the artifact can run."""
    out: list[Mismatch] = []
    for key in sorted(requires, key=lambda k: (k != "arch", k)):
        need = requires[key]
        found = _compare_one(key, need, facts)
        out.extend(found)
        if key == "arch" and found:
            break  # features of another architecture say nothing more
    return out


def _compare_one(key: str, need: object, facts: HostFacts) -> list[Mismatch]:
    if key in ("arch", "system"):
        have = facts.arch if key == "arch" else facts.system
        return [] if need == have else [Mismatch(key, str(need), have)]
    if key == "features" and isinstance(need, (list, tuple)):
        have_not = dict.fromkeys(facts.withheld, WITHHELD)
        have_not.update(dict.fromkeys(facts.masked, "hidden (masked)"))
        return [
            Mismatch(str(name), "yes", have_not.get(name, "no"))
            for name in need
            if name not in facts.features
        ]
    if key == "sve_vector_bits" and isinstance(need, int):
        have_bits = facts.sve_vector_bits
        return [] if need == have_bits else [Mismatch(key, f"{need} bits", f"{have_bits} bits")]
    if key == "max_page_size" and isinstance(need, int):
        ok = facts.page_size <= need
        return [] if ok else [Mismatch("page size", f"<= {need} bytes", f"{facts.page_size} bytes")]
    if key == "min_page_size" and isinstance(need, int):
        ok = facts.page_size >= need
        return [] if ok else [Mismatch("page size", f">= {need} bytes", f"{facts.page_size} bytes")]
    if key == "min_glibc" and isinstance(need, str):
        name, _, version = facts.libc.partition(" ")
        ok = name == "glibc" and _version(version) >= _version(need)
        return [] if ok else [Mismatch("libc", f"glibc >= {need}", facts.libc)]
    if key == "limits" and isinstance(need, dict):
        have_of = {"cores": facts.cpus_online, "memory_bytes": facts.memory_total}
        return [
            Mismatch(name, f">= {least}", str(have_of.get(name, "not known to this loader")))
            for name, least in need.items()
            if not (isinstance(least, (int, float)) and have_of.get(name, -1) >= least)
        ]
    return [Mismatch(key, str(need), "not known to this loader")]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isascii() and part.isdigit())


def refuse(target: str, mismatches: list[Mismatch], facts: HostFacts, where: str = "") -> None:
    """HardwareMismatchError naming both sides; returns when ``mismatches`` is empty."""
    if not mismatches:
        return
    arch = next((m for m in mismatches if m.name == "arch"), None)
    cpu = f"{facts.cpu_model or 'this CPU'}, {facts.arch}"
    if arch is not None:
        what = f"compiled for {arch.need} (target {target}), this host is {arch.have}"
    else:
        withheld = [m.name for m in mismatches if m.have == WITHHELD]
        features = [m.name for m in mismatches if m.need == "yes" and m.have != WITHHELD]
        others = [repr(m) for m in mismatches if m.need != "yes"]
        parts = ["this host lacks " + ", ".join(features)] if features else []
        if withheld:
            parts.append(f"the CPU has {', '.join(withheld)}, but the kernel withholds it")
        if any(name.startswith("amx-") for name in withheld):
            parts.append("AMX needs Linux 5.16 that allows arch_prctl(ARCH_REQ_XCOMP_PERM)")
        what = f"target {target} does not match this host ({cpu}): " + "; ".join(parts + others)
    raise HardwareMismatchError(
        what, where=where, next_step="compile with --target for this host's kind of hardware"
    )


def require(target: Mapping[str, object], facts: HostFacts, where: str = "") -> None:
    """Refuse unless the host meets ``target['requires']`` of a manifest."""
    requires = target.get("requires")
    mapping: Mapping[str, object] = requires if isinstance(requires, dict) else {}
    refuse(str(target.get("name", "?")), compare(mapping, facts), facts, where)
