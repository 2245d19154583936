"""Bodies of Dequantize_F against the gguf package's own numbers."""

from __future__ import annotations

import gguf
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerolayer.compiler.graph import domain
from zerolayer.compiler.graph.execute import Executable, run
from zerolayer.compiler.passes.edit import domain_node, value_like

BLOCK_FORMATS = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
]  # fmt: skip


def model_of(format: str, row_bytes: int) -> ir.Model:
    raw = value_like("raw", ir.DataType.UINT8, ["N", row_bytes])
    node = domain_node(f"Dequantize_{format}", [raw], {}, "y")
    graph = ir.Graph([raw], node.outputs, nodes=[node], opset_imports={"": 24}, name="test")
    return domain.attach_functions(ir.Model(graph, ir_version=11))


def block(format: str) -> tuple[int, int]:
    elems, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]]
    return elems, size


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_body_equals_gguf_bit_for_bit(format: str, blocks: int) -> None:
    """Random bytes: every code, sub-scale and half, normal, subnormal, infinite and NaN."""
    elems, size = block(format)
    raw = np.random.default_rng(1).integers(0, 256, (64, blocks * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format])
    found = run(model_of(format, raw.shape[1]), {"raw": raw})["y"]
    assert found.shape == (64, blocks * elems)
    np.testing.assert_array_equal(found, expected)


def test_every_half_is_decoded_exactly() -> None:
    """All 65,536 scales, through Q8_0 blocks whose codes are 1."""
    raw = np.zeros((65536, 34), np.uint8)
    raw[:, :2] = np.arange(65536, dtype="<u2").view(np.uint8).reshape(-1, 2)
    raw[:, 2:] = 1
    expected = np.arange(65536, dtype="<u2").view("<f2").astype(np.float32)
    found = run(model_of("Q8_0", 34), {"raw": raw})["y"]
    np.testing.assert_array_equal(found, np.repeat(expected[:, None], 32, 1))


def upper_bits(block: bytes, i: int) -> float:
    nibble = block[2 + i % 16] >> 4 * (i // 16) & 15
    return (nibble << 2 | (block[18 + i % 8] >> 2 * (i // 8) & 3) << 6) - 126.5


def lower_bits(block: bytes, i: int) -> float:
    return (block[2 + i % 8] >> 2 * (i // 8) & 3) - 1.5


@pytest.mark.parametrize("format,size", [("Q8_HIGH", 26), ("Q8_LOW", 10)])
def test_halves_of_q8_0(format: str, size: int) -> None:
    """Random bytes of blocks with finite scales, against the bits taken one by one."""
    code = upper_bits if format == "Q8_HIGH" else lower_bits
    raw = np.random.default_rng(2).integers(0, 256, (16, 3 * size), dtype=np.uint8)
    raw.reshape(16, 3, size)[:, :, 1] &= 0xBF
    expected = [
        float(np.frombuffer(block[:2], "<f2")[0]) * code(block, i)
        for block in (bytes(b) for b in raw.reshape(48, size))
        for i in range(32)
    ]
    found = run(model_of(format, raw.shape[1]), {"raw": raw})["y"]
    np.testing.assert_array_equal(found, np.array(expected, np.float32).reshape(16, 96))


_SESSIONS: dict[str, Executable] = {}


@given(st.sampled_from(BLOCK_FORMATS), st.binary(min_size=210, max_size=210))
def test_any_bytes_of_a_block(format: str, data: bytes) -> None:
    _, size = block(format)
    raw = np.frombuffer(data, np.uint8)[None, :size]
    if format not in _SESSIONS:
        _SESSIONS[format] = Executable(model_of(format, size))
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format])
    np.testing.assert_array_equal(_SESSIONS[format].run({"raw": raw})["y"], expected)
