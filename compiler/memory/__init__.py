"""The memory plan and its verifier.

In: a lowered program.  Out: :func:`plan`, :func:`check_plan`, :func:`memory_need`.  Next file:
``plan.py``.
"""

from __future__ import annotations

from .check import PlanError, check_plan
from .plan import MemoryNeed, memory_need, plan

__all__ = ["MemoryNeed", "PlanError", "check_plan", "memory_need", "plan"]
