"""The CPU family: x86-64 levels, Zen 4, Sapphire Rapids.

What the code generator has to know about these machines:

* Decoding one token reads every weight once, so it runs at memory bandwidth as long as unpacking a
  block of weights costs less than fetching it; a prompt runs at the rate of the dot product
  instructions.  Without VNNI an int8 product takes three instructions, and the pair sums of
  ``vpmaddubsw`` saturate; with it, one.
* Zen 4 executes a 512-bit instruction as two 256-bit halves: half the rate per instruction, the
  same rate per byte, and no clock penalty.  Skylake lowers its clock under AVX-512, so its level is
  sized with the AVX-512 clock.
* ``vdpbf16ps`` multiplies pairs of bf16 at twice the rate of float32 and takes denormals for zero.
* AMX tiles belong to the process only after it asked the kernel; the loader asks during detection,
  ``zl_create`` again, and each thread configures its tiles for the length of a kernel call.
* A level is a set of instructions, not a machine.  Nothing beyond the target's
  ``requires.features`` may appear in the code, so the compiler is given exactly these and no
  ``native``.
* Code objects are linked against glibc 2.17 and need nothing but libc (libm, libpthread): any Linux
  distribution since 2014 loads them.

In: a planned :class:`Program`.  Out: ``FAMILY``: rows, weight layouts, and :func:`build`, which
renders ``templates/cpu/module.c.jinja`` around the kernel sources and compiles one shared object.
Next file: ``cpu_compile.py`` (the compiler and what is checked afterwards).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from zerolayer import templates
from zerolayer.runtime_stub.errors import UnsupportedError

from . import cpu_layouts, formats
from .cpu_compile import compile_shared_object, cpu_flag, tool_versions
from .cpu_rows import C_NAMES, ROWS, SCREEN_ROWS, is_short, pair_bytes, scratch_bytes, slots_bytes
from .facts import Target
from .families import Binaries, Cache, Family
from .injection import NOTE_SECTION, NOTE_TYPE, Injection, Injector
from .kernels import KernelRow
from .program import BOUNDS, Buffer, BufferKind, Constant, EntryPoint, KernelCall, Program

SOURCES = Path(templates.__path__[0]) / "cpu"
DECODED = "decoded_f32"
_BY_ID: Mapping[str, KernelRow] = {r.id: r for r in ROWS}
_STEP_SYMBOLS = {"T": "n_tokens", "S": "n_seqs", "R": "n_logit_rows", "B": "max_blocks"}
#: what else has to be beside the kernels' headers
_HEADERS = ("zl_abi.h", "zl_team.h", "zl_task.h", "zl_ahead.h", "zl_trace.h", "zl_probe.h")


def packed_bytes(layout: str, format: str, n: int, k: int) -> int:
    """Bytes of a weight ``[n, k]`` in ``layout``; ``decoded_f32`` is plain float32."""
    if layout == DECODED:
        return 4 * n * k
    return cpu_layouts.packed_bytes(layout, format, n, k)


def pack(layout: str, format: str, raw: Any) -> Any:
    """uint8 ``[N, row_bytes]`` as in the model file -> uint8 ``[packed_bytes]``."""
    if layout == DECODED:
        decoded = formats.dequantize(format, raw)
        return np.ascontiguousarray(decoded, dtype="<f4").reshape(-1).view(np.uint8)
    return cpu_layouts.pack(layout, format, raw)


@dataclass(frozen=True)
class _Instance:
    """A distinct (row, constants): one C function."""

    symbol: str
    row: str
    function: str
    arguments: tuple[str, ...]


def _literal(name: str, value: Constant) -> str:
    """A constant as C.  Floats are hexadecimal: the exact double, rounded once."""
    if isinstance(value, str):
        spelled = C_NAMES.get(name, {}).get(value)
        if spelled is None:
            raise UnsupportedError(f"no CPU kernel takes {name} = {value!r}")
        return spelled
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UnsupportedError(f"{name} = {value} is not a finite number")
        return f"(float){value.hex()}"
    return str(value)


class _Module:
    """Collects what the template needs for one entry point."""

    def __init__(self, program: Program, entry: EntryPoint, injection: Injection) -> None:
        self.program = program
        self.entry = entry
        self.injection = injection
        self.by_name: dict[str, Buffer] = {b.name: b for b in program.buffers}
        self.instances: dict[tuple[object, ...], _Instance] = {}
        self.operands: list[dict[str, object]] = [
            {"value": 0, "space": "ZL_NONE", "name": "absent"}
        ]
        self.operand_index: dict[str, int] = {}
        self.symbols: list[str] = []
        self.scratch = 0
        self.slots = 0

    def operand(self, name: str | None) -> int:
        if name is None:
            return 0
        found = self.operand_index.get(name)
        if found is not None:
            return found
        b = self.by_name[name]
        spaces = {
            BufferKind.WEIGHT: "ZL_WEIGHTS",
            BufferKind.ACTIVATION: "ZL_WORKSPACE",
            BufferKind.KV: "ZL_KV",
            BufferKind.INPUT: "ZL_INPUT",
            BufferKind.OUTPUT: "ZL_OUTPUT",
        }
        if b.kind is BufferKind.INPUT:
            value = self.entry.inputs.index(name)
        elif b.kind is BufferKind.OUTPUT:
            value = self.entry.outputs.index(name)
        else:
            if b.offset is None:
                raise ValueError(f"buffer {name} has no offset: the program was not planned")
            value = b.offset
        index = len(self.operands)
        self.operands.append({"value": value, "space": spaces[b.kind], "name": _comment(name)})
        self.operand_index[name] = index
        return index

    def symbol(self, rows: int | str) -> int:
        if isinstance(rows, int):
            return -1 - rows
        if rows not in self.symbols:
            self.symbols.append(rows)
        return self.symbols.index(rows)

    def instance(self, call: KernelCall) -> _Instance:
        row = _BY_ID[call.row]
        constants = dict(call.constants)
        key = (row.id, call.constants, len(call.inputs), len(call.outputs))
        found = self.instances.get(key)
        if found is not None:
            return found
        injector = self.injection.kernel(f"k{len(self.instances)} {row.id}")
        spelled = []
        for name in row.constants:
            value = injector.constant(name, constants[name], "model")
            spelled.append(_literal(name, value))
        tile_bytes = _kernel_facts(injector, row, constants)
        self.scratch = max(self.scratch, scratch_bytes(row, constants, tile_bytes))
        bounds, kv = dict(self.program.bounds), self.program.kv
        if kv is not None:
            positions = bounds["B"] * kv.block_size
            self.slots = max(self.slots, slots_bytes(row, constants, bounds["T"], positions))
        operands = [f"p[{i}]" for i in range(len(call.inputs) + len(call.outputs))]
        instance = _Instance(f"k{len(self.instances)}", row.id, row.function, (*operands, *spelled))
        self.instances[key] = instance
        return instance

    def calls(self) -> list[dict[str, object]]:
        out: list[dict[str, object]] = []
        first = 0
        for call in self.entry.calls:
            operands = [self.operand(n) for n in (*call.inputs, *call.outputs)]
            out.append(
                {
                    "name": _comment(call.name),
                    "symbol": self.instance(call).symbol,
                    "rows": self.symbol(call.rows),
                    "operands": ", ".join(map(str, operands)),
                    "first": first,
                    "solo": int(_is_solo(call)),
                }
            )
            first += len(operands)
        return out

    def screen(self) -> dict[str, int] | None:
        """The call that bounds the logits, its rows' symbol and its result's operand; None without
        one."""
        for i, call in enumerate(self.entry.calls):
            if _BY_ID[call.row].op in BOUNDS:
                symbol = self.symbol(call.rows)
                return {"call": i, "symbol": symbol, "bounds": self.operand(call.outputs[0])}
        return None

    def regions(self) -> list[dict[str, int]]:
        """The matrices in the order of use, with how their call deals them out to the threads:
        ``zl_region`` in zl_ahead.h.  ``phase`` counts as :meth:`phases` does."""
        out: list[dict[str, int]] = []
        phase, last = -1, -1
        for call in self.entry.calls:
            phase, last = phase + (call.phase != last), call.phase
            op = _BY_ID[call.row].op
            if op not in _STREAMING:
                continue
            constants = dict(call.constants)
            weights = [self.by_name[n] for n in call.inputs if n is not None]
            weights = [b for b in weights if b.layout == "rows16"]
            items = [_items(op, b, constants) for b in weights]
            total = sum(items) if op == "QkvRopeCache" else max(items, default=0)
            pairs = int(_in_pairs(_BY_ID[call.row], {b.format for b in weights}))
            for i, (b, n) in enumerate(zip(weights, items, strict=True)):
                first = sum(items[:i]) if op == "QkvRopeCache" else 0
                if b.offset is None:
                    raise ValueError(f"buffer {b.name} has no offset: the program was not planned")
                place = {"offset": b.offset, "item_bytes": b.nbytes // n}
                deal = {"first": first, "items": n, "total": total, "in_pairs": pairs}
                out.append(place | deal | {"phase": phase})
        return out

    def phases(self, regions: list[dict[str, int]]) -> list[dict[str, int]]:
        """Ranges of calls; the calls are in phase order."""
        taps = set(self.program.taps)
        out: list[dict[str, int]] = []
        last = -1
        for i, call in enumerate(self.entry.calls):
            if call.phase != last:
                later = (n for n, r in enumerate(regions) if r["phase"] > len(out))
                out.append({"begin": i, "end": i, "tap": -1, "ahead": next(later, 0)})
                last = call.phase
            out[-1]["end"] = i + 1
            for name in call.outputs:
                if name in taps:
                    out[-1]["tap"] = self.operand(name)
        return out


#: kernels whose time for few rows is that of reading their matrices
_STREAMING = frozenset(
    {
        "ActLinear", "GatedLinear", "GatedLinearQuantizeInt8", "HeadBounds", "Linear", "LinearAdd",
        "QkvRopeCache", "SplitBounds",
    }
)  # fmt: skip


def _in_pairs(row: KernelRow, formats: set[str]) -> bool:
    """Whether few rows take the items in pairs (``zl_first_half``).  Gate and up are two streams
    already; heads of several formats and the float kernels' groups are taken one by one."""
    if row.op in ("HeadBounds", "SplitBounds"):
        return True
    if not row.function.endswith(("_int8", "_bf16")) or row.op.startswith("GatedLinear"):
        return False
    return row.op != "QkvRopeCache" or len(formats) == 1


