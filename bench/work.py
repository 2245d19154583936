"""What a step has to read and compute, from an artifact's manifest.

In: an artifact.  Out: :class:`Work`.  Next file: ``results.py``.

Counted are the bytes that a step must fetch from memory, weights with their scales and the KV
cache, and the operations of its kernels, attention at its true context.  Activations are counted
apart: they stay in the caches.  The benchmarks are greedy: of a screened output projection a step
reads the int8 copy or the upper bits; the few groups that it then computes are not counted.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: operators of which a greedy step computes next to nothing
_SCREENED = ("ScreenedLinear", "ScreenedSplitLinear")


@dataclass(frozen=True)
class Call:
    """A kernel call; ``context`` is the attended positions of each row, where it has any."""

    group: str
    weight_bytes: int
    activation_bytes: int  # a row
    operations: int  # a row; for attention, a row and attended position
    attention: bool
    last_only: bool  # runs for the rows whose logits are wanted

    def bytes_read(self, rows: int, context: float, kv_bytes: float) -> float:
        """From memory; ``kv_bytes`` is of one position in one layer."""
        kv = context * kv_bytes if self.attention else 0.0
        return self.weight_bytes + kv + (0 if self.weight_bytes else self.activation_bytes * rows)

    def total(self, rows: int, context: float) -> float:
        """Operations of the call."""
        return self.operations * rows * (context if self.attention else 1.0)


@dataclass(frozen=True)
class Work:
    """The step of one artifact."""

    calls: tuple[Call, ...]
    kv_bytes_per_token: float
    format: str
    fusion: str
    phases: int = 0  # of calls that do not wait for each other

    def decode_bytes(self, context: float, batch: int = 1) -> float:
        """Weights once, KV of each sequence."""
        weights = sum(c.weight_bytes for c in self.calls)
        return weights + batch * context * self.kv_bytes_per_token

    def prefill_operations(self, tokens: int) -> float:
        """One sequence's prompt, logits of its last token only."""
        half = (tokens + 1) / 2
        return sum(c.total(1 if c.last_only else tokens, half) for c in self.calls)

    def activation_bytes(self) -> int:
        """Read and written between kernels by a step of one token, logits left out."""
        return sum(c.activation_bytes for c in self.calls)

    @property
    def kv_bytes_per_layer(self) -> float:
        """KV of one position in one layer."""
        return self.kv_bytes_per_token / max(1, sum(c.attention for c in self.calls))


def group(call: dict[str, Any]) -> str:
    """The call's place, the same in every layer."""
    layer = call.get("layer")
    name = str(call["name"])
    return name if layer is None else name.removeprefix(f"layers.{layer}.")


def read_work(artifact: Path) -> Work:
    """From the manifest in the artifact."""
    with zipfile.ZipFile(artifact) as file:
        return work(json.loads(file.read("manifest.json")))


def work(manifest: dict[str, Any]) -> Work:
    """From a manifest."""
    step = next(e for e in manifest["entry_points"] if e["name"] == "step")
    calls = tuple(
        Call(
            group(c),
            0 if c["op"] in _SCREENED else c["weight_bytes"],
            c["activation_bytes_per_row"],
            0 if c["op"] in _SCREENED else c["flops_per_row"],
            "Attention" in c["op"],
            c["rows"] in ("R", "S"),
        )
        for c in step["calls"]
    )
    formats = [str(q["stored_format"]) for q in manifest.get("quantization") or []]
    return Work(
        calls,
        float(manifest["memory"]["kv_bytes_per_token"]),
        max(set(formats), key=formats.count) if formats else "",
        str(manifest["options"]["fusion"]),
        len({c.get("phase", i) for i, c in enumerate(step["calls"])}),
    )
