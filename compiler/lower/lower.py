"""Lowering: the final graph becomes a program of buffers and kernel calls.

In: an ``onnx_ir.Model`` after the passes, the model's configuration, a target.  Out:
:class:`Program`.  Next file: ``zerolayer/compiler/memory/plan.py`` (offsets).

One node is one kernel call.  Views (Reshape, Squeeze, Unsqueeze, Identity, Flatten) cost nothing:
their output is another name for their input.  Decoding views of initializers are folded into how
the weight is stored.  Which kernel serves a node is asked of the family's table, so what cannot run
fails here with the operator's name and place.

Shapes may hold symbols.  A step's are T, S, R and B; a ``run`` graph has its own, and where a row
count is a product of several (``batch*seq``), the product is a symbol too, listed after the plain
ones.  Index inputs (token ids, positions, tables) are 32-bit in the program whatever the graph
says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from zerolayer.compiler.frontends.config import ModelConfig
from zerolayer.compiler.graph import domain
from zerolayer.compiler.graph.places import layer_of, residual_taps
from zerolayer.runtime_stub.errors import UnsupportedError, UsageError
from zerolayer.targets import families
from zerolayer.targets.facts import Target
from zerolayer.targets.kernels import KernelQuery, KernelRow, select
from zerolayer.targets.program import (
    DTYPE_BYTES,
    EMBEDS,
    PICKS,
    Buffer,
    BufferKind,
    Constant,
    Dim,
    EntryPoint,
    KernelCall,
    KvLayout,
    Program,
    kv_bytes,
)

from .constants import DEFAULTS, STANDARD_INPUTS, Call, Operand, constants_of, flops_per_row
from .shapes import Dimensions
from .weights import WeightBuffers, static_shape

_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"})
_DTYPES = {
    ir.DataType.FLOAT: "f32",
    ir.DataType.INT8: "i8",
    ir.DataType.UINT8: "u8",
    ir.DataType.INT64: "i32",
    ir.DataType.INT32: "i32",
}


def check_max_context(wanted: int, limit: int, where: str) -> None:
    """UsageError for more positions than the model has; 0 asks for all of them."""
    if not 0 <= wanted <= limit:
        raise UsageError(
            f"--max-context {wanted} is not between 1 and the model's {limit} positions",
            where=where,
            next_step=f"use at most {limit}",
        )


@dataclass(frozen=True)
class LowerOptions:
    """``dims`` bounds the symbols of a ``run`` graph; others get the target's ``dim_bound``.
    Zeros and empty strings take the target's (or the model's) default."""

    name: str = "model"
    activations: str = "int8"
    fusion: str = "balanced"
    max_context: int = 0
    kv_dtype: str = ""
    dims: tuple[tuple[str, int], ...] = ()


def lower(
    model: ir.Model, config: ModelConfig | None, target: Target, options: LowerOptions
) -> Program:
    """The program of ``model`` on ``target``, without offsets.

    Raises UnsupportedError naming operator and place when the target has no kernel for a node or a
    value's shape is not known.
    """
    return _Lowering(model, config, target, options).program()


class _Lowering:
    """State of one lowering; :meth:`program` runs it."""

    def __init__(
        self, model: ir.Model, config: ModelConfig | None, target: Target, options: LowerOptions
    ) -> None:
        self.graph = model.graph
        self.model = model
        self.config = config
        self.target = target
        self.options = options
        self.family = families.family(target.family)
        self.weights = WeightBuffers(self.family.packed_bytes)
        self.is_step = any(v.name == "seq_starts" for v in self.graph.inputs)
        kv = options.kv_dtype or target.choice("kv_dtype")
        self.kv_dtype = "f32" if options.activations == "f32" and not options.kv_dtype else kv
        self.block_size = self._block_size()
        self.dims = Dimensions(self._step_bounds(), None if self.is_step else self._run_bound)
        self.buffers: dict[str, Buffer] = {}  # inputs, activations, kv
        self.owner: dict[str, str] = {}  # view or updated cache -> the buffer it lives in
        self.phase_of: dict[str, int] = {}  # value name -> phase that makes it
        self.calls: list[KernelCall] = []

    def _block_size(self) -> int:
        sizes = {
            n.attributes["block_size"].as_int() for n in self.graph if "block_size" in n.attributes
        }
        if len(sizes) > 1:
            raise UnsupportedError(f"the graph mixes KV block sizes {sorted(sizes)}")
        return sizes.pop() if sizes else self.target.default("kv_block_size")

    def _step_bounds(self) -> dict[str, int]:
        if not self.is_step:
            return {}
        wanted = self.options.max_context
        limit = self.config.max_context if self.config else self.target.default("max_context")
        check_max_context(wanted, limit, self.graph.name or "")
        return {
            "T": self.target.default("max_tokens"),
            "S": self.target.default("max_seqs"),
            "R": self.target.default("max_logit_rows"),
            "B": -(-(wanted or limit) // self.block_size),
            "S+1": self.target.default("max_seqs") + 1,
        }

    def _run_bound(self, name: str) -> int:
        bound = dict(self.options.dims).get(name, self.target.default("dim_bound"))
        if bound < 1:
            raise UsageError(f"--dim {name}={bound} is not a size")
        return bound

    def _check_dims(self) -> None:
        """Every bound that was asked for belongs to a symbol of a ``run`` graph."""
        known = () if self.is_step else self.dims.plain
        for name, _ in self.options.dims:
            if name not in known:
                raise UsageError(
                    f"--dim {name}: the graph has no such dimension",
                    where=self.options.name,
                    next_step=f"its dimensions: {', '.join(known)}"
                    if known
                    else "leave it out: --dim is for graphs with symbolic dimensions",
                )

    # --- buffers ---------------------------------------------------------------------------------

    def _name(self, value: ir.Value) -> str:
        """The buffer that holds ``value``."""
        name = value.name or ""
        return self.owner.get(name, name)

    def _add_buffer(self, value: ir.Value, kind: BufferKind, place: str) -> None:
        shape = self.dims.shape(value, place)
        dtype = _DTYPES.get(value.dtype) if value.dtype is not None else None
        if dtype is None:
            raise UnsupportedError(f"{value.name} has type {value.dtype}", where=place)
        name = value.name or ""
        nbytes = self.dims.size(shape) * DTYPE_BYTES[dtype]
        self.buffers[name] = Buffer(name, kind, dtype, shape, nbytes)

    def _add_inputs(self) -> KvLayout | None:
        """Buffers of the graph's inputs; a KV block holds the caches in the graph's order."""
        end = 0
        for value in self.graph.inputs:
            name = value.name or ""
            if not (self.is_step and name.startswith(("k_cache.", "v_cache."))):
                self._add_buffer(value, BufferKind.INPUT, name)
                continue
            row = value.shape[-1] if value.shape is not None else None
            if not isinstance(row, int):
                raise UnsupportedError(f"{name} has no fixed row size")
            nbytes = kv_bytes(self.kv_dtype, self.block_size * row)
            shape = (self.block_size, row)
            self.buffers[name] = Buffer(name, BufferKind.KV, self.kv_dtype, shape, nbytes, end)
            end += -(-nbytes // 64) * 64
        return KvLayout(self.block_size, end, self.kv_dtype) if end else None

    def _weight(
        self, value: ir.Value, format: str | None, layout: str, place: str
    ) -> Buffer | None:
        """The WEIGHT buffer that an input reads, or None when it reads something else."""
        if format is not None:
            return self.weights.packed(value, format, layout, place)
        if value.is_initializer():
            return self.weights.decoded(value, "", place)
        producer = value.producer()
        view = None if producer is None else _decoded_view(producer)
        if producer is None or view is None:
            return None
        source = producer.inputs[0]
        assert source is not None
        return self.weights.decoded(source, view, place)

    # --- nodes -----------------------------------------------------------------------------------

    def _lower_node(self, node: ir.Node) -> None:
        place = node.name or node.op_type
        if _decoded_view(node) is not None:
            return  # folded into the weight by whoever reads it
        if node.domain not in ("", "ai.onnx"):
            sig = domain.parse(node.op_type)
            self._add_call(node, sig, domain.input_names(node.op_type), place)
        elif node.op_type in _VIEWS:
            source = node.inputs[0]
            if source is None or source.is_initializer():
                raise UnsupportedError("a view of a weight", where=place)
            name = node.outputs[0].name or ""
            self.owner[name] = self._name(source)
            self.phase_of[name] = self.phase_of.get(source.name or "", -1)
        elif node.op_type in STANDARD_INPUTS:
            sig = domain.OpSignature(node.op_type)
            self._add_call(node, sig, STANDARD_INPUTS[node.op_type], place)
        else:
            raise UnsupportedError(
                f"target {self.target.name} has no kernel for the operator {node.op_type}",
                where=place,
                next_step="no pass replaced it; docs/architecture.md lists the operators",
            )

    def _inputs_by_role(
        self, node: ir.Node, names: Sequence[str], place: str
    ) -> list[tuple[str, ir.Value | None]]:
        given = [*node.inputs, *[None] * (len(names) - len(node.inputs))]
        if len(given) > len(names):
            raise UnsupportedError(f"{node.op_type} with {len(given)} inputs", where=place)
        for name, value in zip(names, given, strict=True):
            if value is None and not name.endswith("?"):
                raise UnsupportedError(f"{node.op_type} without its input {name}", where=place)
        return [(n.rstrip("?"), v) for n, v in zip(names, given, strict=True)]

    def _operand(self, value: ir.Value, format: str | None, place: str) -> Operand:
        shape: tuple[Dim, ...]
        if format is not None:
            if not value.is_initializer():
                raise UnsupportedError(f"weight {value.name} is not an initializer", where=place)
            shape = self.weights.logical_shape(value, format)
        else:
            shape = static_shape(value) if value.is_initializer() else self.dims.shape(value, place)
        return Operand(value.name or "", shape)

    def _add_call(
        self, node: ir.Node, sig: domain.OpSignature, names: Sequence[str], place: str
    ) -> None:
        inputs = self._inputs_by_role(node, names, place)
        operator = domain.OPERATORS.get(sig.base)
        formats = dict(zip(operator.weights, sig.formats, strict=True)) if operator else {}
        outputs = _outputs_to_make(node, sig.base, place)
        if not outputs:
            return
        call = Call(
            place,
            sig.base,
            sig.formats,
            sig.activations,
            _attributes(node, sig.base),
            {r: self._operand(v, formats.get(r), place) for r, v in inputs if v is not None},
            tuple(Operand(v.name or "", self.dims.shape(v, place)) for v in outputs),
            self.kv_dtype,
        )
        row, constants = self._kernel(call)
        layouts = dict(zip(formats, row.weight_layout, strict=True))
        weights = {
            r: self._weight(v, formats.get(r), layouts.get(r, ""), place)
            for r, v in inputs
            if v is not None
        }
        phase = 1 + max((self.phase_of.get(v.name or "", -1) for _, v in inputs if v is not None))
        caches = self._bind_outputs(call, outputs, phase)
        bound: list[str | None] = []
        for role, value in inputs:
            weight = weights.get(role)
            if value is None:
                bound.append(None)
            else:
                bound.append(weight.name if weight else self._name(value))
        lead = call.inputs["x"].shape if sig.base == "CacheWrite" else call.outputs[0].shape
        rows = self.dims.rows(lead)
        made = tuple(self._name(v) for v in outputs)
        self.calls.append(
            KernelCall(
                name=place,
                op=sig.base,
                row=row.id,
                inputs=tuple(bound),
                outputs=made,
                constants=tuple(sorted((n, constants[n]) for n in row.constants)),
                rows=rows,
                phase=phase,
                layer=layer_of(place),
                aliases=tuple((c, c) for c in caches),
                flops=flops_per_row(call, constants),
                weight_bytes=0
                if sig.base in EMBEDS
                else sum(w.nbytes for w in weights.values() if w is not None),
                activation_bytes=self._moved(call, bound, made, rows, weights),
            )
        )

    def _kernel(self, call: Call) -> tuple[KernelRow, dict[str, Constant]]:
        """The row that serves ``call`` and everything that may be baked into it."""
        constants = constants_of(call)
        query = KernelQuery(
            call.op, call.formats, call.activations, tuple(sorted(constants.items())), call.place
        )
        row = select(self.family.rows, query, self.target.features, self.target.name)
        missing = [n for n in row.constants if n not in constants]
        if missing:
            raise UnsupportedError(
                f"kernel {row.id} wants {', '.join(missing)}, which {call.op} lacks",
                where=call.place,
            )
        return row, constants

    def _bind_outputs(self, call: Call, outputs: Sequence[ir.Value], phase: int) -> list[str]:
        """Creates the output buffers; returns the caches that are updated in place."""
        updated = {"CacheWrite": ("cache",), "QkvRopeCache": ("", "k_cache", "v_cache")}
        roles = updated.get(call.op, ())
        caches: list[str] = []
        for i, value in enumerate(outputs):
            name = value.name or ""
            self.phase_of[name] = phase
            if i < len(roles) and roles[i]:
                cache = call.inputs[roles[i]].name
                self.owner[name] = self.owner.get(cache, cache)
                caches.append(self.owner[name])
            else:
                self._add_buffer(value, BufferKind.ACTIVATION, call.place)
        return caches

    def _moved(
        self,
        call: Call,
        inputs: Sequence[str | None],
        outputs: Sequence[str],
        rows: Dim,
        weights: Mapping[str, Buffer | None],
    ) -> int:
        """Bytes read and written per row, without the KV that attention reads: that is per
        position."""
        if call.op in EMBEDS:
            tables = [w for w in weights.values() if w is not None]
            out = self.buffers[outputs[0]]
            row_bytes = sum(w.nbytes // w.logical_shape[0] for w in tables)
            return row_bytes + self._per_row(out, rows)
        if call.op in PICKS:  # of what it picks from, it reads what it writes
            return 2 * sum(self._per_row(self.buffers[n], rows) for n in outputs)
        names = {n for n in (*inputs, *outputs) if n is not None and n in self.buffers}
        moved = [self.buffers[n] for n in names]
        if call.op.startswith("PagedAttention"):
            moved = [b for b in moved if b.kind is not BufferKind.KV]
        return sum(self._per_row(b, rows) for b in moved)

    def _per_row(self, buffer: Buffer, rows: Dim) -> int:
        if buffer.kind is BufferKind.KV:
            return buffer.nbytes // self.block_size
        return buffer.nbytes // max(self.dims.bound(rows), 1)

    # --- the program -----------------------------------------------------------------------------

    def program(self) -> Program:
        kv = self._add_inputs()
        for node in self.graph:
            self._lower_node(node)
        self._check_dims()
        outputs: list[str] = []
        for value in self.graph.outputs:
            name = self._name(value)
            buffer = self.buffers.get(name)
            if buffer is not None and buffer.kind is BufferKind.KV:
                continue
            if buffer is None or buffer.kind is not BufferKind.ACTIVATION or name in outputs:
                raise UnsupportedError(f"output {value.name} is an input, a weight or given twice")
            outputs.append(name)
        for name in outputs:
            self.buffers[name] = replace(self.buffers[name], kind=BufferKind.OUTPUT)
        inputs = tuple(n for n, b in self.buffers.items() if b.kind is BufferKind.INPUT)
        calls = tuple(sorted(self.calls, key=lambda c: c.phase))  # stable: graph order in a phase
        taps: tuple[str, ...] = ()
        if self.is_step and self.config is not None:
            taps = tuple(self.owner.get(n, n) for n in residual_taps(self.model))
        return Program(
            model=self.options.name,
            buffers=(*self.weights.buffers, *self.buffers.values()),
            entry_points=(
                EntryPoint("step" if self.is_step else "run", inputs, tuple(outputs), calls),
            ),
            bounds=self.dims.bounds,
            fusion=self.options.fusion,
            kv=kv,
            vocab_size=self.config.vocab_size if self.config else 0,
            hidden_size=self.config.hidden_size if self.config else 0,
            n_layers=len(self.config.layers) if self.config else 0,
            taps=taps,
        )


def _outputs_to_make(node: ir.Node, op: str, place: str) -> list[ir.Value]:
    """What the kernel of ``node`` has to make; empty when nobody reads any of it."""
    named = [v for v in node.outputs if v.name]
    wanted = [v for v in named if v.uses() or v.is_graph_output()]
    if op not in STANDARD_INPUTS:
        return named if wanted else []
    if any(v is not node.outputs[0] for v in wanted):  # standard kernels make the first output only
        raise UnsupportedError(f"{op} with output {wanted[-1].name}", where=place)
    return wanted


def _decoded_view(node: ir.Node) -> str | None:
    """When ``node`` only decodes an initializer: the format it decodes, or "" for the initializer's
    own type.  None for any other node."""
    if len(node.inputs) != 1 or node.inputs[0] is None or not node.inputs[0].is_initializer():
        return None
    if node.domain == domain.DOMAIN:
        sig = domain.parse(node.op_type)
        return sig.formats[0] if sig.base == "Dequantize" else None
    if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT:
        return ""
    return None


def _attributes(node: ir.Node, op: str) -> dict[str, Constant]:
    out: dict[str, Constant] = dict(DEFAULTS.get(op, {}))
    for name, attribute in node.attributes.items():
        value = attribute.value
        if not isinstance(value, (int, float, str)) or isinstance(value, bool):
            raise UnsupportedError(f"attribute {name} of {op} is {value!r}", where=node.name or op)
        out[name] = value
    return out
