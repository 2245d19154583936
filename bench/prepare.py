"""The models that the comparison runs, in every format that a peer reads.

``python -m bench.prepare --peers DIR [--only WORD ...]``: fills ``DIR/models``; what is there
already stays.  In: the demo model and, for each conversion, the virtual environment that converts
(``docs/performance.md`` has the commands that make them); what has none is named and left out.
Out: GGUF files, Hugging Face folders, OpenVINO and ONNX Runtime folders.  Next file: ``matrix.py``.

SmolLM2's other formats are made from its 4-bit file, so that only speed can be compared, not
quality; the 1.1B model has TinyLlama's shape, random weights and SmolLM2's first 32000 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from bench import compile_memory as tiny
from bench import sweep_models
from bench.matrix import CONVERTERS, PEERS
from bench.needs import late, need
from bench.sweep import Shape

if TYPE_CHECKING:
    import gguf
    import numpy as np
    import numpy.typing as npt
else:
    gguf, np = late("gguf"), late("numpy")

Array: TypeAlias = "npt.NDArray[Any]"
QUANTIZE = """
import sys, llama_cpp as l
p = l.llama_model_quantize_default_params()
p.ftype, p.nthread, p.allow_requantize = int(sys.argv[3]), 2, True
sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))
"""
FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q4_k_m": 15, "bf16": 32}  # llama.h, llama_ftype
OPENVINO = {
    "ov-smollm2-int4": ("smollm2-hf", "int4", "--group-size", "32", "--ratio", "1.0"),
    "ov-smollm2-int8": ("smollm2-hf", "int8"),
    "ov-smollm2-fp16": ("smollm2-hf", "fp16"),
    "ov-tinyllama-int4": ("tinyllama-hf", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"),
    "ov-tinyllama-int8": ("tinyllama-hf", "int8"),
    "ov-tinyllama-fp16": ("tinyllama-hf", "fp16"),
}
ORT_OPTIONS = ("int4_block_size=32", "int4_accuracy_level=4")
ORT = {
    "ort-smollm2-int4": ("smollm2-hf", "int4_is_symmetric=false"),
    "ort-tinyllama-int4": ("tinyllama-hf",),
}


@dataclass(frozen=True)
class Product:
    """A file or folder under ``models``; ``make`` writes it to the path it is given."""

    name: str
    needs: str  # another product
    python: str  # the environment that makes it, "" for this one
    make: Callable[[Path, Path], None]


def products(peers: Path) -> list[Product]:
    """All of them, each after what it is made from."""
    out = [Product("smollm2-135m-q4_1.gguf", "", "", lambda _source, to: demo_model(to))]
    for kind in ("q4_0", "q8_0", "bf16"):
        out.append(quantized(peers, "smollm2-135m-q4_1.gguf", f"smollm2-135m-{kind}.gguf", kind))
    out.append(Product("smollm2-hf", "smollm2-135m-q4_1.gguf", "", smollm2_folder))
    out.append(Product("tinyllama-hf", "smollm2-135m-q4_1.gguf", "", tinyllama_folder))
    out.append(Product("tinyllama-bf16.gguf", "tinyllama-hf", "", tinyllama_gguf))
    for kind in ("q4_0", "q4_k_m", "q8_0"):
        out.append(quantized(peers, "tinyllama-bf16.gguf", f"tinyllama-{kind}.gguf", kind))
    for name, shape, kind in sweep_models.sweep_files():
        out.append(Product(name, "", "", sweep_model(shape, kind)))
    for name, (source, *options) in OPENVINO.items():
        out.append(Product(name, source, "venv-conv-ov", openvino(peers, options)))
    for name, (source, *options) in ORT.items():
        out.append(Product(name, source, "venv-conv-ort", onnxruntime(peers, options)))
    return out


def sweep_model(shape: Shape, kind: str) -> Callable[[Path, Path], None]:
    """A model of the fusion sweep."""
    return lambda _source, to: sweep_models.make(shape, kind, to)


def run(*command: str | Path) -> None:
    """A conversion, at the lowest priority; its output goes to stderr."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    nice = ("nice", "-n", "19", *map(str, command))
    subprocess.run(nice, check=True, stdout=sys.stderr, env=os.environ | offline)


