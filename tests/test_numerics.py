"""The numerics gate: what it lets pass, what it must not, and what it writes down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from zerolayer.compiler.cache import CompileCache
from zerolayer.compiler.numerics import verify
from zerolayer.compiler.numerics.bounds import BY_ACTIVATIONS, bounds_for
from zerolayer.compiler.numerics.gate import Report, require, run_gate
from zerolayer.compiler.numerics.metrics import F32, NOISE, recorded
from zerolayer.runtime_stub.errors import NumericsError

VOCAB, HIDDEN, TAPS = 50, 16, 3
PROMPTS: list[tuple[str | None, list[int]]] = [("a", [1, 2, 3]), (None, [4])]


class Model:
    """Random logits and taps per token; the next token is the best of its logits."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.table = rng.normal(0, 3, (VOCAB, VOCAB)).astype(np.float32)
        self.states = rng.normal(0, 1, (TAPS, VOCAB, HIDDEN)).astype(np.float32)

    def forward(self, tokens: Sequence[int]) -> tuple[F32, F32]:
        return self.table[list(tokens)], self.states[:, list(tokens)]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        out = [int(self.table[prompt[-1]].argmax())]
        while len(out) < count:
            out.append(int(self.table[out[-1]].argmax()))
        return out

    def together(self, sequences: Sequence[Sequence[int]]) -> list[F32]:
        return [self.table[ids[-1]] for ids in sequences]


def gate(
    kernels: Model, reference: Model, activations: str = "f32", batch_invariant: bool = True
) -> Report:
    def references(sequences: Sequence[Sequence[int]]) -> Iterator[tuple[F32, list[F32]]]:
        for ids in sequences:
            logits, taps = reference.forward(ids)
            yield logits, list(taps)

    bounds = bounds_for("keep", activations)
    return run_gate(
        kernels,
        references,
        PROMPTS,
        bounds,
        golden_tokens=6,
        batch_invariant=batch_invariant,
    )[0]


def test_equal_numbers_pass() -> None:
    report = gate(Model(), Model())
    assert report.failures() == [] and report.positions == 3 + 6 + 1 + 6
    require(report, "m")


def wrong_scale(model: Model) -> None:
    model.table *= 1.01


def shifted_columns(model: Model) -> None:
    model.table = np.roll(model.table, 1, axis=1)


def one_wrong_layer(model: Model) -> None:
    model.states[2] *= 1.01


def not_a_number(model: Model) -> None:
    model.table[:, 7] = np.nan


def infinite_state(model: Model) -> None:
    model.states[1, :, 3] = np.inf


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (wrong_scale, "relative logit error"),
        (shifted_columns, "top-1 agreement"),
        (one_wrong_layer, "after layer 1"),
        (not_a_number, "NaN or infinity"),
        (infinite_state, "NaN or infinity"),
    ],
)
@pytest.mark.parametrize("side", ["kernels", "reference"])
def test_wrong_numbers_fail(damage: Any, says: str, side: str) -> None:
    models = {"kernels": Model(), "reference": Model()}
    damage(models[side])
    with np.errstate(invalid="ignore"), pytest.raises(NumericsError, match=says) as error:
        require(gate(models["kernels"], models["reference"]), "m")
    assert error.value.exit_code == 7


def test_both_ways_in_must_agree() -> None:
    class Forgetful(Model):
        def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
            return [*super().greedy(prompt, count)[:-1], 0]

    with pytest.raises(NumericsError, match="token-by-token"):
        require(gate(Forgetful(), Model()), "m")


def test_company_must_not_change_a_bit() -> None:
    class Sociable(Model):
        def together(self, sequences: Sequence[Sequence[int]]) -> list[F32]:
            out = super().together(sequences)
            out[1] = out[1].copy()
            out[1][3] = np.nextafter(out[1][3], np.float32(9))
            return out

    with pytest.raises(NumericsError, match="computed beside it"):
        require(gate(Sociable(), Model()), "m")
    unpromised = gate(Sociable(), Model(), batch_invariant=False)
    assert unpromised.failures() == []


