"""The screened projection in whole steps: the same tokens as without it, whoever is in the batch.

In: small decoders with heads of floats and of Q8_0, built with and without screening.  The
unscreened step's logits and ``numpy.argmax`` are the reference.  Next files:
``test_cpu_kernels_screen.py`` and ``test_cpu_kernels_split.py`` (the bounds themselves).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from cli_run import zerolayer
from decoders import CONFIGS, decoder
from program_cases import (
    TINY,
    engine,
    packed_weights,
    small,
    step_program,
    tiny_decoder,
    zig_cache,
)
from test_cpu_team import regions_of
from tiny_models import make_model
from zerolayer.compiler.frontends.config import ModelConfig
from zerolayer.compiler.graph import domain
from zerolayer.compiler.passes import PassOptions, check_passes, run_passes
from zerolayer.compiler.passes.edit import domain_node
from zerolayer.compiler.passes.screen import screen_head, why_not
from zerolayer.compiler.passes.screen_split import gain_before
from zerolayer.runtime_stub.container import open_artifact
from zerolayer.runtime_stub.driver_cpu import CpuEngine
from zerolayer.runtime_stub.laps import Recorder
from zerolayer.runtime_stub.step import SamplingParams, StepBatch
from zerolayer.runtime_stub.work import work_of
from zerolayer.targets import cpu, cpu_rows, program, roofline
from zerolayer.targets.facts import load_target, resolve_host
from zerolayer.targets.program import Program

HOST = small(resolve_host())
VOCAB = 2003  # not whole groups of 16
CONFIG = replace(TINY, vocab_size=VOCAB)
GROUPS = -(-VOCAB // 16)
GREEDY = SamplingParams()
#: greedy all the same: what would change the choice is off, or has no history
PLAIN = [SamplingParams(temperature=-1.0, top_k=3, seed=5), SamplingParams(repetition_penalty=1.3)]
#: format of the head, activations, fusion: each format and each level, each kind of product
CASES = [
    ("BF16", "int8", "aggressive"), ("BF16", "bf16", "balanced"), ("BF16", "f32", "conservative"),
    ("F16", "int8", "conservative"), ("F16", "f32", "aggressive"), ("F32", "int8", "balanced"),
    ("Q8_0", "int8", "aggressive"), ("Q8_0", "int8", "conservative"), ("tied", "int8", "balanced"),
]  # fmt: skip


class Pair:
    """One model with and without screening, as engines of ``threads`` threads."""

    def __init__(
        self, model: ir.Model, activations: str, fusion: str, threads: int, *,
        config: ModelConfig = CONFIG, split: bool = False,
    ) -> None:  # fmt: skip
        self.split = split  # a logit is the sum of two products: other roundings
        self.programs: list[Program] = []
        self.engines: list[CpuEngine] = []
        for screen in (True, False):
            graph, program = step_program(
                model, HOST, activations, fusion, config=config, screen=screen
            )
            built = cpu.build(program, HOST, work_dir=zig_cache())
            weights = packed_weights(graph, program)
            self.programs.append(program)
            self.engines.append(engine(built.files[built.entry], weights, program, threads))

    def same(self, screened: Any, plain: Any) -> bool:
        """Whether all logits of the one engine are those of the other."""
        if self.split:
            return bool(np.allclose(screened, plain, rtol=1e-5, atol=1e-5))
        return bool(np.array_equal(screened, plain))

    def close(self) -> None:
        for e in self.engines:
            e.close()


def exact_groups(run: CpuEngine) -> int:
    found = run.code.lib.zl_exact_groups
    found.argtypes, found.restype = [ctypes.c_void_p], ctypes.c_int64
    return int(found(run.handle))


def batch(parts: list[tuple[list[int], SamplingParams | None]]) -> StepBatch:
    """Sequences from their first position on; None: no logits wanted."""
    out = StepBatch()
    for i, (tokens, params) in enumerate(parts):
        row = None if params is None else (params, 3, array("i", tokens[:2]))
        out.add(array("i", tokens), 0, array("i", range(6 * i, 6 * i + 6)), row)
    return out


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    head, activations, fusion = request.param
    format, config = "Q4_1" if activations == "int8" else "BF16", CONFIG
    if head == "tied":
        config = replace(CONFIG, tied_embeddings=True)
    split = head in ("Q8_0", "tied")
    model = tiny_decoder(config, format, head="Q8_0" if split else head)
    both = Pair(model, activations, fusion, threads=2, config=config, split=split)
    yield both
    both.close()


def prompts(rng: Any, count: int) -> list[list[int]]:
    return [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 12, count)]


# --- tokens ---------------------------------------------------------------------------------------


def test_the_tokens_are_those_of_all_logits(pair: Pair) -> None:
    """Prefill and decode, 1 to 4 sequences; the same engine's logits, the other engine, numpy."""
    screened, plain = pair.engines
    rng = np.random.default_rng(1)
    seen = []
    for case in range(40):
        parts: Any = [(p, GREEDY) for p in prompts(rng, 1 + case % 4)]
        if case % 5 == 3 and len(parts) > 1:
            parts[0] = (parts[0][0], None)  # a chunk of a prompt that goes on
        rows = sum(params is not None for _, params in parts)
        tokens = screened.step(batch(parts))
        seen.append(exact_groups(screened) / GROUPS)
        logits = [np.zeros((rows, VOCAB), np.float32) for _ in range(2)]
        assert screened.step(batch(parts), logits=logits[0]) == tokens
        assert exact_groups(screened) == GROUPS
        assert plain.step(batch(parts), logits=logits[1]) == tokens
        assert pair.same(*logits)
        assert tokens == logits[0].argmax(axis=1).tolist() == logits[1].argmax(axis=1).tolist()
    assert min(seen) > 0 and np.mean(seen) < 0.6


