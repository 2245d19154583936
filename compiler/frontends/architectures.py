"""Which Hugging Face architectures there are: one row each, of config keys and tensor names.

In: nothing.  Out: :data:`ARCHITECTURES`.  Next file: ``hf_config.py``, which reads a
``config.json`` by them.

A row is data.  Every key of a ``config.json`` must be claimed by its row or by the list of keys
known not to change the numbers; any other is an error, so that nothing is ever silently ignored.
Absent keys have the values that ``transformers`` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["size", "number", "flag", "activation", "inverse_sqrt", "sqrt"]
Transform = Literal["", "transpose", "plus_one"]
REQUIRED: Any = object()

#: config.json's name -> ModelConfig.activation
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh", "relu": "relu",
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """A config key: its ``kind``, its value when absent (required if not given) and when null."""

    name: str
    kind: Kind
    absent: Any = REQUIRED
    null: Any = REQUIRED


@dataclass(frozen=True)
class TensorRow:
    """A tensor of the file and the canonical weights that its rows are split among, in order.

    ``{i}`` stands for the layer.  The transform is applied to the whole tensor, before the split.
    """

    source: str
    targets: tuple[str, ...]
    transform: Transform = ""


@dataclass(frozen=True)
class Architecture:
    """One row.

    ``fields`` fills fields of ModelConfig from keys; ``fixed`` are fields that the architecture
    decides.  ``sizes`` name the keys of the layer count and context.  ``windowed(i, config)`` says
    which layers have the sliding window when ``layer_types`` does not; ``window_keys`` are the keys
    it and the window read.  ``must_be`` lists keys of which only these values are implemented.
    ``prefix`` may be absent from all tensor names.  ``buffers`` are endings of tensors that repeat
    what the configuration says.
    """

    name: str
    model_type: str
    fields: Mapping[str, Key]
    tensors: tuple[TensorRow, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    layers: Key = Key("num_hidden_layers", "size")
    context: Key = Key("max_position_embeddings", "size")
    prefix: str = "model."
    has_rope: bool = True
    theta: float = 10_000.0
    local_theta: Key | None = None  # a second rope for windowed layers
    partial_rope: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    original_context: int | None = None
    window_default: int | None = None
    windowed: Callable[[int, Mapping[str, Any]], bool] = lambda _i, _config: False
    window_keys: tuple[str, ...] = ()
    tied_default: bool = False
    must_be: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)


def _base_fields(activation: str = "hidden_act") -> dict[str, Key]:
    """The fields that all rows but GPT-2's share."""
    return {
        "vocab_size": Key("vocab_size", "size"),
        "hidden_size": Key("hidden_size", "size"),
        "intermediate_size": Key("intermediate_size", "size"),
        "n_heads": Key("num_attention_heads", "size"),
        "n_kv_heads": Key("num_key_value_heads", "size", None, None),
        "head_dim": Key("head_dim", "size", None, None),
        "norm_eps": Key("rms_norm_eps", "number", 1e-6),
        "activation": Key(activation, "activation", "silu"),
    }


_GEMMA_FIELDS = {
    **_base_fields("hidden_activation"),
    "head_dim": Key("head_dim", "size", 256),
    "activation": Key("hidden_activation", "activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh"),
    "embedding_scale": Key("hidden_size", "sqrt"),
    "attention_scale": Key("query_pre_attn_scalar", "inverse_sqrt", 256),
    "qkv_bias": Key("attention_bias", "flag", False),
    "attention_out_bias": Key("attention_bias", "flag", False),
}
_ATTENTION_BIAS = {
    "qkv_bias": Key("attention_bias", "flag", False),
    "attention_out_bias": Key("attention_bias", "flag", False),
}


def _tensors(*rows: tuple[str, str] | TensorRow) -> tuple[TensorRow, ...]:
    return tuple(r if isinstance(r, TensorRow) else TensorRow(r[0], (r[1],)) for r in rows)


def _linear(source: str, target: str, transform: Transform = "") -> tuple[TensorRow, TensorRow]:
    """Weight and bias of one projection; the bias is read only where the config has it."""
    return (
        TensorRow(f"{source}.weight", (f"{target}.weight",), transform),
        TensorRow(f"{source}.bias", (f"{target}.bias",)),
    )