def test_the_loosest_row_counts() -> None:
    """Each figure of a compile's bounds is that of the row that allows most."""
    assert bounds_for("keep", "f32", "f32") is BY_ACTIVATIONS["f32"]
    for activations, cache in (("int8", "f16"), ("int8", "bf16"), ("bf16", "q8_0")):  # no looser
        assert bounds_for("keep", activations, cache) is BY_ACTIVATIONS[activations]
    q8 = bounds_for("keep", "f32", "q8_0")
    assert (q8.name, q8.top1, q8.logits) == ("q8_0 cache, f32 activations", 0.98, 0.05)
    both = bounds_for("int4", "bf16", "q8_0")
    assert both.name == "int4 weights, bf16 activations"
    assert (both.top1, both.margin, both.kl, both.logits) == (0.8, 1.0, 0.8, 0.45)
    both = bounds_for("bf16", "f32", "f16")
    assert (both.name, both.logits) == ("bf16 weights, f32 activations", 0.05)


@pytest.mark.parametrize(
    ("quantize", "activations", "kv_dtype", "wider"),
    [
        ("keep", "int8", "q8_0", ["--kv-dtype f16", "--activations f32"]),
        ("int4", "f32", "f32", ["a wider --quantize"]),
        ("keep", "f32", "f16", ["--kv-dtype f32"]),
        ("keep", "int8", "bf16", ["--activations f32"]),  # which brings a cache of f32
        ("keep", "f32", "f32", []),
    ],
)
def test_what_would_lose_less_is_said(
    quantize: str, activations: str, kv_dtype: str, wider: list[str]
) -> None:
    options: Any = SimpleNamespace(quantize=quantize, activations=activations, kv_dtype=kv_dtype)
    assert verify._wider(options) == wider
    other = Model()
    other.table = other.table[::-1].copy()
    with pytest.raises(NumericsError) as caught:
        require(gate(Model(), other), "m", wider)
    said = caught.value.next_step
    assert all(option in said for option in wider) and "--no-verify" in said
    assert ("compile with" in said) == bool(wider)


def test_nothing_compared_is_no_pass() -> None:
    empty = run_gate(Model(), lambda _: [], [], bounds_for("keep", "f32"), golden_tokens=6)[0]
    with pytest.raises(NumericsError, match="nothing was compared"):
        require(empty, "m")


def test_the_reference_machine_s_rounding_leaves_no_trace() -> None:
    """Two hosts' references differ in their last bits; what is recorded does not."""
    other = Model()
    other.table *= np.float32(1 + 3e-7)
    other.states *= np.float32(1 - 2e-7)
    assert gate(Model(), Model()).as_dict() == gate(Model(), other).as_dict()
    bound = BY_ACTIVATIONS["f32"].logits
    assert recorded(0.0, bound) == recorded(3e-6, bound) == NOISE * bound
    assert recorded(0.0123456, bound) == 0.012


def test_a_verdict_is_kept_for_exactly_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SimpleNamespace(name="m.gguf", sha256="0" * 64)

    def key(hashes: tuple[str, ...] = ("w",), **changes: object) -> str:
        parts: dict[str, Any] = {
            "model": SimpleNamespace(sources=[source]),
            "code": b"code",
            "quantize": "keep",
            "activations": "f32",
            "kv_dtype": "f32",
            "batch_invariant": True,
            "prompts": lambda: PROMPTS,
            **changes,
        }
        written: Any = SimpleNamespace(hashes=hashes)
        gate_inputs: Any = SimpleNamespace(**parts)
        return CompileCache.key(verify._key(gate_inputs, written))

    other = SimpleNamespace(name="m.gguf", sha256="1" * 64)
    keys = [
        key(),
        key(("v",)),
        key(model=SimpleNamespace(sources=[other])),
        key(code=b"other code"),
        key(quantize="int4"),
        key(activations="int8"),
        key(kv_dtype="q8_0"),
        key(prompts=lambda: PROMPTS[:1]),
    ]
    monkeypatch.setattr(verify, "compiler_digest", lambda: "another compiler")
    keys.append(key())
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda n: "99" if n == "onnxruntime" else version(n))
    keys.append(key())
    assert len(set(keys)) == len(keys)
