"""``zerolayer inspect`` and ``zerolayer verify``: what an artifact says about itself, as data.

In: an open :class:`Artifact`.  Out: one list of rows or mapping per view, ready for ``--json`` and
for ``inspect_show.py``, which is the next file.

The constants that kernels were given are read twice, from the manifest and from the record inside
the code object, and compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolayer.runtime_stub.container import Artifact, open_artifact
from zerolayer.runtime_stub.errors import IntegrityError
from zerolayer.runtime_stub.verify import without_golden
from zerolayer.targets.injection import read_note
from zerolayer.targets.program import BOUNDS

Row = Mapping[str, Any]
VIEWS = ("kernels", "injected", "memory", "roofline", "manifest")


_GOLDEN = "this checks bytes on any machine; FILE verify runs them on the host"


@dataclass(frozen=True)
class Verified:
    """The result of :func:`verify_file`."""

    path: str
    digest: str
    members: int
    sections: int
    bytes: int
    golden_why: str

    def as_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "path": self.path,
            "digest": self.digest,
            "members": self.members,
            "sections": self.sections,
            "bytes": self.bytes,
            "status": "ok",
            "golden": "not run",
            "golden_why": self.golden_why,
        }


def verify_file(path: Path, progress: Callable[[int, int], None] | None = None) -> Verified:
    """Checks structure, every hash, and that the code object carries the manifest's constants.

    ``progress(bytes done, bytes in all)``.  Raises InputFileError or IntegrityError.  The golden
    prompts are run by the artifact itself: ``FILE verify``.
    """
    with open_artifact(str(path)) as artifact:
        artifact.verify_all(progress)
        if artifact.manifest.get("kernels"):
            for row in injected(artifact):
                if not row["agrees"]:
                    raise IntegrityError(
                        f"kernel {row['kernel']}: {row['name']} is {row['manifest']!r} in the "
                        f"manifest, {row['binary']!r} in the code object",
                        where=str(path),
                        next_step="build the artifact again",
                    )
        return Verified(
            golden_why=_GOLDEN
            if artifact.manifest.get("golden")
            else without_golden(artifact.manifest),
            path=str(path),
            digest=artifact.digest,
            members=len(artifact.names),
            sections=len(artifact.manifest["weights"]["sections"]),
            bytes=artifact.size,
        )


def summary(artifact: Artifact) -> dict[str, Any]:
    """What the file is, in a few figures."""
    manifest = artifact.manifest
    model, target = _mapping(manifest, "model"), _mapping(manifest, "target")
    sizes = Counter[str]()
    for name in artifact.names:
        sizes[_group(name)] += artifact.member_range(name)[1]
    return {
        "model": model.get("name"),
        "architecture": model.get("architecture"),
        "parameters": model.get("parameters"),
        "target": target.get("name"),
        "requires": target.get("requires"),
        "digest": artifact.digest,
        "bytes": artifact.size,
        "weights_bytes": artifact.weights_size,
        "member_bytes": dict(sorted(sizes.items())),
        "kernel_calls": sum(len(_rows(e, "calls")) for e in _rows(manifest, "entry_points")),
        "screening_bytes": sum(
            _count(call, "weight_bytes")
            for entry in _rows(manifest, "entry_points")
            for call in _rows(entry, "calls")
            if call.get("op") in BOUNDS
        ),
        "stored_formats": _formats(manifest),
        "numerics": _mapping(manifest, "numerics"),
        "options": _mapping(manifest, "options"),
        "max_context": _mapping(manifest, "limits").get("max_context"),
        "tools": _mapping(manifest, "tools"),
    }


def kernels(artifact: Artifact) -> list[Row]:
    """One row per (entry point, kernel): calls of it, operators, weight bytes and flops per row."""
    rows: list[Row] = []
    for entry in _rows(artifact.manifest, "entry_points"):
        groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for call in _rows(entry, "calls"):
            groups.setdefault((str(call.get("kernel")), str(call.get("op"))), []).append(call)
        for (kernel, op), calls in groups.items():
            rows.append(
                {
                    "entry_point": entry.get("name"),
                    "kernel": kernel,
                    "op": op,
                    "calls": len(calls),
                    "weight_bytes": sum(_count(c, "weight_bytes") for c in calls),
                    "flops_per_row": sum(_count(c, "flops_per_row") for c in calls),
                    "activation_bytes_per_row": sum(
                        _count(c, "activation_bytes_per_row") for c in calls
                    ),
                }
            )
    return rows


def injected(artifact: Artifact) -> list[Row]:
    """One row per value that a kernel was given: kernel, kind, name, value in the manifest, value
    in the code object, whether they agree, and the unit and source, origin or formula.

    Raises IntegrityError when the code object has no record.
    """
    listed = _values(_rows(artifact.manifest, "kernels"))
    member = _mapping(artifact.manifest, "code").get("path")
    if not isinstance(member, str):
        raise IntegrityError("the manifest names no code object", where=artifact.path)
    note = read_note(artifact.member(member), f"{artifact.path}:{member}")
    carried = _values(_rows(note, "kernels"))
    rows: list[Row] = []
    for key in [*listed, *(k for k in carried if k not in listed)]:
        kernel, kind, name = key
        left, right = listed.get(key), carried.get(key)
        rows.append(
            {
                "kernel": kernel,
                "kind": kind,
                "name": name,
                "manifest": left.get("value") if left else None,
                "binary": right.get("value") if right else None,
                "agrees": left == right,
                "why": _why(left or right or {}),
            }
        )
    return rows


def _values(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    """(kernel, kind, name) -> the record's entry."""
    found: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for record in records:
        for kind in ("facts", "constants", "derived"):
            for entry in _rows(record, kind):
                found[(str(record.get("kernel")), kind, str(entry.get("name")))] = entry
    return found


