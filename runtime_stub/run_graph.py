"""The command ``run``: a graph without KV cache, arrays in, arrays out.

In: ``--input NAME=FILE.npy`` for each input.  Out: type, shape and first values of each output,
with ``--output-dir`` also ``NAME.npy`` files there.  Next file: ``npy.py``.
"""

from __future__ import annotations

import errno
import os
import sys
import time

from .errors import IntegrityError, ResourceError, UsageError
from .npy import DTYPE_BYTES, DTYPES, first_values, read_npy, write_npy
from .options import PROFILE, THREADS, Option, word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

    from .options import Values
    from .profile import Profile
    from .session import Session

OPTIONS = [
    Option(("--input",), "an input array (repeat for each input)", word, metavar="NAME=FILE.npy",
           many=True),
    Option(("--output-dir",), "where to write NAME.npy for each output; made if missing", word,
           metavar="DIR"),
    THREADS,
    PROFILE,
]  # fmt: skip

#: values of an output that are shown
_SHOWN = 8
#: operators that pick rows -> which of their inputs are (table, indices)
_PICKS = {"Embed": (1, 0), "SplitEmbed": (1, 0), "Gather": (0, 1)}


def symbol_order(entry: dict[str, Any], buffers: dict[str, dict[str, Any]]) -> list[str]:
    """The symbols in the order of ``zl_run``'s ``dims``: as they appear in the inputs' shapes.
    Product symbols (``batch*seq``) are not passed."""
    order: dict[str, None] = {}
    for name in entry["inputs"]:
        order.update({d: None for d in buffers[name]["shape"] if isinstance(d, str)})
    return [symbol for symbol in order if "*" not in symbol]


def value_of(symbol: str, known: dict[str, int]) -> int:
    """A symbol's value; a product symbol is the product of its parts."""
    if symbol in known:
        return known[symbol]
    value = 1
    for part in symbol.split("*"):
        if part not in known:
            raise UsageError(f"the dimension {part!r} is in no input's shape")
        value *= known[part]
    return value


def describe(buffer: dict[str, Any]) -> str:
    """``f32[batch, 64]``."""
    return f"{buffer.get('dtype')}[{', '.join(map(str, buffer.get('shape') or ()))}]"


def _read_inputs(
    session: Session, entry: dict[str, Any], buffers: dict[str, dict[str, Any]], given: list[str]
) -> tuple[list[bytearray], dict[str, int]]:
    """The input arrays in order, and the value of each symbol in their shapes."""
    files: dict[str, str] = {}
    for item in given:
        name, equals, path = item.partition("=")
        if not equals or name not in entry["inputs"] or name in files:
            raise UsageError(
                f"--input {item!r} is not NAME=FILE.npy with a new NAME",
                next_step=f"inputs: {', '.join(entry['inputs'])}",
            )
        files[name] = path
    missing = [n for n in entry["inputs"] if n not in files]
    if missing:
        wanted = ", ".join(f"{n} {describe(buffers[n])}" for n in entry["inputs"])
        raise UsageError(
            f"no --input for {', '.join(missing)}",
            where=session.path,
            next_step=f"the inputs are {wanted}",
        )
    arrays, known = [], dict[str, int]()
    for name in entry["inputs"]:
        buffer = buffers[name]
        dtype, shape, data = read_npy(files[name])
        want = tuple(buffer["shape"])
        ok = dtype == buffer["dtype"] and len(shape) == len(want)
        for have, dim in zip(shape, want):  # noqa: B905 (Python 3.9)
            ok = ok and (known.setdefault(dim, have) if isinstance(dim, str) else dim) == have
        if not ok:
            raise UsageError(
                f"input {name} is {dtype}{list(shape)}, must be {buffer['dtype']}{list(want)}",
                where=files[name],
            )
        arrays.append(data)
    return arrays, known


def _check_indices(
    session: Session,
    entry: dict[str, Any],
    buffers: dict[str, dict[str, Any]],
    inputs: list[bytearray],
    known: dict[str, int],
) -> None:
    """Ids and indices in the inputs lie inside the tables that they pick rows of: kernels do not
    look."""
    tables = {b["name"]: b["shape"] for b in session.manifest["weights"]["tensors"]}
    tables.update({name: b["shape"] for name, b in buffers.items()})
    for call in entry["calls"]:
        if call.get("op") not in _PICKS:
            continue
        table, name = (call["inputs"][i] for i in _PICKS[call["op"]])
        if name not in entry["inputs"]:
            raise IntegrityError(f"{call['name']} picks by {name}, which is no input")
        rows = 1
        for dim in tables[table]:
            rows *= value_of(dim, known) if isinstance(dim, str) else dim
        rows //= call["constants"]["C"]
        ids = memoryview(inputs[entry["inputs"].index(name)]).cast("i")
        if min(ids) < 0 or max(ids) >= rows:
            wrong = next(i for i in ids if not 0 <= i < rows)
            raise UsageError(
                f"input {name} holds {wrong}, {call['name']} picks among rows 0 to {rows - 1}",
                where=session.path,
            )


