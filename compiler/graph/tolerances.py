"""How far a pass may move a graph's outputs: one table by format.

In: nothing.  Out: :func:`pass_tolerance`.  Next file: ``../passes/compare.py``.

The measure is ``|after - before| / |before|`` (Frobenius norms) of the residual stream after any
one layer and of the logits.  A pass that changes no format may only reorder float32 additions.
Largest figures measured, random two-layer models of six structures / SmolLM2-135M (30 layers):

    rearranging 3e-7 / 1e-6; activations bf16 0.004 / 0.025, int8 0.013 / 0.028;
    weights BF16 0.004, Q8_0 0.013, Q4_1 0.15 (two layers only: SmolLM2's file has 4-bit weights)

The limits leave room for depth; a shifted block, a wrong scale or a lost column gives 0.5 or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

#: reordered float32 additions, through all layers
FLOAT32 = 2e-5

#: weight format that a pass encodes to -> tolerance
WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"BF16": 0.05, "Q8_0": 0.08, "Q4_0": 0.45, "Q4_1": 0.40}
)

#: activation kind that a pass rounds to -> tolerance
ACTIVATIONS: Mapping[str, float] = MappingProxyType({"f32": FLOAT32, "bf16": 0.06, "int8": 0.12})


def pass_tolerance(formats: Iterable[str], activations: Iterable[str]) -> float:
    """The limit for a pass that encodes weights to ``formats`` and activations to ``activations``
    (both empty: a pass that only rearranges)."""
    limits = [WEIGHTS[f] for f in formats] + [ACTIVATIONS[a] for a in activations]
    return max(limits, default=FLOAT32)
