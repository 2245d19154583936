"""Rotary frequencies for every kind of rope scaling that the supported families use.

In: rope parameters in Hugging Face's vocabulary (``rope_type``, ``rope_theta``, ``factor``, ...).
Out: a :class:`ScaledRope`: frequencies, attention factor and the longest context for which they are
exact.  Next file: ``architectures.py``.

Frequencies are rounded to float32 after each operation, as the reference implementations do, so
that long positions get the angles that the model was trained and is evaluated with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError

from .config import Rope
from .weights import Array

_F32 = np.float32
MAX_ROTARY_DIM = 8192


@dataclass(frozen=True)
class ScaledRope:
    """``max_context`` is the longest context (positions) for which ``rope`` is exact."""

    rope: Rope
    max_context: int


@dataclass(frozen=True)
class _Request:
    """What a scaling rule sees: ``base`` are the unscaled frequencies [dim / 2]."""

    params: Mapping[str, Any]
    base: Array
    theta: float
    dim: int
    max_context: int
    where: str

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number among the parameters."""
        value = self.params.get(key)
        if value is None:
            value = default
        if type(value) not in (int, float) or not 0 < float(value) < 1e30:  # type: ignore[arg-type]
            raise InputFileError(
                f"rope parameter {key} is {value!r}, not a positive number",
                where=self.where,
                next_step="fetch the model's config.json again",
            )
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: str, default: bool) -> bool:
        value = self.params.get(key, default)
        if not isinstance(value, bool):
            raise InputFileError(
                f"rope parameter {key} is {value!r}, not true or false",
                where=self.where,
                next_step="fetch the model's config.json again",
            )
        return value

    def original_context(self) -> float:
        return self.number("original_max_position_embeddings", self.max_context)


def make_rope(params: Mapping[str, Any], dim: int, max_context: int, where: str) -> ScaledRope:
    """The rope that ``params`` describe, over ``dim`` elements of a head.

    Raises UnsupportedError for an unknown ``rope_type`` or parameter, InputFileError for a bad
    value.
    """
    if not 2 <= dim <= MAX_ROTARY_DIM or dim % 2:
        raise InputFileError(
            f"a rope cannot rotate {dim} elements of a head",
            where=where,
            next_step="fetch the model's config.json again",
        )
    kind = params.get("rope_type", params.get("type", "default"))
    if not isinstance(kind, str) or kind not in _RULES:
        raise UnsupportedError(
            f"rope scaling {str(kind)[:40]!r} is not implemented",
            where=where,
            next_step=f"use a model with one of: {', '.join(sorted(_RULES))}",
        )
    rule, keys = _RULES[kind]
    for key, value in params.items():
        if key not in keys and key not in _COMMON and value is not None:
            raise UnsupportedError(
                f"rope parameter {key} is not known for rope scaling {kind}",
                where=where,
                next_step="remove the key if it does not change the rope",
            )
    theta = _Request(params, np.empty(0), 0.0, dim, max_context, where).number("rope_theta")
    exponents = np.arange(0, dim, 2).astype(_F32) / _F32(dim)
    with np.errstate(all="ignore"):
        base = _F32(1) / _power(theta, exponents)
        return rule(_Request(params, base, theta, dim, max_context, where))


def _power(theta: float, exponents: Array) -> Array:
    """theta ** exponents, rounded once to float32."""
    return np.power(theta, exponents.astype(np.float64)).astype(_F32)


def _scaled(inv_freq: Array, max_context: float, factor: float = 1.0) -> ScaledRope:
    frequencies = tuple(float(f) for f in inv_freq.astype(_F32))
    return ScaledRope(Rope(frequencies, attention_factor=factor), int(max_context))


def _default(r: _Request) -> ScaledRope:
    return _scaled(r.base, r.max_context)


def _linear(r: _Request) -> ScaledRope:
    return _scaled(r.base / _F32(r.number("factor")), r.max_context)


def _dynamic(r: _Request) -> ScaledRope:
    """NTK scaling starts beyond the trained context; up to there the rope is the plain one."""
    r.number("factor")
    return _scaled(r.base, r.max_context)


