"""The configurations that well-known checkpoints are published with are read as what they are."""

from __future__ import annotations

from typing import Any

import pytest
from zerolayer.compiler.frontends.config import ModelConfig
from zerolayer.compiler.frontends.hf_config import find_architecture, read_config

_COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.40.0",
    "use_cache": True,
}  # fmt: skip

SMOLLM2: dict[str, Any] = {
    **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "attention_bias": False, "hidden_size": 576, "intermediate_size": 1536,
    "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
    "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "vocab_size": 49152,
}  # fmt: skip
LLAMA2: dict[str, Any] = {
    "_name_or_path": "llama-2-7b", "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
LLAMA32: dict[str, Any] = {
    **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "attention_bias": False, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    **_COMMON, "architectures": ["MistralForCausalLM"], "model_type": "mistral",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
QWEN25: dict[str, Any] = {
    **_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN25_LONG = {
    **QWEN25,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
}
QWEN3: dict[str, Any] = {
    **_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "attention_bias": False, "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": [1, 107], "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
    "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "sliding_window": 4096, "torch_dtype": "bfloat16", "transformers_version": "4.42.4",
    "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
PHI3: dict[str, Any] = {
    **_COMMON, "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0, "hidden_size": 3072, "intermediate_size": 8192,
    "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
    "tie_word_embeddings": False, "vocab_size": 32064,
}  # fmt: skip
PHI4_MINI = {
    **PHI3, "full_attn_mod": 1, "interpolate_factor": 1, "max_position_embeddings": 131072,
    "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75,
    "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064, "mlp_bias": False,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
}  # fmt: skip
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
    "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}  # fmt: skip

Windows = list[int | None]
#: name -> (config.json, (context, head size, kv heads, ropes, tied), windows of the first layers)
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, int, int, int, bool], Windows]] = {
    "SmolLM2-135M": (SMOLLM2, (8192, 64, 3, 1, True), [None, None]),
    "Llama-2-7b": (LLAMA2, (4096, 128, 32, 1, False), [None, None]),
    "Llama-3.2-1B": (LLAMA32, (131072, 64, 8, 1, True), [None, None]),
    "Mistral-7B-v0.1": (MISTRAL, (32768, 128, 8, 1, False), [4096, 4096]),
    "Mistral-7B-v0.3": ({**MISTRAL, "sliding_window": None}, (32768, 128, 8, 1, False), [None]),
    "Qwen2.5-0.5B": (QWEN25, (32768, 64, 2, 1, True), [None, None]),
    "Qwen2.5-0.5B yarn": (QWEN25_LONG, (131072, 64, 2, 1, True), [None, None]),
    "Qwen3-0.6B": (QWEN3, (40960, 128, 8, 1, True), [None, None]),
    "gemma-2-2b": (GEMMA2, (8192, 256, 4, 1, True), [4096, None, 4096, None]),
    "gemma-3-1b": (GEMMA3, (32768, 256, 1, 2, True), [512, 512, 512, 512, 512, None, 512]),
    "Phi-3-mini-4k": (PHI3, (4096, 96, 32, 1, False), [2047, 2047]),
    "Phi-4-mini": (PHI4_MINI, (4096, 128, 8, 1, True), [None, None]),
    "gpt2": (GPT2, (1024, 64, 12, 0, True), [None, None]),
}


def read(config: dict[str, Any]) -> ModelConfig:
    return read_config(find_architecture(config, "here"), config, "here")


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_configurations(name: str) -> None:
    raw, sizes, windows = PUBLISHED[name]
    config = read(raw)
    got = (
        config.max_context, config.head_dim, config.n_kv_heads, len(config.ropes),
        config.tied_embeddings,
    )  # fmt: skip
    assert got == sizes
    assert [layer.window for layer in config.layers[: len(windows)]] == windows


def test_structure_of_each_family() -> None:
    gemma2, gemma3, gpt2 = read(GEMMA2), read(GEMMA3), read(GPT2)
    assert (gemma2.attention_softcap, gemma2.logit_softcap) == (50.0, 30.0)
    assert (gemma3.attention_softcap, gemma3.logit_softcap) == (0.0, 0.0)
    assert gemma2.embedding_scale == 48.0
    assert gemma2.scale == 1 / 16
    assert (gemma2.activation, gemma2.post_norms, gemma2.qk_norm) == ("gelu_tanh", True, False)
    assert (gemma3.post_norms, gemma3.qk_norm) == (True, True)
    local, wide = (gemma3.ropes[gemma3.layers[i].rope or 0] for i in (0, 5))
    assert local.inv_freq[1] == pytest.approx(10_000 ** (-1 / 128))
    assert wide.inv_freq[1] == pytest.approx(1_000_000 ** (-1 / 128))
    assert (gpt2.norm, gpt2.gated_mlp, gpt2.intermediate_size) == ("layer", False, 3072)
    assert gpt2.learned_positions and gpt2.qkv_bias and gpt2.mlp_bias
    assert read(QWEN25).qkv_bias and not read(QWEN25).attention_out_bias
    assert read(PHI4_MINI).ropes[0].rotary_dim == 96
    assert read(PHI4_MINI).ropes[0].attention_factor == pytest.approx(1.1902, abs=1e-4)
