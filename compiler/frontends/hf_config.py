"""Reads a Hugging Face ``config.json`` by the rows of ``architectures.py``.

In: the object in ``config.json``.  Out: its :class:`Architecture` and a :class:`ModelConfig`.  Next
file: ``hf.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError

from .architectures import (
    ACTIVATIONS,
    ARCHITECTURES,
    HARMLESS,
    MUST_BE,
    REQUIRED,
    Architecture,
    Key,
)
from .config import Layer, ModelConfig, Rope
from .rope import make_rope

MAX_LAYERS = 1024
MAX_SIZE = 2**24
LAYER_KINDS = ("full_attention", "sliding_attention")
_NEXT_STEP = "fetch the model's config.json again"


def find_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """The row of a ``config.json``.  Raises UnsupportedError naming what is supported."""
    names = config.get("architectures")
    supported = ", ".join(sorted(ARCHITECTURES))
    if names is None:
        names = [
            row.name for row in ARCHITECTURES.values() if row.model_type == config.get("model_type")
        ]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise InputFileError(
            "must name one architecture under architectures",
            where=where,
            next_step=f"supported are {supported}",
        )
    row = ARCHITECTURES.get(names[0])
    if row is None:
        raise UnsupportedError(
            f"architecture {names[0][:60]} is not supported",
            where=where,
            next_step=f"supported are {supported}",
        )
    if config.get("model_type", row.model_type) != row.model_type:
        raise InputFileError(
            f"model_type {str(config['model_type'])[:60]!r} contradicts architecture {row.name}",
            where=where,
            next_step=_NEXT_STEP,
        )
    return row


def read_config(row: Architecture, config: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that ``config`` describes.

    Raises UnsupportedError for a key or value that changes the numbers in a way that is not
    implemented, InputFileError for one that makes no sense.
    """
    _check_keys(row, config, where)
    values: dict[str, Any] = {f: _value(config, key, where) for f, key in row.fields.items()}
    n_layers = _value(config, row.layers, where)
    if n_layers > MAX_LAYERS:
        raise _wrong(row.layers.name, n_layers, where)
    if values.get("n_kv_heads") is None:
        values["n_kv_heads"] = values["n_heads"]
    if values.get("head_dim") is None:
        values["head_dim"] = values["hidden_size"] // values["n_heads"]
    if values["intermediate_size"] is None:
        values["intermediate_size"] = 4 * values["hidden_size"]
    layers, ropes, context = _layers(row, config, n_layers, values["head_dim"], where)
    tied = Key("tie_word_embeddings", "flag", row.tied_default)
    return ModelConfig(
        architecture=row.name,
        max_context=context,
        layers=layers,
        ropes=ropes,
        tied_embeddings=_value(config, tied, where),
        **{**values, **row.fixed},
    )


def _check_keys(row: Architecture, config: Mapping[str, Any], where: str) -> None:
    rope_keys = {
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
    }
    known = {key.name for key in (*row.fields.values(), row.layers, row.context)}
    known |= {"tie_word_embeddings", *row.window_keys, *row.harmless, *HARMLESS}
    known |= rope_keys if row.has_rope else set()
    known |= {"partial_rotary_factor"} if row.partial_rope else set()
    known |= {row.local_theta.name} if row.local_theta else set()
    must_be = {**MUST_BE, **row.must_be}
    for key, value in config.items():
        if key in must_be:
            if not any(value is v or (value == v and type(value) is type(v)) for v in must_be[key]):
                raise UnsupportedError(
                    f"{key} = {str(value)[:40]} is not implemented for {row.name}",
                    where=where,
                    next_step="use the plain, unquantized checkpoint of a supported model",
                )
        elif key not in known and value is not None:
            raise UnsupportedError(
                f"the key {key[:60]} is not known for {row.name} and may change the numbers",
                where=where,
                next_step="remove the key if the model does not need it",
            )


def _layers(
    row: Architecture, config: Mapping[str, Any], n_layers: int, head_dim: int, where: str
) -> tuple[tuple[Layer, ...], tuple[Rope, ...], int]:
    """Window and rope of each layer, the distinct ropes, and the context they are exact for."""
    kinds = _layer_kinds(row, config, n_layers, where)
    context = _value(config, row.context, where)
    ropes: list[Rope] = []
    contexts: list[int] = []
    index: dict[str, int | None] = dict.fromkeys(LAYER_KINDS)
    for kind in sorted(set(kinds)) if row.has_rope else ():
        params = _rope_params(row, config, kind, where)
        part = params.get("partial_rotary_factor", 1.0)
        if type(part) not in (int, float) or not 0 < part <= 1:
            raise _wrong("partial_rotary_factor", part, where)
        if part != 1 and not row.partial_rope:
            raise UnsupportedError(
                f"partial_rotary_factor = {part} is not implemented for {row.name}", where=where
            )
        scaled = make_rope(params, int(head_dim * part), context, where)
        contexts.append(scaled.max_context)
        if scaled.rope not in ropes:
            ropes.append(scaled.rope)
        index[kind] = ropes.index(scaled.rope)
    exact = min(contexts, default=context)
    window: int | None = None
    if "sliding_attention" in kinds:
        window = _value(config, Key("sliding_window", "size", row.window_default, None), where)
    if window is not None and window >= exact:
        window = None  # it never cuts anything off
    layers = tuple(
        Layer(window if kind == "sliding_attention" else None, index[kind]) for kind in kinds
    )
    return layers, tuple(ropes), exact