def test_what_counts_as_greedy(pair: Pair) -> None:
    """Sampling settings that change nothing are screened; one sampled row, and nothing is."""
    screened, plain = pair.engines
    rng = np.random.default_rng(2)
    words = prompts(rng, 3)
    for others in ([GREEDY, PLAIN[0]], [PLAIN[0], PLAIN[0]]):
        parts: Any = list(zip(words, [GREEDY, *others], strict=True))
        assert screened.step(batch(parts)) == plain.step(batch(parts))
        assert exact_groups(screened) < GROUPS
    for one in (SamplingParams(temperature=0.8, top_k=50, seed=1), PLAIN[1]):
        for at in range(3):
            params = [GREEDY] * 3
            params[at] = one
            parts = list(zip(words, params, strict=True))
            assert screened.step(batch(parts)) == plain.step(batch(parts))
            assert exact_groups(screened) == GROUPS
    assert exact_groups(plain) == GROUPS


def test_sequences_go_on_the_same(pair: Pair) -> None:
    """70 tokens, each fed back; taps asked for in some steps."""
    found = []
    for run in pair.engines:
        tokens: list[int] = [7]
        blocks = array("i", range(8))
        taps = np.zeros((run.code.info.n_taps, 1, CONFIG.hidden_size), np.float32)
        for position in range(70):
            one = StepBatch()
            one.add(array("i", tokens[-1:]), position, blocks, (GREEDY, 0, array("i")))
            tokens += run.step(one, taps=taps if position % 3 else None)
        found.append((tokens, taps))
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("threads", [1, 3])
def test_more_rows_than_are_screened_and_other_threads(threads: int) -> None:
    """At the limit of rows and above it; ties go to the lowest id."""
    target = replace_limits(HOST, max_seqs=cpu_rows.SCREEN_ROWS + 1)
    model = tiny_decoder(CONFIG, "BF16", head="BF16")
    head = model.graph.initializers["lm_head.weight"]
    values = head.const_value.numpy().copy()  # type: ignore[union-attr]
    values[1500:1999] = values[1:500]
    head.const_value = ir.Tensor(values, name=head.name)
    graph, program = step_program(model, target, "bf16", "aggressive", config=CONFIG, screen=True)
    built = cpu.build(program, target, work_dir=zig_cache())
    weights = packed_weights(graph, program)
    with engine(built.files[built.entry], weights, program, threads) as run:
        for rows in (cpu_rows.SCREEN_ROWS, cpu_rows.SCREEN_ROWS + 1):
            one = StepBatch()
            for i in range(rows):
                one.add(array("i", [3 * i + 1]), 0, array("i", [i]), (GREEDY, 0, array("i")))
            logits = np.zeros((rows, VOCAB), np.float32)
            tokens = run.step(one)
            assert (exact_groups(run) < GROUPS) == (rows == cpu_rows.SCREEN_ROWS)
            assert run.step(one, logits=logits) == tokens == logits.argmax(axis=1).tolist()
        assert np.array_equal(logits[:, 1500:1999], logits[:, 1:500])


