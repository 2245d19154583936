"""The pipeline: a model file in, one artifact out, every stage in the order of the design.

In: a :class:`CompileRequest` and something to report progress to.  Out: the artifact on disk and a
:class:`CompileResult`.  Next file: ``frontends/__init__.py``, the first stage; the summary that
users see is in ``report.py``.

Nothing here knows a format, a device or an operator: it calls the stages and hands on what they
return.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from zerolayer.runtime_stub.errors import UnsupportedError, UsageError, ZerolayerError
from zerolayer.runtime_stub.template import bounded, compile_template
from zerolayer.targets import families, roofline
from zerolayer.targets.facts import Target
from zerolayer.targets.kernels import KernelQuery, select
from zerolayer.targets.program import BOUNDS, BufferKind, Program

from .artifact.loader_sources import loader_members
from .artifact.manifest import (
    ManifestInputs,
    TensorQuantization,
    build_manifest,
    header_text,
    tokenizer_members,
)
from .artifact.tokenizer_table import TokenizerTable, build_table, decode_table, encode_table
from .artifact.vendor import Vendor, collect_vendor
from .artifact.writer import WrittenWeights, write_artifact
from .cache import CompileCache, compiler_digest
from .frontends import load_model
from .frontends.config import LoadedModel
from .lower.lower import LowerOptions, check_max_context, lower
from .memory.check import check_plan
from .memory.plan import memory_need, plan
from .numerics.verify import GateInputs, Verified, cannot_run, verify_weights
from .pack import weight_entries
from .passes import PASSES, PassOptions, run_passes
from .passes.options import Head
from .passes.screen import screening_format, why_not
from .progress import Progress, Stage
from .report import CompileResult, Predictions, Warnings


@dataclass(frozen=True)
class CompileRequest:
    """What to compile, for which target, how.  ``None`` means the target's default.

    ``dims`` bounds symbolic dimensions of graphs that are not language models; ``decisions`` are
    the lines that say where each setting came from, for the summary.
    """

    model: Path
    target: Target
    output: Path
    quantize: str = "keep"
    activations: str | None = None
    fusion: str | None = None
    screen_head: str | None = None
    kv_dtype: str | None = None
    max_context: int | None = None
    dims: Mapping[str, int] | Sequence[tuple[str, int]] = ()
    strict: bool = False
    verify: bool = True
    check_passes: bool = False
    dump: Path | None = None
    decisions: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Choices:
    """The request with every default filled in."""

    quantize: str
    activations: str
    fusion: str
    screen_head: str
    kv_dtype: str
    max_context: int
    dims: tuple[tuple[str, int], ...]

    def as_options(self) -> dict[str, str | int | bool]:
        """What the manifest records."""
        return {
            "quantize": self.quantize,
            "activations": self.activations,
            "fusion": self.fusion,
            "screen_head": self.screen_head,
            "kv_dtype": self.kv_dtype,
            "max_context": self.max_context,
            **{f"dim.{name}": bound for name, bound in self.dims},
        }


def compile_model(request: CompileRequest, progress: Progress) -> CompileResult:
    """Compile ``request.model`` and write ``request.output``.

    Raises a ZerolayerError for anything the user can act on; an existing output file is then left
    as it was and no new one appears.
    """
    warnings = Warnings(request.strict, progress.message)
    cache = CompileCache()
    with progress.stage("read model"):
        model = load_model(request.model)
    _warn_template(model, warnings)
    if request.strict and (why := _not_run(request)):  # before the kernels, not after them
        warnings.add(f"numerics gate not run: {why}")
    choices = _choose(request, model)
    family = families.family(request.target.family)
    graph = _passes(request, choices, model, progress)
    if choices.quantize != "keep" and not _requantized(graph):
        warnings.add(
            f"quantize {choices.quantize} changes nothing: no weight of the file has more bits"
        )
    _warn_not_quantized(graph, choices.quantize, warnings)
    with progress.stage("lower"):
        program = _program(request, choices, model, graph)
        need = memory_need(program, model.config.max_context if model.config else 0)
        predicted = _predictions(program, request.target)
    if choices.screen_head == "on" and not _is_screened(program):
        why = why_not(graph) or "the target has no kernel for it"
        warnings.add(f"screen-head on changes nothing: {why}")
    # the C compiler is another process: what needs no kernel is made beside it
    with ThreadPoolExecutor(1, thread_name_prefix="text") as beside:
        making = beside.submit(_text_parts, model, request.target, cache)
        loading = beside.submit(_loader, cache)
        with progress.stage("kernels") as stage:
            binaries = family.build(
                program, request.target, cache=_noted(cache, stage), work_dir=cache.directory
            )
        text, loader = making.result(), loading.result()
    manifest_inputs = ManifestInputs(
        name=model.name,
        program=program,
        target=request.target,
        memory=need,
        sources=model.sources,
        tools=_tools(binaries.tools),
        options=choices.as_options(),
        config=model.config,
        parameters=model.parameters,
        tokenizer=model.tokenizer,
        table=text.table,
        kernels=binaries.kernels,
        roofline=predicted.as_dict(calls=True),
        batch_invariant=_batch_invariant(program, family),
        quantization=_quantization(program, graph, model),
        vendor=text.vendor.packages,
        licenses=tuple(name for name, _ in model.licenses),
        code=binaries.entry,
        code_extra=binaries.extra,
    )
    members: dict[str, bytes] = {
        **loader,
        **binaries.files,
        **dict(text.vendor.members),
        **tokenizer_members(model.tokenizer, text.table),
        **{f"licenses/model/{name}": data for name, data in model.licenses},
    }
    gate = GateInputs(
        model=model,
        program=program,
        code=binaries.files[binaries.entry],
        quantize=choices.quantize,
        activations=choices.activations,
        kv_dtype=choices.kv_dtype,
        skip=_not_run(request),
        batch_invariant=bool(manifest_inputs.batch_invariant),
    )

    verified = Verified()

    def finish(written: WrittenWeights) -> tuple[dict[str, Any], dict[str, bytes]]:
        nonlocal verified
        with progress.stage("numerics", total=gate.units()) as stage:
            verified = verify_weights(gate, written, cache, stage.advance)
            if verified.not_run or verified.cached:
                stage.note("not run" if verified.not_run else "from the cache")
        if verified.not_run:
            warnings.add(f"numerics gate not run: {verified.not_run}")
        inputs = replace(
            manifest_inputs, numerics=verified.report, golden=verified.golden is not None
        )
        more = {"golden.json": verified.golden} if verified.golden is not None else {}
        return build_manifest(inputs), more

    with progress.stage("write", total=max(1, program.weights_bytes), unit="bytes") as stage:
        identity = write_artifact(
            request.output,
            members=members,
            weights=weight_entries(program, graph, family),
            header_text=header_text(build_manifest(manifest_inputs)),
            finish=finish,
            progress=_bytes_done(stage),
        )
    return CompileResult(
        output=request.output,
        digest=identity.digest,
        sha256=identity.sha256,
        model=model,
        target=request.target,
        options=choices.as_options(),
        decisions=(*request.decisions, *_defaults(request, choices, model)),
        program=program,
        need=need,
        predicted=predicted,
        verified=verified,
        size=request.output.stat().st_size,
        code_bytes=len(binaries.files[binaries.entry]),
        warnings=warnings.lines(),
        timings=tuple(progress.timings),
    )


def _batch_invariant(program: Program, family: families.Family) -> bool | None:
    """Whether every kernel of a language model's step promises it; None for other graphs."""
    if program.kv is None:
        return None
    promises = {row.id: row.batch_invariant for row in family.rows}
    return all(promises[call.row] for entry in program.entry_points for call in entry.calls)