def _layer_kinds(
    row: Architecture, config: Mapping[str, Any], n_layers: int, where: str
) -> list[str]:
    """``full_attention`` or ``sliding_attention`` for each layer."""
    for key in ("max_window_layers", "sliding_window_pattern"):
        value = config.get(key, 1)
        if key in row.window_keys and (type(value) is not int or not 0 <= value < MAX_SIZE):
            raise _wrong(key, value, where)
    if config.get("sliding_window_pattern", 1) == 0:
        raise _wrong("sliding_window_pattern", 0, where)
    listed = config.get("layer_types") if "layer_types" in row.window_keys else None
    if listed is None:
        return [
            "sliding_attention" if row.windowed(i, config) else "full_attention"
            for i in range(n_layers)
        ]
    if not isinstance(listed, list) or len(listed) != n_layers:
        raise InputFileError(
            f"layer_types must list {n_layers} layers", where=where, next_step=_NEXT_STEP
        )
    for kind in listed:
        if kind not in LAYER_KINDS:
            raise UnsupportedError(f"layer type {str(kind)[:40]!r} is not implemented", where=where)
    if "use_sliding_window" in row.window_keys and config.get("use_sliding_window") is not True:
        return ["full_attention"] * n_layers
    return listed


def _rope_params(
    row: Architecture, config: Mapping[str, Any], kind: str, where: str
) -> dict[str, Any]:
    """Rope parameters of the layers of ``kind``, old and new spellings merged into one table."""
    scaling, given = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    for name, value in (("rope_scaling", scaling), ("rope_parameters", given)):
        if not isinstance(value, dict):
            raise _wrong(name, value, where)
    local = row.local_theta if kind == "sliding_attention" else None
    by_layer = any(name in given for name in LAYER_KINDS)
    stray = set(given) - set(LAYER_KINDS) if by_layer or row.local_theta else set()
    if stray:
        raise UnsupportedError(
            f"rope parameter {min(stray)[:40]} beside those of the layer types is not known",
            where=where,
        )
    params = (given.get(kind) or {}) if by_layer else given
    if not isinstance(params, dict):
        raise _wrong("rope_parameters", params, where)
    if scaling and local is None:
        params = {**params, **scaling} if by_layer or row.local_theta else scaling
    params = dict(params)
    theta = config.get(local.name, local.absent) if local else config.get("rope_theta", row.theta)
    params.setdefault("rope_theta", theta)
    if row.partial_rope:
        params.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    original = config.get("original_max_position_embeddings", row.original_context)
    if original is not None:
        params["original_max_position_embeddings"] = original
    rope_type = params.pop("rope_type", None) or params.get("type") or "default"
    params.pop("type", None)
    if isinstance(rope_type, str):
        rope_type = row.rope_aliases.get(rope_type, rope_type)
    params["rope_type"] = rope_type
    return params


def _value(config: Mapping[str, Any], key: Key, where: str) -> Any:
    """The checked value of ``key``, converted as its kind says."""
    value = config.get(key.name, key.absent)
    if value is None and key.name in config and key.null is not REQUIRED:
        value = key.null
    if value is REQUIRED:
        raise InputFileError(f"the key {key.name} is missing", where=where, next_step=_NEXT_STEP)
    if value is None and key.null is None:
        return None
    if key.kind == "flag":
        if isinstance(value, bool):
            return value
    elif key.kind == "activation":
        if isinstance(value, str) and value in ACTIVATIONS:
            return ACTIVATIONS[value]
        raise UnsupportedError(
            f"{key.name} = {str(value)[:40]!r} is not implemented",
            where=where,
            next_step=f"implemented are {', '.join(sorted(ACTIVATIONS))}",
        )
    elif key.kind == "size":
        if type(value) is int and 0 < value <= MAX_SIZE:
            return value
    elif type(value) in (int, float) and 0 <= value < 1e12:
        if key.kind == "number":
            return float(value)
        if value > 0:
            return float(value) ** (0.5 if key.kind == "sqrt" else -0.5)
    raise _wrong(key.name, value, where)


def _wrong(key: str, value: Any, where: str) -> InputFileError:
    return InputFileError(
        f"{key} = {str(value)[:60]} makes no sense", where=where, next_step=_NEXT_STEP
    )
