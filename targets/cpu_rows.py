"""The CPU family's kernel table.

In: nothing. Out: ``ROWS`` (one :class:`KernelRow` per kernel and instruction-set level, best
first), ``C_NAMES`` (how a constant that is a string is spelled in C), :func:`scratch_bytes` and
:func:`slots_bytes`.
Next file: ``cpu_layouts.py`` (how weights are packed for these kernels).

The code of all levels is one source: ``templates/cpu/zl_simd.h`` maps a few primitives to
instructions. A row still names its level, so that what runs is what the manifest says.

Operands of a call, in order: the graph operator's inputs (absent optional: NULL), its outputs,
the row's constants. Token ids, positions, sequence starts, block table and logit rows are
``int32_t`` arrays of the batch; KV caches are ``char *`` into KV block 0 (see zl_task.h). Sizes:
``N`` outputs, ``K`` inputs of a matrix, ``C`` elements per row, all without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import bf16_12
from .facts_schema import CPU_KV_BLOCK_STEP
from .kernels import KernelRow
from .program import KV_Q8_0, Constant

PLAIN = frozenset({"F32", "F16", "BF16"})
BLOCK = frozenset({
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
})  # fmt: skip
FORMATS = PLAIN | BLOCK
BF16 = frozenset({"BF16", "BF16_12"})
HALVES = (frozenset({"Q8_HIGH"}), frozenset({"Q8_LOW"}))

#: instruction-set levels, best first: (suffix of the row id, target features the code needs)
LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("avx512vnni", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"})),
    ("avx512bw", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})),
    ("avx2", frozenset({"avx2", "fma", "f16c"})),
)

#: what the kernels over a bf16 KV cache need, and products of bf16 by one instruction
BF16_LEVEL = ("avx512bf16", LEVELS[0][1] | {"avx512bf16"})
BF16_PRODUCTS = ("avx512bf16", LEVELS[1][1] | {"avx512bf16"})

#: what the int8 products by matrix tiles need; every processor with tiles has bf16 products too
AMX_LEVEL = ("amx", BF16_LEVEL[1] | {"amx-tile", "amx-int8"})

#: why a call does not fit a kernel, from its constants, or None
Check = Callable[[Mapping[str, Constant]], "str | None"]

_FORMAT_C = {name: f"ZL_FMT_{name}" for name in sorted(FORMATS | BF16)}
#: constant name -> its string values -> C spelling.  Any other constant is a number.
C_NAMES: Mapping[str, Mapping[str, str]] = {
    "format": _FORMAT_C,
    "format_q": _FORMAT_C,
    "format_k": _FORMAT_C,
    "format_v": _FORMAT_C,
    "activation_kind": {"f32": "ZL_A_F32", "bf16": "ZL_A_BF16", "int8": "ZL_A_INT8"},
    "activation": {
        "silu": "ZL_ACT_SILU",
        "swish": "ZL_ACT_SILU",
        "gelu": "ZL_ACT_GELU_ERF",
        "gelu_erf": "ZL_ACT_GELU_ERF",
        "gelu_tanh": "ZL_ACT_GELU_TANH",
        "relu": "ZL_ACT_RELU",
        "tanh": "ZL_ACT_TANH",
        "sigmoid": "ZL_ACT_SIGMOID",
    },
    "approximate": {"none": "ZL_ACT_GELU_ERF", "tanh": "ZL_ACT_GELU_TANH"},
    "kv_dtype": {
        "f32": "ZL_KV_F32",
        "f16": "ZL_KV_F16",
        "bf16": "ZL_KV_BF16",
        "q8_0": "ZL_KV_Q8_0",
    },
    "role": {"k": "ZL_ROLE_K", "v": "ZL_ROLE_V"},
    "broadcast": {
        "same": "ZL_SAME",
        "scalar_a": "ZL_SCALAR_A",
        "scalar_b": "ZL_SCALAR_B",
        "row_a": "ZL_ROW_A",
        "row_b": "ZL_ROW_B",
    },
}


def _multiple(name: str, of: int) -> Check:
    def check(constants: Mapping[str, Constant]) -> str | None:
        value = constants.get(name)
        if isinstance(value, int) and value % of:
            return f"{name} = {value} is not a multiple of {of}"
        return None

    return check


def _all(
    *checks: Check,
) -> Check:
    def check(constants: Mapping[str, Constant]) -> str | None:
        return next((why for c in checks if (why := c(constants)) is not None), None)

    return check


def _heads(constants: Mapping[str, Constant]) -> str | None:
    heads, kv_heads = constants.get("num_heads"), constants.get("kv_num_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        return f"num_heads = {heads} is not a multiple of kv_num_heads = {kv_heads}"
    return None


def _head_dim(constants: Mapping[str, Constant]) -> str | None:
    value = constants.get("head_dim")
    if isinstance(value, int) and value > 512:  # more would not fit the stacks of threads
        return f"head_dim = {value} is larger than 512"
    return None


def _whole_q8(constants: Mapping[str, Constant]) -> str | None:
    value = constants.get("head_dim")
    if constants.get("kv_dtype") == KV_Q8_0 and isinstance(value, int) and value % 32:
        return f"head_dim = {value} is not a multiple of 32, which a q8_0 cache needs"
    return None


def _short_rows(constants: Mapping[str, Constant]) -> str | None:
    value = constants.get("K")
    if isinstance(value, int) and value > 65536:  # ZL_TILE_BLOCKS in zl_dot_int8.h
        return f"K = {value} is larger than 65536"
    return None


def _whole_12(constants: Mapping[str, Constant]) -> str | None:
    k = constants.get("K")
    if not is_short(constants):
        return None
    return (bf16_12.whole_rows(k) or None) if isinstance(k, int) else None


def _one_format(constants: Mapping[str, Constant]) -> str | None:
    found = {constants.get(f"format_{letter}") for letter in "qkv"}
    return None if len(found) == 1 else "reads three weights of one format"


_ANY = _all()
_PAGED = _all(
    _multiple("block_size", CPU_KV_BLOCK_STEP),
    _multiple("head_dim", 8),
    _head_dim,
    _heads,
    _whole_q8,
)
_ATTENTION = (
    "num_heads", "kv_num_heads", "head_dim", "scale", "softcap", "window", "block_size", "kv_dtype",
)  # fmt: skip
_QKV = (
    "K",
    "num_heads",
    "kv_num_heads",
    "head_dim",
    "rotary_dim",
    "interleaved",
    "epsilon",
    "block_size",
    "kv_dtype",
    "format_q",
    "format_k",
    "format_v",
)


@dataclass(frozen=True)
class _Kernel:
    """A row before it is repeated per level; ``floats`` is the form for f32 and bf16 activations.
    ``kinds``: what the operator's name calls its activations, where the kernel makes int8 of them.
    ``each``: the formats of each weight, where they differ.
    """

    op: str
    header: str
    function: str
    constants: tuple[str, ...]
    weights: int = 0
    bundle: str = ""  # "int8", "bf16", "floats" or "" (no activation kind)
    formats: frozenset[str] = FORMATS
    constraint: Check = _ANY
    kinds: frozenset[str] = frozenset()
    each: tuple[frozenset[str], ...] = ()


def _linear_kernels() -> list[_Kernel]:
    out: list[_Kernel] = []
    plain = [
        ("Linear", "linear", ("N", "K"), 1),
        ("LinearAdd", "linear_add", ("N", "K"), 1),
        ("ActLinear", "act_linear", ("N", "K", "activation"), 1),
        ("GatedLinear", "gated_linear", ("N", "K", "activation"), 2),
        ("GatedLinearQuantizeInt8", "gated_linear_quantize", ("N", "K", "activation"), 2),
    ]
    for op, name, constants, weights in plain:
        check = _multiple("N", 32) if op.endswith("QuantizeInt8") else _all()
        out.append(
            _Kernel(op, "zl_linear_int8.h", f"zl_{name}_int8", (*constants, "format"), weights,
                    "int8", BLOCK, _all(check, _short_rows))
        )  # fmt: skip
        out.append(
            _Kernel(op, "zl_linear_bf16.h", f"zl_{name}_bf16", (*constants, "format"), weights,
                    "bf16", BF16, _all(check, _whole_12))
        )  # fmt: skip
        out.append(
            _Kernel(op, "zl_linear_float.h", f"zl_{name}_float",
                    (*constants, "format", "activation_kind"), weights, "floats", FORMATS, check)
        )  # fmt: skip
    out += [
        _Kernel("HeadBounds", "zl_screen.h", "zl_head_bounds", ("N", "K", "activation_kind"), 1,
                "int8", frozenset({"Q8_0"}), _short_rows, frozenset({"f32", "bf16"})),
        _Kernel("SplitBounds", "zl_screen_split.h", "zl_split_bounds_int8", ("N", "K"), 1, "int8",
                HALVES[0], _short_rows),
        _Kernel("ScreenedSplitLinear", "zl_screen_split.h", "zl_screened_split_linear_int8",
                ("N", "K"), 2, "int8", constraint=_short_rows, each=HALVES),
        _Kernel("ScreenedLinear", "zl_screen.h", "zl_screened_linear_bf16", ("N", "K"), 1, "bf16",
                frozenset({"BF16"})),
        _Kernel("ScreenedLinear", "zl_screen.h", "zl_screened_linear_float",
                ("N", "K", "format", "activation_kind"), 1, "floats", PLAIN),
    ]  # fmt: skip
    check = _all(_PAGED, _multiple("head_dim", 16))
    out.append(
        _Kernel(
            "QkvRopeCache",
            "zl_qkv.h",
            "zl_qkv_rope_cache_int8",
            _QKV,
            3,
            "int8",
            BLOCK,
            _all(check, _short_rows),
        )
    )
    bf16 = tuple(name for name in _QKV if name not in ("format_k", "format_v"))
    out.append(
        _Kernel("QkvRopeCache", "zl_qkv.h", "zl_qkv_rope_cache_bf16", bf16, 3, "bf16", BF16,
                _all(check, _one_format, _whole_12))
    )  # fmt: skip
    out.append(
        _Kernel(
            "QkvRopeCache",
            "zl_qkv.h",
            "zl_qkv_rope_cache_float",
            (*_QKV, "activation_kind"),
            3,
            "floats",
            FORMATS,
            check,
        )
    )
    return out


_KERNELS: tuple[_Kernel, ...] = (
    *_linear_kernels(),
    _Kernel("Embed", "zl_embed.h", "zl_embed", ("C", "scale", "format"), 1),
    _Kernel("SplitEmbed", "zl_embed.h", "zl_split_embed", ("C", "scale"), 2, each=HALVES),
    _Kernel("QuantizeInt8", "zl_norm.h", "zl_quantize_int8", ("C",), constraint=_multiple("C", 32)),
    _Kernel(
        "RmsNormQuantizeInt8",
        "zl_norm.h",
        "zl_rms_norm_quantize",
        ("C", "epsilon"),
        constraint=_multiple("C", 32),
    ),
    _Kernel(
        "LayerNormQuantizeInt8",
        "zl_norm.h",
        "zl_layer_norm_quantize",
        ("C", "epsilon"),
        constraint=_multiple("C", 32),
    ),
    _Kernel("RMSNormalization", "zl_norm.h", "zl_rms_norm", ("C", "epsilon")),
    _Kernel("LayerNormalization", "zl_norm.h", "zl_layer_norm", ("C", "epsilon")),
    _Kernel("HeadNorm", "zl_norm.h", "zl_head_norm", ("num_heads", "head_dim", "epsilon")),
    _Kernel("RopeTable", "zl_rope.h", "zl_rope_table", ("rotary_dim", "factor")),
    _Kernel("Rope", "zl_rope.h", "zl_rope", ("num_heads", "head_dim", "rotary_dim", "interleaved")),
    _Kernel(
        "CacheWrite",
        "zl_attention.h",
        "zl_cache_write",
        ("kv_num_heads", "head_dim", "block_size", "role", "kv_dtype"),
        constraint=_PAGED,
    ),
    _Kernel(
        "PagedAttention", "zl_attention.h", "zl_paged_attention", _ATTENTION, constraint=_PAGED
    ),
    _Kernel(
        "PagedAttentionQuantizeInt8",
        "zl_attention.h",
        "zl_paged_attention_quantize",
        _ATTENTION,
        constraint=_all(_PAGED, _multiple("head_dim", 32)),
    ),
    _Kernel("Softcap", "zl_elementwise.h", "zl_softcap", ("C", "cap")),
    *(
        _Kernel(op, "zl_elementwise.h", f"zl_{op.lower()}", ("C", "broadcast"))
        for op in ("Add", "Sub", "Mul", "Div")
    ),
    _Kernel("Swish", "zl_elementwise.h", "zl_swish", ("C", "alpha")),
    _Kernel("Gelu", "zl_elementwise.h", "zl_gelu", ("C", "approximate")),
    _Kernel("Relu", "zl_elementwise.h", "zl_relu", ("C",)),
    _Kernel("Tanh", "zl_elementwise.h", "zl_tanh_rows", ("C",)),
    _Kernel("Sigmoid", "zl_elementwise.h", "zl_sigmoid_rows", ("C",)),
    _Kernel("Softmax", "zl_elementwise.h", "zl_softmax", ("C",)),
    _Kernel("Gather", "zl_elementwise.h", "zl_gather", ("C",)),
    _Kernel(
        "GatherInt8",
        "zl_elementwise.h",
        "zl_gather_int8",
        ("C",),
        constraint=_multiple("C", 32),
    ),
)


def _bf16_cache(constants: Mapping[str, Constant]) -> str | None:
    kv = constants.get("kv_dtype")
    return None if kv in (None, "bf16") else f"reads a bf16 cache, not {kv}"


def _no_bf16_cache(constants: Mapping[str, Constant]) -> str | None:
    return "does not read a bf16 cache" if constants.get("kv_dtype") == "bf16" else None


def _rows() -> tuple[KernelRow, ...]:
    caching = [k for k in _KERNELS if "kv_dtype" in k.constants]
    products = [k for k in _KERNELS if k.bundle == "bf16"]
    tiled = [k for k in _KERNELS if k.bundle == "int8" and not k.kinds]
    out = [_row(k, *AMX_LEVEL, k.constraint) for k in tiled]
    out += [_row(k, *BF16_PRODUCTS, k.constraint) for k in products]
    over_cache = [k for k in caching if k not in products]
    out += [_row(k, *BF16_LEVEL, _all(k.constraint, _bf16_cache)) for k in over_cache]
    for suffix, features in LEVELS:
        for k in _KERNELS:
            check = _all(k.constraint, _no_bf16_cache) if k in caching else k.constraint
            out.append(_row(k, suffix, features, check))
    return tuple(out)


def _row(k: _Kernel, suffix: str, features: frozenset[str], constraint: Check) -> KernelRow:
    kinds = k.kinds or {"floats": {"f32", "bf16"}, "": set[str]()}.get(k.bundle, {k.bundle})
    return KernelRow(
        id=".".join(x for x in (k.op, k.bundle, suffix) if x),
        op=k.op,
        header=k.header,
        function=k.function,
        constants=k.constants,
        formats=k.each or (k.formats,) * k.weights,
        activations=frozenset(kinds),
        features=features,
        weight_layout=("rows16",) * k.weights,
        batch_invariant=True,  # zl_task.h asks it of every kernel; the gate and the tests prove it
        constraint=constraint,
    )


ROWS: tuple[KernelRow, ...] = _rows()

#: the most logit rows of a step that is screened; modules get it as ZL_SCREEN_ROWS
SCREEN_ROWS = 8


def pair_bytes(row: KernelRow) -> int:
    """Bytes of two activations of a bf16 kernel: zl_pair in zl_simd.h."""
    return 4 if "avx512bf16" in row.features else 8


def is_short(constants: Mapping[str, Constant]) -> bool:
    """Whether a call's weights are bf16 in 12 bits."""
    return "BF16_12" in (constants.get("format"), constants.get("format_q"))