def quantized(peers: Path, source: str, name: str, kind: str) -> Product:
    """A GGUF file in another format, by llama.cpp."""

    def make(path: Path, to: Path) -> None:
        python = peers / "venv-llamacpp" / "bin" / "python"
        run(python, "-c", QUANTIZE, path, to, str(FILE_TYPES[kind]))

    return Product(name, source, "venv-llamacpp", make)


def openvino(peers: Path, options: list[str]) -> Callable[[Path, Path], None]:
    """An OpenVINO folder, by optimum-intel."""

    def make(path: Path, to: Path) -> None:
        tool = peers / "venv-conv-ov" / "bin" / "optimum-cli"
        task = ("--task", "text-generation-with-past", "--weight-format", *options)
        run(tool, "export", "openvino", "-m", path, *task, to)

    return make


def onnxruntime(peers: Path, options: list[str]) -> Callable[[Path, Path], None]:
    """An ONNX Runtime GenAI folder, by its own builder."""

    def make(path: Path, to: Path) -> None:
        python = peers / "venv-conv-ort" / "bin" / "python"
        builder = (python, "-m", "onnxruntime_genai.models.builder", "-m", "local", "-i", path)
        extra = ("--extra_options", *ORT_OPTIONS, *options)
        run(*builder, "-o", to, "-p", "int4", "-e", "cpu", "-c", to.with_suffix(".cache"), *extra)

    return make


def demo_model(to: Path) -> None:
    """The demo model's GGUF file."""
    from zerolayer.compiler.demo import fetch_demo_model

    shutil.copyfile(fetch_demo_model(), to)


def tokens_of(path: Path) -> tuple[list[str], list[int], list[tuple[str, str]]]:
    """Tokens, their types and the merges of a GGUF file with a byte-level tokenizer."""
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    return tokens, types, [(a, b) for a, b in merges]


