"""GGUF models of every supported architecture and format give transformers' logits."""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx_ir as ir
import pytest
import torch
from gguf_models import random_blocks, write_model
from ort_run import logits_of
from tiny_models import VOCAB, make_model, reference_logits
from zerolayer.compiler.frontends.gguf import load_gguf, read_weights
from zerolayer.compiler.frontends.gguf_architectures import read_config
from zerolayer.compiler.frontends.gguf_file import read_gguf
from zerolayer.compiler.graph import execute
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError
from zerolayer.targets import formats

TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, VOCAB, 40)]

# test name -> (case of tiny_models, overrides that GGUF can express)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-bias": ("llama-tied-bias", {}),
    "llama-head-dim": ("llama-head-dim", {}),
    "llama-llama3": ("llama-llama3", {}),
    "llama-linear": ("llama-linear", {}),
    "llama-yarn": ("llama-yarn", {}),
    "mistral": ("mistral", {}),
    "mistral-full": ("mistral-full", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-bias": ("qwen3-bias", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma2-nocap": ("gemma2-nocap", {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3",
        {"num_hidden_layers": 7, "sliding_window_pattern": 6, "query_pre_attn_scalar": 16},
    ),
    "gemma3-linear": (
        "gemma3-linear",
        {"query_pre_attn_scalar": 16, "num_hidden_layers": 7,
         "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]},
    ),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3-partial", {}),
    "phi3-longrope": ("phi3-longrope", {}),
    "gpt2": ("gpt2", {}),
    "gpt2-inner": ("gpt2-inner", {"activation_function": "gelu_new"}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def close_enough(got: np.ndarray, want: np.ndarray, bound: float = 1e-4) -> bool:
    return got.shape == want.shape and bool(np.abs(got - want).max() < bound * np.abs(want).max())


@pytest.mark.parametrize("case", sorted(CASES))
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    base, overrides = CASES[case]
    model = make_model(base, tmp_path, **overrides)
    path = tmp_path / "model.gguf"
    write_model(model, path)
    loaded = load_gguf(path)
    assert close_enough(logits_of(loaded.graph, TOKENS), reference_logits(model, TOKENS))
    assert loaded.tokenizer is None
    assert loaded.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_logits_equal_transformers_own_gguf_reader(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other independent reading of the same file, for the architectures for which
    transformers reads all keys (not gemma's caps, GPT-2's context, or qwen3's size of a head)."""
    from transformers import AutoModelForCausalLM, modeling_utils

    overrides: dict[str, Any] = {"head_dim": 128} if case == "qwen3" else {}
    model = make_model(case, tmp_path, **overrides)
    write_model(model, tmp_path / "model.gguf", extra=_bare_vocab)
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("ignore")
        # accelerate places weights on devices; on one CPU nothing of it is used
        patch.setattr(modeling_utils, "is_accelerate_available", lambda: True)
        reference = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
        ).eval()
    loaded = load_gguf(tmp_path / "model.gguf")
    assert close_enough(logits_of(loaded.graph, TOKENS), reference_logits(reference, TOKENS))


def _bare_vocab(writer: gguf.GGUFWriter) -> None:
    """transformers takes the vocabulary's size from the token list."""
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])


def test_every_format_keeps_its_bytes_and_gives_its_values(tmp_path: Path) -> None:
    """Every matrix in another format: the graph holds the file's bytes, and computes with the
    values that the gguf package decodes, as transformers does with those values as weights."""
    model = make_model("llama", tmp_path, hidden_size=256, intermediate_size=512, head_dim=64,
                       num_hidden_layers=2)  # fmt: skip
    every = [*formats.FILE_FORMATS, "F16", "BF16"]
    written: dict[str, tuple[bytes, str]] = {}

    def encode(name: str, array: np.ndarray) -> tuple[np.ndarray, str]:
        format = every[len(written) % len(every)]
        if format in formats.FILE_FORMATS:
            raw = random_blocks(format, array.shape[0], array.shape[1], seed=len(written))
        else:
            raw = gguf.quantize(array, gguf.GGMLQuantizationType[format])
        written[name] = raw.tobytes(), format
        return raw, format

    path = tmp_path / "model.gguf"
    decoded = write_model(model, path, encode)
    assert {format for _, format in written.values()} == set(every)
    loaded = load_gguf(path)
    config = loaded.config
    assert config is not None
    weights = read_weights(read_gguf(path), config)
    for weight in weights.values():
        raw, format = written.get(weight.source, (decoded[weight.source].tobytes(), "F32"))
        assert weight.tensor.numpy().tobytes() == raw
        assert dict(loaded.source_formats)[weight.name] == weight.format == format
        assert weight.shape == decoded[weight.source].shape
        if format in formats.FILE_FORMATS:
            assert weight.tensor.dtype == ir.DataType.UINT8
            stored = (weight.shape[0], formats.row_bytes(format, weight.shape[1]))
            assert tuple(weight.tensor.shape) == stored
    _set_weights(model, decoded)
    feeds = {"tokens": np.array(TOKENS, np.int64), "positions": np.arange(40, dtype=np.int64)}
    got = execute.run(loaded.graph, feeds)
    assert close_enough(got["logits"], reference_logits(model, TOKENS))


def _set_weights(model: Any, decoded: dict[str, np.ndarray]) -> None:
    """The values in the file as the weights of ``model`` (4 heads, 2 key/value heads of 64)."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for hf_name, tensor in model.state_dict().items():
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None
        array = decoded[name]
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2], 0)
        if heads:  # interleaved pairs back to halves
            array = array.reshape(heads, 32, 2, 256).swapaxes(1, 2).reshape(array.shape)
        tensor.copy_(torch.from_numpy(np.array(array)))


def test_smollm2(smollm2_gguf: Path, goldens: dict[str, Any]) -> None:
    """The real model: description, bytes, and the prompts' token ids."""
    from tokenizers import Tokenizer

    loaded = load_gguf(smollm2_gguf)
    config = loaded.config
    assert config is not None and loaded.tokenizer is not None
    assert (config.vocab_size, config.hidden_size, len(config.layers)) == (49152, 576, 30)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.ropes[0].interleaved and config.tied_embeddings
    assert config.norm_eps == pytest.approx(1e-5) and config.max_context == 8192
    assert loaded.parameters == 134515008
    assert loaded.name.startswith("smollm2-135m")
    assert loaded.sources[0].sha256 == hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest()
    assert loaded.licenses == (("model-license.txt", b"license: apache-2.0\n"),)
    assert loaded.tokenizer.eos_ids[0] == 2 and not loaded.tokenizer.add_bos
    assert "<|im_start|>" in (loaded.tokenizer.chat_template or "")
    tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json.decode())
    for engine in goldens.values():
        for result in engine["results"]:
            encoded = tokenizer.encode(result["prompt"], add_special_tokens=False)
            assert encoded.ids == result["prompt_ids"]
    # the graph gives the reference's tokens and logits
    result = goldens["transformers-fp32"]["results"][0]
    tokens, start = result["prompt_ids"] + result["greedy_ids"], len(result["prompt_ids"]) - 1
    feeds = {"tokens": np.array(tokens), "positions": np.arange(len(tokens))}
    logits = execute.run(loaded.graph, feeds)["logits"][start:-1]
    assert logits.argmax(axis=1).tolist() == result["greedy_ids"]
    for position, top in result["top5_logits_at_generated_position"].items():
        for token, logit in top:
            assert abs(logits[int(position), token] - logit) < 1e-3


# --- metadata ------------------------------------------------------------------------------------


def tiny(tmp_path: Path, case: str = "llama", extra: Any = None, **overrides: Any) -> Path:
    path = tmp_path / "tiny.gguf"
    write_model(make_model(case, tmp_path, **overrides), path, extra=extra)
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.yarn_log_multiplier", 0.1),
        ("llama.attention.temperature_scale", 0.1),
        ("llama.something_new", 1),
        ("qwen2.context_length", 5),
        ("adapter.type", 2),
        ("llama.expert_count", 8),
        ("llama.attention.causal", False),
        ("llama.residual_scale", 0.5),
    ],
)
def test_keys_that_change_the_numbers_are_refused_by_name(
    key: str, value: Any, tmp_path: Path
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)

    with pytest.raises(UnsupportedError) as error:
        load_gguf(tiny(tmp_path, extra=add))
    assert key in error.value.one_line()


