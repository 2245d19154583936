"""Makes ``artifacts/golden/format-N.x86-64-v3.zla``: ``python tests/make_golden_artifact.py FILE``.

Run once for each released format version; the file is then kept as it is.  Prints the greedy tokens
that transformers gives for ``PROMPT``, which ``test_artifact_golden.py`` holds on to.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from gguf_models import write_model
from tiny_models import make_model
from zerolayer.compiler.driver import CompileRequest, compile_model
from zerolayer.compiler.progress import NullProgress
from zerolayer.targets.facts import load_target

PROMPT = [3, 1, 4, 1, 5]
TOKENS = 12


def main(out: Path) -> None:
    """Compile a two-layer llama with random weights and no tokenizer to ``out``."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = make_model(
            "llama", Path(folder), hidden_size=64, intermediate_size=96, head_dim=16,
            num_hidden_layers=2,
        )  # fmt: skip
        gguf = Path(folder) / "tiny-llama.gguf"
        write_model(model, gguf)
        ids = list(PROMPT)
        with torch.no_grad():
            for _ in range(TOKENS):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        print(ids[len(PROMPT) :])
        request = CompileRequest(
            model=gguf, target=load_target("x86-64-v3"), output=out, activations="f32"
        )
        print(compile_model(request, NullProgress()).digest)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