def _why(entry: Mapping[str, Any]) -> str:
    if "formula" in entry:
        return f"= {entry['formula']}"
    if "unit" in entry:
        return f"{entry['unit']} ({entry.get('source', '')})"
    return str(entry.get("origin", ""))


def memory(artifact: Artifact) -> dict[str, Any]:
    """The memory plan: sizes, the largest buffers, weights by stored format and section."""
    manifest = artifact.manifest
    by_format = Counter[str]()
    by_section = Counter[str]()
    for tensor in _rows(_mapping(manifest, "weights"), "tensors"):
        by_format[str(tensor.get("format"))] += _count(tensor, "nbytes")
        by_section[str(tensor.get("section"))] += _count(tensor, "nbytes")
    buffers = sorted(_rows(manifest, "buffers"), key=lambda b: -_count(b, "nbytes"))
    plan = _mapping(manifest, "memory")
    return {
        **{key: _count(plan, key) for key in plan if key not in ("contexts", "kv_dtype")},
        "kv_dtype": plan.get("kv_dtype"),
        "contexts": [
            {key: _count(row, key) for key in ("memory_bytes", "tokens")}
            for row in _rows(plan, "contexts")
        ],
        "weights_by_format": dict(sorted(by_format.items())),
        "weights_by_section": dict(by_section),
        "largest_buffers": [
            {
                **{k: b.get(k) for k in ("name", "kind", "shape", "dtype", "offset")},
                "nbytes": _count(b, "nbytes"),
            }
            for b in buffers[:12]
        ],
    }


def roofline(artifact: Artifact) -> dict[str, Any]:
    """The prediction that the compiler wrote down: its totals per phase, the facts it used, and per
    kernel of the first phase the calls, flops, bytes, nanoseconds, share of the time and what binds
    most of it."""
    recorded = _mapping(artifact.manifest, "roofline")
    phases = {"one token": recorded, **{k: v for k, v in recorded.items() if isinstance(v, dict)}}
    keys = ("tokens", "context", "ns", "tokens_per_second", "weight_bytes")
    data: dict[str, Any] = {
        "phases": [
            {"phase": name, **{k: phase.get(k) for k in keys}}
            for name, phase in phases.items()
            if "tokens_per_second" in phase
        ],
        "facts": [dict(f) for f in _rows(_mapping(recorded, "injected"), "facts")],
        "calls": _rows(recorded, "calls"),
    }
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for call in _rows(data, "calls"):
        groups.setdefault(str(call.get("row")), []).append(call)
    total = sum(_number(c, "ns") for c in _rows(data, "calls"))
    data["kernels"] = sorted(
        (_predicted(row, calls, total) for row, calls in groups.items()),
        key=lambda r: (-r["ns"], r["kernel"]),
    )
    return data


def _predicted(row: str, calls: Sequence[Mapping[str, Any]], total: float) -> dict[str, Any]:
    bound = Counter[str]()
    for call in calls:
        bound[str(call.get("bound"))] += int(_number(call, "ns") * 1000)
    ns = sum(_number(c, "ns") for c in calls)
    return {
        "kernel": row,
        "calls": len(calls),
        "flops": sum(_count(c, "flops") for c in calls),
        "bytes": sum(_count(c, "bytes") for c in calls),
        "ns": round(ns, 1),
        "share": round(ns / total, 4) if total else 0.0,
        "bound": max(bound, key=lambda name: (bound[name], name)),
    }


def view(artifact: Artifact, name: str) -> Any:
    """One of VIEWS, or the summary for any other name."""
    if name == "kernels":
        return kernels(artifact)
    if name == "injected":
        return injected(artifact)
    if name == "memory":
        return memory(artifact)
    if name == "roofline":
        return roofline(artifact)
    return artifact.manifest if name == "manifest" else summary(artifact)


def manifest_text(artifact: Artifact) -> str:
    """The manifest, indented."""
    return json.dumps(artifact.manifest, indent=2, sort_keys=True)


def _group(name: str) -> str:
    if name == "__main__.py" or name.startswith("zerolayer_stub/"):
        return "loader"
    top = name.split("/", 1)[0]
    return "tokenizer" if top in ("tokenizer.json", "tokenizer.bin", "chat_template.jinja") else top


def _formats(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Stored format -> number of tensors."""
    tensors = _rows(_mapping(manifest, "weights"), "tensors")
    return dict(sorted(Counter(str(t.get("format")) for t in tensors).items()))


def _mapping(where: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = where.get(key)
    return value if isinstance(value, dict) else {}


def _rows(where: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = where.get(key)
    return [r for r in value if isinstance(r, dict)] if isinstance(value, list) else []


def _count(where: Mapping[str, Any], key: str) -> int:
    value = where.get(key)
    return value if isinstance(value, int) else 0


def _number(where: Mapping[str, Any], key: str) -> float:
    value = where.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