def _groups_in_room(row: KernelRow, constants: Mapping[str, Constant]) -> int:
    """Groups of 16 rows that a bf16 kernel multiplies by a register tile of tokens."""
    if row.op == "QkvRopeCache":
        head_dim = constants["head_dim"]
        assert isinstance(head_dim, int)
        return max(2, head_dim // 16)
    return 4 if row.op == "GatedLinearQuantizeInt8" else 2


def scratch_bytes(row: KernelRow, constants: Mapping[str, Constant], tile_bytes: int) -> int:
    """Bytes of per-thread scratch that a call of ``row`` needs; a multiple of 64.

    Only the kernels that round, pad or quantize their activations need any: a tile of token rows.
    """
    kind = row.function.rsplit("_", 1)[-1]
    if kind not in ("float", "bf16", "bounds") or not row.weight_layout:
        return 0
    k = constants["K"]
    if not isinstance(k, int):
        raise TypeError(f"K = {k!r} of {row.id} is not an integer")
    padded = -(-k // 32) * 32
    if kind == "bounds":  # zl_screen_scratch in zl_screen.h: a bundle of 8 rows, and a word a block
        return -(-SCREEN_ROWS * (padded // 32) * 48 // 64) * 64
    if kind == "bf16":  # zl_pair_stride and zl_bf16_tokens in zl_linear_bf16.h
        pair, short = pair_bytes(row), is_short(constants)
        most = tile_bytes if short else tile_bytes // 2
        tokens = max(32, min(256, most // ((k + 1) // 2 * pair) // 8 * 8))
        room = 32 * k * _groups_in_room(row, constants) if short else 0
        if room > max(tile_bytes, 64 * k):  # zl_bf16_room
            room = 0
        return tokens * (padded // 32 | 1) * 16 * pair + room
    tokens = max(8, min(64, 65536 // padded // 8 * 8))  # zl_float_tokens in zl_linear_float.h
    return tokens * padded * 4


#: most bytes of slots; a step that needs more shares its attention out by heads
MOST_SLOTS = 16 << 20


def slots_bytes(
    row: KernelRow, constants: Mapping[str, Constant], tokens: int, positions: int
) -> int:
    """Bytes in which a call of ``row`` on ``tokens`` tokens can keep the spans of its attention,
    each of a context of ``positions``, every head apart; MOST_SLOTS at most.  A multiple of 64; 0
    for all other kernels.
    """
    if row.function not in ("zl_paged_attention", "zl_paged_attention_quantize"):
        return 0
    heads, kv_heads, hd = (constants[n] for n in ("num_heads", "kv_num_heads", "head_dim"))
    if not (isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(hd, int)):
        raise TypeError(f"heads of {row.id} are not integers")
    slot = -(-4 * (-(-hd // 16) * 16 + 2) // 16) * 64  # zl_slot_bytes of one head
    last = positions - 1
    spans = (last // 256 if last < 512 else last // 512 + 1) + 1  # zl_span_of
    return min(tokens * heads * spans * slot, MOST_SLOTS)
