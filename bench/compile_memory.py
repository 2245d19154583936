"""Peak memory and time of compiling a 1.1B model with random weights (TinyLlama's shape, bf16).

``python bench/compile_memory.py [--target TARGET] [--layers N] [compile options]``: makes the model
itself, shard by shard, in a temporary folder (2.2 GB), compiles it in a child process, and prints
one JSON object:

* ``peak_rss_bytes``: largest resident size of any one process, which includes pages of mapped files
* ``peak_anonymous_bytes``: largest sum over the process tree of memory that is not a file's

The second is what the machine has to have; the first is bounded by it plus the model file.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).parent.parent))

from bench.needs import late, need

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = late("numpy")

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB, LAYERS = 2048, 5632, 32, 4, 32000, 22
HEAD_DIM = HIDDEN // HEADS
SHARD_BYTES = 500_000_000
CHUNK = 1 << 22  # elements made at a time

Shape = tuple[int, ...]


def tensors(layers: int) -> list[tuple[str, Shape]]:
    """Names and shapes as a Hugging Face Llama checkpoint has them."""
    kv = KV_HEADS * HEAD_DIM
    out: list[tuple[str, Shape]] = [("model.embed_tokens.weight", (VOCAB, HIDDEN))]
    for i in range(layers):
        p = f"model.layers.{i}."
        out += [
            (f"{p}input_layernorm.weight", (HIDDEN,)),
            (f"{p}self_attn.q_proj.weight", (HIDDEN, HIDDEN)),
            (f"{p}self_attn.k_proj.weight", (kv, HIDDEN)),
            (f"{p}self_attn.v_proj.weight", (kv, HIDDEN)),
            (f"{p}self_attn.o_proj.weight", (HIDDEN, HIDDEN)),
            (f"{p}post_attention_layernorm.weight", (HIDDEN,)),
            (f"{p}mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)),
            (f"{p}mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)),
            (f"{p}mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)),
        ]
    return [*out, ("model.norm.weight", (HIDDEN,)), ("lm_head.weight", (VOCAB, HIDDEN))]


def elements(shape: Shape) -> int:
    """How many elements a shape has."""
    return int(np.prod(shape))


def bf16(rng: np.random.Generator, shape: Shape) -> Iterator[npt.NDArray[np.uint16]]:
    """Random weights in chunks: norms near 1, matrices with the spread of a trained model's."""
    left = elements(shape)
    mean, spread = (1.0, 0.05) if len(shape) == 1 else (0.0, 0.02)
    while left:
        n = min(left, CHUNK)
        values = (mean + spread * rng.standard_normal(n, dtype=np.float32)).astype(np.float32)
        yield ((values.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
        left -= n


def make_model(folder: Path, layers: int) -> int:
    """Write a Hugging Face folder with sharded safetensors; the number of parameters."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_tokenizer(folder)
    shards: list[list[tuple[str, Shape]]] = [[]]
    for name, shape in tensors(layers):
        size = sum(2 * elements(s) for _, s in shards[-1])
        if shards[-1] and size + 2 * elements(shape) > SHARD_BYTES:
            shards.append([])
        shards[-1].append((name, shape))
    rng = np.random.default_rng(1)
    where: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        write_shard(folder / file, shard, rng)
        where.update(dict.fromkeys((name for name, _ in shard), file))
    total = sum(elements(s) for _, s in tensors(layers))
    index_file = {"metadata": {"total_size": 2 * total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file), encoding="utf-8")
    return total


def write_tokenizer(folder: Path) -> None:
    """A word-level tokenizer of the vocabulary's size: its content does not matter here."""
    vocab = {"<s>": 1, "</s>": 2, "<unk>": 0} | {f"w{i}": i for i in range(3, VOCAB)}
    need("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_shard(path: Path, shard: list[tuple[str, Shape]], rng: np.random.Generator) -> None:
    """One safetensors file, streamed."""
    header, at = {}, 0
    for name, shape in shard:
        end = at + 2 * elements(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, shape in shard:
            for chunk in bf16(rng, shape):
                f.write(chunk.tobytes())


def tree(pid: int) -> list[int]:
    """``pid`` and its descendants."""
    found = [pid]
    for p in found:
        try:
            children = Path(f"/proc/{p}/task/{p}/children").read_text(encoding="ascii")
        except OSError:
            continue
        found += [int(c) for c in children.split()]
    return found


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that no file backs; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return 1024 * sum(int(fields.get(k, "0").split()[0]) for k in ("RssAnon", "RssShmem"))


def measure(command: list[str]) -> dict[str, object]:
    """Run ``command``; exit code, wall time, peaks."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        peak = max(peak, sum(map(anonymous_bytes, tree(child.pid))))
        time.sleep(0.01)
    child.returncode = os.waitstatus_to_exitcode(status)
    return {
        "exit_code": child.returncode,
        "seconds": round(time.perf_counter() - start, 2),
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "peak_anonymous_bytes": peak,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="Other options go to `zerolayer compile`.",
    )
    parser.add_argument("--target", default="x86-64-v3", help="as of compile; default %(default)s")
    parser.add_argument("--layers", type=int, default=LAYERS, help="default %(default)s")
    arguments, more = parser.parse_known_args()
    options = ["--target", arguments.target, *more]
    need("zerolayer.compiler.cli")  # before the model is made
    with tempfile.TemporaryDirectory(prefix="compile-memory-") as name:
        model, out = Path(name, "tinyllama-shape"), Path(name, "out.zla")
        model.mkdir()
        parameters = make_model(model, arguments.layers)
        command = [sys.executable, "-c", "from zerolayer.compiler.cli import main; main()"]
        result = measure([*command, "compile", str(model), "-o", str(out), "--json", *options])
        size = out.stat().st_size if out.exists() else 0
    print(json.dumps({"parameters": parameters, "options": options, **result, "bytes": size}))
    return 0 if result["exit_code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