def replace_limits(target: Any, **limits: int) -> Any:
    from zerolayer.targets.facts import with_defaults

    return with_defaults(target, **{**limits, "max_logit_rows": 16})


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_model_whose_logits_are_no_numbers(broken: float) -> None:
    """Says what it said without screening."""
    model = tiny_decoder(CONFIG, "F32", head="F32")
    norm = model.graph.initializers["final_norm.weight"]
    values = norm.const_value.numpy().copy()  # type: ignore[union-attr]
    values[3] = broken
    norm.const_value = ir.Tensor(values, name=norm.name)
    both = Pair(model, "f32", "aggressive", threads=2)
    for tokens in ([1, 2, 3], [5], [9, 9]):
        words: Any = [(tokens, GREEDY), ([4], GREEDY)]
        assert both.engines[0].step(batch(words)) == both.engines[1].step(batch(words))
    both.close()


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "zen4", "sapphirerapids"])
@pytest.mark.parametrize("head", ["BF16", "F16", "F32"])
def test_every_target_has_the_kernels(target: str, head: str) -> None:
    model = tiny_decoder(CONFIG, "Q4_1", head=head)
    _, program = step_program(
        model, small(load_target(target)), "int8", "aggressive", config=CONFIG, screen=True
    )
    (entry,) = program.entry_points
    bounds, linear = entry.calls[-2:]
    assert (bounds.op, linear.op) == ("HeadBounds", "ScreenedLinear")
    assert bounds.phase < linear.phase and linear.inputs[2] == bounds.outputs[0]
    groups = 16 * GROUPS
    norms = 8 * VOCAB
    assert bounds.weight_bytes == groups * 64 // 32 * 34 + norms
    assert linear.weight_bytes == groups * 64 * {"BF16": 2, "F16": 2, "F32": 4}[head]


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "zen4", "sapphirerapids"])
def test_a_projection_of_q8_0_is_taken_apart(target: str) -> None:
    """For all that read it; together the halves have 36 bytes where Q8_0 has 34."""
    config = replace(CONFIG, tied_embeddings=True)
    model = tiny_decoder(config, "Q4_1", head="Q8_0")
    small_target = small(load_target(target))
    _, program = step_program(model, small_target, "int8", "aggressive", config=config, screen=True)
    calls = program.entry_points[0].calls
    bounds, linear = calls[-2:]
    assert (bounds.op, linear.op) == ("SplitBounds", "ScreenedSplitLinear")
    assert bounds.phase < linear.phase and linear.inputs[-1] == bounds.outputs[0]
    (embed,) = [c for c in calls if c.op.endswith("Embed")]
    assert embed.op == "SplitEmbed" and set(embed.inputs[1:]) == set(linear.inputs[3:5])
    rows = 16 * GROUPS * 64 // 32
    assert bounds.weight_bytes == rows * 26 + 4 * (VOCAB + 64)
    assert linear.weight_bytes == rows * 36 and embed.weight_bytes == 0
    assert embed.activation_bytes == 2 * 36 + 64 * 4
    assert linear.flops == bounds.flops == 2 * VOCAB * 64
    assert not [b for b in program.buffers if b.format == "Q8_0"]
    source = cpu.render(program, small_target)[0]
    regions, _ = regions_of(source)
    high = program.buffer("embed.weight.high")
    assert regions[-1][0] == high.offset and regions[-1][1] * regions[-1][3] == high.nbytes


