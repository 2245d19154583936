"""The sweep's models: Llama shapes with random weights, as GGUF files without a tokenizer.

In: a shape and a format.  Out: a GGUF file.  Next file: ``prepare.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench.needs import late
from bench.sweep import SHAPES, Shape

if TYPE_CHECKING:
    import gguf
    import numpy as np
else:
    gguf, np = late("gguf"), late("numpy")


def names_and_shapes(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors as a GGUF file names them; the vocabulary's matrix serves both ends."""
    h, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    out: list[tuple[str, tuple[int, ...]]] = [("token_embd", (shape.vocabulary, h))]
    for i in range(shape.layers):
        out += [
            (f"blk.{i}.{name}", size)
            for name, size in (
                ("attn_norm", (h,)), ("attn_q", (h, h)), ("attn_k", (kv, h)), ("attn_v", (kv, h)),
                ("attn_output", (h, h)), ("ffn_norm", (h,)), ("ffn_gate", (shape.intermediate, h)),
                ("ffn_up", (shape.intermediate, h)), ("ffn_down", (h, shape.intermediate)),
            )
        ]  # fmt: skip
    return [*out, ("output_norm", (h,))]


def make(shape: Shape, kind: str, to: Path) -> None:
    """Write the model; matrices in the format ``kind``, norms near 1."""
    writer = gguf.GGUFWriter(to, "llama")
    writer.add_name(f"{shape.name}, random weights")
    writer.add_block_count(shape.layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.vocabulary)
    rng = np.random.default_rng(shape.hidden)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, size in names_and_shapes(shape):
        values = rng.standard_normal(size, dtype=np.float32)
        if len(size) == 1:
            writer.add_tensor(f"{name}.weight", 1 + np.float32(0.05) * values)
        else:
            raw = gguf.quantize(values * np.float32(size[1] ** -0.5), quantization)
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sweep_files() -> list[tuple[str, Shape, str]]:
    """(file, shape, format) of the models that only the sweep uses."""
    return [
        (file, shape, kind)
        for shape in SHAPES
        for kind, file in shape.files
        if file.startswith("sweep-")
    ]