def _arrays(
    session: Session, entry: dict[str, Any], buffers: dict[str, dict[str, Any]], files: list[str]
) -> tuple[list[bytearray], list[bytearray], list[int], dict[str, tuple[int, ...]]]:
    """(inputs, outputs, values of the symbols, shapes of the outputs), as the manifest has them."""
    bounds = dict(session.manifest.get("limits", {}).get("symbols", {}))
    inputs, known = _read_inputs(session, entry, buffers, files)
    order = entry.get("dims") or symbol_order(entry, buffers)
    dims = [value_of(s, known) for s in order]
    for symbol, value in zip(order, dims):  # noqa: B905 (Python 3.9)
        if not 0 < value <= bounds.get(symbol, value):
            raise ResourceError(
                f"{symbol} is {value}, the artifact was built for 1 to {bounds[symbol]}",
                next_step="use smaller inputs or compile with larger bounds",
            )
    _check_indices(session, entry, buffers, inputs, known)
    shapes = {
        name: tuple(value_of(d, known) if isinstance(d, str) else d for d in buffers[name]["shape"])
        for name in entry["outputs"]
    }
    outputs = []
    for name in entry["outputs"]:
        size = DTYPE_BYTES[buffers[name]["dtype"]]
        for n in shapes[name]:
            size *= n
        outputs.append(bytearray(size))
    return inputs, outputs, dims, shapes


def _profile(session: Session, values: Values, entry: dict[str, Any]) -> Optional[Profile]:
    """What ``--profile`` asks for, if it does; UsageError for a path of another use."""
    if values["profile"] is None:
        return None
    from .profile import Profile

    taken = [("an input", item.partition("=")[2]) for item in values["input"]]
    if values["output_dir"] is not None:
        folder = values["output_dir"]
        taken += [("an output", os.path.join(folder, _file_name(n))) for n in entry["outputs"]]
    return Profile(session, values["profile"], taken, "run")


def run_graph(session: Session, values: Values, as_json: bool) -> dict[str, Any]:
    """Returns what ``--json`` prints."""
    session.require_host()
    entry = session.entry_point("run")
    buffers = {b["name"]: b for b in session.manifest.get("buffers", ())}
    for name in (*entry["inputs"], *entry["outputs"]):
        if buffers.get(name, {}).get("dtype") not in DTYPES:
            raise IntegrityError(f"the manifest does not describe {name}", where=session.path)
    profile = _profile(session, values, entry)
    try:
        inputs, outputs, dims, shapes = _arrays(session, entry, buffers, values["input"])
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as e:
        raise IntegrityError(
            f"the manifest's entry point makes no sense: {type(e).__name__}: {e}",
            where=session.path,
            next_step="build the artifact again",
        ) from None
    if values["output_dir"] is not None:
        _make_folder(values["output_dir"])
    session.memory.require(0, session.path)
    threads, _why = session.threads(values["threads"])
    engine = session.start(0, threads)
    step = engine.run if profile is None else profile.attach(engine).run
    start = time.perf_counter()
    step(inputs, outputs, dims)
    seconds = time.perf_counter() - start
    described = []
    for name, data in zip(entry["outputs"], outputs):  # noqa: B905 (Python 3.9)
        dtype, shape = buffers[name]["dtype"], shapes[name]
        first = first_values(dtype, data, _SHOWN)
        item: dict[str, Any] = {"name": name, "dtype": dtype, "shape": list(shape), "first": first}
        if values["output_dir"] is not None:
            item["file"] = os.path.join(values["output_dir"], _file_name(name))
            write_npy(item["file"], dtype, shape, data)
        described.append(item)
        if not as_json:
            shown = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in first)
            more = ", ..." if len(data) > len(first) * DTYPE_BYTES[dtype] else ""
            row = (name, f"{dtype}{list(shape)}", item.get("file", ""), shown + more)
            sys.stdout.write("  ".join(cell for cell in row if cell) + "\n")
    return {
        "outputs": described,
        "run_ms": round(seconds * 1e3, 3),
        "threads": threads,
        "profile": values["profile"],
        "timings": session.timings.as_dict(),
    }


def _make_folder(folder: str) -> None:
    """The folder of ``--output-dir``, once the inputs are read."""
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        full = getattr(e, "errno", None) in {errno.ENOSPC, errno.EDQUOT}
        kind = ResourceError if full else UsageError
        raise kind(f"cannot make --output-dir: {why}", where=folder) from None


def _file_name(name: str) -> str:
    """An output's name as a file name: it comes from a model file and may hold anything."""
    safe = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "_" for c in name)
    return safe.lstrip(".")[:120] + ".npy"
