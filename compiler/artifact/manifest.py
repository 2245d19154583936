"""The manifest: everything that was decided at compile time, as data.

In: the program, the target, the model's description, what the kernels consumed, the numerics
report.  Out: the manifest without what only the writer knows (``format``, ``header``, ``files``,
``weights``, ``digest``), and the header page's text.  Next file: ``writer.py``.  The schema is
published in ``artifacts/manifest.schema.json``.

No path, no time, no user and no host name gets in: same input, same bytes.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerolayer.compiler.frontends.config import ModelConfig, SourceFile, TokenizerAssets
from zerolayer.compiler.memory.plan import MemoryNeed
from zerolayer.targets.facts import Target
from zerolayer.targets.program import Buffer, BufferKind, EntryPoint, KernelCall, Program

from .tokenizer_table import FILE as TABLE_FILE
from .tokenizer_table import TokenizerTable
from .vendor import VendorPackage

#: keys of the writer
WRITER_KEYS = ("format", "header", "files", "weights", "digest")


@dataclass(frozen=True)
class TensorQuantization:
    """How one packed weight relates to the model file.  ``sources`` are the file's names."""

    tensor: str
    sources: tuple[str, ...]
    source_formats: tuple[str, ...]
    stored_format: str
    layout: str


@dataclass(frozen=True)
class ManifestInputs:
    """What :func:`build_manifest` writes down.

    ``kernels`` are injection records (``InjectionRecord.as_dict()``: facts, constants, formulas),
    ``roofline`` one row per call, ``numerics`` the gate's report or None when it was not run,
    ``options`` what the user asked for, ``tools`` name -> version.  ``code`` is the member that the
    loader opens, ``code_extra`` what the family adds about it.  ``batch_invariant`` is whether all
    kernels of a language model promise it, None for other graphs.  ``golden`` says whether
    ``golden.json`` is a member; ``licenses`` are names under ``licenses/model/``.
    """

    name: str
    program: Program
    target: Target
    memory: MemoryNeed
    sources: tuple[SourceFile, ...]
    tools: Mapping[str, str]
    options: Mapping[str, str | int | bool]
    config: ModelConfig | None = None
    parameters: int = 0
    tokenizer: TokenizerAssets | None = None
    table: TokenizerTable | str = ""  # or why there is none
    kernels: Sequence[Mapping[str, Any]] = ()
    roofline: Mapping[str, Any] | None = None
    quantization: Sequence[TensorQuantization] = ()
    numerics: Mapping[str, Any] | None = None
    batch_invariant: bool | None = None
    vendor: Sequence[VendorPackage] = ()
    licenses: tuple[str, ...] = ()
    golden: bool = False
    code: str = ""
    code_extra: Mapping[str, Any] | None = None


def build_manifest(inputs: ManifestInputs) -> dict[str, Any]:
    """The manifest as JSON-ready data, keys as in ``artifacts/manifest.schema.json``."""
    program = inputs.program
    return {
        "model": _model(inputs),
        "inputs": [
            {"name": s.name, "sha256": s.sha256, "size": s.size}
            for s in sorted(inputs.sources, key=lambda s: s.name)
        ],
        "options": dict(inputs.options),
        "target": inputs.target.as_dict(),
        "code": {**(inputs.code_extra or {}), "path": inputs.code},
        "limits": _limits(inputs),
        "memory": _memory(program, inputs.memory),
        "entry_points": [_entry_point(program, e) for e in program.entry_points],
        "buffers": [_buffer(b) for b in program.buffers if b.kind is not BufferKind.WEIGHT],
        "taps": list(program.taps),
        "kernels": [dict(k) for k in inputs.kernels],
        "quantization": [
            {
                "tensor": q.tensor,
                "sources": list(q.sources),
                "source_formats": list(q.source_formats),
                "stored_format": q.stored_format,
                "layout": q.layout,
            }
            for q in inputs.quantization
        ],
        "numerics": _numerics(inputs),
        "roofline": dict(inputs.roofline or {}),
        "tokenizer": _tokenizer(inputs.tokenizer, inputs.table),
        "golden": "golden.json" if inputs.golden else None,
        "vendor": [p.as_dict() for p in inputs.vendor],
        "tools": dict(inputs.tools),
    }


def _numerics(inputs: ManifestInputs) -> dict[str, Any]:
    """The gate's report, and the promise about batches that it has checked where it was run."""
    report: dict[str, Any] = dict(inputs.numerics) if inputs.numerics else {"status": "not run"}
    if inputs.batch_invariant is not None:
        report["batch_invariant"] = inputs.batch_invariant
    return report


def _model(inputs: ManifestInputs) -> dict[str, Any]:
    program = inputs.program
    return {
        "name": inputs.name,
        "architecture": inputs.config.architecture if inputs.config else "graph",
        "kind": "language_model" if inputs.config else "graph",
        "parameters": inputs.parameters,
        "vocab_size": program.vocab_size,
        "hidden_size": program.hidden_size,
        "n_layers": program.n_layers,
        "config": dataclasses.asdict(inputs.config) if inputs.config else None,
        "licenses": [f"licenses/model/{name}" for name in inputs.licenses],
    }


def _limits(inputs: ManifestInputs) -> dict[str, Any]:
    """Limits of one step (tokens, sequences, logit rows, block-table columns) and of a sequence."""
    bounds = dict(inputs.program.bounds)
    limits: dict[str, Any] = {"symbols": bounds}
    if inputs.config is not None:
        kv = inputs.program.kv
        limits |= {
            "max_tokens": bounds["T"],
            "max_seqs": bounds["S"],
            "max_logit_rows": bounds["R"],
            "max_blocks": bounds["B"],
            "max_context": min(
                inputs.config.max_context,
                bounds["B"] * kv.block_size if kv else inputs.config.max_context,
            ),
        }
    return limits


