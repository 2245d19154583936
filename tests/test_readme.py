"""What README.md promises: its commands are the ones that are run, its links and options exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from zerolayer.compiler.numerics import bounds
from zerolayer.runtime_stub import errors

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def command(name: str) -> str:
    """The one line of the code block marked ``<!-- command: name -->``."""
    found = re.findall(rf"<!-- command: {name} -->\n```sh\n(.*)\n```\n", README)
    assert len(found) == 1
    return str(found[0])


def test_ci_runs_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lines = [line for line in script.splitlines() if line and not line.startswith(("#", "set "))]
    assert lines == ['cd "$(dirname "$0")/.."', "rm -rf .venv", command("tests")]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_there_are_two_set_up_commands() -> None:
    assert re.findall("<!-- command: (.*) -->", README) == ["run", "tests"]


def test_the_test_command_lints_types_and_tests() -> None:
    assert command("tests").endswith(".venv/bin/nox -s lint types tests")


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", ["README.md", "docs/cli.md"])
def test_exit_codes_are_the_ones_in_the_code(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    codes = {v for k, v in vars(errors).items() if k.startswith("EXIT_")}
    assert documented == codes | {1}


def test_the_documented_bounds_are_the_ones_in_the_code() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w ]+) \| ([\d.e-]+(?: \| [\d.e-]+){4}) \|$", text, re.MULTILINE)
    documented = {name: tuple(float(x) for x in cells.split(" | ")) for name, cells in rows}
    tables = (bounds.BY_ACTIVATIONS, bounds.BY_QUANTIZATION, bounds.BY_CACHE)
    rows_of_code = [row for table in tables for row in table.values()]
    assert documented == {b.name: (b.top1, b.margin, b.kl, b.logits, b.layer) for b in rows_of_code}
