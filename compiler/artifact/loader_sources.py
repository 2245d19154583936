"""The loader as it goes into the artifact.

In: the installed package ``zerolayer.runtime_stub``.  Out: ZIP members ``__main__.py``,
``zerolayer_stub/*.py`` and their licence.  Next file: ``manifest.py``.

Comments, docstrings and annotations are blanked, because the ZIP is stored and the host compiles
these sources at every start; lines keep their numbers, so a reported line is the line in the
repository.
``__main__.py`` brings its own finder for them: Python's zipimport compiles every source twice (once
only to learn its file name), which would take longer than all the rest.  Run under another name it
does only that, for programs that use the loader as a library.
"""

from __future__ import annotations

import ast
import importlib.metadata
import io
import json
import re
import tokenize
import zlib
from importlib import resources
from pathlib import Path

from zerolayer.runtime_stub.errors import InputFileError, Interrupted, ResourceError

PACKAGE = "zerolayer_stub"
LOADER_LIMIT = 100_000  # bytes, compressed

#: what ``--json`` prints when the interrupt comes before the loader can say so
_INTERRUPTED = json.dumps(Interrupted("interrupted").as_dict())
_MAIN = f"""\
import gc
import sys

if sys.version_info < (3, 9):
    sys.stderr.write("error: this artifact needs Python 3.9 or later\\n")
    sys.exit(2)
FOLDERS = {{"{PACKAGE}": "", "jinja2": "vendor/", "markupsafe": "vendor/"}}


class Sources:
    def __init__(self, archive):
        self.archive = archive.archive
        self.get_data = archive.get_data

    def find_spec(self, name, path=None, target=None):
        folder = FOLDERS.get(name.partition(".")[0])
        if folder is None:
            return None
        base = self.archive + "/" + folder + name.replace(".", "/")
        for ending in (".py", "/__init__.py"):
            try:
                source = self.get_data(base + ending)
            except OSError:
                continue
            package = ending != ".py"
            spec = type(__spec__)(name, self, origin=base + ending, is_package=package)
            spec.has_location = True
            spec.loader_state = source
            if package:
                spec.submodule_search_locations.append(base)
            return spec
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        spec = module.__spec__
        code = compile(spec.loader_state, spec.origin, "exec", dont_inherit=True)
        spec.loader_state = None
        exec(code, module.__dict__)

    def get_source(self, name):
        return self.get_data(sys.modules[name].__file__).decode("utf-8")


try:
    gc.set_threshold(100000)
    sys.meta_path.insert(0, Sources(__loader__))
    if __name__ == "__main__":
        from {PACKAGE}.cli import main

        sys.exit(main())
except KeyboardInterrupt:
    if "--json" in sys.argv:
        print({_INTERRUPTED!r}, flush=True)
    sys.exit(130)
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
    """``source`` without comments, docstrings, annotations, what only type checkers read, and
    trailing blanks; line numbers unchanged."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    tree = ast.parse(source)
    _blank_annotations(tree, lines)
    for node in ast.walk(tree):
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


def _blank_annotations(tree: ast.Module, lines: list[str]) -> None:
    """Cuts annotations, what they need from ``__future__``, and ``if TYPE_CHECKING`` blocks."""
    cuts: list[tuple[int, int, int, int, str]] = []  # from row and column, to row and column, new
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            at = node.col_offset + len(node.arg.encode("utf-8"))
            cuts.append((node.lineno, at, *_end(node.annotation), ""))
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            row, column = node.returns.lineno, node.returns.col_offset
            arrow = lines[row - 1].encode("utf-8").rfind(b" ->", 0, column)
            if arrow >= 0:
                cuts.append((row, arrow, *_end(node.returns), ""))
        elif isinstance(node, ast.AnnAssign) and node.value is None:
            cuts.append((node.lineno, node.col_offset, *_end(node), "pass"))
        elif isinstance(node, ast.AnnAssign):
            cuts.append((*_end(node.target), *_end(node.annotation), ""))
    for first, column, last, end, new in sorted(cuts, reverse=True):
        start, rest = lines[first - 1].encode("utf-8"), lines[last - 1].encode("utf-8")
        lines[first - 1] = start[:column].decode("utf-8") + new + rest[end:].decode("utf-8")
        lines[first:last] = [""] * (last - first)
    for block in tree.body:
        if isinstance(block, ast.ImportFrom) and block.module == "__future__":
            lines[block.lineno - 1] = ""  # only annotations asked for it
        test = block.test if isinstance(block, ast.If) else None
        if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING":
            last = _end(block)[0]
            lines[block.lineno - 1 : last] = [""] * (last - block.lineno + 1)


def _end(node: ast.stmt | ast.expr) -> tuple[int, int]:
    """The row and column (in UTF-8) behind a node."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset
