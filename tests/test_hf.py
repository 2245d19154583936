"""Hugging Face directories of every architecture give the logits that transformers gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ort_run import logits_of
from tiny_models import CASES, VOCAB, make_model, reference_logits
from zerolayer.compiler.frontends.hf import load_hf

TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, VOCAB, 40)]


@pytest.mark.parametrize("case", sorted(CASES))
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = make_model(case, tmp_path)
    loaded = load_hf(tmp_path)
    want = reference_logits(model, TOKENS)
    got = logits_of(loaded.graph, TOKENS)
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
