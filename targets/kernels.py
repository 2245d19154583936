"""The kernel table and the one function that chooses from it.

In: nothing.  Out: :class:`KernelRow`, :class:`KernelQuery`, :func:`select`.  Fusion, weight layout
and lowering all ask :func:`select`, so no stage predicts what a later one will do.  Next file: a
family's own table, for example ``cpu_rows.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from zerolayer.runtime_stub.errors import UnsupportedError

from .program import Constant


def _always(_constants: Mapping[str, Constant]) -> str | None:
    return None


@dataclass(frozen=True)
class KernelRow:
    """One kernel that a family has.

    ``op`` is the base operator name (``Linear``, not ``Linear_Q4_1_int8``).  ``formats`` holds, per
    weight input, the weight formats the kernel reads; ``activations`` the activation kinds (empty:
    the operator has none).  ``features`` are the target features that the code needs.  The call is
    ``function(task, inputs.., outputs.., constants..)`` with the constants in the order named by
    ``constants``; ``weight_layout`` names the packing per weight input.  ``constraint`` returns
    why a call does not fit, or None.  ``batch_invariant`` promises that the bits of a row of the
    result depend on that row's inputs alone: not on the other rows, how many there are, nor on how
    many threads or blocks of memory take part.  Earlier rows win.
    """

    id: str
    op: str
    header: str
    function: str
    constants: tuple[str, ...] = ()
    formats: tuple[frozenset[str], ...] = ()
    activations: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    weight_layout: tuple[str, ...] = ()
    batch_invariant: bool = False
    constraint: Callable[[Mapping[str, Constant]], str | None] = _always


@dataclass(frozen=True)
class KernelQuery:
    """What a call needs: base operator, weight formats in input order, activation kind,
    constants."""

    op: str
    formats: tuple[str, ...] = ()
    activations: str = ""
    constants: tuple[tuple[str, Constant], ...] = ()
    place: str = ""


def mismatch(row: KernelRow, query: KernelQuery, features: frozenset[str]) -> str | None:
    """Why ``row`` cannot serve ``query`` on a target with ``features``; None when it can."""
    if row.op != query.op:
        return f"implements {row.op}"
    if len(row.formats) != len(query.formats):
        return f"takes {len(row.formats)} weights, not {len(query.formats)}"
    for allowed, wanted in zip(row.formats, query.formats, strict=True):
        if wanted not in allowed:
            return f"reads {'/'.join(sorted(allowed))}, not {wanted}"
    if query.activations not in (row.activations or frozenset({""})):
        return f"takes activations {'/'.join(sorted(row.activations))}, not {query.activations}"
    missing = row.features - features
    if missing:
        return f"needs {', '.join(sorted(missing))}"
    return row.constraint(dict(query.constants))


def select(
    rows: Iterable[KernelRow], query: KernelQuery, features: frozenset[str], target: str
) -> KernelRow:
    """The first row of ``rows`` that serves ``query``.

    Raises UnsupportedError naming operator, formats, activations, target and the nearest rows.
    """
    rows = tuple(rows)
    near: list[tuple[bool, str]] = []
    for row in rows:
        why = mismatch(row, query, features)
        if why is None:
            return row
        if row.op == query.op:
            near.append((bool(row.features - features), f"{row.id} ({why})"))
    if not all(foreign for foreign, _ in near):  # what the target cannot run says nothing new
        near = [row for row in near if not row[0]]
    wanted = " ".join(x for x in (query.op, *query.formats, query.activations) if x)
    nearest = (
        "; nearest: " + "; ".join(why for _, why in near[:4])
        if near
        else "; the target has no kernel for this operator"
    )
    uncached = tuple((name, value) for name, value in query.constants if name != "kv_dtype")
    other = replace(query, constants=uncached)  # of any cache
    blamed = any(mismatch(row, other, features) is None for row in rows)
    choose = "--kv-dtype" if blamed else "--quantize or --activations"
    raise UnsupportedError(
        f"no kernel for {wanted} on target {target}{nearest}",
        where=query.place,
        next_step=f"choose another {choose}, or another target",
    )
