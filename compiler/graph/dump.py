"""Writes a graph as an ordinary ``.onnx`` file that opens in Netron.

In: an ``onnx_ir.Model``.  Out: a file without the weights' data (its size does not depend on the
model's).  A weight of more than 16 elements is written as a graph input of its type and shape, with
its format and source in ``metadata_props``; smaller constants (shapes, axes, scalars) keep their
data.  Next file: ``../passes``.

:func:`load_dump` gives the model back with weights taken, by name, from a model that has them, so
that a compile can be restarted from any dump.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from zerolayer.runtime_stub.errors import InputFileError

from .execute import graph_without_weights

_MARK = "zerolayer.weight"


def dump_graph(model: ir.Model, path: Path) -> None:
    """Write ``model`` to ``path``, through a temporary name."""
    proto = graph_without_weights(model)
    for info in proto.graph.input:
        value = model.graph.initializers.get(info.name)
        if value is not None:
            info.metadata_props.add(key=_MARK, value="1")
            for key, note in sorted(value.metadata_props.items()):
                info.metadata_props.add(key=key, value=str(note))
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(proto.SerializeToString(deterministic=True))
    partial.replace(path)


def load_dump(path: Path, weights: ir.Model) -> ir.Model:
    """The graph in ``path`` with the data of ``weights``' initializers of the same names.

    Raises InputFileError for a file that is not a dump, or a weight that is missing or has another
    type (a pass has changed it since: start from an earlier dump).
    """
    try:
        model = ir.load(path)
    except Exception as error:
        raise InputFileError(f"not an ONNX file: {error}", where=str(path)) from error
    graph = model.graph
    for value in [v for v in graph.inputs if _MARK in v.metadata_props]:
        found = weights.graph.initializers.get(value.name or "")
        if found is None or found.const_value is None:
            raise InputFileError(
                f"no weight called {value.name}", where=str(path),
                next_step="give the model file that the dump was made from",
            )  # fmt: skip
        if found.dtype != value.dtype or found.shape != value.shape:
            raise InputFileError(
                f"weight {value.name} is {found.dtype} {found.shape}, the dump says "
                f"{value.dtype} {value.shape}",
                where=str(path),
                next_step="restart from a dump before the pass that changed it",
            )
        graph.inputs.remove(value)
        value.const_value = found.const_value
        del value.metadata_props[_MARK]
        graph.initializers[value.name or ""] = value
    return model
