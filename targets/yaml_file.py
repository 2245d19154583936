"""Bounded reading of the YAML subset that target files use.

In: the bytes of a ``.yaml`` file.  Out: plain mappings, sequences and scalars, each remembering the
line it came from, so that every later complaint names ``file:line``.  Next file:
``facts_schema.py``.

The subset is one document of mappings, sequences and scalars.  Anchors, aliases, tags, merge keys
and duplicate keys are refused: a target file is a record, and each of them can hide what it says.
The file is consumed as a stream of parser events, so a hostile nesting is refused before it costs
anything.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TypeAlias

import yaml
from zerolayer.runtime_stub.errors import InputFileError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 8
MAX_NODES = 4096

Scalar: TypeAlias = "str | int | float | bool | None"

_INT = re.compile(r"[-+]?[0-9]{1,18}\Z")
_FLOAT = re.compile(r"[-+]?(?:[0-9]{1,30}\.[0-9]{0,30}|[0-9]{1,30})(?:[eE][-+]?[0-9]{1,3})?\Z")
_NON_FINITE = re.compile(r"[-+]?\.(?:inf|nan)\Z", re.IGNORECASE)


@dataclass(frozen=True)
class Node:
    """A value and its line (1-based).  ``value`` is a scalar, a tuple of nodes, or a tuple of
    (key, node) pairs, told apart by ``kind``: ``scalar``, ``list`` or ``map``."""

    kind: str
    line: int
    scalar: Scalar = None
    items: tuple[Node, ...] = ()
    pairs: tuple[tuple[str, Node], ...] = ()

    def get(self, key: str) -> Node | None:
        """The node under ``key`` of a map, or None."""
        for name, node in self.pairs:
            if name == key:
                return node
        return None


@dataclass
class _Open:
    """A collection whose end event has not been seen yet."""

    kind: str
    line: int
    items: list[Node]
    pairs: list[tuple[str, Node]]
    key: str | None = None


def parse(data: bytes, file: str) -> Node:
    """The document in ``data``; ``file`` is the name used in messages.

    Raises InputFileError with ``file:line`` for anything outside the subset.
    """
    if len(data) > MAX_BYTES:
        raise InputFileError(
            f"{len(data)} bytes, more than the {MAX_BYTES} of a target file", where=file
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise InputFileError(f"not UTF-8 at byte {e.start}", where=file) from None
    try:
        return _build(text, file)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"{file}:{mark.line + 1}" if mark is not None else file
        raise InputFileError(f"not YAML: {e.problem or e.context}", where=where) from None
    except yaml.YAMLError as e:  # characters that YAML forbids
        raise InputFileError(f"not YAML: {e}", where=file) from None


def _build(text: str, file: str) -> Node:
    stack: list[_Open] = []
    root: Node | None = None
    count = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = 1 if event.start_mark is None else event.start_mark.line + 1
        where = f"{file}:{line}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise InputFileError("anchors and aliases are not allowed", where=where)
        if isinstance(event, yaml.NodeEvent):
            count += 1
            if count > MAX_NODES:
                raise InputFileError(f"more than {MAX_NODES} values", where=where)
            tag = getattr(event, "tag", None)
            if tag:
                raise InputFileError(f"tags are not allowed ({tag})", where=where)
        done: Node | None = None
        if isinstance(event, yaml.DocumentStartEvent):
            if root is not None:
                raise InputFileError("more than one document", where=where)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            if len(stack) >= MAX_DEPTH:
                raise InputFileError(f"nested deeper than {MAX_DEPTH}", where=where)
            kind = "map" if isinstance(event, yaml.MappingStartEvent) else "list"
            if stack and stack[-1].kind == "map" and stack[-1].key is None:
                raise InputFileError("a key must be a plain word", where=where)
            stack.append(_Open(kind, line, [], []))
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            top = stack.pop()
            done = Node(top.kind, top.line, None, tuple(top.items), tuple(top.pairs))
        elif isinstance(event, yaml.ScalarEvent):
            if stack and stack[-1].kind == "map" and stack[-1].key is None:
                stack[-1].key = _key(event.value, stack[-1], where)
                continue
            value = _scalar(event.value, where) if event.style is None else event.value
            done = Node("scalar", line, value)
        if done is not None:
            if stack:
                _attach(stack[-1], done)
            else:
                root = done
    if root is None:
        raise InputFileError("empty file", where=file)
    return root


def _attach(parent: _Open, node: Node) -> None:
    if parent.kind == "list":
        parent.items.append(node)
    else:
        assert parent.key is not None
        parent.pairs.append((parent.key, node))
        parent.key = None


def _key(text: str, parent: _Open, where: str) -> str:
    if text == "<<":
        raise InputFileError("merge keys are not allowed; use extends", where=where)
    for name, earlier in parent.pairs:
        if name == text:
            raise InputFileError(
                f"key {text!r} appears twice, first at line {earlier.line}", where=where
            )
    return text


def _scalar(text: str, where: str) -> Scalar:
    """A plain scalar: YAML 1.2's integers, floats, booleans and null; everything else is a
    string."""
    if _INT.match(text):
        return int(text)
    if _FLOAT.match(text):
        value = float(text)
        if not math.isfinite(value):
            raise InputFileError(f"{text} is not a finite number", where=where)
        return value
    if _NON_FINITE.match(text):
        raise InputFileError(f"{text} is not a finite number", where=where)
    if text in ("true", "false"):
        return text == "true"
    if text in ("", "~", "null"):
        return None
    return text
