"""Command-line options: a small table-driven parser.

In: argument strings, a table of :class:`Option`.  Out: values by name, or UsageError naming the
argument.  Next file: ``cli.py``.  (The standard library's parser costs more start-up time than the
rest of the loader together.)
"""

from __future__ import annotations

from .detect import MAX_THREADS
from .errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_NO_LIMIT = 1 << 62
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Option:
    """``names`` like ``("-n", "--max-new-tokens")``; ``parse`` is None for a flag; ``many``
    collects repeated uses in a list."""

    __slots__ = ("help", "key", "many", "metavar", "names", "parse")

    def __init__(
        self,
        names: tuple[str, ...],
        help: str,
        parse: Callable[[str], Any] | None = None,
        *,
        metavar: str = "",
        many: bool = False,
    ) -> None:
        self.names = names
        self.help = help
        self.parse = parse
        self.metavar = metavar
        self.many = many
        self.key = names[-1].lstrip("-").replace("-", "_")


class Values:
    """Option values by key (None, False or [] when not given) and the positional arguments."""

    def __init__(self, options: Sequence[Option]) -> None:
        self._values: dict[str, Any] = {
            o.key: [] if o.many else (False if o.parse is None else None) for o in options
        }
        self.positional: list[str] = []

    def set(self, option: Option, value: Any) -> None:
        if option.many:
            self._values[option.key].append(value)
        else:
            self._values[option.key] = value

    def __getitem__(self, key: str) -> Any:
        return self._values[key]


def parse(args: Sequence[str], options: Sequence[Option], where: str) -> Values:
    """``--name value``, ``--name=value``, ``-n value``, flags, ``--`` before positional words."""
    by_name = {name: o for o in options for name in o.names}
    values = Values(options)
    queue = list(args)
    while queue:
        word = queue.pop(0)
        if word == "--":
            values.positional += queue
            break
        if not word.startswith("-") or word == "-":
            values.positional.append(word)
            continue
        name, has_value, value = word.partition("=")
        option = by_name.get(name)
        if option is None:
            raise UsageError(
                f"unknown option {name!r}", where=where, next_step=_suggest(name, by_name)
            )
        if option.parse is None:
            if has_value:
                raise UsageError(f"{name} takes no value", where=where)
            values.set(option, True)
            continue
        if not has_value:
            if not queue:
                raise UsageError(f"{name} needs a value ({option.metavar})", where=where)
            value = queue.pop(0)
        try:
            values.set(option, option.parse(value))
        except ValueError as e:
            raise UsageError(f"{name} {value!r}: {e}", where=where) from None
    return values


def _suggest(name: str, known: dict[str, Option]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"see {'--help'}"


def help_text(usage: str, summary: str, options: Sequence[Option]) -> str:
    """What ``--help`` prints."""
    left = [", ".join(o.names) + (f" {o.metavar}" if o.metavar else "") for o in options]
    width = min(30, max(map(len, left), default=0))
    lines = [f"usage: {usage}", "", summary, "", "options:"]
    for text, option in zip(left, options):  # noqa: B905 (Python 3.9)
        lines.append(f"  {text.ljust(width)}  {option.help}")
    return "\n".join(lines)


# value parsers ----------------------------------------------------------------------------------


def integer(low: int, high: int = _NO_LIMIT) -> Callable[[str], int]:
    """A decimal integer in ``low..high``; without ``high`` any that the loader can hold."""

    def parse_integer(text: str) -> int:
        digits = text[1:] if text.startswith("-") else text
        if not (digits.isascii() and digits.isdigit()):
            raise ValueError("not an integer")
        if len(digits) > 20:  # beyond any limit; Python refuses to convert thousands
            digits = digits.lstrip("0")[:21] or "0"
        value = -int(digits) if text.startswith("-") else int(digits)
        if value < low and high == _NO_LIMIT:
            raise ValueError(f"must be at least {low}")
        if not low <= value <= high:
            raise ValueError(f"not in {low}..{high}")
        return value

    return parse_integer


def number(low: float, high: float) -> Callable[[str], float]:
    """A finite number in ``low..high``."""

    def parse_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("not a number") from None
        if not low <= value <= high:
            raise ValueError(f"not in {low:g}..{high:g}")
        return value

    return parse_number


def size(text: str) -> int:
    """Bytes: ``1500000``, ``512M``, ``1.5G`` (powers of 1024)."""
    lower = text.strip().lower()
    for ending in ("ib", "b"):
        if lower.endswith(ending):
            lower = lower[: -len(ending)]
            break
    unit = lower[-1:] if lower[-1:].isalpha() else ""
    digits = lower[: len(lower) - len(unit)]
    try:
        value = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        raise ValueError("not a size like 512M or 2G") from None
    if not 1 <= value <= 1 << 50:
        raise ValueError("not a size between 1 byte and 1024T")
    return int(value)


def _ids_in(text: str) -> list[str]:
    if "," not in text:
        return text.split()
    words = [part.strip() for part in text.split(",")]
    return words[:-1] if not words[-1] else words  # a comma may follow the last id


def token_ids(text: str) -> list[int]:
    """``1,2,3`` or ``1 2 3``."""
    parse_one = integer(0, (1 << 31) - 1)
    ids = []
    for word in _ids_in(text):
        try:
            ids.append(parse_one(word))
        except ValueError:
            raise ValueError(f"{word[:20]!r} is not a token id") from None
    return ids


def word(text: str) -> str:
    """Text as it is."""
    return text


THREADS = Option(
    ("--threads",),
    "default: physical cores that this process may use",
    integer(1, MAX_THREADS),
    metavar="N",
)
PROFILE = Option(
    ("--profile",),
    "write a trace of steps by kernel and thread, for ui.perfetto.dev",
    word,
    metavar="FILE",
)
