"""Bounded reading of the JSON files of a model directory.

In: a path, or the bytes of a JSON header.  Out: a ``dict`` of plain values.  Next file:
``safetensors_file.py``.

Refused, with the place: files over a size limit, nesting over a depth limit, a key twice in one
object, ``NaN`` and ``Infinity``, numbers that do not fit (integers beyond 64 bits, floats that
overflow), text that is not UTF-8 or holds half a surrogate pair.  ``huge=True`` takes integers of
up to 40 digits, as floats: transformers writes ``int(1e30)`` where a tokenizer has no limit.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from zerolayer.runtime_stub.errors import InputFileError

MAX_DEPTH = 64
MAX_CONFIG_BYTES = 8 << 20
_NEXT_STEP = "fetch the file again"


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole file, which may have at most ``limit`` bytes.  Raises InputFileError."""
    try:
        if not path.is_file():
            raise InputFileError(
                "is missing or not a regular file",
                where=str(path),
                next_step="check the path, or fetch the model again",
            )
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise InputFileError(
            f"cannot be read: {error}",
            where=str(path),
            next_step="check the file and its permissions",
        ) from error
    if len(data) > limit:
        raise InputFileError(
            f"has more than the {limit} bytes that such a file may have",
            where=str(path),
            next_step=_NEXT_STEP,
        )
    return data


def read_json_object(
    path: Path, limit: int = MAX_CONFIG_BYTES, *, huge: bool = False
) -> dict[str, Any]:
    """The JSON object in ``path``.  Raises InputFileError naming the file and what is wrong."""
    return parse_json_object(read_bytes(path, limit), str(path), huge=huge)


def parse_json_object(data: bytes, where: str, *, huge: bool = False) -> dict[str, Any]:
    """The JSON object in ``data``; ``where`` is the place in errors.  Raises InputFileError."""
    try:
        value = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_int=_huge_int if huge else _bounded_int,
            parse_float=_finite_float,
        )
        _check_tree(value)
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text (byte {error.start})"
    except json.JSONDecodeError as error:
        what = f"is not JSON: {error.msg} (line {error.lineno})"
    except RecursionError:
        what = f"nests deeper than {MAX_DEPTH} levels"
    except ValueError as error:
        what = str(error)
    else:
        if isinstance(value, dict):
            return value
        what = f"holds a {type(value).__name__}, not an object"
    raise InputFileError(what, where=where, next_step=_NEXT_STEP)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"has the key {twice[:80]!r} twice in one object")
    return out


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"holds {text}, which is not a JSON number")


def _bounded_int(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"holds the integer {text[:24]}.., which has more than 64 bits")
    return int(text)


def _huge_int(text: str) -> int | float:
    return float(text) if 20 <= len(text) <= 40 else _bounded_int(text)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"holds the number {text[:24]}, which overflows")
    return value


def _check_tree(root: Any) -> None:
    """Depth and text of everything in ``root``; iterative, so the depth cannot hurt it."""
    todo: list[tuple[Any, int]] = [(root, 1)]
    while todo:
        value, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"nests deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            for key, item in value.items():
                _check_text(key)
                todo.append((item, depth + 1))
        elif isinstance(value, list):
            todo.extend((item, depth + 1) for item in value)
        elif isinstance(value, str):
            _check_text(value)


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("holds half of a surrogate pair") from None
