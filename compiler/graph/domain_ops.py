"""Bodies of the ``zerolayer`` operators other than ``Dequantize_F``, in standard operators.

In: a :class:`~.function_body.Body` with the operator's inputs and its :class:`OpSignature`.  Out:
the named outputs.  Next file: ``domain.py`` (the table of operators, names, shapes).

A body is a definition, not an implementation: it favours being obviously right.  T tokens, S
sequences, B block-table columns, L = B * block_size positions that a block-table row covers,
H heads, G kv heads, hd head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .domain_dequantize import dequantize
from .function_body import BFLOAT16, BOOL, FLOAT, INT8, INT64, Body, Ref, Val

Outputs = list[tuple[str, Val]]


@dataclass(frozen=True)
class OpSignature:
    """A domain operator's name taken apart: ``Linear_Q4_1_int8`` is base ``Linear``, formats
    ``("Q4_1",)``, activations ``int8``.  ``variant`` is empty except for ``QkvRopeCache``, whose
    optional inputs change the body: ``qknorm`` (has qnorm, knorm), ``norope`` (no cos, sin) or
    ``qknorm_norope``."""

    base: str
    formats: tuple[str, ...] = ()
    activations: str = ""
    variant: str = ""


BodyBuilder = Callable[[Body, OpSignature], Outputs]


# --- activations and linear layers -------------------------------------------------------------


def _like(b: Body, x: Val) -> Val:
    """The shape of ``x`` with its last dimension left to infer."""
    return b.concat([b.op("Shape", x, end=-1, dtype=INT64), b.ints(-1)], 0)


def _reshape(b: Body, x: Val, shape: Val) -> Val:
    return b.op("Reshape", x, shape, dtype=x.dtype)


def quantize_int8(b: Body, x: Val) -> Outputs:
    """``scale = max|x| / 127`` per 32 columns, ``q = round_half_even(x * (1 / scale))``, sums per
    16; q is 0 where scale is below the normal range of float32.

    Any number of leading dimensions: [.., K] -> q [.., K], scale [.., K/32], sums [.., K/16].
    """
    blocks = x.reshape(-1, 32)
    scale = b.op("ReduceMax", b.op("Abs", blocks), b.ints(1), keepdims=1) / 127.0
    tiny = scale.compare("Less", 2.0**-126)
    inverse = b.where(tiny, 0.0, b.op("Reciprocal", b.where(tiny, 1.0, scale)))
    q = b.op("Clip", b.op("Round", blocks * inverse), b.const(-127.0), b.const(127.0))
    sums = b.op("ReduceSum", q.reshape(-1, 2, 16), b.ints(2), keepdims=0) * scale
    rows = _like(b, x)
    return [
        ("q", _reshape(b, q.cast(INT8), b.op("Shape", x, dtype=INT64))),
        ("scale", _reshape(b, scale, rows)),
        ("sums", _reshape(b, sums, rows)),
    ]


def bundle(b: Body, activations: str) -> Val:
    """The float32 value [.., K] that an activation bundle stands for."""
    if activations == "int8":
        q, scale = b["q"], b["scale"]
        blocks = q.cast(FLOAT).reshape(-1, 32) * scale.reshape(-1, 1)
        return _reshape(b, blocks, b.op("Shape", q, dtype=INT64))
    x = b["x"]
    return x.cast(BFLOAT16).cast(FLOAT) if activations == "bf16" else x


def linear(b: Body, x: Val, format: str, weight: str, bias: str = "") -> Val:
    """x [.., K], weight [N, K] in its format, optional bias [N] -> [.., N]."""
    rows = _reshape(b, x, b.concat([b.ints(-1), x.dim(-1)], 0))
    matrix = dequantize(b, format, b[weight])
    y = b.op("Gemm", rows, matrix, *([b[bias]] if bias else []), transB=1)
    return _reshape(b, y, _like(b, x))


def activate(b: Body, x: Val) -> Val:
    """The function named by attribute ``activation``: silu, gelu_tanh, gelu or relu."""
    name = b.attribute("activation", "string")

    def pick(choice: str, yes: Val, no: Val) -> Val:
        equal = b.op("Equal", name, b.op("Constant", value_string=choice), dtype=BOOL)
        return b.where(equal, yes, no)

    gelu = b.op("Gelu", x, approximate="none")
    tanh = b.op("Gelu", x, approximate="tanh")
    silu = b.op("Swish", x, alpha=1.0)
    return pick("silu", silu, pick("gelu_tanh", tanh, pick("gelu", gelu, b.op("Relu", x))))


def dequantize_op(b: Body, sig: OpSignature) -> Outputs:
    return [("y", dequantize(b, sig.formats[0], b["weight"]))]


def quantize_op(b: Body, sig: OpSignature) -> Outputs:
    return quantize_int8(b, b["x"])


def gather_int8(b: Body, sig: OpSignature) -> Outputs:
    """Rows of a quantized bundle."""
    return [(f"{name}_rows", b[name].gather(b["indices"])) for name in ("q", "scale", "sums")]


def embed(b: Body, sig: OpSignature) -> Outputs:
    rows = b["weight"].gather(b["tokens"])
    return [("y", dequantize(b, sig.formats[0], rows) * b.attribute("scale", "float"))]


def split_embed(b: Body, sig: OpSignature) -> Outputs:
    """The same from a table in two parts, whose sum it is."""
    parts = [b[name].gather(b["tokens"]) for name in ("weight_high", "weight_low")]
    high, low = (dequantize(b, f, x) for f, x in zip(sig.formats, parts, strict=True))
    return [("y", (high + low) * b.attribute("scale", "float"))]


def linear_op(b: Body, sig: OpSignature) -> Outputs:
    return [("y", linear(b, bundle(b, sig.activations), sig.formats[0], "weight", "bias"))]


def linear_add(b: Body, sig: OpSignature) -> Outputs:
    x = bundle(b, sig.activations)
    return [("y", b["residual"] + linear(b, x, sig.formats[0], "weight", "bias"))]


def act_linear(b: Body, sig: OpSignature) -> Outputs:
    x = bundle(b, sig.activations)
    return [("y", activate(b, linear(b, x, sig.formats[0], "weight", "bias")))]


def _gated(b: Body, sig: OpSignature) -> Val:
    x = bundle(b, sig.activations)
    gate = linear(b, x, sig.formats[0], "weight_gate", "bias_gate")
    up = linear(b, x, sig.formats[1], "weight_up", "bias_up")
    return activate(b, gate) * up


def gated_linear(b: Body, sig: OpSignature) -> Outputs:
    return [("y", _gated(b, sig))]


def gated_linear_quantize(b: Body, sig: OpSignature) -> Outputs:
    return _renamed(quantize_int8(b, _gated(b, sig)))


def _renamed(outputs: Outputs) -> Outputs:
    """An operator that takes and gives a bundle: its outputs need names of their own."""
    return [(f"{name}_out", value) for name, value in outputs]


def softcap(b: Body, sig: OpSignature) -> Outputs:
    cap = b.attribute("cap", "float")
    return [("y", b.op("Tanh", b["x"] / cap) * cap)]


# --- the greedy choice (zl_screen.h) -----------------------------------------------------------


def _norm(b: Body, x: Val) -> Val:
    return b.op("ReduceL2", x, b.ints(-1), keepdims=1)


def head_bounds(b: Body, sig: OpSignature) -> Outputs:
    """Of every 16 outputs of a linear layer of floats the largest that one can be, then the largest
    that one must be, told from a copy of its weights and ``norms`` [2, N] of the copy's error and
    of the rows: [.., 2 ceil(N / 16)]."""
    read = bundle(b, sig.activations)
    coded = dict(quantize_int8(b, read if sig.activations == "int8" else b["x"]))
    blocks = coded["q"].cast(FLOAT).reshape(-1, 32) * coded["scale"].reshape(-1, 1)
    q = _reshape(b, blocks, b.op("Shape", read, dtype=INT64))
    size, lost = _norm(b, read), _norm(b, read - q)
    n = (read.dim(-1).cast(FLOAT) * (2 + 1 / 32) + 16.0) * 2.0**-24
    gamma = n / (b.const(1.0) - n)
    both = size + lost
    error, norm = b["norms"].slice(0, 1, 0), b["norms"].slice(1, 2, 0)  # [1, N]
    slack = both * (gamma + 1.0) * error + (lost + gamma * both) * norm
    return _bounds(b, linear(b, q, sig.formats[0], "weight"), slack)


def split_bounds(b: Body, sig: OpSignature) -> Outputs:
    """The same of a linear layer in two parts, told from the first of them and ``norms`` [N] of the
    other's rows divided by ``spread`` [K]."""
    x = bundle(b, sig.activations)
    slack = _norm(b, x * b["spread"]) * b["norms"]
    return _bounds(b, linear(b, x, sig.formats[0], "weight"), slack)


