"""What is baked into a kernel call: attributes and static sizes, and what it costs.

In: a node of the final graph with the shapes of its values.  Out: the constants by the names that
kernel-table rows use, and flops and bytes.  Next file: ``lower.py``.

The names: ``N``, ``K`` outputs and inputs of a matrix; ``C`` elements per row; ``head_dim``,
``rotary_dim``; ``format``, ``format_q`` ..; ``activation_kind``; ``broadcast``; ``kv_dtype``; and
every attribute under its own name, with the operator's default where the node has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zerolayer.runtime_stub.errors import UnsupportedError
from zerolayer.targets.program import PICKS, Constant, Dim

#: inputs of the standard operators that may remain in a final graph; ``?`` marks optional ones
STANDARD_INPUTS: Mapping[str, tuple[str, ...]] = {
    "RMSNormalization": ("x", "weight"),
    "LayerNormalization": ("x", "weight", "bias?"),
    "Add": ("a", "b"),
    "Sub": ("a", "b"),
    "Mul": ("a", "b"),
    "Div": ("a", "b"),
    "Swish": ("x",),
    "Gelu": ("x",),
    "Relu": ("x",),
    "Tanh": ("x",),
    "Sigmoid": ("x",),
    "Softmax": ("x",),
    "Gather": ("x", "indices"),
}

#: attributes that a node may leave out, with the value the operator's definition gives them
DEFAULTS: Mapping[str, Mapping[str, Constant]] = {
    "RMSNormalization": {"epsilon": 1e-5, "axis": -1, "stash_type": 1},
    "LayerNormalization": {"epsilon": 1e-5, "axis": -1, "stash_type": 1},
    "Swish": {"alpha": 1.0},
    "Gelu": {"approximate": "none"},
    "Softmax": {"axis": -1},
    "Gather": {"axis": 0},
    "Embed": {"scale": 1.0},
    "SplitEmbed": {"scale": 1.0},
    "RopeTable": {"factor": 1.0},
    "Rope": {"interleaved": 0},
    "QkvRopeCache": {"interleaved": 0, "epsilon": 0.0},
    "PagedAttention": {"softcap": 0.0, "window": 0},
    "PagedAttentionQuantizeInt8": {"softcap": 0.0, "window": 0},
}


@dataclass(frozen=True)
class Operand:
    """An input or output of a node: its logical shape (a weight's is [N, K], not its bytes)."""

    name: str
    shape: tuple[Dim, ...]

    @property
    def columns(self) -> int:
        """Elements of one row: the last dimension."""
        last = self.shape[-1] if self.shape else 1
        if not isinstance(last, int):
            raise UnsupportedError(
                f"the last dimension of {self.name} is {last}, not a number",
                next_step="export the model with a fixed feature size",
            )
        return last


@dataclass(frozen=True)
class Call:
    """A node ready for kernel selection: operands by role, name taken apart."""

    place: str
    op: str
    formats: tuple[str, ...]
    activations: str
    attributes: Mapping[str, Constant]
    inputs: Mapping[str, Operand]  # by role; absent optional inputs are absent
    outputs: tuple[Operand, ...]
    kv_dtype: str = "f32"

    def attribute(self, name: str) -> int:
        value = self.attributes[name]
        assert isinstance(value, int)
        return value


Sizes = Callable[[Call], dict[str, Constant]]


def _x(call: Call) -> Operand:
    return call.inputs["q" if "q" in call.inputs else "x"]


def _matrix(call: Call) -> dict[str, Constant]:
    name = next(n for n in ("weight", "weight_gate", "weight_high") if n in call.inputs)
    n, k = call.inputs[name].shape
    if k != _x(call).columns:
        raise UnsupportedError(
            f"a weight of {k} columns meets rows of {_x(call).columns}", where=call.place
        )
    out: dict[str, Constant] = {"N": _static(n), "K": _static(k)}
    for role, what in (("weight_up", "gate and up weights"), ("weight_low", "halves of a weight")):
        other = call.inputs.get(role)
        if other is not None and other.shape != (n, k):
            raise UnsupportedError(f"{what} differ in shape", where=call.place)
    for role in ("bias", "bias_gate", "bias_up"):
        _check_vector(call, role, _static(n))
    return out


def _static(dim: Dim) -> int:
    if not isinstance(dim, int):
        raise UnsupportedError(f"a weight has the symbolic dimension {dim}")
    return dim


def _columns(call: Call) -> dict[str, Constant]:
    axis = call.attributes.get("axis", -1)
    rank = len(_x(call).shape)
    if axis not in (-1, rank - 1):
        raise UnsupportedError(f"{call.op} over axis {axis} of {rank}", where=call.place)
    columns = _x(call).columns
    for role in ("weight", "bias"):
        _check_vector(call, role, columns)
    return {"C": columns}


def _check_vector(call: Call, role: str, size: int) -> None:
    """A vector operand, where there is one, has an element for each column: kernels do not look."""
    operand = call.inputs.get(role)
    if operand is not None and (operand.columns, math.prod(map(_static, operand.shape))) != (
        size,
        size,
    ):
        raise UnsupportedError(
            f"{call.op} with a {role} of shape {list(operand.shape)} for {size} columns",
            where=call.place,
        )


def _embed(call: Call) -> dict[str, Constant]:
    return {"C": call.inputs["weight" if "weight" in call.inputs else "weight_high"].columns}


def _gather(call: Call) -> dict[str, Constant]:
    if call.attributes["axis"] != 0 or len(call.inputs["indices"].shape) != 1:
        raise UnsupportedError("Gather of other than rows by a list of indices", where=call.place)
    columns = [_static(d) for d in call.inputs["x"].shape[1:]]
    return {"C": math.prod(columns)}


def _binary(call: Call) -> dict[str, Constant]:
    a, b, out = call.inputs["a"], call.inputs["b"], call.outputs[0]

    def is_scalar(x: Operand) -> bool:
        return all(d == 1 for d in x.shape)

    def is_row(x: Operand) -> bool:
        return bool(x.shape) and x.shape[-1] == out.shape[-1] and all(d == 1 for d in x.shape[:-1])

    if a.shape == b.shape:
        how = "same"
    elif is_scalar(b) and a.shape == out.shape:
        how = "scalar_b"
    elif is_scalar(a) and b.shape == out.shape:
        how = "scalar_a"
    elif is_row(b) and a.shape == out.shape:
        how = "row_b"
    elif is_row(a) and b.shape == out.shape:
        how = "row_a"
    else:
        raise UnsupportedError(f"{call.op} broadcasts {a.shape} and {b.shape}", where=call.place)
    return {"C": out.columns, "broadcast": how}


def _rope_table(call: Call) -> dict[str, Constant]:
    return {"rotary_dim": 2 * call.inputs["inv_freq"].columns}


def _heads(name: str) -> Sizes:
    def sizes(call: Call) -> dict[str, Constant]:
        x = call.inputs["q"] if "q" in call.inputs else call.inputs["x"]
        out: dict[str, Constant] = {"head_dim": x.columns // call.attribute(name)}
        if "cos" in call.inputs:
            out["rotary_dim"] = 2 * call.inputs["cos"].columns
        if call.op.startswith(("Paged", "Cache")):
            out["kv_dtype"] = call.kv_dtype
        return out

    return sizes


def _qkv(call: Call) -> dict[str, Constant]:
    rotary = 2 * call.inputs["cos"].columns if "cos" in call.inputs else 0
    out: dict[str, Constant] = {
        "K": _x(call).columns,
        "rotary_dim": rotary,
        "kv_dtype": call.kv_dtype,
    }
    for letter, format in zip("qkv", call.formats, strict=True):
        out[f"format_{letter}"] = format
        rows = call.inputs[f"weight_{letter}"].shape[0]
        heads = call.attribute("num_heads" if letter == "q" else "kv_num_heads")
        if rows != heads * call.attribute("head_dim"):
            raise UnsupportedError(
                f"{letter} weight has {rows} rows for {heads} heads", where=call.place
            )
    return out


_SIZES: Mapping[str, Sizes] = {
    "Linear": _matrix,
    "LinearAdd": _matrix,
    "ActLinear": _matrix,
    "GatedLinear": _matrix,
    "GatedLinearQuantizeInt8": _matrix,
    "HeadBounds": _matrix,
    "SplitBounds": _matrix,
    "ScreenedLinear": _matrix,
    "ScreenedSplitLinear": _matrix,
    "QkvRopeCache": _qkv,
    "Embed": _embed,
    "SplitEmbed": _embed,
    "RopeTable": _rope_table,
    "Rope": _heads("num_heads"),
    "HeadNorm": _heads("num_heads"),
    "CacheWrite": _heads("kv_num_heads"),
    "PagedAttention": _heads("num_heads"),
    "PagedAttentionQuantizeInt8": _heads("num_heads"),
    "Gather": _gather,
    "GatherInt8": lambda call: {"C": call.inputs["q"].columns},
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), _binary),
    **dict.fromkeys(
        ("QuantizeInt8", "RmsNormQuantizeInt8", "LayerNormQuantizeInt8", "RMSNormalization",
         "LayerNormalization", "Softcap", "Swish", "Gelu", "Relu", "Tanh", "Sigmoid", "Softmax"),
        _columns,
    ),
}  # fmt: skip


