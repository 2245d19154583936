"""The loader as it goes into the artifact.

In: the installed package ``zerolayer.runtime_stub``.  Out: ZIP members ``__main__.py``,
``zerolayer_stub/*.py`` and their licence.  Next file: ``manifest.py``.

Comments and docstrings are blanked, because the ZIP is stored and the host compiles these sources
at every start; lines keep their numbers, so a reported line is the line in the repository.
"""

from __future__ import annotations

import ast
import importlib.metadata
import io
import re
import tokenize
import zlib
from importlib import resources
from pathlib import Path

from zerolayer.runtime_stub.errors import InputFileError, ResourceError

PACKAGE = "zerolayer_stub"
LOADER_LIMIT = 100_000  # bytes, compressed

_MAIN = f"""\
import sys

if sys.version_info < (3, 9):
    sys.stderr.write("error: this artifact needs Python 3.9 or later\\n")
    sys.exit(2)
try:
    from {PACKAGE}.cli import main

    code = main()
except KeyboardInterrupt:
    code = 130
sys.exit(code)
"""


def loader_members() -> dict[str, bytes]:
    """The loader's members by name.

    Raises ResourceError when they take more than LOADER_LIMIT bytes compressed (they are stored
    plain; the limit is on how much there is to read and compile at start).
    """
    members = {"__main__.py": _MAIN.encode("ascii"), "licenses/zerolayer/LICENSE": license_text()}
    for entry in resources.files("zerolayer.runtime_stub").iterdir():
        if entry.name.endswith(".py"):
            source = entry.read_bytes().decode("utf-8")
            members[f"{PACKAGE}/{entry.name}"] = blank_comments(source).encode("utf-8")
    size = sum(len(zlib.compress(members[n], 9)) for n in members if n.endswith(".py"))
    if size > LOADER_LIMIT:
        raise ResourceError(f"the loader takes {size} bytes, over its limit of {LOADER_LIMIT}")
    return dict(sorted(members.items()))


def license_text() -> bytes:
    """The licence of the loader and the kernels: of the installed package, or of the checkout.

    Raises InputFileError when neither has one.
    """
    found = [
        Path(str(dist.locate_file(entry)))
        for dist in importlib.metadata.distributions(name="zerolayer")
        for entry in dist.files or ()
        if re.fullmatch(r"(zerolayer-[^/]+\.dist-info/(licenses/)?)?LICENSE", entry.as_posix())
    ]
    found.append(Path(__file__).parents[2] / "LICENSE")
    for path in found:
        if path.is_file():
            return path.read_bytes()
    raise InputFileError(
        "zerolayer's own licence is missing", next_step="install zerolayer again: pip install ."
    )


def blank_comments(source: str) -> str:
    """``source`` without comments, docstrings and trailing blanks, line numbers unchanged."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _blank_docstring(node, lines)
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    compile(text, "<loader>", "exec")
    return text


def _blank_docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> None:
    """Replaces a docstring by nothing, or by ``pass`` where the body would be empty."""
    first = node.body[0] if node.body else None
    if not (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return
    last = first.end_lineno
    assert last is not None
    alone = len(node.body) == 1 and not isinstance(node, ast.Module)
    for row in range(first.lineno, last + 1):
        lines[row - 1] = ""
    if alone:
        lines[first.lineno - 1] = " " * first.col_offset + "pass"
