"""Imports go one way, packages and dependencies are as declared, a wheel leaves nothing out."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

#: folder -> the folders it may import
MAY_IMPORT = {
    "runtime_stub": {"runtime_stub"},
    "templates": {"templates", "runtime_stub"},
    "targets": {"targets", "templates", "runtime_stub"},
    "compiler": {"compiler", "targets", "templates", "runtime_stub"},
}
#: distribution -> the module it gives, where the names differ
MODULES = {"pyyaml": "yaml", "onnx-ir": "onnx_ir", "ml-dtypes": "ml_dtypes"}
#: optional: only inside a function, so that nobody needs it who does not use it
OPTIONAL = {"torch"}
#: what an artifact carries under vendor/: the loader imports it inside the function that needs it
VENDORED = {"jinja2", "tokenizers"}

FILES = [p for folder in MAY_IMPORT for p in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(absolute module name, line, at module level) of every import in ``path``."""
    package = ("zerolayer", *path.relative_to(ROOT).parent.parts)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(n)
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
        for n in ast.walk(f)
    }
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, top
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [a.name for a in node.names]
            for name in names if module == "zerolayer" else [""]:
                yield f"{module}.{name}".rstrip("."), node.lineno, top


def base_modules() -> set[str]:
    names = (re.split(r"[^A-Za-z0-9_.-]", d)[0] for d in PROJECT["project"]["dependencies"])
    return {MODULES.get(n, n) for n in names}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    third_party = base_modules() if folder in {"compiler", "targets"} else set()
    for name, line, top in imports(path):
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        first, *rest = name.split(".")
        if first == "zerolayer":
            assert rest and rest[0] in MAY_IMPORT[folder], where
        elif first not in sys.stdlib_module_names:
            lazily = {"compiler": OPTIONAL, "runtime_stub": VENDORED}.get(folder, set())
            optional = first in lazily and not top
            assert first in third_party or optional, where


@pytest.mark.parametrize(
    "path", sorted((ROOT / "runtime_stub").rglob("*.py")), ids=lambda p: p.name
)
def test_the_loader_is_self_contained(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 9))
    for node in ast.walk(tree):  # it runs as zerolayer_stub inside the artifact
        if isinstance(node, ast.Import):
            assert all(not a.name.startswith("zerolayer") for a in node.names), node.lineno
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("zerolayer"), node.lineno
        assert not isinstance(node, ast.Match), f"{path.name}:{node.lineno} is not Python 3.9"
    if len(tree.body) > 1:
        assert "from __future__ import annotations" in source


def packages() -> dict[str, Path]:
    """Package name -> folder, as pyproject.toml says."""
    tool = PROJECT["tool"]["setuptools"]
    folders: dict[str, str] = tool["package-dir"]
    found = {}
    for name in tool["packages"]:
        root = ".".join(name.split(".")[:2])
        found[name] = ROOT.joinpath(folders[root], *name.split(".")[2:])
    return found


def test_every_package_is_listed() -> None:
    there = {
        ".".join(("zerolayer", *p.parent.relative_to(ROOT).parts))
        for folder in MAY_IMPORT
        for p in (ROOT / folder).rglob("__init__.py")
    }
    assert set(packages()) == there


def test_every_file_is_in_the_wheel() -> None:
    data: dict[str, list[str]] = PROJECT["tool"]["setuptools"]["package-data"]
    listed: set[Path] = set()
    for name, folder in packages().items():
        listed |= set(folder.glob("*.py"))
        for pattern in data.get(name, []):
            matched = set(folder.glob(pattern))
            assert matched, f"package-data {name}: {pattern} matches nothing"
            listed |= matched
    there = {
        p
        for folder in MAY_IMPORT
        for p in (ROOT / folder).rglob("*")
        if p.is_file() and "__pycache__" not in p.parts and not p.name.startswith(".")
    }
    assert sorted(there - listed) == []


def test_the_pinned_torch_is_the_one_the_readme_installs() -> None:
    dev: list[Any] = PROJECT["project"]["optional-dependencies"]["dev"]
    (torch,) = (d for d in dev if d.startswith("torch"))
    assert torch in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_oracle_sends_nothing(tmp_path: Path) -> None:
    """onnxruntime 1.32 keeps a device id in the user's cache folder when it may send usage data."""
    code = (
        "from zerolayer.compiler.graph import execute\n"
        "import numpy as np, onnx_ir as ir\n"
        "x, y = ir.val('x', ir.DataType.FLOAT, [2]), ir.val('y', ir.DataType.FLOAT, [2])\n"
        "node = ir.node('Abs', [x], outputs=[y])\n"
        "graph = ir.Graph([x], [y], nodes=[node], opset_imports={'': 23}, name='g')\n"
        "run = execute.Executable(ir.Model(graph, ir_version=11)).run\n"
        "print(run({'x': np.array([-1, 2], np.float32)}))\n"
    )
    clean = {k: v for k, v in os.environ.items() if k not in {"XDG_CACHE_HOME", "HOME"}}
    clean.pop("ORT_DISABLE_TELEMETRY", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1." in done.stdout and not list(tmp_path.rglob("*onnxruntime*"))


def test_a_compile_needs_neither_sympy_nor_onnxruntime(tiny_llama: Path, tmp_path: Path) -> None:
    """Without the gate; both are there where they are used, and sympy is itself."""
    code = """
import sys
from zerolayer.compiler.cli import main
sys.argv = ["zerolayer", "compile", sys.argv[1], "--target", "x86-64-v3", "--no-verify", "-o",
            sys.argv[2], "--json"]
try:
    main()
except SystemExit as e:
    assert not e.code, e
print(sorted({"sympy", "onnx_ir._symbolic_shapes", "onnxruntime"} & set(sys.modules)))
import numpy as np
import onnx_ir as ir
import sympy.core, sympy.logic.boolalg
from zerolayer.compiler.graph.execute import _ort_value
print(ir.SymbolicDim("N") * 2 + 1, ir.SymbolicDim(sympy.Symbol("M")),
      _ort_value(np.ones(3, np.float32)).shape())
print(sympy.core.numbers.__name__, sys.modules["sympy"] is sympy, type(sympy).__name__)
"""
    arguments = [sys.executable, "-c", code, str(tiny_llama), str(tmp_path / "m.zla")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "[]",
        "2*N + 1 M [3]",
        "sympy.core.numbers True module",
    ]
