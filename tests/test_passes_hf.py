"""The fused step graph, over a scrambled paged cache, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_model, reference_logits, write_tokenizer
from zerolayer.compiler.frontends import load_model
from zerolayer.compiler.graph.execute import run
from zerolayer.compiler.graph.feeds import step_feeds
from zerolayer.compiler.passes import PassOptions, run_passes

TOKENS = [5, 90, 3, 3, 17, 60, 2, 41, 8, 77, 30, 12, 99, 150, 7]


@pytest.mark.parametrize(
    "case", ["llama-llama3", "mistral", "qwen3-bias", "gemma2", "gemma3", "phi3-partial", "gpt2"]
)
def test_step_graph_equals_transformers(case: str, tmp_path: Path) -> None:
    model = make_model(case, tmp_path)
    write_tokenizer(tmp_path)
    graph = run_passes(load_model(tmp_path).graph, PassOptions(activations="f32", block_size=4))
    feeds = step_feeds(graph, [TOKENS], blocks=[[6, 0, 3, 1]])
    found = run(graph, feeds, ["logits"])["logits"]
    expected = reference_logits(model, TOKENS)
    assert np.linalg.norm(found - expected) < 5e-6 * np.linalg.norm(expected)
