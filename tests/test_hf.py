"""Hugging Face directories of every architecture give the logits that transformers gives."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ort_run import logits_of
from safetensors.numpy import load_file, save_file
from tiny_models import CASES, VOCAB, make_model, reference_logits
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from zerolayer.compiler.frontends import load_model
from zerolayer.compiler.frontends.hf import load_hf
from zerolayer.compiler.frontends.rope import make_rope
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError, ZerolayerError

TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, VOCAB, 40)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of ``...`` removes the key."""
    data = json.loads(path.read_text())
    for key, value in changes.items():
        data.pop(key, None)
        if value is not ...:
            data[key] = value
    path.write_text(json.dumps(data))


def assert_close(got: Any, want: Any) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("case", sorted(CASES))
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = make_model(case, tmp_path)
    loaded = load_hf(tmp_path)
    assert_close(logits_of(loaded.graph, TOKENS), reference_logits(model, TOKENS))
    tied = model.config.tie_word_embeddings
    assert loaded.parameters == sum(p.numel() for p in model.parameters())
    assert loaded.config is not None
    assert loaded.config.tied_embeddings == tied


@pytest.mark.parametrize("case", ["gemma2", "gpt2", "phi3", "llama", "qwen3"])
def test_sharded_bfloat16(case: str, tmp_path: Path) -> None:
    model = make_model(case, tmp_path, torch.bfloat16, max_shard_size="60KB")
    shards = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    loaded = load_hf(tmp_path)
    assert_close(logits_of(loaded.graph, TOKENS), reference_logits(model, TOKENS))
    assert {s.name for s in loaded.sources} >= {*shards, "model.safetensors.index.json"}
    formats = dict(loaded.source_formats)
    assert formats["layers.0.mlp.up.weight"] == "BF16"
    # gemma's 1 + w has more digits than bfloat16 holds
    assert formats["final_norm.weight"] == ("F32" if case == "gemma2" else "BF16")


def test_half_precision_and_transforms_are_recorded(tmp_path: Path) -> None:
    make_model("phi3", tmp_path / "phi3", torch.float16)
    graph = load_hf(tmp_path / "phi3").graph.graph
    value = graph.initializers["layers.1.attn.k.weight"]
    assert value.metadata_props["format"] == "F16"
    assert value.metadata_props["source"] == "model.layers.1.self_attn.qkv_proj.weight[rows 64:96]"
    make_model("gpt2", tmp_path / "gpt2")
    graph = load_hf(tmp_path / "gpt2").graph.graph
    source = graph.initializers["layers.0.attn.v.weight"].metadata_props["source"]
    assert source == "transformer.h.0.attn.c_attn.weight[transposed][rows 128:192]"


OLD_STYLE: dict[str, dict[str, Any]] = {
    "llama-llama3": {},
    "llama-yarn": {},
    "llama-linear": {},
    "phi3-longrope": {},
    "qwen2": {},
    "gemma3": {"rope_local_base_freq": 10_000.0},
}


@pytest.mark.parametrize("case", sorted(OLD_STYLE))
def test_old_style_rope_keys_mean_the_same(case: str, tmp_path: Path) -> None:
    make_model(case, tmp_path)
    new = load_hf(tmp_path).config
    path = tmp_path / "config.json"
    given = json.loads(path.read_text())["rope_parameters"]
    given = given.get("full_attention", given)
    theta = given.pop("rope_theta")
    given.pop("partial_rotary_factor", None)
    scaling: dict[str, Any] | None = {**given, "type": given.pop("rope_type")}
    if scaling == {"type": "default"}:
        scaling = None
    edit_json(path, rope_parameters=..., rope_theta=theta, rope_scaling=scaling, **OLD_STYLE[case])
    assert load_hf(tmp_path).config == new


def test_contexts_end_where_the_rope_stops_being_exact(tmp_path: Path) -> None:
    contexts = {}
    for case in ("llama", "llama-dynamic", "llama-yarn", "phi3-longrope", "gpt2"):
        make_model(case, tmp_path / case)
        config = load_hf(tmp_path / case).config
        assert config is not None
        contexts[case] = config.max_context
    # yarn: factor 4 x 24 original positions equals the configured 96
    assert contexts == {
        "llama": 96, "llama-dynamic": 96, "llama-yarn": 96, "phi3-longrope": 48, "gpt2": 64,
    }  # fmt: skip


