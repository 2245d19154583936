"""``system_config.toml``: a deployment's standing choices, and what it believes of its hardware.

In: the TOML file, the command line's options, the target.  Out: :class:`Choices`, each with the
place that decided it.  Next file: ``driver.py``.

Words and booleans decide; a number decides nothing: it is an assertion that has to agree with the
target's facts.  docs/system_config.md is the reference.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError, UsageError
from zerolayer.targets.facts import Target
from zerolayer.targets.facts_schema import FAMILIES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES = 64 * 1024
#: an asserted number agrees with a fact up to this share (data sheets round)
TOLERANCE = 0.005

Quantize = Literal["keep", "bf16", "int8", "int4"]
Fusion = Literal["conservative", "balanced", "aggressive"]

COMMAND_LINE = "command line"
DEFAULT = "default"

Value = bool | int | float | str

#: keys whose value is one of a few words
_WORDS: Mapping[str, tuple[str, ...]] = {
    "model.quantization_scheme": get_args(Quantize),
    "kernel.fusion_level": get_args(Fusion),
}
#: keys that hold a free text
_TEXTS = frozenset({"hardware.default_gpu_family", "model.default_version"})
_BOOLEANS = frozenset({"hardware.nvlink_enabled"})
#: what default_gpu_family may say besides the GPU targets that this version has
GPU_FAMILIES = ("a100", "h100", "h200")
#: numbers with a name of their own: the fact that they assert, and the families that can have it
_ALIASES: Mapping[str, tuple[str, frozenset[str]]] = {
    "hardware.hbm3_bandwidth_gbps": ("memory_bandwidth_gbps", frozenset({"cuda"})),
}
#: every fact of every family can be asserted under its own name
_FACTS = frozenset(
    f"hardware.{name}" for family in FAMILIES.values() for name in family.facts
) - set(_ALIASES)
_SECTIONS = ("hardware", "model", "kernel")


@dataclass(frozen=True)
class Setting:
    """One key of the file.  ``name`` is ``section.key``, ``where`` is ``file:line``."""

    name: str
    value: Value
    where: str

    @property
    def source(self) -> str:
        """``where`` without folders: what a summary shows."""
        return re.split(r"[/\\]", self.where)[-1]


@dataclass(frozen=True)
class SystemConfig:
    """A checked file: every key known and of the right type."""

    path: Path
    settings: tuple[Setting, ...]

    def get(self, name: str) -> Setting | None:
        """The setting called ``section.key``, or None."""
        return next((s for s in self.settings if s.name == name), None)


@dataclass(frozen=True)
class Decision:
    """What was decided and where: the command line, a ``file:line``, or the built-in default.

    Files are named without folders: the same inputs give the same summary.  ``overrides`` says
    which setting of the file lost against the command line.
    """

    name: str
    value: str
    source: str
    overrides: str = ""

    def line(self) -> str:
        """The decision in words: ``fusion = balanced (system_config.toml:3)``."""
        over = f", over {self.overrides}" if self.overrides else ""
        return f"{self.name} = {self.value} ({self.source}{over})"


def load_system_config(path: Path) -> SystemConfig:
    """Read and check ``path``.

    Raises InputFileError with ``file:line`` for anything that is not a known key with a value of
    its type.
    """
    try:
        if path.is_fifo():  # opening one would wait for a writer
            raise InputFileError("not a regular file", where=str(path))
        with path.open("rb") as f:
            raw = f.read(MAX_BYTES + 1)
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise InputFileError(f"cannot be read: {why}", where=str(path)) from None
    if len(raw) > MAX_BYTES:
        raise InputFileError(f"larger than {MAX_BYTES} bytes", where=str(path))
    return _check(path, _parse(raw, str(path)))


@dataclass(frozen=True)
class _Document:
    text: str
    table: dict[str, Any]
    file: str

    def where(self, *keys: str) -> str:
        """``file:line`` of a key: the first line that names it, before which it is not there and
        after which it is, or its value goes on."""
        name = re.compile(rf"(?<![\w-]){re.escape(keys[-1])}(?![\w-])")
        lines = self.text.split("\n")
        named = [n for n, line in enumerate(lines) if name.search(line)]
        for n in named[:100]:  # a hostile file may name it on every line
            if _has(lines[:n], keys) is False and _has(lines[: n + 1], keys) is not False:
                return f"{self.file}:{n + 1}"
        return self.file


def _has(lines: list[str], keys: tuple[str, ...]) -> bool | None:
    """Whether ``lines`` hold ``keys``; None when they stop in the middle of a value."""
    try:
        node: Any = tomllib.loads("\n".join(lines))
    except (ValueError, RecursionError):
        return None
    for key in keys:
        if not isinstance(node, dict) or key not in node:
            return False
        node = node[key]
    return True


def _parse(raw: bytes, file: str) -> _Document:
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
        return _Document(text, tomllib.loads(text), file)
    except UnicodeDecodeError as e:
        line = raw[: e.start].count(b"\n") + 1
        raise InputFileError("not UTF-8", where=f"{file}:{line}") from None
    except RecursionError:
        raise InputFileError("nested too deeply", where=file) from None
    except ValueError as e:
        what, line = str(e), text.rstrip("\n").count("\n") + 1  # the last one
        if found := re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", what):
            what, line = what[: found.start()], int(found[1] or line)
        raise InputFileError(f"not TOML: {what}", where=f"{file}:{line}") from None


def _check(path: Path, document: _Document) -> SystemConfig:
    settings = []
    for section, entries in document.table.items():
        where = document.where(section)
        if section not in _SECTIONS:
            raise InputFileError(
                f"unknown section or key {_shown(section)}",
                where=where,
                next_step="known sections: " + ", ".join(f"[{s}]" for s in _SECTIONS),
            )
        if not isinstance(entries, dict):
            raise InputFileError(f"{section} must be a section, [{section}]", where=where)
        for key, value in entries.items():
            place = document.where(section, key)
            settings.append(Setting(f"{section}.{key}", _typed(section, key, value, place), place))
    return SystemConfig(path, tuple(settings))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _known(section: str) -> str:
    names = [*_TEXTS, *_BOOLEANS, *_WORDS, *_ALIASES]
    known = ", ".join(sorted(n.split(".")[1] for n in names if n.startswith(f"{section}.")))
    return f"known: {known}" + (", and every fact of the target" if section == "hardware" else "")


def _typed(section: str, key: str, value: object, where: str) -> Value:
    """``value`` when it has the key's type."""
    name = f"{section}.{key}"
    if name in _WORDS:
        if value in _WORDS[name] and isinstance(value, str):
            return value
        wanted = "one of " + ", ".join(f'"{w}"' for w in _WORDS[name])
    elif name in _TEXTS:
        if isinstance(value, str) and value.strip() and value.isprintable():
            return value
        wanted = "a text"
    elif name in _BOOLEANS:
        if isinstance(value, bool):
            return value
        wanted = "true or false"
    elif name in _ALIASES or name in _FACTS:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return value
        wanted = "a number"
    else:
        raise InputFileError(
            f"unknown key {_shown(key)} in [{section}]", where=where, next_step=_known(section)
        )
    raise InputFileError(f"{name} is {_shown(value)}, not {wanted}", where=where)


