"""The ``zerolayer`` command run inside the process of the tests, for those that need no own one."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any

from zerolayer.compiler import cli


@dataclass(frozen=True)
class Outcome:
    """Exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """Stdout, which has to be exactly one line with one object."""
        assert self.out.count("\n") == 1, self.out
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    def one_error(self, code: int, *words: str) -> None:
        """It failed with ``code``, and its one error line on stderr has ``words``."""
        assert self.code == code, self
        lines = [x for x in self.err.splitlines() if x.startswith(("error:", "internal", "Error"))]
        assert len(lines) == 1, self
        assert lines[0].startswith("error: "), self
        assert "Traceback" not in self.err
        for word in words:
            assert word in lines[0]


def zerolayer(*arguments: object) -> Outcome:
    """Run ``zerolayer ARGUMENTS``."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.app([str(a) for a in arguments], prog_name="zerolayer")
        except SystemExit as e:
            code = e.code or 0
    assert isinstance(code, int)
    return Outcome(code, out.getvalue(), err.getvalue())