@pytest.mark.parametrize(
    "params",
    [
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8,
         "original_max_position_embeddings": 4096, "truncate": False},
        {"rope_type": "longrope", "short_factor": [1.0 + i / 50 for i in range(64)],
         "long_factor": [1.0 + i for i in range(64)], "original_max_position_embeddings": 4096},
    ],
    ids=lambda p: f"{p['rope_type']}-{p.get('factor', 'ratio')}",
)  # fmt: skip
def test_real_sized_ropes_equal_transformers(params: dict[str, Any]) -> None:
    params = {**params, "rope_theta": 500_000.0}
    config = SimpleNamespace(
        rope_parameters=params, head_dim=128, hidden_size=4096, num_attention_heads=32,
        max_position_embeddings=131072, standardize_rope_params=lambda: None,
    )  # fmt: skip
    want, factor = ROPE_INIT_FUNCTIONS[params["rope_type"]](config, torch.device("cpu"))
    got = make_rope(params, 128, 131072, "here").rope
    assert got.attention_factor == pytest.approx(factor, rel=1e-12)
    np.testing.assert_allclose(np.array(got.inv_freq), want.numpy(), rtol=2.5e-7, atol=0)


def test_text_side(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    assets = load_hf(tmp_path).tokenizer
    assert assets is not None
    assert (assets.bos_id, assets.eos_ids, assets.add_bos) == (0, (1,), False)
    assert (assets.bos_token, assets.eos_token) == ("<s>", "</s>")
    assert assets.chat_template == "{{ x }}"
    assert assets.generation == ()
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 5], "do_sample": True, "top_p": 0.9, "temperature": 0.6})
    )
    (tmp_path / "chat_template.jinja").write_text("{{ y }}")
    (tmp_path / "LICENSE.txt").write_text("free")
    # transformers writes int(1e30) for a tokenizer without a limit: most directories have it
    edit_json(tmp_path / "tokenizer_config.json", add_bos_token=True, model_max_length=int(1e30))
    loaded = load_hf(tmp_path)
    assets = loaded.tokenizer
    assert assets is not None
    assert (assets.eos_ids, assets.add_bos, assets.chat_template) == ((1, 5), True, "{{ y }}")
    assert assets.generation == (("temperature", 0.6), ("top_p", 0.9))
    assert loaded.licenses == (("LICENSE.txt", b"free"),)
    edit_json(tmp_path / "generation_config.json", do_sample=False, repetition_penalty=1.1)
    assets = load_hf(tmp_path).tokenizer
    assert assets is not None and assets.generation == (("repetition_penalty", 1.1),)


def test_post_processor_decides_bos(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    make_model("llama", tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(path))
    assets = load_hf(tmp_path).tokenizer
    assert assets is not None and assets.add_bos
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save(str(path))
    with pytest.raises(UnsupportedError, match="special tokens"):
        load_hf(tmp_path)


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"attention_temperature": 0.7}, "attention_temperature"),
    "other architecture": ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    "two architectures": ({"architectures": ["LlamaForCausalLM", "X"]}, "architectures"),
    "model type": ({"model_type": "qwen2"}, "model_type"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "interleaved": ({"rope_interleaved": True}, "rope_interleaved"),
    "activation": ({"hidden_act": "quick_gelu"}, "quick_gelu"),
    "no size": ({"hidden_size": ...}, "hidden_size"),
    "negative": ({"num_attention_heads": -4}, "num_attention_heads"),
    "bool as size": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "too many layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
    "too few layers": ({"num_hidden_layers": 2}, "layers.2."),
    "too many": ({"num_hidden_layers": 4}, "layers.3."),
    "vocabulary": ({"vocab_size": 200}, "embed.weight"),
    "heads": ({"num_key_value_heads": 3}, "3 key/value heads"),
    "rope kind": ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
    "rope key": ({"rope_parameters": {"rope_theta": 1e4, "twist": 2}}, "twist"),
    "rope theta": ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
    "partial rope": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "head_dim": ({"head_dim": 17}, "17"),
    "tie": ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    "flag": ({"mlp_bias": "no"}, "mlp_bias"),
    "bias": ({"attention_bias": True}, "attn.q.bias"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama", directory)
    return directory


def copy(source: Path, target: Path) -> Path:
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("name", sorted(BAD_CONFIGS))
def test_bad_config_is_named(name: str, llama: Path, tmp_path: Path) -> None:
    changes, word = BAD_CONFIGS[name]
    directory = copy(llama, tmp_path)
    edit_json(directory / "config.json", **changes)
    with pytest.raises((InputFileError, UnsupportedError)) as caught:
        load_hf(directory)
    assert word in caught.value.one_line()
    assert caught.value.where


def test_weights_are_accounted_for(llama: Path, tmp_path: Path) -> None:
    directory = copy(llama, tmp_path)
    file = directory / "model.safetensors"
    tensors = load_file(file)

    def message(**changes: Any) -> str:
        edited = {k: v for k, v in {**tensors, **changes}.items() if v is not None}
        save_file(edited, file)
        with pytest.raises(ZerolayerError) as caught:
            load_hf(directory)
        return caught.value.one_line()

    name = "model.layers.1.mlp.down_proj.weight"
    assert "layers.1.mlp.down.weight" in message(**{name: None})
    assert "model.extra.weight" in message(**{"model.extra.weight": np.zeros(3, np.float32)})
    assert name in message(**{name: np.zeros((64, 95), np.float32)})
    assert "I32" in message(**{name: np.zeros((64, 96), np.int32)})
    # buffers that older checkpoints stored are not weights
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    save_file({**tensors, **inv_freq}, file)
    load_hf(directory)


def test_stored_tied_head_must_repeat_the_embedding(tmp_path: Path) -> None:
    make_model("llama-tied-bias", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.copy()}, file)
    load_hf(tmp_path)
    save_file({**tensors, "lm_head.weight": embedding + np.float32(1)}, file)
    with pytest.raises(InputFileError, match="tie_word_embeddings"):
        load_hf(tmp_path)


def test_missing_pieces_name_the_next_step(llama: Path, tmp_path: Path) -> None:
    directory = copy(llama, tmp_path)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(InputFileError, match=r"AutoTokenizer"):
        load_hf(directory)
    copy(llama, directory)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(InputFileError, match=r"pytorch_model.bin is a pickle"):
        load_hf(directory)


def test_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    make_model("llama", tmp_path, max_shard_size="60KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"]))
    for bad in ("../x.safetensors", "/etc/x.safetensors", "a\\..\\x.safetensors", 3, "x.bin"):
        index["weight_map"][first] = bad
        path.write_text(json.dumps(index))
        with pytest.raises(InputFileError, match="weight_map"):
            load_hf(tmp_path)
    index["weight_map"][first] = "absent.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(InputFileError, match="absent"):
        load_hf(tmp_path)