_AT = "layers.{i}"
_QKV = tuple(row for p in "qkv" for row in _linear(f"{_AT}.self_attn.{p}_proj", f"{_AT}.attn.{p}"))
_ATTN_OUT = _linear(f"{_AT}.self_attn.o_proj", f"{_AT}.attn.o")
_GATE_UP = (
    *_linear(f"{_AT}.mlp.gate_proj", f"{_AT}.mlp.gate"),
    *_linear(f"{_AT}.mlp.up_proj", f"{_AT}.mlp.up"),
)
_DOWN = _linear(f"{_AT}.mlp.down_proj", f"{_AT}.mlp.down")
_ENDS = _tensors(("embed_tokens.weight", "embed.weight"), ("lm_head.weight", "lm_head.weight"))


def _norms(names: Mapping[str, str], transform: Transform = "") -> tuple[TensorRow, ...]:
    return tuple(
        TensorRow(f"{source}.weight", (f"{target}.weight",), transform)
        for source, target in names.items()
    )


_PRE_NORMS = {
    f"{_AT}.input_layernorm": f"{_AT}.attn_norm",
    f"{_AT}.post_attention_layernorm": f"{_AT}.mlp_norm",
    "norm": "final_norm",
}
_SANDWICH_NORMS = {
    f"{_AT}.input_layernorm": f"{_AT}.attn_norm",
    f"{_AT}.post_attention_layernorm": f"{_AT}.attn_post_norm",
    f"{_AT}.pre_feedforward_layernorm": f"{_AT}.mlp_norm",
    f"{_AT}.post_feedforward_layernorm": f"{_AT}.mlp_post_norm",
    "norm": "final_norm",
}
_HEAD_NORMS = {
    f"{_AT}.self_attn.q_norm": f"{_AT}.attn.q_norm",
    f"{_AT}.self_attn.k_norm": f"{_AT}.attn.k_norm",
}
_LLAMA_TENSORS = (*_ENDS, *_norms(_PRE_NORMS), *_QKV, *_ATTN_OUT, *_GATE_UP, *_DOWN)


def _qwen_windowed(i: int, config: Mapping[str, Any]) -> bool:
    return config.get("use_sliding_window") is True and i >= config.get("max_window_layers", 28)


_QWEN_WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_ONE_DIRECTION = {"use_bidirectional_attention": (False, None)}