def _bounds(b: Body, y: Val, slack: Val) -> Outputs:
    return [("bounds", b.concat([_most_of_16(b, y + slack), _most_of_16(b, y - slack)], -1))]


def _most_of_16(b: Body, x: Val) -> Val:
    """[.., N] -> [.., ceil(N / 16)], the largest of each 16."""
    n = x.dim(-1)
    zero, sixteen = b.const([0], INT64), b.const([16], INT64)
    left = b.op("Mod", sixteen - b.op("Mod", n, sixteen, dtype=INT64), sixteen, dtype=INT64)
    last = b.op("Pad", x, b.concat([zero, left], 0), b.const(float("-inf")), b.ints(-1))
    groups = _reshape(b, last, b.concat([_like(b, x), b.ints(16)], 0))
    return b.op("ReduceMax", groups, b.ints(-1), keepdims=0)


def screened_linear(b: Body, sig: OpSignature) -> Outputs:
    """The logits.  A step that asks only for each row's largest may leave minus infinity in place
    of those that ``bounds`` say are not it."""
    return [("y", linear(b, bundle(b, sig.activations), sig.formats[0], "weight"))]


def screened_split_linear(b: Body, sig: OpSignature) -> Outputs:
    """The same for weights in two parts, whose sum they are."""
    x = bundle(b, sig.activations)
    high = linear(b, x, sig.formats[0], "weight_high")
    return [("y", high + linear(b, x, sig.formats[1], "weight_low"))]


