"""Bodies of the zerolayer operators against plain loops over tokens, heads and positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from zerolayer.compiler.graph import domain
from zerolayer.compiler.graph.check import check_graph
from zerolayer.compiler.graph.execute import run
from zerolayer.compiler.passes.edit import Attribute, domain_node, value_like
from zerolayer.runtime_stub.errors import UnsupportedError

Arrays = Mapping[str, np.ndarray]
rng = np.random.default_rng(7)


def execute(
    op_type: str, feeds: Arrays, attributes: Mapping[str, Attribute] | None = None
) -> list[np.ndarray]:
    """One operator as a whole model, inputs by role; a role without a feed is absent."""
    roles = [r.rstrip("?") for r in domain.input_names(op_type)]
    assert set(feeds) <= set(roles)
    values: list[ir.Value | None] = []
    for role in roles:
        if role not in feeds:
            values.append(None)
            continue
        dtype = ir.DataType.from_numpy(feeds[role].dtype)
        values.append(value_like(role, dtype, list(feeds[role].shape)))
    node = domain_node(op_type, values, attributes or {}, "out")
    given = [v for v in values if v is not None]
    graph = ir.Graph(given, node.outputs, nodes=[node], opset_imports={"": 24}, name="test")
    model = domain.attach_functions(ir.Model(graph, ir_version=11))
    check_graph(model, infer=True)
    results = run(model, feeds)
    found = [results[v.name or ""] for v in node.outputs]
    for value, array in zip(node.outputs, found, strict=True):  # the shape rule told the truth
        assert value.dtype == ir.DataType.from_numpy(array.dtype)
        assert value.shape is not None and tuple(value.shape.numpy()) == array.shape
    return found


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def int8_of(x: np.ndarray) -> list[np.ndarray]:
    """The definition of an int8 bundle, block by block."""
    t, k = x.shape
    q = np.zeros((t, k), np.int8)
    scale = np.zeros((t, k // 32), np.float32)
    sums = np.zeros((t, k // 16), np.float32)
    for i in range(t):
        for b in range(k // 32):
            block = x[i, 32 * b : 32 * b + 32]
            s = np.float32(np.abs(block).max() / np.float32(127))
            scale[i, b] = s
            if s >= np.finfo(np.float32).tiny:
                q[i, 32 * b : 32 * b + 32] = np.rint(block * (np.float32(1) / s))
            for h in range(2):
                at = 32 * b + 16 * h
                sums[i, 2 * b + h] = s * np.float32(q[i, at : at + 16].astype(np.int32).sum())
    return [q, scale, sums]


def value_of(activations: str, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Feeds of an activation bundle, and the float32 numbers that they stand for."""
    if activations == "int8":
        q, scale, sums = int8_of(x)
        return {"q": q, "scale": scale, "sums": sums}, q * np.repeat(scale, 32, axis=1)
    if activations == "bf16":
        return {"x": x}, x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return {"x": x}, x


def weight(format: str, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """A stored weight and its float32 values, both from the gguf package."""
    w = normal(n, k)
    if format == "F32":
        return w, w
    if format == "F16":
        return w.astype(np.float16), w.astype(np.float16).astype(np.float32)
    if format == "BF16":
        b = w.astype(ml_dtypes.bfloat16)
        return b, b.astype(np.float32)
    kind = gguf.GGMLQuantizationType[format]
    raw = gguf.quants.quantize(w, kind)
    return raw, gguf.quants.dequantize(raw, kind)


def close(found: np.ndarray, expected: Any, tolerance: float = 2e-6) -> None:
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * max(1.0, float(np.abs(expected).max()))


def test_quantize_int8_is_exact() -> None:
    x = normal(5, 96) * np.array([[1], [1e-3], [1e4], [0], [1]], np.float32)
    x[4, :32] = 0
    x[0, :4] = [127, 0.5, 1.5, -2.5]  # ties go to the even neighbour
    x[0, 4:32] = 0
    found = execute("QuantizeInt8", {"x": x})
    expected = int8_of(x)
    assert list(found[0][0, :4]) == [127, 0, 2, -2]
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    close(found[2], expected[2])


def test_gather_int8_picks_rows_of_the_bundle() -> None:
    bundle = dict(zip(("q", "scale", "sums"), int8_of(normal(5, 96)), strict=True))
    rows = [4, 0, 0, 3]
    found = execute("GatherInt8", {**bundle, "indices": np.array(rows, np.int64)})
    for got, whole in zip(found, bundle.values(), strict=True):
        np.testing.assert_array_equal(got, whole[rows])


def test_quantize_int8_of_three_dimensions() -> None:
    x = normal(2, 3, 64)
    found = execute("QuantizeInt8", {"x": x})
    expected = int8_of(x.reshape(6, 64))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b.reshape(2, 3, -1), rtol=1e-6)


