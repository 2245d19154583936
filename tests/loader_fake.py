"""A small artifact whose kernels are ``loader_engine.c``, written by the real writer.

The loader's tests run it as users run a real one.  ``expected`` computes its tokens in Python.
Vocabulary: 256 bytes, then ``<bos>``, ``<eos>``, ``<user>``.
"""

from __future__ import annotations

import ctypes
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from zerolayer.compiler.artifact.loader_sources import loader_members
from zerolayer.compiler.artifact.vendor import collect_vendor
from zerolayer.compiler.artifact.writer import WeightEntry, write_artifact
from zerolayer.runtime_stub import ceilings, driver_cpu, laps

VOCAB, BOS, EOS, USER = 259, 256, 257, 258
WEIGHT_BYTE = 42
MAX_CONTEXT = 128
BLOCK_BYTES = 64
TEMPLATE = (
    "{%- for m in messages %}{% if m['role'] == 'system' %}[{{ m['content'] }}]{% else %}"
    "<user>{{ m['content'] }}{% endif %}{% endfor %}"
)


def expected(
    prompt: Sequence[int], count: int, seed: int | None = None, stop: Sequence[int] = ()
) -> list[int]:
    """The fake model's tokens; ``seed`` when sampled."""
    mask, out = (1 << 64) - 1, list[int]()
    for draw in range(count):
        h = ((14695981039346656037 ^ WEIGHT_BYTE) * 1099511628211) & mask
        mixed = [*prompt, *out] + ([] if seed is None else [seed, draw])
        for x in mixed:
            h = ((h ^ x) * 1099511628211) & mask
        token = (h >> 20) % VOCAB
        if token in stop:
            break
        out.append(token)
    return out


STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "zl_module_info": driver_cpu.ModuleInfo,
    "zl_sampling": driver_cpu.Sampling,
    "zl_batch": driver_cpu.Batch,
    "zl_create_args": driver_cpu.CreateArgs,
    "zl_decoding": driver_cpu.Decoding,
    "zl_lap": laps.CLap,
    "zl_ceilings": ceilings.CCeilings,
}


@cache
def engine_code(*defines: str) -> bytes:
    """The shared object of ``loader_engine.c``, compiled once per test run; with ``WITHOUT_TRACE``
    it lacks the functions that an older code object lacks.

    Its symbol ``layout`` holds the size of each of STRUCTURES and the offset of each field, as the
    C compiler sees them.
    """
    here = Path(__file__).parent
    layout = []
    for name, structure in STRUCTURES.items():
        layout.append(f"sizeof({name})")
        layout += [f"offsetof({name}, {field[0]})" for field in structure._fields_]
    with tempfile.TemporaryDirectory() as folder:
        out, header = Path(folder) / "engine.so", Path(folder) / "layout.h"
        array = f"unsigned long layout[] = {{{', '.join(layout)}}};"
        header.write_text(f'#include <stddef.h>\n#include "zl_abi.h"\n{array}\n')
        subprocess.run(
            [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.17",
             "-mcpu=x86_64_v3", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra",
             "-Werror", *(f"-D{d}" for d in defines), f"-I{here.parent / 'templates' / 'cpu'}",
             "-include", str(header), "-o", str(out), str(here / "loader_engine.c")],
            check=True,
        )  # fmt: skip
        return out.read_bytes()


def with_abi(code: bytes, version: int) -> bytes:
    """``code`` with another ABI number in its info record."""
    size = ctypes.sizeof(driver_cpu.ModuleInfo)
    record = struct.pack("<II", driver_cpu.ABI_VERSION, size)
    assert code.count(record) == 1
    return code.replace(record, struct.pack("<II", version, size))