def test_what_is_read_ahead_is_the_copy() -> None:
    """The floats are not: hardly any of them will be read."""
    model = tiny_decoder(CONFIG, "Q4_1", head="BF16")
    _, program = step_program(model, HOST, "int8", "aggressive", config=CONFIG, screen=True)
    source = cpu.render(program, HOST)[0]
    regions, _ = regions_of(source)
    copy = program.buffer("lm_head.weight.int8")
    assert regions[-1][0] == copy.offset and regions[-1][1] * regions[-1][3] == copy.nbytes
    assert program.buffer("lm_head.weight").offset not in {r[0] for r in regions}


def graph_of(config: ModelConfig, head: str, **options: Any) -> ir.Model:
    model = decoder(config, (head,))
    return run_passes(model, PassOptions(screen=lambda _head: True, **options))


def test_what_cannot_be_screened_and_why() -> None:
    for name, head, why in (
        (
            "plain",
            "Q4_1",
            "the output projection has Q4_1 weights and int8 activations; floats, and Q8_0 with"
            " int8 activations, can be screened",
        ),
        ("gemma2", "BF16", "the logits are made by Softcap, not by a projection alone"),
    ):
        config = CONFIGS.get(name, CONFIG)
        model = graph_of(config, head)
        assert not any(n.op_type.startswith("HeadBounds") for n in model.graph), name
        assert why_not(model) == why


def test_a_projection_that_others_read_is_left_alone() -> None:
    """But for embeddings, any number of them; and nothing is left behind by a refusal."""
    config = replace(CONFIG, tied_embeddings=True)

    def final(model: ir.Model, **options: Any) -> list[str]:
        passed = run_passes(model, PassOptions(screen=lambda _head: True, **options))
        return [n.op_type for n in passed.graph]

    model = tiny_decoder(config, "Q4_1", head="Q8_0")
    assert sum(op.startswith("Split") for op in final(model)) == 2  # bounds, embedding
    refused = final(model, supports=lambda q: "no" if q.op == "ScreenedSplitLinear" else None)
    plain = run_passes(model, PassOptions())
    assert refused == [n.op_type for n in plain.graph]
    assert not any("Split" in op for op in refused) and "Embed_Q8_0" in refused
    (embed,) = [n for n in plain.graph if n.op_type == "Embed_Q8_0"]
    second = domain_node("Embed_Q8_0", embed.inputs, {"scale": 2.0}, "again")
    strange = domain_node("Dequantize_Q8_0", [embed.inputs[1]], {}, "strange")
    for extra, split in ((second, True), (strange, False)):
        graph = plain.clone()
        weight = graph.graph.initializers["embed.weight"]
        inputs = [weight if v is embed.inputs[1] else v for v in extra.inputs]
        inputs = [graph.graph.inputs[0] if v is embed.inputs[0] else v for v in inputs]
        node = domain_node(extra.op_type, inputs, {"scale": 2.0} if split else {}, "extra")
        graph.graph.append(node)
        graph.graph.outputs.append(node.outputs[0])
        screen_head(graph, PassOptions(screen=lambda _head: True))
        ops = [n.op_type for n in graph.graph]
        assert sum(op.startswith("SplitEmbed") for op in ops) == (2 if split else 0)
        if not split:
            assert why_not(graph) == "its weights are read by Dequantize_Q8_0 too"


