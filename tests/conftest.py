"""Fixtures that more than one test file needs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The test machine may have two cores: libraries that start one thread per core on each call would
# measure each other.  Set before torch, numpy and onnxruntime are imported.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

GOLDEN = Path(__file__).parent / "golden"


# `--hypothesis-profile fuzz` (nox -s fuzz) looks longer than a test run can.
settings.register_profile("tests", deadline=None, max_examples=100)
settings.register_profile("fuzz", deadline=None, max_examples=5000)
settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that compare with other implementations' results: ``-m golden`` runs these."""
    for item in items:
        if "goldens" in getattr(item, "fixturenames", ()):
            item.add_marker("golden")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as a GGUF file in the user's cache; downloaded on first use."""
    from zerolayer.compiler.demo import fetch_demo_model

    return fetch_demo_model()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 118,080 parameters as a Hugging Face folder, with a word tokenizer."""
    from tiny_models import make_model

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    folder.mkdir()
    make_model("llama", folder)
    return folder


@pytest.fixture(scope="session")
def tiny_artifact(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, compiled for x86-64-v3 without the numerics gate."""
    from cli_run import zerolayer

    out = tmp_path_factory.mktemp("out") / "tiny.zla"
    done = zerolayer("compile", tiny_llama, "--target", "x86-64-v3", "--no-verify", "-o", out)
    assert done.code == 0, done.err
    return out


@pytest.fixture(scope="session")
def goldens() -> dict[str, Any]:
    """Greedy tokens and top logits of SmolLM2 by other implementations; see tests/golden/README.md.

    Keys: ``transformers-fp32`` (the float32 reference), ``llamacpp`` and ``llamacpp-dequant-f32``.
    Each has ``results``: a list with ``prompt``, ``prompt_ids``, ``greedy_ids``, ``greedy_text``
    and ``top5_logits_at_generated_position``.
    """
    found = {}
    for path in sorted(GOLDEN.glob("smollm2-135m-q4_1.*.json")):
        found[path.name.split(".")[1]] = json.loads(path.read_text(encoding="utf-8"))
    return found