@cache
def tokenizer_json() -> bytes:
    """A byte-level tokenizer without merges: one token per byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {byte_character(b): b for b in range(256)}
    assert sorted(vocab) == characters
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for text in ("<bos>", "<eos>", "<user>"):
        tokenizer.add_special_tokens([AddedToken(text, special=True)])
    return tokenizer.to_str().encode()


def byte_character(byte: int) -> str:
    """GPT-2's printable character of a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def manifest(**changes: Any) -> dict[str, Any]:
    """A manifest of the documented shape for the fake model."""
    calls = [
        {"name": f"layers.0.{n}", "op": "Fake", "rows": "T", "layer": 0, "weight_bytes": 64,
         "activation_bytes_per_row": 8, "flops_per_row": 16}
        for n in ("a", "b", "c")
    ]  # fmt: skip
    f32 = {"dtype": "f32", "shape": ["n"], "nbytes": 64}
    base: dict[str, Any] = {
        "model": {"name": "fake", "architecture": "hash", "parameters": 1, "vocab_size": VOCAB,
                  "config": None, "licenses": []},
        "target": {"name": "fake-target", "family": "cpu", "description": "a test", "facts": [],
                   "defaults": {},
                   "requires": {"arch": "x86_64", "system": "Linux", "features": ["avx2", "fma"],
                                "max_page_size": 65536}},
        "limits": {"max_tokens": 32, "max_seqs": 4, "max_logit_rows": 4, "max_blocks": 8,
                   "max_context": MAX_CONTEXT, "symbols": {"T": 32, "S": 4, "R": 4, "n": 16}},
        "memory": {"weights_bytes": 256, "workspace_bytes": 4096, "kv_block_size": 16,
                   "kv_block_bytes": BLOCK_BYTES, "kv_bytes_per_token": 4, "contexts": []},
        "entry_points": [
            {"name": "step", "inputs": [], "outputs": [], "calls": calls},
            {"name": "run", "inputs": ["x"], "outputs": ["y"], "calls": []},
        ],
        "buffers": [{"name": "x", "kind": "input", **f32}, {"name": "y", "kind": "output", **f32}],
        "tokenizer": {"file": "tokenizer.json", "chat_template": "chat_template.jinja",
                      "bos_id": BOS, "eos_ids": [EOS], "add_bos": True, "bos_token": "<bos>",
                      "eos_token": "<eos>", "generation": {}},
        "golden": "golden.json",
        "vendor": [{"name": "tokenizers", "min_python": "3.9"}],
        "options": {}, "inputs": [], "tools": {}, "kernels": [],
        "roofline": {"calls": [{"name": "layers.0.c", "ns": 750.0}], "tokens_per_second": 5.0},
        "numerics": {"status": "not run"},
    }  # fmt: skip
    for key, value in changes.items():
        base[key] = {**base[key], **value} if isinstance(value, dict) else value
    return base


def golden(*prompts: Sequence[int]) -> bytes:
    """``golden.json`` with the right tokens."""
    cases = [{"prompt": None, "prompt_ids": list(p), "expect_ids": expected(p, 8)} for p in prompts]
    return json.dumps({"cases": cases}).encode()


def build(
    out: Path, *, members: dict[str, bytes] | None = None, vendor: bool = True, spare: int = 0,
    **changes: Any,
) -> Path:  # fmt: skip
    """Writes the artifact ``out``; ``changes`` go into the manifest, ``spare`` bytes that nobody
    reads behind the weights."""
    if not vendor:
        changes["vendor"] = []
    weights = bytes([WEIGHT_BYTE]) * 256
    everything = {
        **loader_members(),
        **(dict(collect_vendor("x86_64").members) if vendor else {}),
        "kernels/fake.so": engine_code(),
        "tokenizer.json": tokenizer_json(),
        "chat_template.jinja": TEMPLATE.encode(),
        "golden.json": golden([1, 2, 3], list(range(40))),
        **(members or {}),
    }
    entries = [WeightEntry("w", 256, "u8", (256,), "row_major", "U8", "weights", lambda: weights)]
    if spare:
        more = bytes(i % 251 for i in range(4096)) * (spare >> 12)
        shape = (len(more),)
        entries.append(
            WeightEntry("x", len(more), "u8", shape, "row_major", "U8", "weights", lambda: more)
        )
    write_artifact(
        out, manifest=manifest(**changes), members=everything, weights=entries, header_text="test\n"
    )
    return out