def _items(op: str, weight: Buffer, constants: Mapping[str, Constant]) -> int:
    """Items that a call deals out to the threads, of one of its matrices [N, K]."""
    n = weight.logical_shape[0]
    if op == "QkvRopeCache":
        head_dim = constants["head_dim"]
        assert isinstance(head_dim, int)
        return n // head_dim
    return -(-n // (32 if op.endswith("QuantizeInt8") else 16))


#: kernels that split their work by rows only, and the widest row that one thread does at once
_BY_ROWS = frozenset(
    {
        "Add", "Div", "Embed", "Gather", "GatherInt8", "Gelu", "LayerNormQuantizeInt8",
        "LayerNormalization", "Mul", "QuantizeInt8", "RMSNormalization", "Relu",
        "RmsNormQuantizeInt8", "RopeTable", "SplitEmbed", "Sub", "Swish",
    }
)  # fmt: skip
_SOLO_WIDTH = 16384


def _is_solo(call: KernelCall) -> bool:
    """Whether a call over one row is work for one thread.  On a team that stays together, the
    thread that ends the phase before it runs it at once."""
    width = dict(call.constants).get("C", dict(call.constants).get("rotary_dim"))
    row = _BY_ID[call.row]
    return row.op in _BY_ROWS and isinstance(width, int) and width <= _SOLO_WIDTH


def _comment(text: str) -> str:
    """Text that is safe inside a C comment."""
    return text.replace("*/", "* /").encode("ascii", "replace").decode().replace("\\", "/")[:120]


def _kernel_facts(injector: Injector, row: KernelRow, constants: Mapping[str, Constant]) -> int:
    """The hardware facts that a kernel's code depends on, and what is derived from them; returns
    the bytes of its token tile, 0 where it has none or the tile is its scratch (float kernels)."""
    injector.constant("instruction_set", row.id.rsplit(".", 1)[-1], "requires.features")
    injector.fact("register_bits")
    if not row.weight_layout or "K" not in constants:
        return 0
    _stream_bytes(injector)
    if row.op in ("HeadBounds", "SplitBounds") or row.function.endswith(("_int8", "_bf16")):
        _streams(injector)
    if row.function.endswith("_int8"):  # zl_tile_tokens
        injector.derive("prefetch_bytes", _PREFETCH_BYTES)
        tile_bytes = _tile_bytes(injector)
        step = 16 if row.id.endswith(".amx") else 8  # ZL_TILE_STEP
        most = 512 if row.id.endswith(".avx512vnni") else 256  # ZL_TILE_TOKENS
        injector.derive("tile_tokens", _TILE_TOKENS.format(step=step, most=most))
        return tile_bytes
    if row.op == "HeadBounds":
        injector.derive("prefetch_bytes", _PREFETCH_BYTES)
        return 0
    if row.function.endswith("_bf16"):  # zl_bf16_tokens
        tile_bytes = _tile_bytes(injector)
        injector.constant("pair_bytes", pair_bytes(row), "requires.features")
        injector.derive("token_bytes", "(K + 1) // 2 * pair_bytes")
        short = is_short(constants)
        if short:
            injector.derive("prefetch_bytes", _PREFETCH_BYTES)
        share = "tile_bytes" if short else "tile_bytes // 2"
        injector.derive("tile_tokens", f"max(32, min(256, {share} // token_bytes // 8 * 8))")
        return tile_bytes
    return 0


def _stream_bytes(injector: Injector) -> int:
    """How far ahead one or two tokens ask for weights; 0 where the target leaves it to its own
    prefetchers."""
    name = "stream_prefetch_bytes"
    return int(injector.fact(name)) if injector.has(name) else 0


def _streams(injector: Injector) -> int:
    """Streams of weights that a thread reads side by side for one or two tokens."""
    return int(injector.fact("weight_streams")) if injector.has("weight_streams") else 1


_PREFETCH_BYTES = "64 * cache_line_bytes"
_TILE_TOKENS = "max({step}, min({most}, tile_bytes // K // {step} * {step}))"


def _tile_bytes(injector: Injector) -> int:
    """Activations of a token tile: half of L2, so that the weights streaming past and the outputs
    do not push them out.  Weights are read once for a tile: with a quarter, those of 5,632 columns
    were read twice as often, which cost 1.1B in 8 bits 3 to 6 % of its prefill on Zen 4."""
    return injector.derive("tile_bytes", "l2_bytes // 2")


def render(program: Program, target: Target) -> tuple[str, Injection]:
    """The module's C source with every kernel header in it, and what was injected."""
    injection = Injection(target)
    (entry,) = program.entry_points
    step = entry.name == "step"
    module = _Module(program, entry, injection)
    shared = injection.kernel("module")
    calls, regions = module.calls(), module.regions()
    phases = module.phases(regions)
    plain = [] if step else list(program.plain_symbols)
    note = injection_note(injection, shared, module, program)
    headers = dict.fromkeys(
        (
            *_HEADERS,
            *(_BY_ID[c.row].header for c in entry.calls),
            *(["zl_sample.h", "zl_validate.h"] if step else []),
        )
    )
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    template = environment.from_string((SOURCES / "module.c.jinja").read_text("utf-8"))
    text = template.render(
        model=_comment(program.model),
        model_c=_c_string(program.model),
        target=target.name,
        defines=_defines(program, module, shared),
        headers=list(headers),
        note_section=NOTE_SECTION,
        note_type=NOTE_TYPE,
        note_bytes=len(note),
        note_lines=_c_lines(note),
        instances=list(module.instances.values()),
        operands=module.operands,
        calls=calls,
        phases=phases,
        regions=regions,
        symbols=module.symbols,
        step=step,
        step_symbols=_STEP_SYMBOLS,
        n_taps=len(program.taps),
        screen=module.screen(),
        persistent=program.fusion == "aggressive",
        inputs=list(entry.inputs),
        n_outputs=len(entry.outputs),
        logits_operand=module.operand(entry.outputs[0]) if step else 0,
        plain_bounds=[program.bound(n) for n in plain],
        symbol_c={n: _symbol_c(n, plain) for n in module.symbols} if not step else {},
    )
    return amalgamate(text), injection


def injection_note(
    injection: Injection, shared: Injector, module: _Module, program: Program
) -> bytes:
    """Injects what the module as a whole takes and returns the record's bytes."""
    _defines(program, module, shared)
    return injection.note()


def _symbol_c(name: str, plain: list[str]) -> str:
    """``2*batch*seq`` as C over ``dims``."""
    parts = [p if p.isdigit() else f"dims[{plain.index(p)}]" for p in name.split("*")]
    return " * ".join(parts)


def _defines(program: Program, module: _Module, shared: Injector) -> list[tuple[str, str, str]]:
    """(macro, value, comment) of the module's configuration, all of it injected."""
    bounds = dict(program.bounds)
    kv = program.kv
    logits = [
        b.offset for b in program.buffers if b.kind is BufferKind.OUTPUT and b.offset is not None
    ]
    plan: list[tuple[str, str, int]] = [
        ("ZL_WEIGHTS_BYTES", "bytes of the weights region", program.weights_bytes),
        ("ZL_WORKSPACE_BYTES", "bytes of activations", program.workspace_bytes),
        ("ZL_LOGITS_OFFSET", "logits, when the caller passes no place", logits[0] if logits else 0),
        ("ZL_KV_BLOCK_BYTES", "bytes of one KV block, all layers", kv.block_bytes if kv else 0),
        ("ZL_KV_BLOCK_SIZE", "positions in one KV block", kv.block_size if kv else 0),
        ("ZL_MAX_TOKENS", "T", bounds.get("T", 1)),
        ("ZL_MAX_SEQS", "S", bounds.get("S", 1)),
        ("ZL_MAX_LOGIT_ROWS", "R", bounds.get("R", 1)),
        ("ZL_MAX_BLOCKS", "B", bounds.get("B", 1)),
        ("ZL_VOCAB", "token ids", program.vocab_size),
        ("ZL_HIDDEN", "elements of the residual stream", program.hidden_size),
        ("ZL_LAYERS", "layers", program.n_layers),
        ("ZL_SCRATCH_BYTES", "scratch of one thread", module.scratch),
        ("ZL_SLOTS_BYTES", "spans of attention that threads share", module.slots),
        ("ZL_MAX_HEAD_DIM", "largest head, padded to 16", _largest_head(program)),
        ("ZL_SCREEN_ROWS", "most logit rows of a step that is screened", SCREEN_ROWS),
    ]
    for name, _, value in plan:
        shared.constant(name, value, "plan")
    tile = _tile_bytes(shared)
    ahead = shared.derive("ahead_bytes", "l2_bytes // 8")
    prefetch = shared.derive("prefetch_bytes", _PREFETCH_BYTES)
    return [
        *((name, str(value), comment) for name, comment, value in plan),
        ("ZL_TILE_BYTES", str(tile), "l2_bytes // 2"),
        ("ZL_AHEAD_BYTES", str(ahead), "l2_bytes // 8"),
        ("ZL_PREFETCH_BYTES", str(prefetch), _PREFETCH_BYTES),
        ("ZL_STREAM_BYTES", str(_stream_bytes(shared)), "stream_prefetch_bytes, 0 without it"),
        ("ZL_STREAMS", str(_streams(shared)), "weight_streams, 1 without it"),
    ]


def _largest_head(program: Program) -> int:
    """What arrays on a thread's stack are sized by, at least 16."""
    dims = [
        int(dict(call.constants).get("head_dim") or 0)
        for entry in program.entry_points
        for call in entry.calls
    ]
    return -(-max([16, *dims]) // 16) * 16


def _c_string(text: str) -> str:
    return "".join(
        c if (c.isalnum() and c.isascii()) or c in " ._-+" else f"\\{b:03o}"
        for c in text
        for b in ([0] if c.isascii() and (c.isalnum() or c in " ._-+") else c.encode("utf-8"))
    )


def _c_lines(data: bytes, width: int = 96) -> list[str]:
    """ASCII bytes as the insides of C string literals."""
    text = data.decode("ascii")
    return [
        text[i : i + width].replace("\\", "\\\\").replace('"', '\\"').replace("?", "\\?")
        for i in range(0, len(text), width)
    ]


def amalgamate(text: str) -> str:
    """``text`` with every ``#include "zl_..."`` replaced by the source, once: one self-contained
    file."""
    done: set[str] = set()

    def expand(source: str) -> str:
        out: list[str] = []
        for line in source.splitlines():
            name = line.strip().removeprefix('#include "').partition('"')[0]
            if not line.strip().startswith('#include "'):
                out.append(line)
            elif name not in done:
                done.add(name)
                out += [f"/* ---- {name} ---- */", expand((SOURCES / name).read_text("utf-8"))]
        return "\n".join(out)

    return expand(text) + "\n"


def build(
    program: Program, target: Target, *, cache: Cache | None = None, work_dir: Path | None = None
) -> Binaries:
    """Renders and compiles ``program``; the object comes from ``cache`` when it was built before.

    Raises UnsupportedError when the compiler is missing or refuses the source, or when the object
    is not what a host may load (see ``cpu_compile.check_object``).
    """
    source, injection = render(program, target)

    def compiled() -> bytes:
        return compile_shared_object(source, target, work_dir)

    parts: dict[str, str | bytes] = {
        "family": "cpu",
        "source": source,
        "flags": json.dumps(cpu_flag(target)),
    }
    data = cache(parts, compiled)[0] if cache is not None else compiled()
    stem = f"kernels/{target.name}"
    return Binaries(
        files={f"{stem}.so": data, f"{stem}.c": source.encode("utf-8")},
        entry=f"{stem}.so",
        kernels=tuple(injection.records()),
        tools=tool_versions(),
        extra={"flags": list(cpu_flag(target))},
    )


FAMILY = Family("cpu", ROWS, packed_bytes, pack, cpu_layouts.holds, build)