def test_harmless_keys_are_accepted(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_string("general.description", "text")
        writer.add_string("quantize.imatrix.file", "x.dat")
        writer.add_uint32("split.count", 1)
        writer.add_uint32("llama.expert_count", 0)
        writer.add_bool("llama.attention.causal", True)
        writer.add_string("llama.tensor_data_layout", "Meta AI original pth")

    assert load_gguf(tiny(tmp_path, extra=add)).config is not None


def test_variants_that_are_not_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"parts of a split model.*--merge"):
        load_gguf(tiny(tmp_path, extra=lambda w: w.add_uint32("split.count", 3)))
    with pytest.raises(UnsupportedError, match="type 'adapter'"):
        load_gguf(tiny(tmp_path, extra=lambda w: w.add_string("general.type", "adapter")))


def edit(path: Path, **changes: Any) -> Path:
    """Rewrites a GGUF file with metadata replaced (``None`` = removed) or tensors changed.

    ``name__as`` renames the tensor ``name``; ``drop`` is the name of a tensor to leave out.
    """
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    keys = {k.replace("__", "."): v for k, v in changes.items() if k not in ("rename", "drop")}
    out = path.with_name("edited.gguf")
    writer = gguf.GGUFWriter(out, keys.pop("general.architecture", arch))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if field.name in keys:
            continue
        writer.add_key_value(field.name, field.contents(), field.types[0],
                             field.types[-1] if len(field.types) > 1 else None)  # fmt: skip
    for key, value in keys.items():
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    renames: dict[str, str] = changes.get("rename", {})
    for tensor in reader.tensors:
        if tensor.name != changes.get("drop"):
            name = renames.get(tensor.name, tensor.name)
            writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": "blk.1.ffn_down.weight"}, r"missing.*layers\.1\.mlp\.down\.weight"),
        ({"drop": "token_embd.weight"}, r"token_embd\.weight"),
        ({"drop": "blk.0.attn_norm.weight"}, r"missing.*layers\.0\.attn_norm\.weight"),
        ({"rename": {"blk.1.ffn_down.weight": "blk.1.ffn_dawn.weight"}}, r"blk\.1\.ffn_dawn"),
        ({"rename": {"blk.1.ffn_down.weight": "blk.9.ffn_down.weight"}}, r"blk\.9\.ffn_down"),
        ({"rename": {"blk.1.ffn_down.weight": "blk.01.ffn_down.weight"}}, r"blk\.01\.ffn_down"),
        ({"rename": {"blk.1.ffn_down.weight": "blk.1.ffn_up.bias"}}, r"missing|shape"),
        ({"llama__feed_forward_length": 97}, r"blk\.0\.ffn_.*shape|mlp"),
        ({"llama__block_count": 2}, r"blk\.2\."),
        ({"llama__block_count": 0}, r"llama\.block_count"),
        ({"llama__block_count": 2**31 - 1}, r"llama\.block_count"),
        ({"llama__block_count": None}, r"llama\.block_count.*missing"),
        ({"llama__attention__head_count": 0}, r"head_count"),
        ({"llama__attention__head_count": 2**31 - 1}, r"head_count"),
        ({"llama__attention__head_count_kv": 3}, r"3 key/value heads"),
        ({"llama__attention__head_count_kv": 0}, r"n_kv_heads is 0"),
        ({"llama__embedding_length": 0}, r"head_count|embedding_length"),
        ({"llama__embedding_length": -5}, r"embedding_length.*-5"),
        ({"llama__embedding_length": "64"}, r"embedding_length.*'64'"),
        ({"llama__vocab_size": 5}, r"llama\.vocab_size"),
        ({"llama__context_length": 0}, r"max_context is 0"),
        ({"llama__attention__layer_norm_rms_epsilon": -1.0}, r"epsilon"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, r"epsilon.*finite"),
        ({"llama__rope__freq_base": 0.0}, r"freq_base"),
        ({"llama__rope__scaling__factor": -2.0}, r"factor"),
        ({"llama__attn_logit_softcapping": -1.0}, r"attn_logit_softcapping"),
        ({"llama__rope__scaling__type": "dynamic"}, r"rope scaling 'dynamic'"),
        ({"llama__rope__dimension_count": 7}, r"rotate 7 elements"),
        ({"llama__rope__dimension_count": 1000}, r"dimension_count"),
        ({"llama__attention__key_length": 8}, r"value"),
        ({"general__architecture": "mamba"}, r"architecture 'mamba'.*supported: llama"),
        ({"general__quantization_version": 1}, r"quantization version"),
    ],
)
def test_inconsistent_files_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = edit(tiny(tmp_path), **changes)
    with pytest.raises((InputFileError, UnsupportedError), match=f"(?s){message}"):
        load_gguf(path)