_ROWS = (
    Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        fields={
            **_base_fields(), **_ATTENTION_BIAS, "mlp_bias": Key("mlp_bias", "flag", False),
        },
        tensors=_LLAMA_TENSORS,
        must_be={"rope_interleaved": (False, None)},
        # tensor-parallel slicing of a pretraining run: another order of the same sums
        harmless=frozenset({"pretraining_tp", "is_llama_config"}),
    ),
    Architecture(
        name="MistralForCausalLM",
        model_type="mistral",
        fields=_base_fields(),
        tensors=_LLAMA_TENSORS,
        window_default=4096,
        windowed=lambda _i, _config: True,
        window_keys=("sliding_window",),
    ),
    Architecture(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        fields=_base_fields(),
        fixed={"qkv_bias": True},
        tensors=_LLAMA_TENSORS,
        window_default=4096,
        windowed=_qwen_windowed,
        window_keys=_QWEN_WINDOW_KEYS,
        must_be={"use_mrope": (False, None)},
    ),
    Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        fields={**_base_fields(), **_ATTENTION_BIAS, "head_dim": Key("head_dim", "size", 128)},
        fixed={"qk_norm": True},
        tensors=(*_LLAMA_TENSORS, *_norms(_HEAD_NORMS)),
        window_default=4096,
        windowed=_qwen_windowed,
        window_keys=_QWEN_WINDOW_KEYS,
        must_be={"use_mrope": (False, None)},
    ),
    Architecture(
        name="Gemma2ForCausalLM",
        model_type="gemma2",
        fields={
            **_GEMMA_FIELDS,
            "attention_softcap": Key("attn_logit_softcapping", "number", 50.0, 0.0),
            "logit_softcap": Key("final_logit_softcapping", "number", 30.0, 0.0),
        },
        fixed={"post_norms": True},
        tensors=(
            *_ENDS, *_norms(_SANDWICH_NORMS, "plus_one"), *_QKV, *_ATTN_OUT, *_GATE_UP, *_DOWN,
        ),
        window_default=4096,
        windowed=lambda i, _config: i % 2 == 0,
        window_keys=("sliding_window", "layer_types"),
        tied_default=True,
        must_be=_ONE_DIRECTION,
        harmless=frozenset({"hidden_act", "sliding_window_size"}),
    ),
    Architecture(
        name="Gemma3ForCausalLM",
        model_type="gemma3_text",
        fields={
            **_GEMMA_FIELDS,
            "attention_softcap": Key("attn_logit_softcapping", "number", 0.0, 0.0),
            "logit_softcap": Key("final_logit_softcapping", "number", 0.0, 0.0),
        },
        fixed={"post_norms": True, "qk_norm": True},
        tensors=(
            *_ENDS, *_norms({**_SANDWICH_NORMS, **_HEAD_NORMS}, "plus_one"),
            *_QKV, *_ATTN_OUT, *_GATE_UP, *_DOWN,
        ),
        theta=1_000_000.0,
        local_theta=Key("rope_local_base_freq", "number", 10_000.0),
        window_default=4096,
        windowed=lambda i, config: (i + 1) % config.get("sliding_window_pattern", 6) != 0,
        window_keys=("sliding_window", "layer_types", "sliding_window_pattern"),
        tied_default=True,
        must_be=_ONE_DIRECTION,
        harmless=frozenset({"hidden_act", "_sliding_window_pattern"}),
    ),
    Architecture(
        name="Phi3ForCausalLM",
        model_type="phi3",
        fields={**_base_fields(), "norm_eps": Key("rms_norm_eps", "number", 1e-5)},
        tensors=(
            *_ENDS, *_norms(_PRE_NORMS), *_ATTN_OUT, *_DOWN,
            TensorRow(
                f"{_AT}.self_attn.qkv_proj.weight",
                tuple(f"{_AT}.attn.{p}.weight" for p in "qkv"),
            ),
            TensorRow(
                f"{_AT}.mlp.gate_up_proj.weight",
                (f"{_AT}.mlp.gate.weight", f"{_AT}.mlp.up.weight"),
            ),
        ),
        partial_rope=True,
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        original_context=4096,
        windowed=lambda _i, _config: True,
        window_keys=("sliding_window",),
        must_be={
            "attention_bias": (False, None), "mlp_bias": (False, None),
            "full_attn_mod": (1, None), "interpolate_factor": (1, None),
        },
        harmless=frozenset({"embd_pdrop", "resid_pdrop"}),
    ),
    Architecture(
        name="GPT2LMHeadModel",
        model_type="gpt2",
        fields={
            "vocab_size": Key("vocab_size", "size"),
            "hidden_size": Key("n_embd", "size"),
            "intermediate_size": Key("n_inner", "size", None, None),
            "n_heads": Key("n_head", "size"),
            "norm_eps": Key("layer_norm_epsilon", "number", 1e-5),
            "activation": Key("activation_function", "activation", "gelu_new"),
        },
        fixed={
            "norm": "layer", "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
            "gated_mlp": False, "learned_positions": True,
        },
        layers=Key("n_layer", "size"),
        context=Key("n_positions", "size"),
        prefix="transformer.",
        has_rope=False,
        tensors=(
            *_tensors(
                ("wte.weight", "embed.weight"), ("wpe.weight", "embed.positions"),
                ("lm_head.weight", "lm_head.weight"),
            ),
            *_linear("h.{i}.ln_1", f"{_AT}.attn_norm"),
            *_linear("h.{i}.ln_2", f"{_AT}.mlp_norm"),
            *_linear("ln_f", "final_norm"),
            *(
                TensorRow(
                    f"h.{{i}}.attn.c_attn.{part}",
                    tuple(f"{_AT}.attn.{p}.{part}" for p in "qkv"),
                    "transpose" if part == "weight" else "",
                )
                for part in ("weight", "bias")
            ),
            *_linear("h.{i}.attn.c_proj", f"{_AT}.attn.o", "transpose"),
            *_linear("h.{i}.mlp.c_fc", f"{_AT}.mlp.up", "transpose"),
            *_linear("h.{i}.mlp.c_proj", f"{_AT}.mlp.down", "transpose"),
        ),
        tied_default=True,
        must_be={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False, None),
            "add_cross_attention": (False, None),
        },
        # reorder_and_upcast_attn only changes the order of rounding below float32
        harmless=frozenset({
            "n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn",
            "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
            "summary_type", "summary_use_proj",
        }),
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
)  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in _ROWS}

#: keys that no supported model's numbers depend on: identity, training, storage and token ids
HARMLESS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures",
    "attention_dropout", "attn_implementation", "auto_map", "bos_token_id", "cache_implementation",
    "dtype", "eos_token_id", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "id2label", "initializer_range", "label2id", "model_type", "num_labels", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "sep_token_id",
    "_num_labels", "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_cache",
})  # fmt: skip

#: keys every model may carry, of which only these values are implemented
MUST_BE: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "chunk_size_feed_forward": (0, None),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False, None),
    "use_bfloat16": (False, None),
    "quantization_config": (None,),
}