def test_dispatch_by_content(llama: Path, tmp_path: Path) -> None:
    assert load_model(llama).config == load_hf(llama).config
    cases: dict[str, bytes | None] = {
        "absent": None,
        "empty": b"",
        "text.gguf": b"hello, this is not a model",
        "pickle.pt": b"\x80\x02}q\x00.",
        "zip.bin": b"PK\x03\x04" + bytes(30),
        "bare.safetensors": (llama / "model.safetensors").read_bytes(),
        "broken.onnx": b"\x08\x07\x12\xff\xff",
    }
    for name, data in cases.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises((InputFileError, UnsupportedError)) as caught:
            load_model(tmp_path / name)
        assert caught.value.next_step, name
    with pytest.raises(InputFileError, match=r"config\.json"):
        load_model(tmp_path)


def test_memory_is_that_of_the_largest_tensor(tmp_path: Path) -> None:
    """90 MB of weights pass through less than 40 MB of memory."""
    make_model(
        "llama", tmp_path, torch.bfloat16, hidden_size=512, intermediate_size=4096,
        num_hidden_layers=7, vocab_size=VOCAB,
    )  # fmt: skip
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 85e6
    script = """
import resource, sys
from pathlib import Path
from zerolayer.compiler.frontends import load_model
import zerolayer.compiler.frontends.hf, onnx_ir.passes.common
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loaded = load_model(Path(sys.argv[1]))
total = sum(len(v.const_value.tobytes()) for v in loaded.graph.graph.initializers.values())
print(total, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    total, growth = map(int, result.stdout.split())
    assert total > 0.99 * size - 1e5
    assert growth < 40e6


def test_deep_context_angles(tmp_path: Path) -> None:
    """Positions in the tens of thousands still have transformers' angles."""
    model = make_model("llama-llama3", tmp_path, max_position_embeddings=131072)
    loaded = load_hf(tmp_path)
    from ort_run import run_graph

    start = 100_000
    positions = np.arange(start, start + 12, dtype=np.int64)
    feeds = {"tokens": np.array(TOKENS[:12], np.int64), "positions": positions}
    got = run_graph(loaded.graph, feeds)[0]
    with torch.no_grad():
        want = model(
            torch.tensor([TOKENS[:12]]), position_ids=torch.from_numpy(positions)[None],
            use_cache=False,
        ).logits[0].numpy()  # fmt: skip
    assert math.isfinite(float(np.abs(want).max()))
    assert_close(got, want)