def test_wrong_token_count_is_named(tmp_path: Path) -> None:
    path = tiny(tmp_path, extra=lambda w: w.add_token_list(["a", "b"]))
    with pytest.raises(InputFileError, match="2 tokens for an embedding table of 199 rows"):
        load_gguf(path)


def test_fused_tensor_of_wrong_size_is_named(tmp_path: Path) -> None:
    path = edit(tiny(tmp_path, "phi3"), phi3__attention__head_count_kv=1)
    with pytest.raises(InputFileError, match=r"blk\.0\.attn_qkv\.weight"):
        load_gguf(path)


def test_per_layer_sizes_are_one_size_or_refused(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    same = edit(path, llama__feed_forward_length=[96, 96, 96])
    assert load_gguf(same).config == load_gguf(path).config
    with pytest.raises(UnsupportedError, match="differs from layer to layer"):
        load_gguf(edit(path, llama__feed_forward_length=[96, 96, 64]))


def test_longrope_is_offered_as_far_as_it_is_exact(tmp_path: Path) -> None:
    config = read_config(read_gguf(tiny(tmp_path, "phi3-longrope")))
    assert config.max_context == 48
    assert config.ropes[0].attention_factor == pytest.approx(
        math.sqrt(1 + math.log(96 / 48) / math.log(48))
    )


def test_windows_and_ropes_of_gemma(tmp_path: Path) -> None:
    _, overrides = CASES["gemma3-linear"]
    path = tiny(tmp_path, "gemma3-linear", **overrides)
    config = read_config(read_gguf(path))
    assert [layer.window for layer in config.layers] == [9] * 5 + [None, 9]
    assert [layer.rope for layer in config.layers] == [1] * 5 + [0, 1]
    period = edit(path, gemma3__attention__sliding_window_pattern=3)
    assert [layer.window for layer in read_config(read_gguf(period)).layers] == [
        9, 9, None, 9, 9, None, 9,
    ]  # fmt: skip
    listed = edit(path, gemma3__attention__sliding_window_pattern=[True, False] * 3 + [True])
    assert [layer.rope for layer in read_config(read_gguf(listed)).layers] == [1, 0] * 3 + [1]
    wide = edit(path, gemma3__attention__sliding_window=96)
    assert all(layer.window is None for layer in read_config(read_gguf(wide)).layers)


def test_the_widest_gemmas_scale_by_hidden_over_heads(tmp_path: Path) -> None:
    """gemma2 27B: 46 blocks, query_pre_attn_scalar = hidden / heads, which no key records."""
    path = tiny(tmp_path, "gemma2", hidden_size=16, intermediate_size=8, head_dim=8,
                num_hidden_layers=46, query_pre_attn_scalar=4)  # fmt: skip
    assert read_config(read_gguf(path)).scale == pytest.approx(4**-0.5)


def test_gpt2_with_a_separate_output(tmp_path: Path) -> None:
    """Old converters write the tied table twice; it is read as what it is."""
    model = make_model("gpt2", tmp_path)
    path = tmp_path / "model.gguf"

    def add(writer: gguf.GGUFWriter) -> None:
        table = model.state_dict()["transformer.wte.weight"].numpy()
        writer.add_tensor("output.weight", table)

    write_model(model, path, extra=add)
    loaded = load_gguf(path)
    assert loaded.config is not None and not loaded.config.tied_embeddings
    assert close_enough(logits_of(loaded.graph, TOKENS), reference_logits(model, TOKENS))


def test_quantized_vectors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = make_model("llama", tmp_path)
    norm = model.state_dict().pop("model.norm.weight")
    assert norm.shape == (64,)
    write_model(model, path)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        data, kind = np.array(tensor.data), tensor.tensor_type
        if tensor.name == "output_norm.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quantize(data.reshape(1, 64), kind).reshape(-1)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=r"output_norm\.weight.*only matrices"):
        load_gguf(tmp_path / "q.gguf")


def test_the_name_comes_from_the_file(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    assert load_gguf(path).name == "tiny-llama"
    assert load_gguf(edit(path, general__name="  ")).name == "edited"
    config = load_gguf(path).config
    assert config is not None and replace(config) == config
