"""Small random decoders built straight from a ModelConfig, for tests of graphs and passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import onnx_ir as ir
from zerolayer.compiler.frontends.config import Layer, ModelConfig, Rope
from zerolayer.compiler.frontends.decoder import build_decoder, expected_weights
from zerolayer.compiler.frontends.weights import Weight

VOCAB = 97


def inv_freq(rotary_dim: int, theta: float = 10000.0) -> tuple[float, ...]:
    return tuple((theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).tolist())


def config(**changes: Any) -> ModelConfig:
    """A llama-like model of two layers; ``changes`` are fields of ModelConfig."""
    base: dict[str, Any] = {
        "architecture": "test", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96,
        "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "max_context": 64,
        "layers": (Layer(), Layer()), "ropes": (Rope(inv_freq(16)),),
    }  # fmt: skip
    return ModelConfig(**{**base, **changes})


#: every structural novelty that a ModelConfig can describe
CONFIGS: dict[str, ModelConfig] = {
    "llama": config(),
    "interleaved-tied": config(
        ropes=(Rope(inv_freq(16), interleaved=True),), tied_embeddings=True
    ),
    "gemma2": config(
        layers=(Layer(window=5), Layer()), head_dim=32, attention_softcap=20.0, logit_softcap=15.0,
        embedding_scale=8.0, post_norms=True, activation="gelu_tanh", tied_embeddings=True,
        ropes=(Rope(inv_freq(32)),), attention_scale=0.3,
    ),
    "gemma3": config(
        layers=(Layer(window=4, rope=0), Layer(rope=1)), qk_norm=True, post_norms=True,
        embedding_scale=8.0, activation="gelu_tanh",
        ropes=(Rope(inv_freq(16)), Rope(inv_freq(16, 1e6), attention_factor=1.3)),
    ),
    "qwen2": config(qkv_bias=True),
    "qwen3": config(qk_norm=True, head_dim=32, ropes=(Rope(inv_freq(32)),)),
    "no-rope-layer": config(layers=(Layer(rope=None), Layer())),
    "partial-rope": config(ropes=(Rope(inv_freq(8)),)),
    "bias-everywhere": config(qkv_bias=True, attention_out_bias=True, mlp_bias=True),
    "gpt2": config(
        norm="layer", layers=(Layer(rope=None), Layer(rope=None)), ropes=(), gated_mlp=False,
        learned_positions=True, activation="gelu_tanh", qkv_bias=True, attention_out_bias=True,
        mlp_bias=True, tied_embeddings=True, n_kv_heads=4,
    ),
    "relu-scaled": config(gated_mlp=False, activation="relu", logit_scale=0.25),
    "gelu-erf": config(activation="gelu", n_kv_heads=1),
}  # fmt: skip


def stored(x: np.ndarray, format: str) -> tuple[np.ndarray, ir.DataType]:
    """``x`` float32 [N, K] (or [N]) as a model file holds it in ``format``."""
    if format == "F32":
        return x, ir.DataType.FLOAT
    if format == "F16":
        return x.astype(np.float16), ir.DataType.FLOAT16
    if format == "BF16":
        return x.astype(ml_dtypes.bfloat16), ir.DataType.BFLOAT16
    kind = gguf.GGMLQuantizationType[format]
    return gguf.quants.quantize(x, kind), ir.DataType.UINT8


def weights(model: ModelConfig, formats: Sequence[str], seed: int) -> dict[str, Weight]:
    """Random weights; matrices take ``formats`` in turn (a block format only where K allows)."""
    rng = np.random.default_rng(seed)
    found: dict[str, Weight] = {}
    for i, (name, shape) in enumerate(expected_weights(model).items()):
        x = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            x = 0.1 * x + (name.endswith("weight"))
            format = "BF16" if "BF16" in formats else "F32"
        else:
            x *= np.float32(1.0 if "embed" in name else shape[1] ** -0.5)
            format = formats[i % len(formats)]
            if "mlp" in name and not name.endswith("down.weight"):
                format = formats[0]  # gate and up of one format, so that they can be fused
        array, dtype = stored(x.astype(np.float32), format)
        tensor = ir.Tensor(array, dtype=dtype, name=name)
        found[name] = Weight(name, format, shape, tensor, f"test.{name}")
    return found


def decoder(model: ModelConfig, formats: Sequence[str] = ("F32",), seed: int = 0) -> ir.Model:
    return build_decoder(model, weights(model, formats, seed), "test")
