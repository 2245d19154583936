"""The ``zerolayer`` operator domain, version 1: the table of operators, their names and shapes.

In: an operator name such as ``Linear_Q4_1_int8``.  Out: what it means (:func:`parse`), its ONNX
function (:func:`function`), its output types (:func:`infer`), and models whose used functions are
attached (:func:`attach_functions`) so that any ONNX runtime can execute them.  Next file:
``execute.py``.

An operator is added here (a row), in ``domain_ops.py`` (its body) and in a family's kernel table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import onnx_ir as ir
from zerolayer.runtime_stub.errors import UnsupportedError
from zerolayer.targets import formats as weight_formats

from . import domain_ops as ops
from .domain_ops import BodyBuilder, OpSignature
from .function_body import (
    BFLOAT16,
    DOMAIN,
    DOMAIN_VERSION,
    FLOAT,
    INT8,
    INT64,
    OPSET,
    UINT8,
    Body,
)

__all__ = [
    "ACTIVATIONS",
    "DOMAIN",
    "DOMAIN_VERSION",
    "FORMATS",
    "FORMAT_DTYPES",
    "OPERATORS",
    "OPSET",
    "OpSignature",
    "Operator",
    "attach_functions",
    "function",
    "infer",
    "input_dtype",
    "input_names",
    "op_name",
    "parse",
    "weight_shape",
]

FORMATS: tuple[str, ...] = (*weight_formats.PLAIN, *weight_formats.FORMATS)
ACTIVATIONS = ("int8", "bf16", "f32")
VARIANTS = ("qknorm_norope", "qknorm", "norope")

FORMAT_DTYPES: Mapping[str, ir.DataType] = MappingProxyType(
    dict.fromkeys(FORMATS, UINT8)
    | {"F32": FLOAT, "F16": ir.DataType.FLOAT16}
    | dict.fromkeys(("BF16", *weight_formats.SAME_VALUES), BFLOAT16)
)

Dim = int | str | None
Shape = tuple[Dim, ...]
Typed = tuple[ir.DataType, Shape]
#: (signature, shapes of the inputs by name, attributes) -> outputs in order
ShapeRule = Callable[[OpSignature, Mapping[str, Shape], Mapping[str, object]], list[Typed]]

_STEP = ("positions", "seq_starts", "block_table")
_INT64_INPUTS = frozenset({"tokens", "indices", *_STEP})


@dataclass(frozen=True)
class Operator:
    """One row: ``inputs`` in order, ``A`` standing for the activation bundle and ``?`` marking an
    optional input; ``weights`` are the inputs that have a format.  ``shared_format``: they all have
    the same, which the name gives once (``GatedLinear_Q4_1_int8``)."""

    inputs: tuple[str, ...]
    body: BodyBuilder
    shapes: ShapeRule
    attributes: tuple[tuple[str, str], ...] = ()
    weights: tuple[str, ...] = ()
    shared_format: bool = False

    @property
    def has_activations(self) -> bool:
        return "A" in self.inputs


# --- shape rules -------------------------------------------------------------------------------


def weight_shape(format: str, shape: Shape) -> Shape:
    """Stored shape of a weight (raw bytes for a block format) -> logical [N, K]."""
    block = weight_formats.FORMATS.get(format)
    if block is None or not isinstance(shape[-1], int):
        return shape
    return (*shape[:-1], shape[-1] // block.block_bytes * block.block_elems)


def _over(dim: Dim, by: int) -> Dim:
    return dim // by if isinstance(dim, int) else None


def _quantized(shape: Shape) -> list[Typed]:
    lead, k = shape[:-1], shape[-1]
    return [(INT8, shape), (FLOAT, (*lead, _over(k, 32))), (FLOAT, (*lead, _over(k, 16)))]


def _linear_shape(sig: OpSignature, inputs: Mapping[str, Shape]) -> Shape:
    name = next(n for n in ("weight", "weight_gate", "weight_high") if n in inputs)
    return (*inputs["q" if "q" in inputs else "x"][:-1], inputs[name][0])


def _as_x(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    return [(FLOAT, i["x"])]


def _as_q(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    return [(FLOAT, i["q"])]


def _as_cache(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    return [(FLOAT, i["cache"])]


def _as_linear(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    return [(FLOAT, _linear_shape(sig, i))]


def _as_linear_q(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    return _quantized(_linear_shape(sig, i))


def _x_quantized(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    return _quantized(i["x"])


def _picked(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    return _quantized((*i["indices"], *i["q"][1:]))


def _q_quantized(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    return _quantized(i["q"])


def _as_weight(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    return [(FLOAT, weight_shape(sig.formats[0], i["weight"]))]


def _as_embed(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    weight = i["weight" if "weight" in i else "weight_high"]
    return [(FLOAT, (i["tokens"][0], weight_shape(sig.formats[0], weight)[1]))]


def _as_bounds(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    rows = i["weight"][0]
    groups = -(-rows // 16) if isinstance(rows, int) else None
    x = i["q" if "q" in i else "x"]
    return [(FLOAT, (*x[:-1], None if groups is None else 2 * groups))]


def _as_table(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    shape = (i["positions"][0], i["inv_freq"][-1])
    return [(FLOAT, shape), (FLOAT, shape)]


def _as_qkv(sig: OpSignature, i: Mapping[str, Shape], a: Mapping[str, object]) -> list[Typed]:
    q = (i["positions"][0], i["weight_q"][0])
    return [(FLOAT, q), (FLOAT, i["k_cache"]), (FLOAT, i["v_cache"])]


# --- the table ---------------------------------------------------------------------------------

_ATTENTION = (
    ("num_heads", "int"), ("kv_num_heads", "int"), ("scale", "float"),
    ("softcap", "float"), ("window", "int"), ("block_size", "int"),
)  # fmt: skip
_QKV_INPUTS = (
    "A", "weight_q", "weight_k", "weight_v", "bias_q?", "bias_k?", "bias_v?",
    "qnorm?", "knorm?", "cos?", "sin?", "k_cache", "v_cache", *_STEP,
)  # fmt: skip
_QKV_ATTRIBUTES = (
    ("num_heads", "int"), ("kv_num_heads", "int"), ("head_dim", "int"),
    ("interleaved", "int"), ("epsilon", "float"), ("block_size", "int"),
)  # fmt: skip
_CACHE_ATTRIBUTES = (("block_size", "int"), ("role", "string"), ("kv_num_heads", "int"))
_GATED = ("A", "weight_gate", "weight_up", "bias_gate?", "bias_up?")
_GATED_WEIGHTS = ("weight_gate", "weight_up")
_ATTENTION_INPUTS = ("q", "k_cache", "v_cache", *_STEP)
_EPSILON = (("epsilon", "float"),)
_ACTIVATION = (("activation", "string"),)
_W = ("weight",)
_HALVES = ("weight_high", "weight_low")

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "Dequantize": Operator(("weight",), ops.dequantize_op, _as_weight, (), _W),
        "QuantizeInt8": Operator(("x",), ops.quantize_op, _x_quantized),
        "GatherInt8": Operator(("q", "scale", "sums", "indices"), ops.gather_int8, _picked),
        "Embed": Operator(
            ("tokens", "weight"), ops.embed, _as_embed, (("scale", "float"),), _W
        ),
        "Linear": Operator(("A", "weight", "bias?"), ops.linear_op, _as_linear, (), _W),
        "RopeTable": Operator(
            ("positions", "inv_freq"), ops.rope_table, _as_table, (("factor", "float"),)
        ),
        "Rope": Operator(
            ("x", "cos", "sin"), ops.rope, _as_x, (("num_heads", "int"), ("interleaved", "int"))
        ),
        "HeadNorm": Operator(
            ("x", "weight"), ops.head_norm, _as_x, (("num_heads", "int"), *_EPSILON)
        ),
        "CacheWrite": Operator(
            ("cache", "x", *_STEP), ops.cache_write, _as_cache, _CACHE_ATTRIBUTES
        ),
        "PagedAttention": Operator(_ATTENTION_INPUTS, ops.paged_attention, _as_q, _ATTENTION),
        "PagedAttentionQuantizeInt8": Operator(
            _ATTENTION_INPUTS, ops.paged_attention_quantize, _q_quantized, _ATTENTION
        ),
        "Softcap": Operator(("x",), ops.softcap, _as_x, (("cap", "float"),)),
        "RmsNormQuantizeInt8": Operator(
            ("x", "weight"), ops.rms_norm_quantize, _x_quantized, _EPSILON
        ),
        "LayerNormQuantizeInt8": Operator(
            ("x", "weight", "bias?"), ops.layer_norm_quantize, _x_quantized, _EPSILON
        ),
        "LinearAdd": Operator(
            ("A", "weight", "residual", "bias?"), ops.linear_add, _as_linear, (), _W
        ),
        "GatedLinear": Operator(
            _GATED, ops.gated_linear, _as_linear, _ACTIVATION, _GATED_WEIGHTS, True
        ),
        "GatedLinearQuantizeInt8": Operator(
            _GATED, ops.gated_linear_quantize, _as_linear_q, _ACTIVATION, _GATED_WEIGHTS, True
        ),
        "ActLinear": Operator(
            ("A", "weight", "bias?"), ops.act_linear, _as_linear, _ACTIVATION, _W
        ),
        "HeadBounds": Operator(("A", "weight", "norms"), ops.head_bounds, _as_bounds, (), _W),
        "SplitBounds": Operator(
            ("A", "weight", "norms", "spread"), ops.split_bounds, _as_bounds, (), _W
        ),
        "ScreenedLinear": Operator(
            ("A", "weight", "bounds"), ops.screened_linear, _as_linear, (), _W
        ),
        "ScreenedSplitLinear": Operator(
            ("A", *_HALVES, "bounds"), ops.screened_split_linear, _as_linear, (), _HALVES
        ),
        "SplitEmbed": Operator(
            ("tokens", *_HALVES), ops.split_embed, _as_embed, (("scale", "float"),), _HALVES
        ),
        "QkvRopeCache": Operator(
            _QKV_INPUTS, ops.qkv_rope_cache, _as_qkv, _QKV_ATTRIBUTES,
            ("weight_q", "weight_k", "weight_v"),
        ),
    }
)  # fmt: skip


# --- names -------------------------------------------------------------------------------------


def op_name(
    base: str, formats: Sequence[str] = (), activations: str = "", variant: str = ""
) -> str:
    """``("Linear", ("Q4_1",), "int8")`` -> ``Linear_Q4_1_int8``.

    ``formats`` has one entry per weight.  Raises UnsupportedError when they differ in an operator
    that has one format.
    """
    if OPERATORS[base].shared_format:
        if len(set(formats)) != 1:
            raise UnsupportedError(f"{base} takes weights of one format, not {', '.join(formats)}")
        formats = formats[:1]
    return "_".join(part for part in (base, *formats, activations, variant) if part)


@cache
def parse(op_type: str) -> OpSignature:
    """Take a domain operator's name apart.

    Raises UnsupportedError naming the operator when it is not in the table.
    """
    base, _, rest = op_type.partition("_")
    operator = OPERATORS.get(base)
    if operator is None:
        raise _unknown(op_type, "no such operator")
    formats: list[str] = []
    expected = 1 if operator.shared_format else len(operator.weights)
    for _ in range(expected):
        named = [f for f in FORMATS if rest == f or rest.startswith(f + "_")]
        found = max(named, key=len, default=None)  # BF16_12 begins with BF16
        if found is None:
            raise _unknown(op_type, f"it names {len(formats)} of {expected} formats")
        formats.append(found)
        rest = rest[len(found) + 1 :]
    if operator.shared_format:
        formats *= len(operator.weights)
    activations = ""
    if operator.has_activations:
        activations, _, rest = rest.partition("_")
        if activations not in ACTIVATIONS:
            raise _unknown(op_type, "its activations are not one of " + ", ".join(ACTIVATIONS))
    if rest and not (base == "QkvRopeCache" and rest in VARIANTS):
        raise _unknown(op_type, f"{rest} is not part of its name")
    return OpSignature(base, tuple(formats), activations, rest)


def _unknown(op_type: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{DOMAIN}::{op_type} is not an operator of domain version {DOMAIN_VERSION}: {why}",
        next_step="docs/architecture.md lists the operators",
    )


@cache
def input_names(op_type: str) -> tuple[str, ...]:
    """The inputs of an operator in order; an optional one ends in ``?``.  A bundle is expanded:
    ``x`` or ``q, scale, sums``."""
    sig = parse(op_type)
    names: list[str] = []
    for name in OPERATORS[sig.base].inputs:
        if name == "A":
            names += ["q", "scale", "sums"] if sig.activations == "int8" else ["x"]
        else:
            names.append(name)
    return tuple(names)


@cache
def input_dtype(op_type: str, name: str) -> ir.DataType:
    """The type of an input of an operator."""
    sig = parse(op_type)
    operator = OPERATORS[sig.base]
    if name in operator.weights:
        return FORMAT_DTYPES[sig.formats[operator.weights.index(name)]]
    if name in _INT64_INPUTS:
        return INT64
    quantized = sig.activations == "int8" or "scale" in operator.inputs
    return INT8 if name == "q" and quantized else FLOAT


# --- functions ---------------------------------------------------------------------------------


def function(op_type: str) -> ir.Function:
    """A new ONNX function that defines ``op_type``.  Raises UnsupportedError for other names."""
    sig = parse(op_type)
    operator = OPERATORS[sig.base]
    names = [n.rstrip("?") for n in input_names(op_type)]
    body = Body([(n, input_dtype(op_type, n)) for n in names])
    outputs = operator.body(body, sig)
    return body.function(op_type, outputs, [name for name, _ in operator.attributes])


def attach_functions(model: ir.Model) -> ir.Model:
    """Give ``model`` exactly the functions of the domain operators that it uses, in place."""
    used = sorted({n.op_type for n in model.graph if n.domain == DOMAIN})
    for key in [k for k in model.functions if k[0] == DOMAIN and k[1] not in used]:
        del model.functions[key]
    for op_type in used:
        key = (DOMAIN, op_type, "")
        if key not in model.functions:
            model.functions[key] = function(op_type)
    imports = model.graph.opset_imports
    if used:
        imports[DOMAIN] = DOMAIN_VERSION
    else:
        imports.pop(DOMAIN, None)
    return model


def infer(
    op_type: str, inputs: Iterable[Shape | None], attributes: Mapping[str, object]
) -> list[Typed]:
    """Types and shapes of the outputs from the shapes of the inputs (None = absent input)."""
    sig = parse(op_type)
    names = [n.rstrip("?") for n in input_names(op_type)]
    shapes = {n: s for n, s in zip(names, inputs, strict=False) if s is not None}
    return OPERATORS[sig.base].shapes(sig, shapes, attributes)