@dataclass(frozen=True)
class _TextParts:
    """What turns text into ids on the host: vendored packages, and the tokenizer's table or why
    there is none."""

    vendor: Vendor
    table: TokenizerTable | str


def _text_parts(model: LoadedModel, target: Target, cache: CompileCache) -> _TextParts:
    if model.tokenizer is None:
        return _TextParts(Vendor((), ()), "")
    raw = model.tokenizer.tokenizer_json
    parts: dict[str, str | bytes] = {
        "what": "tokenizer table",
        "tokenizer": hashlib.sha256(raw).hexdigest(),
        "library": importlib.metadata.version("tokenizers"),
        "compiler": compiler_digest(),
    }
    data, _ = cache.get_or_build(parts, lambda: encode_table(build_table(raw)))
    return _TextParts(collect_vendor(target.requires.arch), decode_table(data))


def _loader(cache: CompileCache) -> dict[str, bytes]:
    """The loader's members; blanking comments takes longer than reading them back."""
    parts: dict[str, str | bytes] = {
        "what": "loader",
        "python": sys.version,
        "compiler": compiler_digest(),
    }

    def build() -> bytes:
        return json.dumps({n: d.decode("utf-8") for n, d in loader_members().items()}).encode()

    data, _ = cache.get_or_build(parts, build)
    return {name: text.encode("utf-8") for name, text in json.loads(data).items()}


