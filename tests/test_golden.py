"""The real model end to end against results that other implementations gave.

The float32 results come from transformers and, independently, from llama.cpp on dequantized
weights; the int8 results are held to what llama.cpp's own int8 kernels reach on the same file.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zerolayer.compiler.driver import CompileRequest, compile_model
from zerolayer.compiler.numerics.metrics import F32
from zerolayer.compiler.numerics.runner import StepRunner, step_runner
from zerolayer.compiler.progress import NullProgress
from zerolayer.compiler.report import CompileResult
from zerolayer.runtime_stub.container import open_artifact
from zerolayer.targets.facts import resolve_host


def compiled(gguf: Path, folder: Path, activations: str, **options: Any) -> CompileResult:
    """SmolLM2 for this host."""
    request = CompileRequest(
        model=gguf,
        target=resolve_host(),
        output=folder / f"smollm2-{activations}.zla",
        activations=activations,
        **options,
    )
    return compile_model(request, NullProgress())


@contextlib.contextmanager
def runner_of(result: CompileResult, context: int = 256) -> Iterator[StepRunner]:
    """The artifact's own kernels and weights, through the loader's driver."""
    artifact = open_artifact(str(result.output))
    weights, offset = artifact.map_weights()
    code = artifact.member(artifact.manifest["code"]["path"])
    with step_runner(code, weights, offset, result.program, context=context, threads=2) as runner:
        yield runner


@pytest.fixture(scope="session")
def f32(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> CompileResult:
    return compiled(smollm2_gguf, tmp_path_factory.mktemp("f32"), "f32")


@pytest.fixture(scope="session")
def int8(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> CompileResult:
    return compiled(smollm2_gguf, tmp_path_factory.mktemp("int8"), "int8")


def generate(artifact: Path, *args: str) -> dict[str, Any]:
    """The last line of ``generate --json``, run as a user would."""
    command = [sys.executable, "-I", str(artifact), "generate", "--json", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("case", range(5))
def test_f32_tokens_are_the_reference_tokens(
    f32: CompileResult, goldens: dict[str, Any], case: int
) -> None:
    want = goldens["transformers-fp32"]["results"][case]
    assert want["greedy_ids"] == goldens["llamacpp-dequant-f32"]["results"][case]["greedy_ids"]
    got = generate(f32.output, want["prompt"], "--raw", "-n", "64", "--ignore-eos")
    assert got["prompt_tokens"] == want["prompt_ids"]
    assert got["tokens"] == want["greedy_ids"]


def top5_error(logits: F32, want: dict[str, Any]) -> list[float]:
    """Largest error over the reference's top five, at each recorded position."""
    first = len(want["prompt_ids"]) - 1
    return [
        max(abs(float(logits[first + int(at), token]) - value) for token, value in top)
        for at, top in want["top5_logits_at_generated_position"].items()
    ]


def test_f32_logits_match_the_reference(f32: CompileResult, goldens: dict[str, Any]) -> None:
    with runner_of(f32) as runner:
        for want in goldens["transformers-fp32"]["results"]:
            logits, _ = runner.forward([*want["prompt_ids"], *want["greedy_ids"][:-1]])
            assert max(top5_error(logits, want)) < 1e-3


def test_int8_is_at_least_as_close_as_llama_cpp(
    int8: CompileResult, goldens: dict[str, Any]
) -> None:
    """Teacher forced along the float32 path: agreement over all prompts, and logit error.

    In a prompt alone the count is a matter of one or two near ties, of less than 0.2 nats.
    """
    ours: list[float] = []
    theirs: list[float] = []
    agreement, their_agreement = 0, 0
    with runner_of(int8) as runner:
        for want in goldens["transformers-fp32"]["results"]:
            ids = want["prompt_ids"]
            logits, _ = runner.forward([*ids, *want["greedy_ids"][:-1]])
            chosen = logits[len(ids) - 1 :].argmax(-1)
            agreement += int((chosen == np.asarray(want["greedy_ids"])).sum())
            matched, _, of = want["vs_llamacpp"]["teacher_forced_argmax_match"].partition("/")
            assert int(of) == len(chosen)
            their_agreement += int(matched)
            ours += top5_error(logits, want)
            theirs += want["vs_llamacpp"]["max_abs_logit_diff_on_llamacpp_top5_at_positions"]
    assert agreement >= their_agreement
    assert float(np.mean(ours)) <= float(np.mean(theirs))
    assert max(ours) <= max(theirs)


def test_the_gate_passed_and_is_in_the_manifest(int8: CompileResult) -> None:
    numerics = open_artifact(str(int8.output)).manifest["numerics"]
    assert numerics["status"] == "passed"
    assert numerics["top1"] >= numerics["bounds"]["top1"]
    assert len(numerics["layer_errors"]) == 31
