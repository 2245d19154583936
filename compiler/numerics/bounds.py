"""How wrong an artifact may be: one row per precision, never a number inside a test.

In: nothing.  Out: :class:`Bounds` and :func:`bounds_for`.  Next file: ``metrics.py``.

The bounds are engineering limits, set from what was measured on SmolLM2-135M-Instruct (Q4_1) and on
random models of every supported architecture, with a margin of about three; a kernel with a wrong
scale, a shifted block or a dropped column exceeds them by orders of magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Bounds:
    """Limits of one precision.

    ``top1``: smallest share of decisive positions (reference margin between the two largest logits
    of at least ``margin`` nats) where kernel and reference choose the same token.  ``kl``: largest
    mean Kullback-Leibler divergence in nats, reference to kernel.  ``logits``: largest RMS logit
    error relative to the RMS of the centred reference logits.  ``layer``: the same, for the
    residual stream after any one layer.
    """

    name: str
    top1: float
    margin: float
    kl: float
    logits: float
    layer: float


#: activation kind -> bounds, for weights kept as they are in the file
BY_ACTIVATIONS = {
    "f32": Bounds("f32", top1=1.0, margin=1e-3, kl=1e-5, logits=1e-3, layer=1e-3),
    "bf16": Bounds("bf16", top1=0.98, margin=0.3, kl=0.01, logits=0.05, layer=0.05),
    "int8": Bounds("int8", top1=0.97, margin=0.3, kl=0.05, logits=0.10, layer=0.15),
}

#: requantized weights add their own error on top of the activations'
BY_QUANTIZATION = {
    "bf16": Bounds("bf16 weights", top1=0.98, margin=0.3, kl=0.01, logits=0.05, layer=0.05),
    "int8": Bounds("int8 weights", top1=0.97, margin=0.3, kl=0.05, logits=0.10, layer=0.15),
    "int4": Bounds("int4 weights", top1=0.80, margin=1.0, kl=0.80, logits=0.45, layer=0.45),
}


#: so does a KV cache of fewer bits than the activations have
BY_CACHE = {
    "f16": Bounds("f16 cache", top1=1.0, margin=1e-2, kl=1e-5, logits=2e-3, layer=2e-3),
    "bf16": Bounds("bf16 cache", top1=0.98, margin=0.3, kl=0.01, logits=0.05, layer=0.05),
    "q8_0": Bounds("q8_0 cache", top1=0.98, margin=0.3, kl=0.01, logits=0.05, layer=0.05),
}


def _looser(a: Bounds, b: Bounds, name: str) -> Bounds:
    """Figure by figure the looser limit of two rows."""
    return Bounds(
        name,
        top1=min(a.top1, b.top1),
        margin=max(a.margin, b.margin),
        kl=max(a.kl, b.kl),
        logits=max(a.logits, b.logits),
        layer=max(a.layer, b.layer),
    )


def bounds_for(quantize: str, activations: str, kv_dtype: str = "") -> Bounds:
    """The limits of a compile: the loosest, per figure, of its activations', its requantized
    weights' and its KV cache's row.  A cache that loosens none is not named."""
    bounds = BY_ACTIVATIONS[activations]
    name = f"{bounds.name} activations"
    if (weights := BY_QUANTIZATION.get(quantize)) is not None:
        name = f"{weights.name}, {name}"
        bounds = _looser(bounds, weights, name)
    if (cache := BY_CACHE.get(kv_dtype)) is not None:
        both = _looser(bounds, cache, f"{cache.name}, {name}")
        if replace(both, name=bounds.name) != bounds:
            bounds = both
    return bounds