def write_tokenizer(source: Path, folder: Path, size: int) -> None:
    """The first ``size`` tokens of the GGUF file's byte-level tokenizer as Hugging Face files."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types, merges = tokens_of(source)
    tokens = tokens[:size]
    known = set(tokens)
    kept = [(a, b) for a, b in merges if {a, b, a + b} <= known]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, kept))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=False) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[1],
    }
    settings |= {"eos_token": tokens[2], "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def halves(matrix: Array, heads: int) -> Array:
    """Rows of q or k from GGUF's order (pairs of the rotation adjacent) to Hugging Face's."""
    rows, columns = matrix.shape
    out: Array = (
        matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, -1)
    )
    return out


def pairs(matrix: Array, heads: int) -> Array:
    """The inverse of :func:`halves`."""
    rows, columns = matrix.shape
    out: Array = (
        matrix.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, -1)
    )
    return out


def smollm2_folder(source: Path, to: Path) -> None:
    """The GGUF file's weights, decoded to bf16, as a Hugging Face folder."""
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(source)
    number = {
        k.removeprefix("llama."): f.contents()
        for k, f in reader.fields.items()
        if k.startswith("llama.")
    }
    heads, kv_heads = number["attention.head_count"], number["attention.head_count_kv"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, number["block_count"])
    ours = {names.get_name(n, (".weight",)): n for n, _ in tiny.tensors(number["block_count"])}
    tensors = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            array = halves(array, heads if ".attn_q." in tensor.name else kv_heads)
        value = torch.from_numpy(np.ascontiguousarray(array, np.float32)).bfloat16()
        tensors[ours[tensor.name]] = value
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number["embedding_length"],
        "intermediate_size": number["feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": number["block_count"],
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "max_position_embeddings": number["context_length"],
        "rms_norm_eps": number["attention.layer_norm_rms_epsilon"],
        "rope_theta": number["rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    to.mkdir()
    (to / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(source, to, config["vocab_size"])


def tinyllama_folder(source: Path, to: Path) -> None:
    """TinyLlama's shape with random weights, as a Hugging Face folder."""
    to.mkdir()
    tiny.make_model(to, tiny.LAYERS)
    write_tokenizer(source, to, tiny.VOCAB)


def tinyllama_gguf(source: Path, to: Path) -> None:
    """The Hugging Face folder as llama.cpp's converter would write it, bf16."""
    import torch
    from safetensors import safe_open

    writer = gguf.GGUFWriter(to, "llama")
    writer.add_name("TinyLlama-1.1B shape, random weights")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(tiny.LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(tiny.HIDDEN)
    writer.add_feed_forward_length(tiny.INTERMEDIATE)
    writer.add_head_count(tiny.HEADS)
    writer.add_head_count_kv(tiny.KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(tiny.HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(tiny.VOCAB)
    tokens, types, merges = tokens_of(source.parent / "smollm2-135m-q4_1.gguf")
    tokens, known = tokens[: tiny.VOCAB], set(tokens[: tiny.VOCAB])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types[: tiny.VOCAB])
    writer.add_token_merges([f"{a} {b}" for a, b in merges if {a, b, a + b} <= known])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, tiny.LAYERS)
    where = json.loads((source / "model.safetensors.index.json").read_text(encoding="utf-8"))
    for name, file in where["weight_map"].items():
        with safe_open(source / file, "pt") as tensors:
            tensor = tensors.get_tensor(name)
        target = str(names.get_name(name, (".weight",)))
        if tensor.ndim == 1:
            writer.add_tensor(target, tensor.float().numpy())
            continue
        array = tensor.view(torch.uint16).numpy()
        if "q_proj" in name or "k_proj" in name:
            array = pairs(array, tiny.HEADS if "q_proj" in name else tiny.KV_HEADS)
        raw = np.ascontiguousarray(array).view(np.uint8)
        writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def install(peers: Path) -> None:
    """The environments that are not there; one that fails is named by pip and left out."""
    wanted = {p.venv: (p.install, dict(p.environment)) for p in PEERS.values() if p.install}
    wanted |= {venv: (packages, {}) for venv, packages in CONVERTERS.items()}
    for venv, (packages, environment) in wanted.items():
        if (peers / venv).exists():
            continue
        subprocess.run([sys.executable, "-m", "venv", str(peers / venv)], check=True)
        command = [str(peers / venv / "bin" / "python"), "-m", "pip", "install", "-q"]
        # torch first, on its own: where a CPU build is configured, the others then keep it
        torch = [p for p in packages if p.startswith("torch==")]
        others = [p for p in packages if not p.startswith("torch==")]
        for part in filter(None, (torch, others)):
            done = subprocess.run([*command, *part], env=os.environ | environment, check=False)
            if done.returncode:
                shutil.rmtree(peers / venv)
                break


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True, help="folder of the peers' venvs")
    parser.add_argument("--only", nargs="*", default=[], help="products whose name has a WORD")
    parser.add_argument("--install", action="store_true", help="make missing environments first")
    arguments = parser.parse_args()
    need("gguf")  # now, not after the environments were made
    peers = arguments.peers.resolve()
    if arguments.install:
        peers.mkdir(parents=True, exist_ok=True)
        install(peers)
    models = peers / "models"
    models.mkdir(parents=True, exist_ok=True)
    left_out = []
    for product in products(peers):
        path = models / product.name
        if path.exists() or not (
            not arguments.only or any(word in product.name for word in arguments.only)
        ):
            continue
        source = models / product.needs
        if product.python and not (peers / product.python).is_dir():
            left_out.append(f"{product.name}: no {product.python}")
            continue
        if not source.exists():
            left_out.append(f"{product.name}: no {product.needs}")
            continue
        unfinished = models / f"unfinished-{product.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.unlink(missing_ok=True)
        try:
            product.make(source, unfinished)
        except (subprocess.CalledProcessError, OSError) as error:
            left_out.append(f"{product.name}: {error}")
            continue
        unfinished.rename(path)
        print(f"made {path}", flush=True)
    for line in left_out:
        print(f"left out {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
