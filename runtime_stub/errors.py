"""Errors and exit codes shared by the compiler and the loader.

In: nothing.  Out: one exception type per documented exit code; every message names the thing that
is wrong, the place, and the next step.  Next file: ``container.py``.

This module is the bottom of the import graph: standard library only, Python >= 3.9.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_INPUT = 3
EXIT_UNSUPPORTED = 4
EXIT_HARDWARE = 5
EXIT_INTEGRITY = 6
EXIT_NUMERICS = 7
EXIT_RESOURCES = 8
EXIT_INTERRUPTED = 130


class ZerolayerError(Exception):
    """A failure that the user can act on.

    ``what`` names the thing and what is wrong with it, ``where`` the file, tensor, key or line it
    was found at, ``next_step`` what to do about it.  ``exit_code`` is the process's exit status.
    """

    exit_code = 1
    kind = "error"

    def __init__(self, what: str, *, where: str = "", next_step: str = "") -> None:
        self.what = what
        self.where = where
        self.next_step = next_step
        super().__init__(self.one_line())

    def one_line(self) -> str:
        """The whole message on one line, as printed to stderr."""
        text = self.what
        if self.where:
            text = f"{self.where}: {text}"
        if self.next_step:
            text = f"{text}; {self.next_step}"
        return " ".join(text.split())

    def as_dict(self) -> dict[str, object]:
        """The same facts for ``--json``."""
        return {
            "error": self.kind,
            "exit_code": self.exit_code,
            "what": self.what,
            "where": self.where,
            "next_step": self.next_step,
        }


class UsageError(ZerolayerError):
    """A wrong option, argument or request (exit code 2)."""

    exit_code = EXIT_USAGE
    kind = "usage"


class InputFileError(ZerolayerError):
    """A model, tokenizer, configuration or target file that is damaged or inconsistent (3)."""

    exit_code = EXIT_INPUT
    kind = "input"


class UnsupportedError(ZerolayerError):
    """A well-formed model, operator, dtype or feature that has no exact implementation (4)."""

    exit_code = EXIT_UNSUPPORTED
    kind = "unsupported"


class HardwareMismatchError(ZerolayerError):
    """The host lacks what the artifact was compiled for (5)."""

    exit_code = EXIT_HARDWARE
    kind = "hardware"


class IntegrityError(ZerolayerError):
    """An artifact whose bytes are not the bytes that were written (6)."""

    exit_code = EXIT_INTEGRITY
    kind = "integrity"


class NumericsError(ZerolayerError):
    """Results outside the documented bounds (7)."""

    exit_code = EXIT_NUMERICS
    kind = "numerics"


class Interrupted(ZerolayerError):
    """The user ended the command (130)."""

    exit_code = EXIT_INTERRUPTED
    kind = "interrupted"


class ResourceError(ZerolayerError):
    """Not enough memory, disk, blocks or threads (8)."""

    exit_code = EXIT_RESOURCES
    kind = "resources"
