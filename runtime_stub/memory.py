"""How much memory a run needs, and what fits here.

In: the manifest's ``memory`` and ``limits``, :class:`HostFacts`.  Out: :class:`MemoryPlan` or
ResourceError with the breakdown.  Next file: ``session.py``.  Nothing is allocated.
"""

from __future__ import annotations

from .errors import IntegrityError, ResourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .detect import HostFacts

#: the Python interpreter, the loader, the tokenizer, the code object, its scratch and its slots
RESERVE_BYTES = 96 << 20


class MemoryPlan:
    """Bytes by purpose.  ``largest_context`` is in tokens over all sequences, 0 when not even one
    block fits; ``max_context`` what one sequence may have by the model."""

    def __init__(self, manifest: Mapping[str, Any], facts: HostFacts) -> None:
        memory = manifest.get("memory")
        limits = manifest.get("limits")
        if not isinstance(memory, dict) or not isinstance(limits, dict):
            raise IntegrityError("the manifest has no memory plan", where="manifest.json")
        self.weights = _count(memory, "weights_bytes")
        self.workspace = _count(memory, "workspace_bytes")
        self.block_size = _count(memory, "kv_block_size")
        self.block_bytes = _count(memory, "kv_block_bytes")
        self.max_context = _count(limits, "max_context") if self.block_size else 0
        self.available = facts.memory_available
        self.total = facts.memory_total
        self.limit = facts.memory_limit

    @property
    def fixed(self) -> int:
        """What is needed whatever the context."""
        return self.weights + self.workspace + RESERVE_BYTES

    @property
    def kv_per_token(self) -> float:
        return self.block_bytes / self.block_size if self.block_size else 0.0

    @property
    def largest_blocks(self) -> int:
        """KV blocks that fit beside the rest."""
        if not self.block_bytes:
            return 0
        return max(0, self.available - self.fixed) // self.block_bytes

    @property
    def largest_context(self) -> int:
        return min(self.max_context, self.largest_blocks * self.block_size)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size) if self.block_size else 0

    @property
    def fits(self) -> bool:
        """Weights, workspace and at least one block of KV."""
        return self.available >= self.fixed + self.block_bytes

    def as_dict(self) -> dict[str, object]:
        return {
            "weights_bytes": self.weights,
            "workspace_bytes": self.workspace,
            "reserve_bytes": RESERVE_BYTES,
            "kv_block_size": self.block_size,
            "kv_block_bytes": self.block_bytes,
            "kv_bytes_per_token": self.kv_per_token,
            "available_bytes": self.available,
            "total_bytes": self.total,
            "limit_bytes": self.limit,
            "max_context": self.max_context,
            "largest_context": self.largest_context,
            "fits": self.fits,
        }

    def breakdown(self) -> str:
        """The numbers in one line, for messages."""
        parts = [f"weights {human(self.weights)}", f"workspace {human(self.workspace)}"]
        if self.block_size:
            parts.append(f"KV {human(int(self.kv_per_token))} per token")
        parts.append(f"loader {human(RESERVE_BYTES)}")
        return " + ".join(parts)

    def require(self, tokens: int, where: str) -> None:
        """ResourceError unless ``tokens`` of context fit beside weights and workspace."""
        need = self.fixed + self.blocks_for(tokens) * self.block_bytes
        if need <= self.available:
            return
        largest = self.largest_context
        if largest and self.block_size:
            step = f"use --max-context {largest} or less, or free memory"
        else:
            step = f"free {human(need - self.available)} of memory"
        context = f" for a context of {tokens} tokens" if self.block_size else ""
        raise ResourceError(
            f"needs {human(need)} of memory{context} ({self.breakdown()}), "
            f"{human(self.available)} are available",
            where=where,
            next_step=step,
        )


def _count(where: Mapping[str, Any], key: str) -> int:
    value = where.get(key)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise IntegrityError(f"{key} is missing or not a count", where="manifest.json")
    return value


def human(nbytes: int) -> str:
    """``1.50 GiB``, ``312 KiB``, ``17 B``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