def _choose(request: CompileRequest, model: LoadedModel) -> _Choices:
    target = request.target
    activations = request.activations or target.choice("activations")
    if model.config is None:
        activations = "f32"
        if request.activations not in (None, "f32"):
            raise UnsupportedError(
                f"--activations {request.activations} is for language models",
                where=model.name,
                next_step="leave it out: other graphs run in float32",
            )
        if request.quantize != "keep":
            raise UnsupportedError(
                f"--quantize {request.quantize} is for language models",
                where=model.name,
                next_step="leave it out",
            )
        if request.max_context is not None:
            raise UsageError(
                "--max-context is for language models", next_step="use --dim NAME=N for graphs"
            )
        if request.kv_dtype is not None:
            raise UnsupportedError(
                f"--kv-dtype {request.kv_dtype} is for language models",
                where=model.name,
                next_step="leave it out",
            )
        if request.screen_head == "on":
            raise UnsupportedError(
                "--screen-head on is for language models",
                where=model.name,
                next_step="leave it out",
            )
    else:
        check_max_context(request.max_context or 0, model.config.max_context, model.name)
    return _Choices(
        quantize=request.quantize,
        activations=activations,
        fusion=request.fusion or target.choice("fusion"),
        screen_head=(request.screen_head or "auto") if model.config is not None else "off",
        # float32 activations promise the reference's tokens: so does their cache, unless told
        kv_dtype=request.kv_dtype or ("f32" if activations == "f32" else target.choice("kv_dtype")),
        max_context=request.max_context or 0,
        dims=tuple(sorted(dict(request.dims).items())),
    )


def _not_run(request: CompileRequest) -> str:
    """Why the numerics gate will not run here; empty when it will."""
    return cannot_run(request.target) if request.verify else "--no-verify"


