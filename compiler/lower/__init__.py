"""Graph to program.

In: the final graph.  Out: :func:`lower`, which makes a :class:`Program`.  Next file:
``constants.py``.
"""

from __future__ import annotations

from .lower import LowerOptions, lower

__all__ = ["LowerOptions", "lower"]
