"""Builds the float32 graph of a decoder-only language model from its description and weights.

In: a :class:`ModelConfig` and weights under canonical names, from ``gguf.py`` or ``hf.py``.
Out: an ``onnx_ir.Model`` at opset 24, as laid down in ``docs/architecture.md`` ("The frontend
graph"): single sequence, no cache, weights in the file's own format.  Next file: ``../passes``.

A value carries the name of the node that makes it, and node names are places: ``embed`` and
``layers.3.mlp.add`` are the residual stream after the embedding and after layer 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from zerolayer.runtime_stub.errors import InputFileError

from .config import ModelConfig
from .weights import Array, Weight

OPSET = 24
IR_VERSION = 12
DOMAIN = "zerolayer"

F32 = ir.DataType.FLOAT
I64 = ir.DataType.INT64
Dims = Sequence[int | str]

_GELU = {"gelu_tanh": "tanh", "gelu": "none"}


def expected_weights(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight that the graph of ``config`` reads: name -> logical shape, in graph order."""
    d, f, hd = config.hidden_size, config.intermediate_size, config.head_dim
    sizes = {"q": config.n_heads * hd, "k": config.n_kv_heads * hd, "v": config.n_kv_heads * hd}
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, d)}

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (d,)
        if config.norm == "layer":
            shapes[f"{name}.bias"] = (d,)

    def linear(name: str, n: int, k: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (n, k)
        if bias:
            shapes[f"{name}.bias"] = (n,)

    if config.learned_positions:
        shapes["embed.positions"] = (config.max_context, d)
    for i in range(len(config.layers)):
        at = f"layers.{i}"
        norm(f"{at}.attn_norm")
        for part, n in sizes.items():
            linear(f"{at}.attn.{part}", n, d, config.qkv_bias)
        if config.qk_norm:
            shapes[f"{at}.attn.q_norm.weight"] = (hd,)
            shapes[f"{at}.attn.k_norm.weight"] = (hd,)
        linear(f"{at}.attn.o", d, sizes["q"], config.attention_out_bias)
        if config.post_norms:
            norm(f"{at}.attn_post_norm")
        norm(f"{at}.mlp_norm")
        if config.gated_mlp:
            linear(f"{at}.mlp.gate", f, d, config.mlp_bias)
        linear(f"{at}.mlp.up", f, d, config.mlp_bias)
        linear(f"{at}.mlp.down", d, f, config.mlp_bias)
        if config.post_norms:
            norm(f"{at}.mlp_post_norm")
    norm("final_norm")
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes


def check_config(config: ModelConfig, where: str) -> None:
    """Raise InputFileError when the sizes in ``config`` contradict each other."""

    def wrong(what: str) -> InputFileError:
        return InputFileError(
            what, where=where, next_step="the model's configuration is damaged; fetch it again"
        )

    sizes = ("vocab_size", "hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "head_dim")
    for key in (*sizes, "max_context"):
        value = getattr(config, key)
        if not 0 < value < 2**31:
            raise wrong(f"{key} is {value}, which is not a size")
    if not config.layers:
        raise wrong("the model has no layers")
    if config.n_heads % config.n_kv_heads:
        raise wrong(f"{config.n_heads} heads cannot share {config.n_kv_heads} key/value heads")
    for j, rope in enumerate(config.ropes):
        if not 0 < rope.rotary_dim <= config.head_dim:
            raise wrong(
                f"rope {j} rotates {rope.rotary_dim} of the {config.head_dim} elements of a head"
            )
        if not np.isfinite([*rope.inv_freq, rope.attention_factor]).all():
            raise wrong(f"rope {j} has a frequency that is not a finite number")
    for i, layer in enumerate(config.layers):
        if layer.window is not None and layer.window < 1:
            raise wrong(f"layer {i} has an attention window of {layer.window} positions")
        if layer.rope is not None and not 0 <= layer.rope < len(config.ropes):
            raise wrong(f"layer {i} names rope {layer.rope}, but there are {len(config.ropes)}")


def check_weights(config: ModelConfig, weights: Mapping[str, Weight], where: str) -> None:
    """Raise InputFileError for the first weights that are missing, unused or misshapen."""
    expected = expected_weights(config)
    next_step = "the configuration and the weights disagree; fetch the model again"
    missing = [name for name in expected if name not in weights]
    if missing:
        raise InputFileError(
            f"{len(missing)} weight(s) are missing: {_some(missing)}",
            where=where,
            next_step=next_step,
        )
    unused = [f"{name} ({w.source})" for name, w in weights.items() if name not in expected]
    if unused:
        raise InputFileError(
            f"{len(unused)} weight(s) have no use in the model: {_some(unused)}",
            where=where,
            next_step=next_step,
        )
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise InputFileError(
                f"weight {name} ({weights[name].source}) has shape "
                f"{list(weights[name].shape)}, the configuration says {list(shape)}",
                where=where,
                next_step=next_step,
            )


def build_decoder(config: ModelConfig, weights: Mapping[str, Weight], name: str) -> ir.Model:
    """The graph ``tokens[T], positions[T] -> logits[T, vocab]`` (INT64 in, FLOAT out).

    ``weights`` maps canonical names to weights; the set must be exactly
    ``expected_weights(config)``.  ``name`` names the graph and is the place in errors.  Raises
    InputFileError naming the weight that is missing, unused or misshapen, or the sizes that
    contradict each other.
    """
    check_config(config, name)
    check_weights(config, weights, name)
    return _DecoderBuilder(config, weights, name).build()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


class _GraphBuilder:
    """Nodes and initializers in order; every value gets its type and shape when it is made."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self.weights = weights
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self.domains: dict[str, int] = {"": OPSET}
        self.views: dict[str, ir.Value] = {}

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        shape: Dims,
        name: str,
        *,
        dtype: ir.DataType = F32,
        domain: str = "",
        attributes: Mapping[str, int | float | str] | None = None,
    ) -> ir.Value:
        """Append one node with one output, which is named like the node."""
        if domain:
            self.domains[domain] = 1
        out = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        attrs = [ir.AttrInt64(k, v) if isinstance(v, int)
                 else ir.AttrFloat32(k, v) if isinstance(v, float)
                 else ir.AttrString(k, v) for k, v in (attributes or {}).items()]  # fmt: skip
        self.nodes.append(ir.Node(domain, op_type, inputs, attrs, outputs=[out], name=name))
        return out

    def constant(self, name: str, array: Array) -> ir.Value:
        """A small constant as an initializer; made once per name."""
        if name not in self.initializers:
            self._initializer(name, ir.Tensor(array, name=name))
        return self.initializers[name]

    def scalar(self, name: str, value: float) -> ir.Value:
        return self.constant(name, np.array(value, np.float32))

    def ints(self, *values: int) -> ir.Value:
        """An INT64 vector: a shape, or axes."""
        return self.constant(
            "const." + "_".join(map(str, values)).replace("-", "m"), np.array(values, np.int64)
        )

    def raw(self, name: str) -> ir.Value:
        """The initializer of a weight, in the file's own format."""
        if name not in self.initializers:
            weight = self.weights[name]
            weight.tensor.name = name
            value = self._initializer(name, weight.tensor)
            value.metadata_props["source"] = weight.source
            value.metadata_props["format"] = weight.format
        return self.initializers[name]

    def view(self, name: str) -> ir.Value:
        """A weight as float32 ``[N, K]`` (or ``[N]``)."""
        if name not in self.views:
            value = self.raw(name)
            self.views[name] = self.decode(value, name, self.weights[name].shape, f"{name}.f32")
        return self.views[name]

    def decode(self, value: ir.Value, weight: str, shape: Dims, name: str) -> ir.Value:
        """Rows of ``weight`` in its own format -> float32."""
        kind = self.weights[weight]
        if kind.format == "F32":
            return value
        if kind.is_plain:
            return self.op("Cast", [value], shape, name, attributes={"to": int(F32)})
        return self.op(f"Dequantize_{kind.format}", [value], shape, name, domain=DOMAIN)

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=name,
            shape=ir.Shape([int(d) for d in tensor.shape.numpy()]),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.initializers[name] = value
        return value


class _DecoderBuilder(_GraphBuilder):
    """Methods in the order in which the graph runs."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], name: str) -> None:
        super().__init__(weights)
        self.config = config
        self.name = name
        self.tokens = ir.Value(name="tokens", shape=ir.Shape(["T"]), type=ir.TensorType(I64))
        self.positions = ir.Value(name="positions", shape=ir.Shape(["T"]), type=ir.TensorType(I64))
        self.ropes: dict[int, tuple[ir.Value, ir.Value]] = {}
        self.masks: dict[int, ir.Value] = {}

    def build(self) -> ir.Model:
        x = self.embedding()
        for j in sorted({layer.rope for layer in self.config.layers if layer.rope is not None}):
            self.ropes[j] = self.rope_table(j)
        for window in sorted({w.window for w in self.config.layers if w.window is not None}):
            self.masks[window] = self.window_mask(window)
        for i in range(len(self.config.layers)):
            x = self.attention_block(x, i)
            x = self.mlp_block(x, i)
        logits = self.head(self.norm(x, "final_norm"))
        graph = ir.Graph(
            [self.tokens, self.positions],
            [logits],
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports=self.domains,
            name=self.name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="zerolayer")

    def embedding(self) -> ir.Value:
        """Rows of the table (decoded after the gather), scale, learned positions: [T, D]."""
        config = self.config
        scaled, learned = config.embedding_scale != 1.0, config.learned_positions
        table = "embed.rows" if scaled or learned else "embed"
        x = self.gather("embed.weight", self.tokens, table)
        if scaled:
            scale = self.scalar("const.embedding_scale", config.embedding_scale)
            x = self.op("Mul", [x, scale], self.rows(), "embed.scaled" if learned else "embed")
        if learned:
            p = self.gather("embed.positions", self.positions, "embed.positions.rows")
            x = self.op("Add", [x, p], self.rows(), "embed")
        return x

    def gather(self, weight: str, indices: ir.Value, place: str) -> ir.Value:
        """Rows of ``weight`` as float32 [T, D]; the last node is named ``place``."""
        raw = self.raw(weight)
        assert raw.shape is not None and raw.dtype is not None
        shape: Dims = ["T", *(int(d) for d in raw.shape.numpy()[1:])]
        name = place if self.weights[weight].format == "F32" else f"{place}.raw"
        x = self.op("Gather", [raw, indices], shape, name, dtype=raw.dtype, attributes={"axis": 0})
        return self.decode(x, weight, self.rows(), place)

    def rows(self) -> tuple[str, int]:
        return ("T", self.config.hidden_size)

    def rope_table(self, j: int) -> tuple[ir.Value, ir.Value]:
        """cos and sin of the rotation angles, each [1, T, rotary_dim / 2]."""
        rope, at = self.config.ropes[j], f"rope.{j}"
        half = len(rope.inv_freq)
        inv_freq = self.constant(f"{at}.inv_freq", np.array(rope.inv_freq, np.float32))
        column = self.op(
            "Unsqueeze", [self.positions, self.ints(1)], ["T", 1], f"{at}.column", dtype=I64
        )
        where = self.op("Cast", [column], ["T", 1], f"{at}.position", attributes={"to": int(F32)})
        angles = self.op("Mul", [where, inv_freq], ["T", half], f"{at}.angles")

        def table(op_type: str) -> ir.Value:
            place = f"{at}.{op_type.lower()}"
            x = self.op(op_type, [angles], ["T", half], place)
            if rope.attention_factor != 1.0:
                factor = self.scalar(f"{at}.attention_factor", rope.attention_factor)
                x = self.op("Mul", [x, factor], ["T", half], f"{place}.scaled")
            return self.batch(x, half)

        return table("Cos"), table("Sin")

    def window_mask(self, window: int) -> ir.Value:
        """BOOL[T, T]: query i sees key j when 0 <= position i - position j < window."""
        at = f"mask.{window}"
        t: Dims = ["T", "T"]
        query = self.op(
            "Unsqueeze", [self.positions, self.ints(1)], ["T", 1], f"{at}.query", dtype=I64
        )
        key = self.op("Unsqueeze", [self.positions, self.ints(0)], [1, "T"], f"{at}.key", dtype=I64)
        distance = self.op("Sub", [query, key], t, f"{at}.distance", dtype=I64)
        zero = self.constant("const.zero", np.array(0, np.int64))
        limit = self.constant(f"{at}.limit", np.array(window, np.int64))
        past = self.op("GreaterOrEqual", [distance, zero], t, f"{at}.past", dtype=ir.DataType.BOOL)
        near = self.op("Less", [distance, limit], t, f"{at}.near", dtype=ir.DataType.BOOL)
        return self.op("And", [past, near], t, at, dtype=ir.DataType.BOOL)

    def attention_block(self, x: ir.Value, i: int) -> ir.Value:
        """x + attention(norm(x)): [T, D] -> [T, D]."""
        config, layer, at = self.config, self.config.layers[i], f"layers.{i}.attn"
        heads, kv_heads, hd = config.n_heads, config.n_kv_heads, config.head_dim
        h = self.norm(x, f"layers.{i}.attn_norm")
        parts = []
        for part, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            y = self.linear(h, f"{at}.{part}", n * hd, config.qkv_bias)
            if part != "v" and config.qk_norm:
                y = self.head_norm(y, f"{at}.{part}_norm", n)
            y = self.batch(y, n * hd)
            if part != "v" and layer.rope is not None:
                y = self.rotate(y, layer.rope, f"{at}.{part}.rope", n)
            parts.append(y)
        attributes: dict[str, int | float | str] = {
            "q_num_heads": heads,
            "kv_num_heads": kv_heads,
            "scale": float(config.scale),
        }
        if config.attention_softcap:
            attributes["softcap"] = float(config.attention_softcap)
        if layer.window is None:
            attributes["is_causal"] = 1
        else:
            parts.append(self.masks[layer.window])
        y = self.op(
            "Attention", parts, [1, "T", heads * hd], f"{at}.attention", attributes=attributes
        )
        y = self.op("Squeeze", [y, self.ints(0)], ["T", heads * hd], f"{at}.attention.rows")
        y = self.linear(y, f"{at}.o", config.hidden_size, config.attention_out_bias)
        if config.post_norms:
            y = self.norm(y, f"layers.{i}.attn_post_norm")
        return self.op("Add", [x, y], self.rows(), f"{at}.add")

    def mlp_block(self, x: ir.Value, i: int) -> ir.Value:
        """x + mlp(norm(x)): [T, D] -> [T, D]."""
        config, at = self.config, f"layers.{i}.mlp"
        f = config.intermediate_size
        h = self.norm(x, f"layers.{i}.mlp_norm")
        if config.gated_mlp:
            gate = self.linear(h, f"{at}.gate", f, config.mlp_bias)
            up = self.linear(h, f"{at}.up", f, config.mlp_bias)
            y = self.op("Mul", [self.activation(gate, f"{at}.act"), up], ["T", f], f"{at}.gated")
        else:
            y = self.activation(self.linear(h, f"{at}.up", f, config.mlp_bias), f"{at}.act")
        y = self.linear(y, f"{at}.down", config.hidden_size, config.mlp_bias)
        if config.post_norms:
            y = self.norm(y, f"layers.{i}.mlp_post_norm")
        return self.op("Add", [x, y], self.rows(), f"{at}.add")

    def head(self, x: ir.Value) -> ir.Value:
        """Logits [T, vocab]."""
        config = self.config
        weight = "embed.weight" if config.tied_embeddings else "lm_head.weight"
        factors: list[tuple[str, float | None]] = []
        if config.logit_scale != 1.0:
            factors.append(("scale", config.logit_scale))
        if config.logit_softcap:
            cap = config.logit_softcap
            factors += [("softcap.in", 1.0 / cap), ("softcap.tanh", None), ("softcap.out", cap)]
        shape: Dims = ["T", config.vocab_size]
        x = self.gemm(x, weight, None, config.vocab_size, "lm_head" if factors else "logits")
        for k, (step, factor) in enumerate(factors):
            name = "logits" if k == len(factors) - 1 else f"logits.{step}"
            if factor is None:
                x = self.op("Tanh", [x], shape, name)
            else:
                x = self.op("Mul", [x, self.scalar(f"const.logits.{step}", factor)], shape, name)
        return x

    def linear(self, x: ir.Value, place: str, n: int, bias: bool) -> ir.Value:
        return self.gemm(x, f"{place}.weight", f"{place}.bias" if bias else None, n, place)

    def gemm(self, x: ir.Value, weight: str, bias: str | None, n: int, name: str) -> ir.Value:
        """x[T,K] times view(weight)[N,K] transposed, plus bias[N]: [T, N]."""
        inputs = [x, self.view(weight)] + ([self.view(bias)] if bias else [])
        return self.op("Gemm", inputs, ["T", n], name, attributes={"transB": 1})

    def norm(self, x: ir.Value, place: str) -> ir.Value:
        attributes = {"axis": -1, "epsilon": float(self.config.norm_eps)}
        inputs = [x, self.view(f"{place}.weight")]
        if self.config.norm == "rms":
            return self.op("RMSNormalization", inputs, self.rows(), place, attributes=attributes)
        inputs.append(self.view(f"{place}.bias"))
        return self.op("LayerNormalization", inputs, self.rows(), place, attributes=attributes)

    def head_norm(self, x: ir.Value, place: str, n: int) -> ir.Value:
        """RMS norm of each head of [T, n * head_dim]."""
        hd = self.config.head_dim
        heads: Dims = ["T", n, hd]
        x = self.op("Reshape", [x, self.ints(-1, n, hd)], heads, f"{place}.heads")
        x = self.op(
            "RMSNormalization",
            [x, self.view(f"{place}.weight")],
            heads,
            place,
            attributes={"axis": -1, "epsilon": float(self.config.norm_eps)},
        )
        return self.op("Reshape", [x, self.ints(-1, n * hd)], ["T", n * hd], f"{place}.rows")

    def rotate(self, x: ir.Value, j: int, place: str, n: int) -> ir.Value:
        """Rotary embedding of [1, T, n * head_dim]."""
        rope = self.config.ropes[j]
        attributes = {"num_heads": n, "interleaved": int(rope.interleaved)}
        if rope.rotary_dim != self.config.head_dim:
            attributes["rotary_embedding_dim"] = rope.rotary_dim
        width = n * self.config.head_dim
        return self.op(
            "RotaryEmbedding", [x, *self.ropes[j]], [1, "T", width], place, attributes=attributes
        )

    def activation(self, x: ir.Value, place: str) -> ir.Value:
        shape: Dims = ["T", self.config.intermediate_size]
        kind = self.config.activation
        if kind in _GELU:
            return self.op("Gelu", [x], shape, place, attributes={"approximate": _GELU[kind]})
        return self.op({"silu": "Swish", "relu": "Relu"}[kind], [x], shape, place)

    def batch(self, x: ir.Value, width: int) -> ir.Value:
        """[T, width] -> [1, T, width]."""
        return self.op("Unsqueeze", [x, self.ints(0)], [1, "T", width], f"{x.name}.batch")