def _number(value: float) -> str:
    return f"{value:.15g}"


def check_assertions(config: SystemConfig, target: Target) -> tuple[Decision, ...]:
    """Compare every number and ``nvlink_enabled`` with ``target``; what was found to agree.

    Raises InputFileError that shows both values with units, and where each comes from.
    """
    agreed = []
    facts = {f.name: f for f in target.facts}
    for s in config.settings:
        key = s.name.split(".")[1]
        if isinstance(s.value, bool):
            agreed.append(_check_nvlink(s, s.value, target))
        if isinstance(s.value, bool | str):
            continue
        fact_name, families = _ALIASES.get(s.name, (key, frozenset(FAMILIES)))
        fact = facts.get(fact_name) if target.family in families else None
        if fact is None:
            raise InputFileError(
                f"{s.name} = {_number(s.value)} asserts a fact that target {target.name}"
                f" (family {target.family}) does not have",
                where=s.where,
                next_step="remove the key, or compile for the target that it describes",
            )
        if not math.isclose(s.value, fact.value, rel_tol=TOLERANCE):
            raise InputFileError(
                f"{s.name} is {_number(s.value)} {fact.unit}, but target {target.name} has"
                f" {fact.name} = {_number(fact.value)} {fact.unit} ({fact.source})",
                where=s.where,
                next_step="correct the number, or compile for the target that it describes",
            )
        shown = f"{_number(s.value)} {fact.unit}"
        agreed.append(Decision(s.name, f"{shown}: agrees with {fact.name}", s.source))
    return tuple(agreed)


