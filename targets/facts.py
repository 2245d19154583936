"""Targets: frozen records of hardware facts.

In: ``hardware/<name>.yaml`` or a user's own file.  Out: :class:`Target`.  Next file:
``injection.py`` (how a fact reaches a kernel).

Each number has a unit and a source.  ``extends:`` names another target (or a path beside this
file): facts and defaults of the same name replace the parent's, ``requires.features`` are added to
the parent's.  The merged record is checked as a whole, so that a child that changes a memory rate
but not the bandwidth is refused.  A target is identified by architecture and limits; its name is a
label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from zerolayer.runtime_stub.errors import HardwareMismatchError, InputFileError, UsageError

from .facts_schema import DEFAULTS, FAMILIES, FactKind, Number, inconsistencies
from .yaml_file import MAX_BYTES, Node, parse

HARDWARE = Path(__file__).parent / "hardware"
MAX_EXTENDS = 8
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}\Z")
_SECTIONS = frozenset(
    {"name", "family", "description", "extends", "facts", "requires", "defaults", "build"}
)


@dataclass(frozen=True)
class Fact:
    """One number about the hardware.  ``where`` is the ``file:line`` it was read from."""

    name: str
    value: Number
    unit: str
    source: str
    where: str = field(default="", compare=False, repr=False)

    def as_dict(self) -> dict[str, object]:
        """The manifest's form (no path: artifacts do not depend on folders)."""
        return {"name": self.name, "value": self.value, "unit": self.unit, "source": self.source}


@dataclass(frozen=True)
class Requires:
    """What the loader checks on the host before it touches weights.  ``limits`` are minimal values
    of facts, by name."""

    arch: str
    os: str = "linux"
    features: tuple[str, ...] = ()
    limits: tuple[tuple[str, Number], ...] = ()
    sve_vector_bits: int = 0  # exact; 0 = no SVE

    def as_dict(self) -> dict[str, object]:
        """The manifest's form, with the keys that ``runtime_stub/requires.py`` compares.  Files'
        sections are aligned for 64 KiB pages and CPU code objects are linked against glibc 2.17."""
        out: dict[str, object] = {"arch": self.arch, "system": self.os.capitalize()}
        if self.features:
            out["features"] = list(self.features)
        if self.arch in ("x86_64", "aarch64"):
            out |= {"max_page_size": 65536, "min_glibc": "2.17"}
        if self.sve_vector_bits:
            out["sve_vector_bits"] = self.sve_vector_bits
        if self.limits:
            out["limits"] = dict(self.limits)
        return out


@dataclass(frozen=True)
class Target:
    """One kind of hardware.  ``mcpu`` is the code generator's name for it."""

    name: str
    family: str
    description: str
    facts: tuple[Fact, ...]
    requires: Requires
    defaults: tuple[tuple[str, Number | str], ...]
    mcpu: str = ""

    @property
    def features(self) -> frozenset[str]:
        return frozenset(self.requires.features)

    def fact(self, name: str) -> Fact:
        """The fact called ``name``; InputFileError names the target that lacks it."""
        for f in self.facts:
            if f.name == name:
                return f
        raise InputFileError(
            f"target {self.name} has no fact {name!r}", next_step="add it to the target file"
        )

    def default(self, name: str) -> int:
        """A numeric default."""
        value = dict(self.defaults)[name]
        assert isinstance(value, int)
        return value

    def choice(self, name: str) -> str:
        """A default that is one of a few words."""
        value = dict(self.defaults)[name]
        assert isinstance(value, str)
        return value

    def as_dict(self) -> dict[str, object]:
        """The manifest's form."""
        return {
            "name": self.name,
            "family": self.family,
            "description": self.description,
            "facts": [f.as_dict() for f in self.facts],
            "requires": self.requires.as_dict(),
            "defaults": dict(self.defaults),
            "mcpu": self.mcpu,
        }


@dataclass
class _Raw:
    """A file and its parents, merged, before the checks that need the whole."""

    file: str
    name: str = ""
    family: str = ""
    description: str = ""
    arch: str = ""
    os: str = "linux"
    mcpu: str = ""
    mcpu_where: str = ""  # file:line, as all of these
    facts: dict[str, Fact] = field(default_factory=dict)
    features: list[str] = field(default_factory=list)
    limits: list[tuple[str, str]] = field(default_factory=list)  # fact name, where
    defaults: dict[str, Number | str] = field(default_factory=dict)
    default_where: dict[str, str] = field(default_factory=dict)


def list_targets() -> list[str]:
    """Names of the targets that come with zerolayer, sorted."""
    return sorted(p.stem for p in HARDWARE.glob("*.yaml"))