# --- norms -------------------------------------------------------------------------------------


def _rms_norm(b: Body, x: Val, weight: Val) -> Val:
    epsilon = Ref("epsilon", "float")
    return b.op("RMSNormalization", x, weight, axis=-1, epsilon=epsilon, stash_type=1)


def rms_norm_quantize(b: Body, sig: OpSignature) -> Outputs:
    return quantize_int8(b, _rms_norm(b, b["x"], b["weight"]))


def layer_norm_quantize(b: Body, sig: OpSignature) -> Outputs:
    epsilon = Ref("epsilon", "float")
    y = b.op("LayerNormalization", b["x"], b["weight"], b["bias"], axis=-1, epsilon=epsilon)
    return quantize_int8(b, y)


def _head_norm(b: Body, x: Val, weight: Val) -> Val:
    normed = _rms_norm(b, x.reshape(0, -1, weight.dim(0)), weight)  # [T, n, hd]
    return b.op("Reshape", normed, b.op("Shape", x, dtype=INT64))


def head_norm(b: Body, sig: OpSignature) -> Outputs:
    return [("y", _head_norm(b, b["x"], b["weight"]))]


# --- rotary embedding --------------------------------------------------------------------------


def rope_table(b: Body, sig: OpSignature) -> Outputs:
    angles = b["positions"].cast(FLOAT).unsqueeze(1) * b["inv_freq"]  # [T, rd/2]
    factor = b.attribute("factor", "float")
    return [("cos", b.op("Cos", angles) * factor), ("sin", b.op("Sin", angles) * factor)]


def _rope(b: Body, x: Val, cos: Val, sin: Val, heads: str) -> Val:
    """Rotate the first rd columns of every head; pairs are (2i, 2i+1) or (i, i + rd/2)."""
    n = b.attribute(heads, "int").reshape(1)
    half = cos.dim(1)
    rd = half * 2
    x3 = x.reshape(0, n, -1)  # [T, n, hd]
    interleaved = b.attribute("interleaved", "int").compare("Equal", 1)
    i = b.range(half)
    first = x3.gather(b.where(interleaved, i * 2, i, INT64), axis=2)
    second = x3.gather(b.where(interleaved, i * 2 + 1, i + half, INT64), axis=2)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    halves = b.concat([first * c - second * s, second * c + first * s], 2)
    j = b.range(rd)
    parity = b.op("Mod", j, b.const(2, INT64), dtype=INT64)
    rotated = halves.gather(b.where(interleaved, parity * half + j / 2, j, INT64), axis=2)
    rest = x3.slice(rd, 2**31 - 1, 2)
    return b.op("Reshape", b.concat([rotated, rest], 2), b.op("Shape", x, dtype=INT64))


def rope(b: Body, sig: OpSignature) -> Outputs:
    return [("y", _rope(b, b["x"], b["cos"], b["sin"], "num_heads"))]


# --- paged KV and attention --------------------------------------------------------------------