def _memory(program: Program, need: MemoryNeed) -> dict[str, Any]:
    kv = program.kv
    return {
        "weights_bytes": program.weights_bytes,
        "workspace_bytes": program.workspace_bytes,
        "kv_block_size": kv.block_size if kv else 0,
        "kv_block_bytes": kv.block_bytes if kv else 0,
        "kv_dtype": kv.dtype if kv else None,
        "kv_bytes_per_token": kv.bytes_per_token if kv else 0,
        "contexts": [{"memory_bytes": m, "tokens": t} for m, t in need.contexts],
    }


def _entry_point(program: Program, entry: EntryPoint) -> dict[str, Any]:
    return {
        "name": entry.name,
        "fusion": program.fusion,
        "inputs": list(entry.inputs),
        "outputs": list(entry.outputs),
        "dims": list(program.plain_symbols),  # the order in which zl_run takes them
        "calls": [_call(c) for c in entry.calls],
    }


def _call(call: KernelCall) -> dict[str, Any]:
    return {
        "name": call.name,
        "op": call.op,
        "kernel": call.row,
        "inputs": list(call.inputs),
        "outputs": list(call.outputs),
        "constants": dict(call.constants),
        "rows": call.rows,
        "phase": call.phase,
        "layer": call.layer,
        "aliases": [list(pair) for pair in call.aliases],
        "flops_per_row": call.flops,
        "weight_bytes": call.weight_bytes,
        "activation_bytes_per_row": call.activation_bytes,
    }


def _buffer(buffer: Buffer) -> dict[str, Any]:
    return {
        "name": buffer.name,
        "kind": buffer.kind.value,
        "dtype": buffer.dtype,
        "shape": list(buffer.shape),
        "nbytes": buffer.nbytes,
        "offset": buffer.offset,
        "layout": buffer.layout,
    }


def _tokenizer(
    assets: TokenizerAssets | None, table: TokenizerTable | str
) -> dict[str, Any] | None:
    if assets is None:
        return None
    return {
        "file": "tokenizer.json",
        "table": dict(table.settings) if isinstance(table, TokenizerTable) else None,
        "table_missing": (table or None) if isinstance(table, str) else None,
        "chat_template": "chat_template.jinja" if assets.chat_template is not None else None,
        "bos_id": assets.bos_id,
        "eos_ids": list(assets.eos_ids),
        "add_bos": assets.add_bos,
        "bos_token": assets.bos_token,
        "eos_token": assets.eos_token,
        "generation": dict(assets.generation),
    }


def tokenizer_members(
    assets: TokenizerAssets | None, table: TokenizerTable | str
) -> dict[str, bytes]:
    """The members that ``manifest["tokenizer"]`` names; ``table`` from ``build_table``."""
    if assets is None:
        return {}
    members = {"tokenizer.json": assets.tokenizer_json}
    if isinstance(table, TokenizerTable):
        members[TABLE_FILE] = table.data
    if assets.chat_template is not None:
        members["chat_template.jinja"] = assets.chat_template.encode("utf-8")
    return members


def header_text(manifest: Mapping[str, Any]) -> str:
    """The page that ``head`` shows: what the file is, for whom, how to check and run it."""
    model, target, memory = manifest["model"], manifest["target"], manifest["memory"]
    requires = target["requires"]
    features = ", ".join(requires.get("features", ())) or "none beyond the architecture"
    licenses = ", ".join(model["licenses"]) or "not stated in the model's files"
    graph = model["kind"] == "graph"
    parts = "the weights and" if graph else "the weights, the tokenizer and"
    context = "" if graph else f", {memory['kv_bytes_per_token']:,} per token of context"
    text = f"""
{_CUT}

{_one_line(model["name"])} for {_one_line(target["name"])}: a compiled model, ready to run.

It holds the kernels, {parts} the program that runs them.  It needs Python
3.9 or later and nothing else, writes nothing to disk and connects to nothing.

  check this host      ./FILE check            (or: python3 FILE check)
  what is inside       ./FILE info             unzip -l FILE
{_GRAPH_USE if graph else _TEXT_USE}
  verify every byte    ./FILE verify

Model          {_one_line(model["architecture"])}, {model["parameters"]:,} parameters
Target         {_one_line(target["description"])}
Requires       {_wrapped(f"{requires['arch']}; CPU or device features: {_one_line(features)}")}
Memory         {memory["weights_bytes"]:,} bytes of weights, {memory["workspace_bytes"]:,} of
               workspace{context}
Licences       model: {_one_line(licenses)}
               loader and kernels: Apache-2.0; others: licenses/ in the ZIP

Layout         this page (64 KiB), then the weights, then an ordinary ZIP.
               manifest.json in the ZIP describes every byte and holds its hash.
"""
    return text[1:]


#: Python reads a file without its end as source text, and shows the first line that is none
_CUT = "A SyntaxError in this line? What follows these 64KiB is not complete: copy the file again."
_TEXT_USE = """\
  generate text        ./FILE generate --raw "The capital of France is"
  chat                 ./FILE chat"""
_GRAPH_USE = """\
  run it               ./FILE run --input NAME=FILE.npy --output-dir DIR"""


def _wrapped(text: str) -> str:
    """Text in lines of at most 80 columns, behind a label."""
    return ("\n" + " " * 15).join(textwrap.wrap(text, 80, break_long_words=False))


def _one_line(value: object) -> str:
    """Text from a model file, made safe to print: one line, no control characters, bounded."""
    text = "".join(c if c.isprintable() else "?" for c in str(value))
    return text[:400]
