"""Injection: how a hardware fact or a model constant reaches a kernel, and the record of it.

In: a :class:`Target`.  Out: :class:`Injector`, one per kernel, and the record that the manifest
lists and the binary carries.  Next file: ``roofline.py``.

Code generation sees a target only through an injector.  A derived constant is *computed* from its
formula over names that were injected before, so the record cannot say one thing and the kernel
another.  In a shared object the record is the note of section ``.note.zerolayer``: canonical JSON,
owner ``zerolayer``, type 1.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zerolayer.runtime_stub.errors import IntegrityError

from .elf import read_shared_object
from .facts import Fact, Target
from .facts_schema import Number
from .program import Constant

NOTE_SECTION = ".note.zerolayer"
NOTE_NAME = "zerolayer"
NOTE_TYPE = 1
MAX_NOTE_BYTES = 16 << 20

_OPERATORS: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {"min": min, "max": max}


@dataclass(frozen=True)
class Derived:
    """A constant computed from facts and constants."""

    name: str
    value: Number
    formula: str
    uses: tuple[str, ...]


class Injector:
    """Everything that one kernel (or the module around the kernels) was told."""

    def __init__(self, target: Target, kernel: str) -> None:
        self._target = target
        self.kernel = kernel
        self._facts: dict[str, Fact] = {}
        self._constants: dict[str, tuple[Constant, str]] = {}
        self._derived: dict[str, Derived] = {}

    def fact(self, name: str) -> Number:
        """A hardware fact; recorded as consumed."""
        fact = self._target.fact(name)
        self._facts[name] = fact
        return fact.value

    def has(self, name: str) -> bool:
        """Whether the target states a fact that targets may leave out."""
        return any(fact.name == name for fact in self._target.facts)

    def constant(self, name: str, value: Constant, origin: str = "model") -> Constant:
        """A constant of the model, the graph or the plan; ``origin`` says which."""
        if self._constants.setdefault(name, (value, origin))[0] != value:
            raise ValueError(f"constant {name} of {self.kernel} injected with two values")
        return value

    def derive(self, name: str, formula: str) -> int:
        """The whole number that ``formula`` gives over injected names and facts, recorded with it.

        A formula has numbers, names, ``+ - * // / %``, ``min`` and ``max``.
        """
        uses: list[str] = []
        value = int(self._evaluate(ast.parse(formula, mode="eval").body, uses))
        self._derived[name] = Derived(name, value, formula, tuple(dict.fromkeys(uses)))
        return value

    def _evaluate(self, node: ast.expr, uses: list[str]) -> Number:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.Name):
            uses.append(node.id)
            return self._value(node.id)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self._evaluate(node.left, uses), self._evaluate(node.right, uses)
            return _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return _FUNCTIONS[node.func.id](*[self._evaluate(a, uses) for a in node.args])
        raise ValueError(f"{ast.unparse(node)} is not allowed in a formula")

    def _value(self, name: str) -> Number:
        if name in self._derived:
            return self._derived[name].value
        if name in self._constants:
            value = self._constants[name][0]
            if isinstance(value, str):
                raise ValueError(f"{name} is text")
            return value
        return self.fact(name)

    def record(self) -> dict[str, object]:
        """Facts (with unit and source), constants and derivations, ready for canonical JSON."""
        return {
            "kernel": self.kernel,
            "facts": [self._facts[n].as_dict() for n in sorted(self._facts)],
            "constants": [
                {"name": n, "value": v, "origin": origin}
                for n, (v, origin) in sorted(self._constants.items())
            ],
            "derived": [
                {"name": d.name, "value": d.value, "formula": d.formula, "uses": list(d.uses)}
                for _, d in sorted(self._derived.items())
            ],
        }


class Injection:
    """The injectors of one module."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._injectors: dict[str, Injector] = {}

    @property
    def target_name(self) -> str:
        return self._target.name

    def kernel(self, name: str) -> Injector:
        """The injector of kernel ``name``; the same one each time."""
        return self._injectors.setdefault(name, Injector(self._target, name))

    def records(self) -> list[dict[str, object]]:
        """One record per kernel, in order of creation."""
        return [i.record() for i in self._injectors.values()]

    def note(self) -> bytes:
        """The records as the bytes that the binary carries."""
        document = {"target": self._target.name, "kernels": self.records()}
        text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")
        return text + b" " * (-(len(text) + 1) % 4)  # with the string's zero byte, a multiple of 4


def read_note(so_bytes: bytes, name: str = "shared object") -> dict[str, object]:
    """The injection record in a shared object.  Raises IntegrityError when there is none or the
    object or the record is damaged."""
    for note in read_shared_object(so_bytes, name).notes:
        if note.name == NOTE_NAME and note.type == NOTE_TYPE:
            if len(note.desc) > MAX_NOTE_BYTES:
                raise IntegrityError(f"a note of {len(note.desc)} bytes", where=name)
            try:
                document = json.loads(note.desc)
            except (ValueError, RecursionError):
                raise IntegrityError("its injection record is not JSON", where=name) from None
            if not isinstance(document, dict):
                raise IntegrityError("its injection record is not an object", where=name)
            return document
    raise IntegrityError(f"no section {NOTE_SECTION}", where=name)
