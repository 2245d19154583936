"""Artifacts of earlier format versions: today's reader opens them, their own loaders run them.

The tokens are transformers' for the same random model (``make_golden_artifact.py`` printed them).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from zerolayer.runtime_stub.container import open_artifact

GOLDEN = Path(__file__).parent.parent / "artifacts" / "golden"
FILES = {
    "format-1.x86-64-v3.zla": [96, 192, 178, 115, 102, 192, 66, 134, 115, 102, 115, 174],
}


def test_every_golden_artifact_is_tested() -> None:
    assert {p.name for p in GOLDEN.glob("*.zla")} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_todays_reader_opens_and_verifies_it(name: str) -> None:
    with open_artifact(str(GOLDEN / name)) as artifact:
        artifact.verify_all()
        assert artifact.manifest["format"]["major"] == int(name[len("format-")])
        assert artifact.manifest["target"]["name"] == "x86-64-v3"


@pytest.mark.parametrize(("name", "tokens"), FILES.items())
def test_it_still_runs(name: str, tokens: list[int]) -> None:
    command = [
        sys.executable, "-I", str(GOLDEN / name), "generate", "--tokens", "3,1,4,1,5", "-n",
        str(len(tokens)), "--ignore-eos", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout.splitlines()[-1])["tokens"] == tokens