def _sequence_of_token(b: Body, tokens: Val) -> Val:
    """int64 [T]: the number of sequences that end at or before each token."""
    row = b.range(tokens.dim(0)).unsqueeze(1)
    ends = b["seq_starts"].slice(1, 2**31 - 1, 0)
    ended = row.compare("GreaterOrEqual", ends).cast(INT64)  # [T, S]
    return b.op("ReduceSum", ended, b.ints(1), keepdims=0, dtype=INT64)


def _cache_write(b: Body, cache: Val, x: Val, positions: Val) -> Val:
    size = b.attribute("block_size", "int")
    table = b["block_table"].gather(_sequence_of_token(b, positions))  # [T, B]
    column = (positions / size).unsqueeze(1)
    block = b.op("GatherElements", table, column, axis=1, dtype=INT64)  # [T, 1]
    offset = b.op("Mod", positions, size, dtype=INT64).unsqueeze(1)
    return b.op("ScatterND", cache, block * size + offset, x)


def cache_write(b: Body, sig: OpSignature) -> Outputs:
    return [("cache_out", _cache_write(b, b["cache"], b["x"], b["positions"]))]


def _paged_attention(b: Body) -> Val:
    """Token t of sequence s attends to positions 0 .. positions[t] of s, the last ``window`` of
    them if window > 0; slots beyond are never read as numbers (they may hold anything)."""
    q, positions = b["q"], b["positions"]
    size = b.attribute("block_size", "int")
    window = b.attribute("window", "int")
    heads = b.attribute("num_heads", "int").reshape(1)
    groups = b.attribute("kv_num_heads", "int").reshape(1)

    table = b["block_table"].gather(_sequence_of_token(b, positions))  # [T, B]
    offsets = b.range(size.reshape(1))
    slots = (table * size).unsqueeze(2) + offsets
    slots = slots.reshape(table.dim(0), -1)  # [T, L]
    key_position = b.range(slots.dim(1))  # [L]
    at = positions.unsqueeze(1)
    seen = key_position.compare("LessOrEqual", at)
    near = b.op("Or", window.compare("Equal", 0), key_position.compare("Greater", at - window))
    mask = b.op("And", seen, near, dtype=BOOL)  # [T, L]
    slots = b.where(mask, slots, 0, INT64)

    share = b.op("Div", heads, groups, dtype=INT64)
    queries = q.reshape(0, groups, share, -1)  # [T, G, H/G, hd]

    def cached(name: str) -> Val:
        rows = b[name].gather(slots)  # [T, L, G*hd]
        rows = b.where(mask.unsqueeze(2), rows, 0.0)
        return rows.reshape(0, 0, groups, -1).transpose(0, 2, 1, 3)  # [T, G, L, hd]

    keys = cached("k_cache").transpose(0, 1, 3, 2)
    scores = b.op("MatMul", queries, keys) * b.attribute("scale", "float")
    cap = b.attribute("softcap", "float")
    some = b.where(cap.compare("Greater", 0.0), cap, 1.0)
    scores = b.where(cap.compare("Greater", 0.0), b.op("Tanh", scores / some) * some, scores)
    scores = b.where(mask.unsqueeze(1, 2), scores, float("-inf"))
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), cached("v_cache"))
    return b.op("Reshape", mixed, b.op("Shape", q, dtype=INT64))


def paged_attention(b: Body, sig: OpSignature) -> Outputs:
    return [("y", _paged_attention(b))]


def paged_attention_quantize(b: Body, sig: OpSignature) -> Outputs:
    return _renamed(quantize_int8(b, _paged_attention(b)))


def qkv_rope_cache(b: Body, sig: OpSignature) -> Outputs:
    x = bundle(b, sig.activations)
    positions = b["positions"]
    q, k, v = (
        linear(b, x, format, f"weight_{name}", f"bias_{name}")
        for format, name in zip(sig.formats, "qkv", strict=True)
    )
    if "qknorm" in sig.variant:
        q, k = _head_norm(b, q, b["qnorm"]), _head_norm(b, k, b["knorm"])
    if "norope" not in sig.variant:
        q = _rope(b, q, b["cos"], b["sin"], "num_heads")
        k = _rope(b, k, b["cos"], b["sin"], "kv_num_heads")
    k_cache = _cache_write(b, b["k_cache"], k, positions)
    v_cache = _cache_write(b, b["v_cache"], v, positions)
    return [("q_out", q), ("k_cache_out", k_cache), ("v_cache_out", v_cache)]