@pytest.mark.parametrize("name", ["llama", "gpt2", "interleaved-tied"])
@pytest.mark.parametrize("fusion", ["conservative", "balanced", "aggressive"])
def test_the_gain_of_the_norm_before_is_found(name: str, fusion: Any) -> None:
    """RMS and layer norms, fused with the rounding or not."""
    model = run_passes(decoder(CONFIGS[name], ("Q8_0",)), PassOptions(fusion=fusion))
    (node,) = [v.producer() for v in model.graph.outputs if v.name == "logits"]
    assert node is not None
    gain = gain_before(node)
    weight = model.graph.initializers["final_norm.weight"].const_value
    assert gain is not None and weight is not None
    assert np.array_equal(gain, weight.numpy().astype(np.float32).reshape(-1))


@pytest.mark.parametrize("head,quantize", [("Q8_0", "keep"), ("BF16", "int8"), ("BF16", "int4")])
@pytest.mark.parametrize("tied", [False, True])
def test_what_became_of_a_weight_is_recorded(head: str, quantize: Any, tied: bool) -> None:
    """Its own format and every step; the bodies of the new operators run."""
    config = replace(TINY, tied_embeddings=tied)
    model = tiny_decoder(config, "BF16", head=head)
    options = PassOptions(quantize=quantize, screen=lambda _head: True)
    passed = run_passes(model, options)
    for name in ("high", "low", "norms", "spread"):
        value = passed.graph.initializers[f"{'embed' if tied else 'lm_head'}.weight.{name}"]
        assert value.metadata_props["source_format"] == head
        steps = value.metadata_props["transform"].split("; ")
        assert steps[:-1] == ([] if head == "Q8_0" else ["quantized to Q8_0"])
    if quantize == "keep":
        reports = {r.name: r for r in check_passes(model, options)}
        assert reports["screen-head"].changed and reports["screen-head"].error < 1e-5


def test_the_names_of_the_operators_are_the_same_everywhere() -> None:
    """The loader has lists of its own: it imports nothing of the targets."""
    step: Any = SimpleNamespace(exact_groups=1, sequences=[])
    for op in (*program.BOUNDS, *program.SCREENED, *program.EMBEDS, "Linear"):
        assert op in domain.OPERATORS
        call = {"op": op, "constants": {"N": 32}, "weight_bytes": 100, "flops_per_row": 10,
                "activation_bytes_per_row": 7, "name": "x"}  # fmt: skip
        idle, work = (work_of({}, [call], step, {0: rows})[0] for rows in (0, 1))
        assert work.bytes == 100 * (0.5 if op in program.SCREENED else 1) + 7 * (
            op in program.EMBEDS
        )
        assert idle.bytes == 0 and idle.flops == 0
        assert work.activation_bytes == (0 if op in program.EMBEDS else 7)


def test_check_passes_runs_the_bodies() -> None:
    """The pass moves no logit; the definitions of its operators run in onnxruntime."""
    model = tiny_decoder(TINY, "BF16", head="BF16")
    options = PassOptions(activations="bf16", screen=lambda _head: True)
    reports = {r.name: r for r in check_passes(model, options)}
    assert reports["screen-head"].changed and reports["screen-head"].error == 0.0


def test_where_it_pays() -> None:
    """A whole vocabulary of floats yes, a small one no; never where int8 products are slow."""
    zen4, v3 = load_target("zen4"), load_target("x86-64-v3")
    for n, k in ((49152, 576), (32000, 2048), (262144, 2304)):
        for size in (2, 4):
            saved = roofline.screening_saves(
                zen4, size * n * k, n * k * 34 // 32, 2 * n * k, "bf16"
            )
            assert 0 < saved < size * n * k / 460.8e9
    assert roofline.screening_saves(zen4, 2 * 500 * 64, 500 * 68, 2 * 500 * 64, "f32") < 0
    slow = replace(v3, facts=tuple(
        replace(f, value=10) if f.name == "peak_int8_gops" else f for f in v3.facts
    ))  # fmt: skip
    assert roofline.screening_saves(slow, 2 * 49152 * 576, 49152 * 612, 2 * 49152 * 576, "f32") < 0