def _check_nvlink(s: Setting, enabled: bool, target: Target) -> Decision:
    links = any(f.name == "nvlink_total_gbps" for f in target.facts)
    if enabled and not links:
        raise InputFileError(
            f"{s.name} is true, but target {target.name} (family {target.family}) has no NVLink",
            where=s.where,
            next_step="set it to false, or compile for a target with NVLink",
        )
    return Decision(s.name, "true" if enabled else "false", s.source)


def _check_gpu_family(family: Setting, available: list[str], *, decides: bool) -> None:
    known = sorted({*GPU_FAMILIES, *available})
    if family.value not in known:
        raise InputFileError(
            f"{family.name} is {_shown(family.value)}, which is no GPU target",
            where=family.where,
            next_step=f"known: {', '.join(known)}",
        )
    if decides and family.value not in available:
        raise UnsupportedError(
            f"{family.name} is {_shown(family.value)}, but this version has no such target",
            where=family.where,
            next_step="give --target (see `zerolayer targets`)",
        )


@dataclass(frozen=True)
class Choices:
    """What the command line and the file decided together.

    ``model`` is a path as given, ``target`` a name or a YAML file, ``decisions`` the record for the
    manifest.
    """

    model: Path
    target: str
    quantize: str
    fusion: str | None  # None: the target's default
    decisions: tuple[Decision, ...]


def choose(
    config: SystemConfig | None,
    *,
    model: Path | None,
    target: str | None,
    quantize: str | None,
    fusion: str | None,
    gpu_targets: Callable[[], list[str]],
) -> Choices:
    """Command line over file over default.

    ``gpu_targets`` gives the names that ``default_gpu_family`` may have.  Raises UsageError when
    neither names the model or the target, InputFileError or UnsupportedError
    for a GPU family that nobody knows or that this version has no target for.
    """
    decisions: list[Decision] = []

    def decide(name: str, given: str | None, key: str, default: str | None) -> str | None:
        setting = config.get(key) if config else None
        if given is not None:
            lost = f"{key} = {setting.value} ({setting.source})" if setting else ""
            decisions.append(Decision(name, given, COMMAND_LINE, lost))
            return given
        if setting is not None:
            decisions.append(Decision(name, str(setting.value), setting.source))
            return str(setting.value)
        if default is not None:
            decisions.append(Decision(name, default, DEFAULT))
        return default

    if config and (family := config.get("hardware.default_gpu_family")):
        _check_gpu_family(family, gpu_targets(), decides=target is None)
    chosen_target = decide("target", target, "hardware.default_gpu_family", None)
    if chosen_target is None:
        raise UsageError("no target", next_step="give --target (see `zerolayer targets`)")
    chosen_model = decide("model", str(model) if model else None, "model.default_version", None)
    if chosen_model is None:
        raise UsageError("no model", next_step="give MODEL: a GGUF file, a folder or an ONNX file")
    path = model if model is not None or config is None else config.path.parent / chosen_model
    return Choices(
        model=path if path is not None else Path(chosen_model),
        target=chosen_target,
        quantize=decide("quantize", quantize, "model.quantization_scheme", "keep") or "keep",
        fusion=decide("fusion", fusion, "kernel.fusion_level", None),
        decisions=tuple(decisions),
    )
