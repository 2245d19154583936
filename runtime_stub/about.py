"""``info``, ``check``, ``--version``: what an artifact is, and whether it can run here.

In: a :class:`Session`.  Out: an exit code and what ``--json`` prints; a table on stdout.  Next
file: ``requires.py``.  Nothing is allocated and no weight is read.
"""

from __future__ import annotations

import sys

from .errors import EXIT_HARDWARE, EXIT_OK, EXIT_RESOURCES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from .options import Values
    from .session import Session


def _table(rows: Iterable[tuple[str, object]]) -> None:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        sys.stdout.write(f"{name.ljust(width)}  {value}\n")


def run_version(path: str, as_json: bool) -> tuple[int, dict[str, Any]]:
    """``--version``: one line that tells this artifact from others."""
    from .container import open_artifact
    from .session import check_shapes

    with open_artifact(path) as artifact:
        manifest, digest = artifact.manifest, artifact.digest
        check_shapes(manifest, path)
    tools = manifest.get("tools") or {}
    model, target = manifest["model"].get("name"), manifest["target"].get("name")
    data = {
        "model": model,
        "target": target,
        "format": manifest.get("format"),
        "digest": digest,
        "tools": tools,
    }
    if not as_json:
        compiler = f"zerolayer {tools.get('zerolayer', '?')}"
        sys.stdout.write(f"{model} for {target}, digest {digest[:16]}, {compiler}\n")
    return EXIT_OK, data


def run_info(session: Session, _values: Values, as_json: bool) -> tuple[int, dict[str, Any]]:
    from .memory import human

    manifest, memory = session.manifest, session.memory
    model = manifest.get("model", {})
    numerics = manifest.get("numerics") or {}
    options, tools = manifest.get("options") or {}, manifest.get("tools") or {}
    data: dict[str, Any] = {
        "path": session.path,
        "size_bytes": session.artifact.size,
        "digest": session.artifact.digest,
        "format": manifest.get("format"),
        "model": {k: v for k, v in model.items() if k != "config"},
        "target": {k: session.target.get(k) for k in ("name", "family", "description", "requires")},
        "limits": manifest.get("limits"),
        "memory": memory.as_dict(),
        "options": options,
        "inputs": manifest.get("inputs"),
        "tools": tools,
        "numerics": numerics.get("status"),
        "batch_invariant": numerics.get("batch_invariant"),
        "members": len(session.artifact.names),
        "text": bool(session.text_needs),
    }
    if not as_json:
        promise = ", batch-invariant" if numerics.get("batch_invariant") is True else ""
        if promise and numerics.get("status", "not run") == "not run":
            promise += " as promised, not checked"
        settings = {k: v for k, v in options.items() if k != "max_context"}  # in the context row
        if memory.block_size:
            shape = [("context", f"{memory.max_context} tokens")]
        else:
            shape = _inputs_outputs(session)
        _table(
            [
                ("model", f"{model.get('name')} ({model.get('parameters', 0):,} parameters)"),
                ("target", f"{session.target.get('name')}: {session.target.get('description')}"),
                ("file", f"{session.path} ({human(session.artifact.size)})"),
                ("digest", session.artifact.digest),
                ("options", ", ".join(f"{k}={v}" for k, v in settings.items())),
                ("memory", memory.breakdown()),
                *shape,
                ("numerics", f"{numerics.get('status', 'not run')}{promise}"),
                ("built with", ", ".join(f"{k} {v}" for k, v in tools.items())),
            ]
        )
    return EXIT_OK, data


def _inputs_outputs(session: Session) -> list[tuple[str, str]]:
    """What a graph reads and gives, by name, as ``run`` takes them."""
    from .run_graph import describe

    buffers = {b["name"]: b for b in session.manifest["buffers"]}
    entry = session.entry_point("run")
    return [
        (kind, ", ".join(f"{n} {describe(buffers.get(n, {}))}" for n in entry[kind]))
        for kind in ("inputs", "outputs")
    ]


def run_check(session: Session, values: Values, as_json: bool) -> tuple[int, dict[str, Any]]:
    """Structure (done by opening), hardware, memory, Python; the first failure's exit code."""
    from .memory import human

    facts, memory = session.facts, session.memory
    mismatches = session.mismatches
    asked = values["max_context"] or 0
    if asked and memory.block_size:
        session.context(asked)
    fits = memory.fits and memory.largest_context >= min(asked, memory.max_context)
    threads, why = session.threads(None)
    features = _python_features(session)
    code = EXIT_HARDWARE if mismatches else (EXIT_OK if fits else EXIT_RESOURCES)
    data = {
        "ok": code == EXIT_OK,
        "exit_code": code,
        "artifact": {"path": session.path, "digest": session.artifact.digest, "structure": "ok"},
        "target": session.target.get("name"),
        "mismatches": [m.as_dict() for m in mismatches],
        "host": facts.as_dict(),
        "memory": memory.as_dict(),
        "threads": threads,
        "threads_why": why,
        "python": features,
        "timings": session.timings.as_dict(),
    }
    if not as_json:
        rows: list[tuple[str, object]] = [
            ("artifact", f"structure ok, digest {session.artifact.digest[:16]}"),
            ("host", f"{facts.cpu_model or '?'}, {facts.arch}, {facts.libc}, {facts.kernel}"),
            ("hardware", f"matches {session.target.get('name')}"),
        ]
        if mismatches:
            rows[-1] = ("hardware", f"does not match {session.target.get('name')}:")
            rows += [("", _lack(m.name, m.need, m.have)) for m in mismatches]
        rows.append(("memory", f"{memory.breakdown()}; {human(memory.available)} available"))
        if memory.block_size:
            largest = f"largest that fits: {memory.largest_context} tokens"
            rows.append(("context", f"{largest}; the model's limit: {memory.max_context}"))
        if asked and not fits:
            rows.append(("", f"{asked} tokens do not fit: not enough memory"))
        rows.append(("threads", f"{threads} ({why})"))
        rows.append(("python", f"{features['version']}, text: {features['text']}"))
        rows.append(("result", "can run here" if code == EXIT_OK else "cannot run here"))
        _table(rows)
    return code, data


def _lack(name: str, need: str, have: str) -> str:
    """One difference between what the target requires and the host."""
    return f"{name}: missing" if have == "no" else f"{name}: needs {need}, has {have}"


def _python_features(session: Session) -> dict[str, str]:
    """What this interpreter has of the things that the loader uses."""
    import os

    oldest = session.text_needs
    text = "token ids only (no tokenizer in the artifact)"
    if oldest:
        ok = sys.version_info[:2] >= tuple(int(p) for p in oldest.split(".") if p.isdigit())
        text = "yes" if ok else f"token ids only (the tokenizer needs Python {oldest})"
    return {
        "version": session.facts.python,
        "memfd": "yes" if hasattr(os, "memfd_create") else "no (a temporary directory is used)",
        "text": text,
    }