@pytest.mark.parametrize("activations", domain.ACTIVATIONS)
@pytest.mark.parametrize("format", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q5_1"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(format: str, activations: str, bias: bool) -> None:
    feeds, x = value_of(activations, normal(3, 64))
    raw, w = weight(format, 7, 64)
    b = normal(7)
    expected = x.astype(np.float64) @ w.T.astype(np.float64) + (b if bias else 0)
    optional = {"bias": b} if bias else {}
    close(
        execute(f"Linear_{format}_{activations}", {**feeds, "weight": raw, **optional})[0], expected
    )
    residual = normal(3, 7)
    feeds = {**feeds, "weight": raw, "residual": residual, **optional}
    close(execute(f"LinearAdd_{format}_{activations}", feeds)[0], residual + expected)


def test_linear_of_three_dimensions() -> None:
    x, w = normal(2, 3, 8), normal(5, 8)
    close(execute("Linear_F32_f32", {"x": x, "weight": w})[0], x @ w.T)


ACTIVATE: dict[str, Any] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
}


@pytest.mark.parametrize("activation", ACTIVATE)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_and_activated_linear(activation: str, bias: bool) -> None:
    feeds, x = value_of("int8", normal(3, 64))
    (raw_g, g), (raw_u, u) = weight("Q4_1", 32, 64), weight("Q4_1", 32, 64)
    bg, bu = normal(32), normal(32)
    gate = torch.from_numpy(x @ g.T + (bg if bias else 0))
    act = ACTIVATE[activation](gate.float()).numpy()
    expected = act * (x @ u.T + (bu if bias else 0))
    weights = {"weight_gate": raw_g, "weight_up": raw_u}
    biases = {"bias_gate": bg, "bias_up": bu} if bias else {}
    attributes = {"activation": activation}
    found = execute("GatedLinear_Q4_1_int8", {**feeds, **weights, **biases}, attributes)[0]
    close(found, expected)
    q = execute("GatedLinearQuantizeInt8_Q4_1_int8", {**feeds, **weights, **biases}, attributes)
    for a, b in zip(q, int8_of(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    plain = {**feeds, "weight": raw_g, **({"bias": bg} if bias else {})}
    close(execute("ActLinear_Q4_1_int8", plain, attributes)[0], act)


@pytest.mark.parametrize("format", ["F32", "BF16", "Q8_0", "Q4_0"])
def test_embed(format: str) -> None:
    raw, w = weight(format, 11, 32)
    tokens = np.array([3, 0, 10, 3])
    found = execute(f"Embed_{format}", {"tokens": tokens, "weight": raw}, {"scale": 8.5})[0]
    np.testing.assert_array_equal(found, w[tokens] * np.float32(8.5))


def test_norms() -> None:
    x, w, b = normal(3, 64) * 3, normal(64), normal(64)
    rms = torch.nn.functional.rms_norm(
        torch.from_numpy(x), (64,), torch.from_numpy(w), 1e-3
    ).numpy()
    layer = torch.nn.functional.layer_norm(
        torch.from_numpy(x), (64,), torch.from_numpy(w), torch.from_numpy(b), 1e-3
    ).numpy()
    for op_type, feeds, y in (
        ("RmsNormQuantizeInt8", {"x": x, "weight": w}, rms),
        ("LayerNormQuantizeInt8", {"x": x, "weight": w, "bias": b}, layer),
        ("LayerNormQuantizeInt8", {"x": x, "weight": w}, layer - b),
    ):
        q, scale, _ = execute(op_type, feeds, {"epsilon": 1e-3})
        np.testing.assert_allclose(scale, int8_of(y)[1], rtol=1e-5)
        assert np.abs(q.astype(int) - int8_of(y)[0]).max() <= 1  # x / scale on a rounding boundary
    heads = execute("HeadNorm", {"x": x, "weight": w[:16]}, {"num_heads": 4, "epsilon": 1e-3})[0]
    by_head = torch.nn.functional.rms_norm(
        torch.from_numpy(x).reshape(3, 4, 16), (16,), torch.from_numpy(w[:16]), 1e-3
    )
    close(heads, by_head.reshape(3, 64).numpy())


def test_softcap() -> None:
    x = normal(3, 5) * 40
    close(execute("Softcap", {"x": x}, {"cap": 30.0})[0], 30 * np.tanh(x / 30))


# --- rope ----------------------------------------------------------------------------------------


def rotate(x: np.ndarray, positions: np.ndarray, freq: np.ndarray, heads: int,
           interleaved: bool, factor: float) -> np.ndarray:  # fmt: skip
    """Pair by pair, with complex numbers."""
    out = x.astype(np.float64).reshape(len(x), heads, -1).copy()
    half = len(freq)
    for t, p in enumerate(positions):
        for i, f in enumerate(freq):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            for h in range(heads):
                z = complex(out[t, h, a], out[t, h, b]) * factor * np.exp(1j * float(p) * float(f))
                out[t, h, a], out[t, h, b] = z.real, z.imag
    rotated: np.ndarray = out.reshape(x.shape)
    return rotated


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rotary_dim", [16, 8, 6])
def test_rope(interleaved: int, rotary_dim: int) -> None:
    positions = np.array([0, 1, 17, 4])
    freq = (10000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)
    cos, sin = execute("RopeTable", {"positions": positions, "inv_freq": freq}, {"factor": 1.25})
    x = normal(4, 3 * 16)
    feeds = {"x": x, "cos": cos, "sin": sin}
    found = execute("Rope", feeds, {"num_heads": 3, "interleaved": interleaved})[0]
    close(found, rotate(x, positions, freq, 3, bool(interleaved), 1.25), 1e-5)


# --- paged KV ------------------------------------------------------------------------------------

BLOCK = 4


class Batch:
    """A ragged batch whose sequences own scrambled blocks of a cache full of other data."""

    def __init__(self, counts: list[int], starts: list[int], width: int) -> None:
        total = [a + n for a, n in zip(starts, counts, strict=True)]
        columns = -(-max(total) // BLOCK) + 1
        n_blocks = len(counts) * columns + 3
        ids = np.random.default_rng(len(counts)).permutation(n_blocks)
        self.table = ids[: len(counts) * columns].reshape(len(counts), columns).astype(np.int64)
        self.positions = np.concatenate(
            [np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)]
        ).astype(np.int64)
        self.seq_starts = np.cumsum([0, *counts]).astype(np.int64)
        self.sequence = np.repeat(np.arange(len(counts)), counts)
        self.k, self.v = normal(n_blocks * BLOCK, width), normal(n_blocks * BLOCK, width)

    def slot(self, sequence: int, position: int) -> int:
        return int(self.table[sequence, position // BLOCK]) * BLOCK + position % BLOCK

    @property
    def step(self) -> dict[str, np.ndarray]:
        return {
            "positions": self.positions, "seq_starts": self.seq_starts, "block_table": self.table
        }  # fmt: skip


BATCHES = {
    "prefill": ([5], [0]),
    "decode": ([1, 1, 1], [0, 6, 11]),
    "ragged": ([3, 1, 6], [2, 9, 0]),
    "empty-sequence": ([2, 0, 3], [1, 4, 0]),
}


def attend(q: np.ndarray, batch: Batch, heads: int, groups: int, scale: float, softcap: float,
           window: int) -> np.ndarray:  # fmt: skip
    out = np.zeros(q.shape)
    hd = q.shape[1] // heads
    for t, (s, p) in enumerate(zip(batch.sequence, batch.positions, strict=True)):
        first = max(0, p - window + 1) if window else 0
        slots = [batch.slot(int(s), j) for j in range(first, p + 1)]
        for h in range(heads):
            g = h // (heads // groups)
            k = batch.k[slots, g * hd : (g + 1) * hd].astype(np.float64)
            v = batch.v[slots, g * hd : (g + 1) * hd].astype(np.float64)
            scores = k @ q[t, h * hd : (h + 1) * hd] * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            e = np.exp(scores - scores.max())
            out[t, h * hd : (h + 1) * hd] = (e / e.sum()) @ v
    return out


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (0, 2.0), (1, 1.5)])
def test_paged_attention(batch: str, heads: int, groups: int, window: int, softcap: float) -> None:
    b = Batch(*BATCHES[batch], groups * 8)
    q = normal(len(b.positions), heads * 8) * 2
    feeds = {"q": q, "k_cache": b.k, "v_cache": b.v, **b.step}
    attributes: dict[str, Attribute] = {
        "num_heads": heads, "kv_num_heads": groups, "scale": 0.4, "softcap": softcap,
        "window": window, "block_size": BLOCK,
    }  # fmt: skip
    found = execute("PagedAttention", feeds, attributes)[0]
    close(found, attend(q, b, heads, groups, 0.4, softcap, window), 1e-5)


def test_paged_attention_never_reads_what_it_does_not_see() -> None:
    """Slots after a position, and block ids beyond it, may hold anything at all."""
    b = Batch([2, 1], [3, 0], 16)
    q = normal(3, 16)
    attributes: dict[str, Attribute] = {
        "num_heads": 2, "kv_num_heads": 2, "scale": 0.4, "softcap": 0.0, "window": 0,
        "block_size": BLOCK,
    }  # fmt: skip
    expected = attend(q, b, 2, 2, 0.4, 0.0, 0)
    seen = {b.slot(0, j) for j in range(5)} | {b.slot(1, 0)}
    for slot in set(range(len(b.k))) - seen:
        b.k[slot], b.v[slot] = np.nan, np.inf
    b.table[0, 2:], b.table[1, 1:] = -5, 10**12
    feeds = {"q": q, "k_cache": b.k, "v_cache": b.v, **b.step}
    close(execute("PagedAttention", feeds, attributes)[0], expected, 1e-5)


def test_paged_attention_quantize() -> None:
    b = Batch([3], [2], 64)
    q = normal(3, 64)
    attributes: dict[str, Attribute] = {
        "num_heads": 2, "kv_num_heads": 2, "scale": 0.2, "softcap": 0.0, "window": 0,
        "block_size": BLOCK,
    }  # fmt: skip
    feeds = {"q": q, "k_cache": b.k, "v_cache": b.v, **b.step}
    plain = execute("PagedAttention", feeds, attributes)[0]
    found = execute("PagedAttentionQuantizeInt8", feeds, attributes)
    for a, c in zip(found, int8_of(plain), strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", BATCHES)
def test_cache_write(batch: str) -> None:
    b = Batch(*BATCHES[batch], 24)
    x = normal(len(b.positions), 24)
    expected = b.k.copy()
    for t, (s, p) in enumerate(zip(b.sequence, b.positions, strict=True)):
        expected[b.slot(int(s), int(p))] = x[t]
    attributes: dict[str, Attribute] = {"block_size": BLOCK, "role": "k", "kv_num_heads": 3}
    found = execute("CacheWrite", {"cache": b.k, "x": x, **b.step}, attributes)[0]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_qkv_rope_cache(norm: bool, rope: bool, bias: bool) -> None:
    heads, groups, hd, eps = 4, 2, 16, 1e-3
    b = Batch([3, 1], [2, 5], groups * hd)
    feeds, x = value_of("int8", normal(4, 64))
    freq = (100.0 ** (-np.arange(0, hd, 2) / hd)).astype(np.float32)
    angles = b.positions[:, None].astype(np.float32) * freq
    made: dict[str, np.ndarray] = {}
    for name, n, format in (("q", heads, "Q4_1"), ("k", groups, "Q8_0"), ("v", groups, "Q5_0")):
        raw, w = weight(format, n * hd, 64)
        y = x @ w.T
        feeds[f"weight_{name}"] = raw
        if bias:
            feeds[f"bias_{name}"] = normal(n * hd)
            y = y + feeds[f"bias_{name}"]
        if norm and name != "v":
            scale = normal(hd)
            feeds[f"{name}norm"] = scale
            y3 = y.reshape(4, n, hd)
            y = (y3 / np.sqrt((y3**2).mean(-1, keepdims=True) + eps) * scale).reshape(4, -1)
        if rope and name != "v":
            y = rotate(y, b.positions, freq, n, False, 1.0)
        made[name] = y
    k, v = b.k.copy(), b.v.copy()
    for t, (s, p) in enumerate(zip(b.sequence, b.positions, strict=True)):
        k[b.slot(int(s), int(p))], v[b.slot(int(s), int(p))] = made["k"][t], made["v"][t]
    if rope:
        feeds |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    feeds |= {"k_cache": b.k, "v_cache": b.v, **b.step}
    variant = "_".join(n for n, on in (("qknorm", norm), ("norope", not rope)) if on)
    name = domain.op_name("QkvRopeCache", ("Q4_1", "Q8_0", "Q5_0"), "int8", variant)
    attributes: dict[str, Attribute] = {
        "num_heads": heads, "kv_num_heads": groups, "head_dim": hd, "interleaved": 0,
        "epsilon": eps, "block_size": BLOCK,
    }  # fmt: skip
    found = execute(name, feeds, attributes)
    for a, c in zip(found, (made["q"], k, v), strict=True):
        close(a, c, 1e-5)


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", domain.OPERATORS)
def test_every_name_comes_back_and_has_a_body(base: str) -> None:
    operator = domain.OPERATORS[base]
    formats = ["Q4_K", "IQ4_NL", "F16"][: len(operator.weights)]
    if operator.shared_format:
        formats = ["Q5_1", "Q5_1"]
    kinds = domain.ACTIVATIONS if operator.has_activations else ("",)
    variants = ("", "qknorm", "norope", "qknorm_norope") if base == "QkvRopeCache" else ("",)
    for kind in kinds:
        for variant in variants:
            name = domain.op_name(base, formats, kind, variant)
            assert domain.parse(name) == domain.OpSignature(base, tuple(formats), kind, variant)
            body = domain.function(name)
            assert {n.domain for n in body} <= {"", "ai.onnx"}
            assert [v.name for v in body.inputs] == [
                r.rstrip("?") for r in domain.input_names(name)
            ]
            assert set(body.attributes) == {n for n, _ in operator.attributes}
            schemas = {n.op_type for n in body}
            for op_type in schemas:
                onnx.defs.get_schema(op_type, domain.OPSET)


@pytest.mark.parametrize(
    "name",
    ["Linear", "Linear_Q4_1", "Linear_Q4_1_int4", "Linear_Q9_0_f32", "Linear_Q4_1_int8_x", "Nope",
     "Rope_F32", "QkvRopeCache_Q4_1_Q4_1_int8", "GatedLinear_Q4_1_Q4_0_int8", "", "_", "Softcap_"],
)  # fmt: skip
def test_unknown_names_are_refused(name: str) -> None:
    if name == "Softcap_":
        name = "Softcap_x"
    with pytest.raises(UnsupportedError) as error:
        domain.parse(name)
    assert name in error.value.what


def test_math_of_the_test_itself() -> None:
    """int8_of bounds its error by half a step, so a bundle stands for nearly its input."""
    x = normal(4, 64)
    q, scale, _ = int8_of(x)
    assert np.abs(q * np.repeat(scale, 32, 1) - x).max() <= scale.max() / 2 * (1 + 1e-5)
    assert math.isclose(float(np.abs(q).max()), 127)