def _llama3(r: _Request) -> ScaledRope:
    """Long wavelengths are divided by ``factor``, middle ones are blended."""
    factor, original = _F32(r.number("factor")), r.original_context()
    low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
    if low >= high:
        raise InputFileError(
            f"rope parameter low_freq_factor ({low}) must be below high_freq_factor ({high})",
            where=r.where,
            next_step="fetch the model's config.json again",
        )
    wavelength = _F32(2 * math.pi) / r.base
    scaled = np.where(wavelength > original / low, r.base / factor, r.base)
    smooth = (_F32(original) / wavelength - _F32(low)) / _F32(high - low)
    blended = (_F32(1) - smooth) * scaled / factor + smooth * scaled
    middle = (wavelength >= original / high) & (wavelength <= original / low)
    return _scaled(np.where(middle, blended, scaled), r.max_context)


def _yarn(r: _Request) -> ScaledRope:
    """Blend of interpolated and extrapolated frequencies over a ramp, and a softened softmax."""
    factor, original, dim = r.number("factor"), r.original_context(), r.dim

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if r.params.get("attention_factor") is not None:
        attention = r.number("attention_factor")
    elif r.params.get("mscale") and r.params.get("mscale_all_dim"):
        attention = mscale(r.number("mscale")) / mscale(r.number("mscale_all_dim"))
    else:
        attention = mscale(1.0)

    def dimension(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(r.theta))

    if r.theta == 1.0:
        raise InputFileError("yarn needs a rope_theta other than 1", where=r.where)
    low, high = dimension(r.number("beta_fast", 32.0)), dimension(r.number("beta_slow", 1.0))
    if r.flag("truncate", True):
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=_F32) - _F32(low)) / _F32(high - low), 0, 1)
    keep = _F32(1) - ramp
    powers = _power(r.theta, np.arange(0, dim, 2).astype(_F32) / _F32(dim))
    interpolated = _F32(1) / (_F32(factor) * powers)
    inv_freq = interpolated * (_F32(1) - keep) + (_F32(1) / powers) * keep
    return _scaled(inv_freq, max(r.max_context, factor * original), attention)


def _longrope(r: _Request) -> ScaledRope:
    """Two sets of factors, chosen by the length of the whole sequence.

    The choice changes every earlier key once a sequence passes the original context, which no cache
    can follow.  So the short factors are baked and the context ends where they stop being exact.
    """
    original = r.original_context()
    factor = r.number("factor", r.max_context / original)
    attention = 1.0
    if r.params.get("attention_factor") is not None:
        attention = r.number("attention_factor")
    elif factor > 1 and original > 1:
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
    for key in ("short_factor", "long_factor"):
        values = r.params.get(key)
        if (
            not isinstance(values, list)
            or len(values) != r.dim // 2
            or not all(type(v) in (int, float) and v > 0 for v in values)
        ):
            raise InputFileError(
                f"rope parameter {key} must be a list of {r.dim // 2} positive numbers",
                where=r.where,
                next_step="fetch the model's config.json again",
            )
    powers = _power(r.theta, np.arange(0, r.dim, 2).astype(_F32) / _F32(r.dim))
    inv_freq = _F32(1) / (np.array(r.params["short_factor"], _F32) * powers)
    return _scaled(inv_freq, min(r.max_context, original), attention)


_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ORIGINAL = "original_max_position_embeddings"
_RULES: dict[str, tuple[Callable[[_Request], ScaledRope], frozenset[str]]] = {
    "default": (_default, frozenset({_ORIGINAL})),
    "linear": (_linear, frozenset({"factor", _ORIGINAL})),
    "dynamic": (_dynamic, frozenset({"factor", _ORIGINAL})),
    "llama3": (_llama3, frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL})),
    "yarn": (
        _yarn,
        frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
                   "mscale_all_dim", "truncate", _ORIGINAL}),
    ),
    "longrope": (
        _longrope,
        frozenset({"factor", "attention_factor", "short_factor", "long_factor", _ORIGINAL}),
    ),
}  # fmt: skip