def _defaults(request: CompileRequest, choices: _Choices, model: LoadedModel) -> list[str]:
    """Where each setting came from that the request left open, as ``request.decisions`` say it."""
    config, target = model.config, "target's default"
    floats = choices.activations == "f32"
    found: list[tuple[str, object, str]] = []
    if request.fusion is None:
        found.append(("fusion", choices.fusion, target))
    if request.activations is None:
        source = target if config is not None else "the only choice for this kind of graph"
        found.append(("activations", choices.activations, source))
    if config is not None:
        source = "as float32 activations need it" if floats else target
        if request.kv_dtype is None:
            found.append(("kv_dtype", choices.kv_dtype, source))
        if request.screen_head is None:
            found.append(("screen_head", choices.screen_head, "default"))
        if request.max_context is None:
            found.append(("max_context", config.max_context, "the model's"))
        else:
            block = request.target.default("kv_block_size")
            whole = -(-request.max_context // block) * block
            held = min(whole, config.max_context)
            if held != request.max_context:
                source = f"{request.max_context} rounded up to whole KV blocks of {block}"
                source += "" if held == whole else ", at most the model's"
                found.append(("max_context", held, source))
    return [f"{name} = {value} ({source})" for name, value, source in found]


def _passes(
    request: CompileRequest, choices: _Choices, model: LoadedModel, progress: Progress
) -> ir.Model:
    target = request.target
    rows = families.family(target.family).rows

    def supports(query: KernelQuery) -> str | None:
        try:
            select(rows, query, target.features, target.name)
        except UnsupportedError as e:
            return e.what
        return None

    def screen(head: Head) -> bool:
        if choices.screen_head != "auto":
            return choices.screen_head == "on"
        packed = families.family(target.family).packed_bytes
        whole = packed("rows16", head.format, head.rows, head.columns)
        read = packed("rows16", screening_format(head), head.rows, head.columns)
        flops = 2 * head.rows * head.columns
        return roofline.screening_saves(target, whole, read, flops, head.activations) > 0

    options = PassOptions(
        quantize=choices.quantize,  # type: ignore[arg-type]
        activations=choices.activations,  # type: ignore[arg-type]
        fusion=choices.fusion,  # type: ignore[arg-type]
        block_size=target.default("kv_block_size"),
        kv_dtype=choices.kv_dtype,
        supports=supports,
        screen=screen,
        # a graph that is not decoded multiplies many rows by each weight: reading is not its time
        shorten=lambda n: model.config is not None and roofline.reads_memory(target, n),
        holds=families.family(target.family).holds,
    )
    with progress.stage("passes", total=len(PASSES)) as stage:
        return run_passes(
            model.graph,
            options,
            dump=request.dump,
            check=request.check_passes,
            progress=lambda _name: stage.advance(1),
        )


def _warn_template(model: LoadedModel, warnings: Warnings) -> None:
    """A chat template that cannot even be read would fail on the host only."""
    source = model.tokenizer.chat_template if model.tokenizer else None
    if source is None:
        return
    try:
        bounded(lambda: compile_template(source, model.name), model.name)
    except ZerolayerError as e:
        warnings.add(e.what)
    except Exception as e:
        why = (str(e).splitlines() or [type(e).__name__])[0][:200]
        warnings.add(f"the chat template is damaged, the artifact needs --raw prompts: {why}")


def _warn_not_quantized(graph: ir.Model, scheme: str, warnings: Warnings) -> None:
    """Weights that ``--quantize`` could not change are no secret."""
    kept = [
        (value.name, value.metadata_props["not_quantized"])
        for value in graph.graph.initializers.values()
        if "not_quantized" in value.metadata_props
    ]
    if kept:
        name, why = kept[0]
        more = f" and {len(kept) - 1} more weights keep their" if kept[1:] else " keeps its"
        warnings.add(f"--quantize {scheme}: {name}{more} format: {why}")


def _requantized(graph: ir.Model) -> bool:
    """Whether the passes gave any weight another format."""
    values = graph.graph.initializers.values()
    return any("quantized to" in v.metadata_props.get("transform", "") for v in values)


def _is_screened(program: Program) -> bool:
    """Whether greedy steps bound the logits first and compute those that can be the largest."""
    return any(c.op in BOUNDS for e in program.entry_points for c in e.calls)


def _program(
    request: CompileRequest, choices: _Choices, model: LoadedModel, graph: ir.Model
) -> Program:
    options = LowerOptions(
        name=model.name,
        activations=choices.activations,
        fusion=choices.fusion,
        max_context=choices.max_context,
        kv_dtype=choices.kv_dtype,
        dims=choices.dims,
    )
    program = plan(lower(graph, model.config, request.target, options))
    check_plan(program)
    return program


def _predictions(program: Program, target: Target) -> Predictions:
    step = program.kv is not None
    decode = roofline.predict(program, target)
    prefill = roofline.predict(program, target, tokens=program.bound("T")) if step else None
    sampled = roofline.predict(program, target, greedy=False) if _is_screened(program) else None
    return Predictions(decode, prefill, sampled)


def _quantization(
    program: Program, graph: ir.Model, model: LoadedModel
) -> list[TensorQuantization]:
    formats = dict(model.source_formats)
    initializers = graph.graph.initializers
    rows = []
    for b in program.buffers:
        if b.kind is not BufferKind.WEIGHT:
            continue
        names = [initializers[s].metadata_props.get("source", s) for s in b.source]
        rows.append(
            TensorQuantization(
                tensor=b.name,
                sources=tuple(names),
                source_formats=tuple(
                    formats.get(s, initializers[s].metadata_props.get("source_format", b.format))
                    for s in b.source
                ),
                stored_format=b.format,
                layout=b.layout,
            )
        )
    return rows


def _noted(cache: CompileCache, stage: Stage) -> families.Cache:
    """The cache as families see it, telling the stage whether the code was there."""

    def get_or_build(
        parts: Mapping[str, str | bytes], build: Callable[[], bytes]
    ) -> tuple[bytes, bool]:
        data, hit = cache.get_or_build(parts, build)
        stage.note("from the cache" if hit else "compiled")
        return data, hit

    return get_or_build


def _bytes_done(stage: Stage) -> Callable[[int, int], None]:
    last = 0

    def done(now: int, _total: int) -> None:
        nonlocal last
        stage.advance(now - last)
        last = now

    return done


def _tools(build_tools: Sequence[tuple[str, str]]) -> dict[str, str]:
    names = ("numpy", "onnx", "onnx-ir", "onnxruntime")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"zerolayer": importlib.metadata.version("zerolayer"), **found, **dict(build_tools)}