def load_target(name_or_path: str | Path) -> Target:
    """The target of that name, in that file, or (``host``) the best named target for this machine.

    Raises UsageError for an unknown name, InputFileError (with ``file:line``) for a bad file.
    """
    text = str(name_or_path)
    if text == "host":
        return resolve_host()
    path = HARDWARE / f"{text}.yaml"
    if not (_NAME.match(text) and path.is_file()):
        path = Path(name_or_path)
        if path.suffix not in (".yaml", ".yml"):
            raise UsageError(
                f"unknown target {text!r}",
                next_step=f"use host, a .yaml file or one of: {', '.join(list_targets())}",
            )
    return _finish(_read(path, ()))


def _fail(file: str, node: Node, what: str, next_step: str = "") -> InputFileError:
    return InputFileError(what, where=f"{file}:{node.line}", next_step=next_step)


def _read(path: Path, seen: tuple[Path, ...]) -> _Raw:
    """``path`` merged over what it extends, at most MAX_EXTENDS deep."""
    file = path.name if path.parent == HARDWARE else str(path)
    try:
        real = path.resolve()
        if not real.is_file():
            raise InputFileError("no such target file", where=file)
        with real.open("rb") as f:
            data = f.read(MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as e:
        raise InputFileError(f"cannot be read: {e}", where=file) from None
    if real in seen:
        raise InputFileError("extends itself, directly or through its parents", where=file)
    if len(seen) >= MAX_EXTENDS:
        raise InputFileError(f"extends more than {MAX_EXTENDS} deep", where=file)
    root = parse(data, file)
    if root.kind != "map":
        raise _fail(file, root, "not a mapping of sections")
    for key, node in root.pairs:
        if key not in _SECTIONS:
            raise _fail(
                file, node, f"unknown key {key!r}", f"known: {', '.join(sorted(_SECTIONS))}"
            )
    raw = _Raw(file)
    extends = root.get("extends")
    if extends is not None:
        parent = _string(file, extends, "extends")
        named = HARDWARE / f"{parent}.yaml"
        next_path = named if _NAME.match(parent) and named.is_file() else real.parent / parent
        if next_path is not named and next_path.suffix not in (".yaml", ".yml"):
            known = f"known: {', '.join(list_targets())}, or a .yaml file beside this one"
            raise _fail(file, extends, f"extends unknown target {parent!r}", known)
        raw = _read(next_path, (*seen, real))
        raw.file = file
    _merge(raw, root, file)
    return raw


def _string(file: str, node: Node, what: str, limit: int = 500) -> str:
    if node.kind != "scalar" or not isinstance(node.scalar, str) or not node.scalar.strip():
        raise _fail(file, node, f"{what} must be a text")
    text = " ".join(node.scalar.split())
    if len(text) > limit or not text.isprintable():
        raise _fail(file, node, f"{what} must be at most {limit} printable characters")
    return text


def _map(file: str, node: Node, what: str, known: Iterable[str]) -> tuple[tuple[str, Node], ...]:
    if node.kind != "map":
        raise _fail(file, node, f"{what} must be a mapping")
    names = set(known)
    for key, value in node.pairs:
        if key not in names:
            raise _fail(file, value, f"unknown key {key!r} in {what}", f"known: {_words(names)}")
    return node.pairs


def _words(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _merge(raw: _Raw, root: Node, file: str) -> None:
    name = root.get("name")
    if name is None:
        raise _fail(file, root, "no name")
    raw.name = _string(file, name, "name")
    if not _NAME.match(raw.name):
        raise _fail(file, name, f"name {raw.name!r} is not lower-case letters, digits, . _ -")
    if (node := root.get("family")) is not None:
        family = _string(file, node, "family")
        if family not in FAMILIES:
            raise _fail(file, node, f"unknown family {family!r}", f"known: {_words(FAMILIES)}")
        if raw.family and family != raw.family:
            raise _fail(file, node, f"family {family} extends a target of family {raw.family}")
        raw.family = family
    if not raw.family:
        raise _fail(file, root, "no family")
    if (node := root.get("description")) is not None:
        raw.description = _string(file, node, "description")
    if (node := root.get("build")) is not None:
        for _key, value in _map(file, node, "build", ("mcpu",)):
            raw.mcpu, raw.mcpu_where = _string(file, value, "mcpu"), f"{file}:{value.line}"
            mcpus = FAMILIES[raw.family].mcpus
            if raw.mcpu not in mcpus:
                known = f"known: {_words(mcpus)}; more instructions are requires.features"
                raise _fail(file, value, f"unknown mcpu {raw.mcpu!r}", known)
    _merge_facts(raw, root, file)
    _merge_requires(raw, root, file)
    _merge_defaults(raw, root, file)


def _merge_facts(raw: _Raw, root: Node, file: str) -> None:
    node = root.get("facts")
    if node is None:
        return
    known = FAMILIES[raw.family].facts
    for name, entry in _map(file, node, "facts", known):
        _map(file, entry, f"facts.{name}", ("value", "unit", "source"))
        for part in ("value", "unit", "source"):
            if entry.get(part) is None:
                raise _fail(file, entry, f"fact {name} has no {part}")
        value, unit, source = (entry.get(p) for p in ("value", "unit", "source"))
        assert value is not None and unit is not None and source is not None
        kind = known[name]
        number = _number(file, value, name, kind)
        if _string(file, unit, f"unit of {name}") != kind.unit:
            raise _fail(file, unit, f"unit of {name} is {unit.scalar!r}, not {kind.unit!r}")
        raw.facts[name] = Fact(
            name,
            number,
            kind.unit,
            _string(file, source, f"source of {name}"),
            f"{file}:{value.line}",
        )


def _number(file: str, node: Node, name: str, kind: FactKind) -> Number:
    value = node.scalar
    if node.kind != "scalar" or isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _fail(file, node, f"value of {name} must be a number")
    if kind.whole:
        if value != int(value):
            raise _fail(file, node, f"value of {name} must be a whole number, not {value}")
        value = int(value)
    if not kind.low <= value <= kind.high:
        raise _fail(
            file,
            node,
            f"value of {name} is {f'{value:.12g} {kind.unit}'.strip()}, outside the known range "
            f"{kind.low:.12g} to {kind.high:.12g}",
            "check the unit" if kind.unit else "",
        )
    return value


def _merge_requires(raw: _Raw, root: Node, file: str) -> None:
    node = root.get("requires")
    if node is None:
        return
    family = FAMILIES[raw.family]
    for key, value in _map(file, node, "requires", ("arch", "os", "features", "limits")):
        if key == "arch":
            arch = _string(file, value, "arch")
            if arch not in family.archs:
                raise _fail(file, value, f"unknown arch {arch!r}", f"known: {_words(family.archs)}")
            if raw.arch and raw.arch != arch:
                raise _fail(file, value, f"arch {arch} extends a target for {raw.arch}")
            raw.arch = arch
        elif key == "os":
            raw.os = _string(file, value, "os")
            if raw.os != "linux":
                raise _fail(file, value, f"unknown os {raw.os!r}", "known: linux")
        else:
            known = family.features if key == "features" else frozenset(family.facts)
            for item in _items(file, value, f"requires.{key}"):
                word = _string(file, item, f"requires.{key}")
                if word not in known:
                    raise _fail(file, item, f"unknown name {word!r} in requires.{key}")
                if key == "features" and word not in raw.features:
                    raw.features.append(word)
                elif key == "limits":
                    raw.limits.append((word, f"{file}:{item.line}"))


def _items(file: str, node: Node, what: str) -> tuple[Node, ...]:
    if node.kind != "list":
        raise _fail(file, node, f"{what} must be a list")
    return node.items


def _merge_defaults(raw: _Raw, root: Node, file: str) -> None:
    node = root.get("defaults")
    if node is None:
        return
    for name, value in _map(file, node, "defaults", DEFAULTS):
        raw.default_where[name] = f"{file}:{value.line}"
        allowed = DEFAULTS[name]
        if isinstance(allowed[0], str):
            word = _string(file, value, name)
            if word not in allowed:
                raise _fail(
                    file, value, f"{name} is {word!r}, not one of {', '.join(map(str, allowed))}"
                )
            raw.defaults[name] = word
        else:
            low, high = float(allowed[0]), float(allowed[1])
            raw.defaults[name] = _number(file, value, name, FactKind("", low, high))


def _finish(raw: _Raw) -> Target:
    """The checks that need the merged record, and the record."""
    family = FAMILIES[raw.family]
    missing = [n for n, kind in family.facts.items() if kind.required and n not in raw.facts]
    if missing:
        raise InputFileError(f"missing facts: {', '.join(missing)}", where=raw.file)
    if not raw.arch:
        raise InputFileError("missing requires.arch", where=raw.file)
    absent = [n for n in DEFAULTS if n not in raw.defaults]
    if absent:
        raise InputFileError(f"missing defaults: {', '.join(absent)}", where=raw.file)
    if raw.family == "cpu" and not raw.mcpu:
        raise InputFileError("missing build.mcpu", where=raw.file)
    for name, where in raw.limits:
        if name not in raw.facts:
            raise InputFileError(f"requires.limits names {name}, which facts lack", where=where)
    values = {n: f.value for n, f in raw.facts.items()}
    for name, what in inconsistencies(raw.family, values, frozenset(raw.features)):
        raise _contradiction(raw, name, what)
    _check_build(raw)
    limits = sorted({(n, raw.facts[n].value) for n, _ in raw.limits})
    return Target(
        name=raw.name,
        family=raw.family,
        description=raw.description,
        facts=tuple(raw.facts[n] for n in family.facts if n in raw.facts),
        requires=Requires(
            raw.arch,
            raw.os,
            tuple(sorted(raw.features)),
            tuple(limits),
            int(values.get("sve_bits", 0)),
        ),
        defaults=tuple((n, raw.defaults[n]) for n in DEFAULTS),
        mcpu=raw.mcpu,
    )


def _contradiction(raw: _Raw, name: str, what: str) -> InputFileError:
    where = raw.facts[name].where
    if not where.startswith(f"{raw.file}:"):  # a parent's: right until the child said otherwise
        what, where = f"{what}; {name} is from {where}", raw.file
    advice = f"one of the numbers is wrong, or {name} has to change too"
    return InputFileError(what, where=where, next_step=advice)


def _check_build(raw: _Raw) -> None:
    """A code generator uses nothing that the host is not asked for, and blocks fit the kernels."""
    family = FAMILIES[raw.family]
    unasked = family.mcpus.get(raw.mcpu, frozenset()) - set(raw.features)
    if unasked:
        raise InputFileError(
            f"build.mcpu {raw.mcpu} uses {_words(unasked)}, which requires.features lack",
            where=raw.mcpu_where,
            next_step="add them, or take a lesser mcpu",
        )
    block = raw.defaults["kv_block_size"]
    if isinstance(block, int) and block % family.kv_block_step:
        raise InputFileError(
            f"kv_block_size is {block}, not a multiple of {family.kv_block_step}",
            where=raw.default_where["kv_block_size"],
        )


def candidates(arch: str, features: frozenset[str]) -> list[Target]:
    """The named CPU targets that a host with ``arch`` and ``features`` can run, best first.

    Best is by cost, not by feature count: int8 operations per core and nanosecond, which is what
    separates the instruction sets (memory bandwidth is the host's either way); ties go to the more
    specific target, then to the name.
    """
    fitting = [
        t
        for t in map(load_target, list_targets())
        if t.family == "cpu" and t.requires.arch == arch and t.features <= features
    ]

    def cost(t: Target) -> tuple[float, int, str]:
        rate = t.fact("int8_ops_per_cycle").value * t.fact("clock_ghz").value
        return (-rate, -len(t.features), t.name)

    return sorted(fitting, key=cost)


def resolve_host(
    detect: Callable[[], tuple[str, frozenset[str]]] | None = None,
) -> Target:
    """The best named target for this machine.  ``detect`` returns (arch, features) and defaults to
    the loader's own detection, so that compile time and load time cannot disagree.

    Raises HardwareMismatchError when no named target fits.
    """
    arch, features = (detect or _detect)()
    found = candidates(arch, features)
    if not found:
        raise HardwareMismatchError(
            f"no named target fits this host ({arch}: {_words(features) or 'no features'})",
            next_step=f"name one with --target: {', '.join(list_targets())}",
        )
    return found[0]


def _detect() -> tuple[str, frozenset[str]]:
    from zerolayer.runtime_stub import detect

    facts = detect.host_facts()
    return facts.arch, frozenset(facts.features)


def _within(value: Number, allowed: tuple[float, float] | tuple[str, ...]) -> bool:
    return isinstance(value, int) and float(allowed[0]) <= value <= float(allowed[1])


def with_defaults(target: Target, **changes: Number | str) -> Target:
    """``target`` with some defaults replaced.  Raises UsageError for a name that is not a default
    or a value outside its range."""
    for name, value in changes.items():
        allowed = DEFAULTS.get(name)
        if allowed is None:
            raise UsageError(f"{name} is not a default", next_step=f"known: {_words(DEFAULTS)}")
        words = isinstance(allowed[0], str)
        fits = value in allowed if words or isinstance(value, str) else _within(value, allowed)
        if not fits:
            raise UsageError(f"{name} = {value!r} is not allowed: {allowed}")
    merged = {**dict(target.defaults), **changes}
    return replace(target, defaults=tuple((n, merged[n]) for n in DEFAULTS))
