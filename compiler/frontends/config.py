"""What a decoder-only language model is, independent of the file it came from.

In: nothing.  Out: :class:`ModelConfig`, the one description from which ``decoder.py`` builds the
graph, and :class:`LoadedModel`, what every frontend returns.  Next file: ``architectures.py`` (how
each file format's names map onto this).

A new architecture is a row in the tables of ``architectures.py``; a structural novelty is a field
here.  Nothing downstream ever asks for the architecture's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import onnx_ir as ir

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]


@dataclass(frozen=True)
class Rope:
    """One rotary position embedding.

    ``inv_freq`` holds ``rotary_dim / 2`` angular frequencies in radians per position, after any
    scaling (linear, llama3, yarn, longrope); cos and sin are multiplied by ``attention_factor``.
    ``interleaved`` pairs (0,1),(2,3),..; otherwise element i is paired with i + rotary_dim/2.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False
    attention_factor: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class Layer:
    """What may differ between layers: the attention window (positions, ``None`` = all) and the rope
    (index into ``ModelConfig.ropes``, ``None`` = no rotary embedding)."""

    window: int | None = None
    rope: int | None = 0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.  Sizes are element counts; ``layers`` has one entry per block."""

    architecture: str  # information only: printed, never branched on
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_context: int
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...] = ()
    norm: NormKind = "rms"
    norm_eps: float = 1e-5
    attention_scale: float = 0.0  # 0.0 means head_dim ** -0.5; use .scale
    attention_softcap: float = 0.0  # 0.0 = none
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k, before the rope
    post_norms: bool = False  # gemma2/3: norms on what attention and mlp add to the residual
    gated_mlp: bool = True
    activation: Activation = "silu"
    learned_positions: bool = False  # gpt2: wpe is added to the token embedding
    tied_embeddings: bool = False  # the output projection is the embedding table

    @property
    def scale(self) -> float:
        return self.attention_scale or float(self.head_dim) ** -0.5


@dataclass(frozen=True)
class TokenizerAssets:
    """Everything the host needs to turn text into token ids and back.

    ``tokenizer_json`` is a Hugging Face ``tokenizers`` file.  ``add_bos`` says whether raw text is
    prefixed with ``bos_id``; the chat template writes its own.  ``generation`` are the defaults for
    sampling (keys: temperature, top_k, top_p, min_p, repetition_penalty) or empty = greedy.
    """

    tokenizer_json: bytes
    chat_template: str | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    bos_token: str = ""
    eos_token: str = ""
    generation: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class SourceFile:
    """An input file, named by its base name only so that artifacts do not depend on folders."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class LoadedModel:
    """What a frontend returns.  ``config`` is ``None`` for graphs that are not decoders."""

    name: str
    graph: ir.Model
    config: ModelConfig | None
    tokenizer: TokenizerAssets | None
    sources: tuple[SourceFile, ...]
    licenses: tuple[tuple[str, bytes], ...] = ()
    parameters: int = 0
    source_formats: tuple[tuple[str, str], ...] = field(default=())  # (weight name, format name)
