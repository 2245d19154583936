"""How wrong an artifact may be: one row per precision, never a number inside a test.

In: nothing.  Out: :class:`Bounds` and :func:`bounds_for`.  Next file: ``metrics.py``.

The bounds are engineering limits, set from what was measured on SmolLM2-135M-Instruct (Q4_1) and on
random models of every supported architecture, with a margin of about three; a kernel with a wrong
scale, a shifted block or a dropped column exceeds them by orders of magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass


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


#: so does a cache that keeps less than the activations have; f16 stays within any of the above
BY_CACHE = {
    "bf16": Bounds("bf16 cache", top1=0.98, margin=0.3, kl=0.01, logits=0.05, layer=0.05),
    "q8_0": Bounds("q8_0 cache", top1=0.98, margin=0.3, kl=0.01, logits=0.05, layer=0.05),
}


def bounds_for(quantize: str, activations: str, kv_dtype: str = "") -> Bounds:
    """The limits of a compile: the loosest, per figure, of its weights', its activations' and its
    KV cache's row."""
    rows = [BY_ACTIVATIONS[activations]]
    for more in (BY_QUANTIZATION.get(quantize), BY_CACHE.get(kv_dtype)):
        if more is not None:
            rows.insert(0, more)
    if len(rows) == 1:
        return rows[0]
    return Bounds(
        name=", ".join([*(r.name for r in rows[:-1]), f"{rows[-1].name} activations"]),
        top1=min(r.top1 for r in rows),
        margin=max(r.margin for r in rows),
        kl=max(r.kl for r in rows),
        logits=max(r.logits for r in rows),
        layer=max(r.layer for r in rows),
    )
