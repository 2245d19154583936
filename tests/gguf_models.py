"""GGUF files for tests, written with the ``gguf`` package: its keys, tensor names and codecs.

What a converter does to the weights (llama's row permutation, gemma's ``1 + w``, GPT-2's
transposition, fused matrices) is done here from llama.cpp's published conversion rules, so that the
frontend is compared with ``transformers`` on the original model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ARCHITECTURE = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
}


def random_blocks(name: str, rows: int, k: int, seed: int) -> Array:
    """Random bytes of a block format whose halves are small positive numbers: values near 1."""
    kind = gguf.GGMLQuantizationType[name]
    elems, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, k // elems, size), dtype=np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
              "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0,))  # fmt: skip
    spread = float(np.abs(gguf.dequantize(_with_halves(raw, halves, 1.0), kind)).max())
    return _with_halves(raw, halves, 0.5 / spread).reshape(rows, k // elems * size)


def _with_halves(raw: Array, offsets: tuple[int, ...], value: float) -> Array:
    raw = raw.copy()
    for at in offsets:
        raw[:, :, at : at + 2] = np.array([value], "<f2").view(np.uint8)
    return raw


def write_model(
    model: Any,
    path: Path,
    encode: Callable[[str, Array], tuple[Array, str]] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> dict[str, Array]:
    """Writes the transformers model ``model`` to ``path``.

    ``encode(name, float32 array) -> (raw, format)`` chooses a matrix's format (default F32).
    Returns the tensors as the file's readers see them, float32, by GGUF name.
    """
    config = model.config
    kind = config.model_type
    arch = ARCHITECTURE[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name(f"Tiny {kind}")
    _add_config(writer, config)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors: dict[str, Array] = {}
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        tensors[name] = _convert(config, hf_name, tensor.detach().numpy())
    tensors |= _rope_tensors(writer, config)
    for name, array in tensors.items():
        if encode is not None and array.ndim == 2:
            raw, format = encode(name, array)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[format])
            kind_of = gguf.GGMLQuantizationType[format]
            tensors[name] = np.asarray(gguf.dequantize(raw, kind_of)).reshape(array.shape)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    for add in (tokenizer, extra):
        if add is not None:
            add(writer)
    close(writer)
    return tensors


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    gpt2 = config.model_type == "gpt2"
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    inner = (config.n_inner or 4 * config.hidden_size) if gpt2 else config.intermediate_size
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    if gpt2:
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key, add in (("attn_logit_softcapping", writer.add_attn_logit_softcapping),
                     ("final_logit_softcapping", writer.add_final_logit_softcapping)):  # fmt: skip
        if hasattr(config, key) and config.model_type == "gemma2":
            add(getattr(config, key) or 0.0)
    _add_rope(writer, config, head_dim)


def _add_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = rope_parameters(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1.0)))
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def rope_parameters(config: Any) -> Mapping[str, Any]:
    """The rope of the layers that see everything."""
    rope: Mapping[str, Any] = config.rope_parameters
    full: Mapping[str, Any] = rope.get("full_attention", rope)
    return full


def _rope_tensors(writer: gguf.GGUFWriter, config: Any) -> dict[str, Array]:
    if config.model_type == "gpt2":
        return {}
    rope = rope_parameters(config)
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], np.float32)
                for length in ("short", "long")}  # fmt: skip
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def _convert(config: Any, name: str, array: Array) -> Array:
    kind = config.model_type
    if kind in ("llama", "mistral") and ".q_proj." in name:
        return permute(array, config.num_attention_heads)
    if kind in ("llama", "mistral") and ".k_proj." in name:
        return permute(array, config.num_key_value_heads)
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return np.asarray(array + np.float32(1))
    conv1d = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    if kind == "gpt2" and name.endswith(conv1d):
        array = array.T
    return array


def permute(array: Array, heads: int) -> Array:
    """Rows of each head from two halves to interleaved pairs."""
    rest = array.shape[1:]
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *rest)
    pairs: Array = split.swapaxes(1, 2).reshape(array.shape)
    return pairs


@dataclass(frozen=True)
class Vocabulary:
    """Metadata of a tokenizer, as GGUF has it."""

    kind: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    pre: str | None = None
    bos: int | None = None
    eos: int | None = None

    def add(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.kind)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        if self.bos is not None:
            writer.add_bos_token_id(self.bos)
        if self.eos is not None:
            writer.add_eos_token_id(self.eos)


def write_vocabulary(
    path: Path,
    vocabulary: Vocabulary,
    arch: str = "llama",
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """A GGUF file with a tokenizer and no tensors."""
    writer = gguf.GGUFWriter(path, arch)
    vocabulary.add(writer)
    if extra is not None:
        extra(writer)
    close(writer)
    return path