def test_predictions_tell_greedy_from_sampled() -> None:
    model = tiny_decoder(CONFIG, "Q4_1", head="BF16")
    _, program = step_program(model, HOST, "int8", "aggressive", config=CONFIG, screen=True)
    greedy, sampled = (roofline.predict(program, HOST, greedy=g) for g in (True, False))
    calls = program.entry_points[0].calls
    copy, floats = calls[-2].weight_bytes, calls[-1].weight_bytes
    rest = sum(c.weight_bytes for c in calls[:-2])
    assert greedy.weight_bytes == rest + copy + round(floats / 32)
    assert sampled.weight_bytes == rest + floats
    assert [c.bytes for c in sampled.calls[-2:]] == [0, floats]


def test_the_bytes_of_a_traced_step_are_those_it_read(pair: Pair) -> None:
    screened, program = pair.engines[0], pair.programs[0]
    calls = [
        {"op": c.op, "name": c.name, "kernel": c.row, "inputs": list(c.inputs),
         "constants": dict(c.constants), "weight_bytes": c.weight_bytes,
         "flops_per_row": c.flops, "activation_bytes_per_row": c.activation_bytes}
        for c in program.entry_points[0].calls
    ]  # fmt: skip
    recorder = Recorder(screened)
    recorder.start()
    for params in (GREEDY, SamplingParams(temperature=1.0)):
        _, step = recorder.step(batch([([1, 2, 3], params)]))
        rows = {lap.call: lap.rows for thread in step.threads for lap in thread}
        work = work_of({}, calls, step, rows)
        copy, floats = calls[-2]["weight_bytes"], calls[-1]["weight_bytes"]
        assert isinstance(copy, int) and isinstance(floats, int)
        if params is GREEDY:
            assert step.exact_groups is not None and 0 < step.exact_groups < GROUPS
            assert work[-2].bytes == copy
            assert work[-1].bytes == pytest.approx(floats * 16 * step.exact_groups / VOCAB)
        else:
            assert (work[-2].bytes, work[-1].bytes) == (0, floats)
            assert work[-2].flops == 0
    recorder.stop()


# --- the command line -----------------------------------------------------------------------------


def test_an_artifact_with_and_without(tmp_path: Path) -> None:
    """The option decides, is recorded and shown; the golden prompts are the same."""
    make_model("llama", tmp_path)
    out: dict[str, Any] = {}
    for how in ("on", "off", "auto"):
        path = tmp_path / f"{how}.zla"
        done = zerolayer("compile", tmp_path, "--target", "host", "--screen-head", how, "-o", path)
        assert done.code == 0, done.err
        assert ("\nhead " in done.out) == (how == "on")
        assert f"screen_head = {how} (command line)" in done.out
        shown = zerolayer("inspect", path)
        assert ("tell a greedy step which logits" in shown.out) == (how == "on")
        manifest = open_artifact(str(path)).manifest
        assert manifest["options"]["screen_head"] == how
        assert ("sampled" in manifest["roofline"]) == (how == "on")
        out[how] = open_artifact(str(path)).member("golden.json")
    assert out["on"] == out["off"] == out["auto"]
    done = zerolayer(
        "compile", tmp_path, "--target", "host", "--screen-head", "on", "--quantize", "int8",
        "--activations", "f32", "--no-verify", "-o", tmp_path / "int8.zla",
    )  # fmt: skip
    assert done.code == 0
    why = "the output projection has Q8_0 weights and f32 activations"
    assert f"screen-head on changes nothing: {why}" in done.out
    assert domain.OPERATORS["HeadBounds"].weights == ("weight",)
