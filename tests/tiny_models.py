"""Random models of every supported architecture, made with transformers, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB = 199
_BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def _longrope(half: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(half)],
        "long_factor": [2.0 + i for i in range(half)],
    }


#: test name -> (model_type, configuration beyond the base)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rms_norm_eps": 1e-5}),
    "llama-tied-bias": (
        "llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-llama3": ("llama", {"rope_scaling": _LLAMA3, "rope_theta": 500000.0}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "llama-yarn": ("llama", {"rope_scaling": _YARN}),
    "llama-yarn-mscale": (
        "llama",
        {"rope_scaling": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 16.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 16}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"rope_theta": 1e6}),
    "qwen2-window": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2-nocap": (
        "gemma2",
        {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 4, "query_pre_attn_scalar": 20,
         "sliding_window_pattern": 3},
    ),
    "gemma3-linear": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 9,
         "rope_scaling": {"rope_type": "linear", "factor": 8.0},
         "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ),
    "phi3": ("phi3", {"sliding_window": 10}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "phi3-longrope": (
        "phi3", {"rope_scaling": _longrope(8), "original_max_position_embeddings": 48},
    ),
    "gpt2": ("gpt2", {**_GPT2}),
    "gpt2-inner": ("gpt2", {**_GPT2, "n_inner": 80, "activation_function": "gelu"}),
}  # fmt: skip


def write_tokenizer(directory: Path, size: int = VOCAB) -> None:
    """A word-level tokenizer of ``size`` tokens and its settings."""
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ x }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make_model(
    case: str,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Any:
    """Save the random model of ``case`` under ``directory``; returns it, in float32, eager."""
    model_type, extra = CASES[case]
    options = {**({} if model_type == "gpt2" else _BASE), **extra, **overrides}
    torch.manual_seed(sum(map(ord, case)))
    config = CONFIG_MAPPING[model_type](**options)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # norms and biases start as constants; random ones catch a swapped or dropped tensor
            scale = 0.3 if parameter.ndim == 1 else 0.15
            offset = 1.0 if "norm" in name and "gemma" not in model_type else 0.0
            parameter.normal_(offset if parameter.ndim == 1 else 0.0, scale)
    model.tie_weights()
    model = model.to(dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    write_tokenizer(directory)
    # read back, because .to(dtype) has also rounded what is not in the file (rope, embedding scale)
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def reference_logits(model: Any, tokens: list[int]) -> Any:
    """Logits [T, vocab] of transformers, float32, eager attention."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
