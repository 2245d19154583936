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


def bounds_for(quantize: str, activations: str) -> Bounds:
    """The limits of a compile: the looser, per figure, of its weights' and its activations' row."""
    a = BY_ACTIVATIONS[activations]
    q = BY_QUANTIZATION.get(quantize)
    if q is None:
        return a
    return Bounds(
        name=f"{q.name}, {a.name} activations",
        top1=min(a.top1, q.top1),
        margin=max(a.margin, q.margin),
        kl=max(a.kl, q.kl),
        logits=max(a.logits, q.logits),
        layer=max(a.layer, q.layer),
    )