def constants_of(call: Call) -> dict[str, Constant]:
    """Everything a kernel row may ask for.  Raises UnsupportedError for shapes that no kernel
    takes."""
    sizes = _SIZES.get(call.op)
    out: dict[str, Constant] = dict(call.attributes)
    if sizes is not None:
        out.update(sizes(call))
    if len(set(call.formats)) == 1 or call.op.startswith("Gated"):
        if len(set(call.formats)) > 1:
            raise UnsupportedError(
                f"gate and up weights have different formats ({', '.join(call.formats)})",
                where=call.place,
            )
        out["format"] = call.formats[0]
    if call.activations:
        out["activation_kind"] = call.activations
    return out


def flops_per_row(call: Call, constants: Mapping[str, Constant]) -> int:
    """Floating-point (or integer) operations per row; attention's are per row *and* per position
    of context."""

    def c(name: str) -> int:
        value = constants.get(name, 0)
        return int(value) if isinstance(value, (int, float)) else 0

    if call.op.startswith("Paged"):
        return 4 * c("num_heads") * c("head_dim")
    if call.op == "QkvRopeCache":
        rows = (c("num_heads") + 2 * c("kv_num_heads")) * c("head_dim")
        return 2 * rows * c("K")
    if "N" in constants:
        matrices = 1 if call.op == "ScreenedSplitLinear" else len(call.formats)  # two make one
        return 2 * c("N") * c("K") * matrices
    if call.op in PICKS:
        return 0
    return sum(_row_elements(o) for o in call.outputs)


def _row_elements(x: Operand) -> int:
    return x.shape[-1] if x.shape and isinstance(x.shape[-1], int) else 1
