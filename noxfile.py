"""The project's jobs.  ``nox -l`` lists them; all run in the environment that nox itself is in.

dev     links that mypy and editors need, editable install
lint    ruff, check and format
types   strict mypy
tests   everything under tests/ (arguments go to pytest: nox -s tests -- -k cache)
golden  the tests that compare with other implementations' results
fuzz    the property tests, fifty times longer
replay  artifacts are byte-identical before and after a change (nox -s replay -- main)
bench   footprint and compile memory; with arguments the comparison (nox -s bench -- --peers DIR)
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
PYTHON = sys.executable
LINKED = ("compiler", "targets", "runtime_stub", "templates")
BENCHES = ("bench/footprint.py", "bench/compile_memory.py")


def link() -> None:
    """``.link/zerolayer/<folder>``: the layout that setuptools' package-dir gives, as symlinks."""
    folder = ROOT / ".link" / "zerolayer"
    folder.mkdir(parents=True, exist_ok=True)
    for name in LINKED:
        there = folder / name
        if not there.is_symlink():
            there.symlink_to(Path("..", "..", name))


def run(session: nox.Session, *command: str) -> None:
    """A tool of this very environment, by module name."""
    session.run(PYTHON, "-m", *command, external=True)


@nox.session
def dev(session: nox.Session) -> None:
    """Links that mypy and editors need, editable install."""
    link()
    run(session, "pip", "install", "--quiet", "--editable", ".[dev]")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, check and format."""
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Strict mypy over everything."""
    link()
    run(session, "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """All tests; arguments go to pytest."""
    session.run(PYTHON, "tests/system_packages.py", external=True)
    run(session, "pytest", *session.posargs)


@nox.session
def golden(session: nox.Session) -> None:
    """The tests that compare with other implementations' results."""
    run(session, "pytest", "-m", "golden", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """The property tests, fifty times longer."""
    run(session, "pytest", "-m", "hypothesis", "--hypothesis-profile", "fuzz", *session.posargs)


@nox.session
def replay(session: nox.Session) -> None:
    """Compile the demo model with this tree and with another commit (default HEAD), and compare."""
    session.run(PYTHON, "tests/replay.py", *session.posargs, external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Footprint and compile memory, one JSON object a line; with arguments, ``python -m bench``."""
    if session.posargs:
        run(session, "bench", *session.posargs)
        return
    for script in BENCHES:
        session.run(PYTHON, script, external=True)
