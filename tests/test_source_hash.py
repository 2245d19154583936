"""The hash of a source, begun early or not, against hashlib over the whole file."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from zerolayer.compiler import source_hash
from zerolayer.compiler.frontends.sources import source_file
from zerolayer.runtime_stub.errors import InputFileError


@pytest.mark.parametrize("begun", [False, True])
def test_it_is_that_of_the_file(tmp_path: Path, begun: bool) -> None:
    path = tmp_path / "model.gguf"
    data = bytes(range(256)) * 9000 + b"end"  # more than two pieces
    path.write_bytes(data)
    if begun:
        source_hash.begin(path)
    found = source_file(path)
    assert (found.sha256, found.size) == (hashlib.sha256(data).hexdigest(), len(data))
    path.write_bytes(b"another")  # a hash is handed out once
    assert source_file(path).sha256 == hashlib.sha256(b"another").hexdigest()


def test_what_is_no_file_is_told_by_the_reader(tmp_path: Path) -> None:
    source_hash.begin(tmp_path)
    source_hash.begin(tmp_path / "none")
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputFileError, match="cannot be read"):
            source_file(path)


def test_it_begins_before_anything_large_is_imported() -> None:
    code = "import sys, zerolayer.compiler.source_hash; print('onnx_ir' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
