"""The command ``verify``: every hash of the file, then the golden prompts through the kernels.

In: a :class:`Session`.  Out: what was checked; IntegrityError (6) names the first damaged part,
NumericsError (7) the first golden prompt whose tokens differ.  An artifact without golden prompts
says why there are none.  Next file: ``scheduler.py``.

``golden.json``: ``{"cases": [{"prompt": text or null, "prompt_ids": [..], "expect_ids": [..]}]}``,
the greedy tokens that this artifact's own kernels gave on the build host.
"""

from __future__ import annotations

import sys
import time

from .errors import IntegrityError, NumericsError
from .options import THREADS, Option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Callable

    from .options import Values
    from .progress import Line
    from .session import Session

OPTIONS = [
    Option(("--hashes-only",), "do not run the golden prompts (works on any host)"),
    THREADS,
]


def run_verify(session: Session, values: Values, as_json: bool) -> dict[str, Any]:
    """Returns what ``--json`` prints."""
    line = None
    if not as_json and sys.stderr.isatty():
        from .progress import Line

        line = Line()
    start = time.perf_counter()
    try:
        session.artifact.verify_all(None if line is None else _percent(line))
    finally:
        if line is not None:
            line.clear()
    seconds = time.perf_counter() - start
    data: dict[str, Any] = {
        "ok": True,
        "digest": session.artifact.digest,
        "bytes": session.artifact.size,
        "hash_seconds": round(seconds, 3),
        "golden": "not run",
        "golden_why": "",
    }
    if not as_json:
        rate = session.artifact.size / 1e9 / max(seconds, 1e-9)
        sys.stdout.write(f"hashes ok: {session.artifact.size} bytes ({rate:.2f} GB/s)\n")
    if values["hashes_only"]:
        data["golden_why"] = "--hashes-only"
        return data
    member = session.manifest.get("golden")
    if not member:
        data["golden_why"] = without_golden(session.manifest)
        sys.stderr.write(f"note: no golden prompts in this artifact: {data['golden_why']}\n")
        return data
    session.require_host()
    data["golden"] = run_golden(session, str(member), values["threads"])
    if not as_json:
        golden = data["golden"]
        sys.stdout.write(
            f"golden prompts ok: {golden['cases']} prompts, {golden['tokens']} tokens equal\n"
        )
    return data


def without_golden(manifest: Mapping[str, Any]) -> str:
    """Why an artifact has no golden prompts."""
    entries = manifest.get("entry_points") or ()
    if not any(e.get("name") == "step" for e in entries):
        return "only language models have them"
    numerics = manifest.get("numerics") or {}
    return str(numerics.get("reason") or "the build did not say why")


def _percent(line: Line) -> Callable[[int, int], None]:
    """Shows how much of the file is hashed."""
    return lambda done, total: line.show(f"hashes {100 * done // max(total, 1)} %")


def _cases(session: Session, member: str) -> list[dict[str, Any]]:
    import json

    try:
        cases = json.loads(session.artifact.member(member))["cases"]
        for case in cases:
            for key in ("prompt_ids", "expect_ids"):
                ok = all(type(i) is int and 0 <= i < session.vocab_size for i in case[key])
                if not ok or not case[key]:
                    raise ValueError(f"{key} is empty or outside the vocabulary")
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise IntegrityError(f"{member} is not a list of golden prompts: {e}") from None
    return list(cases)


def run_golden(session: Session, member: str, threads: int | None) -> dict[str, Any]:
    """Runs every case, together as one ragged batch; NumericsError at the first difference."""
    cases = _cases(session, member)
    limits = session.limits()
    lengths = [len(c["prompt_ids"]) + len(c["expect_ids"]) + 1 for c in cases]
    blocks = session.kv_blocks(
        sum(session.memory.blocks_for(n) * limits.block_size for n in lengths),
        max(lengths, default=1),
        None,
        None,
    )
    scheduler = session.scheduler(blocks, session.threads(threads)[0])
    sequences = [scheduler.add(c["prompt_ids"], max_new_tokens=len(c["expect_ids"])) for c in cases]
    scheduler.run()
    for number, (case, seq) in enumerate(zip(cases, sequences), 1):  # noqa: B905 (Python 3.9)
        have, want = seq.output, case["expect_ids"]
        if have != want:
            at = next(
                (i for i, (a, b) in enumerate(zip(have, want)) if a != b),  # noqa: B905
                min(len(have), len(want)),
            )
            raise NumericsError(
                f"golden prompt {number} of {len(cases)} ({str(case.get('prompt'))[:60]!r}) gives "
                f"{have[at : at + 4]} at token {at + 1}, expected {want[at : at + 4]}",
                where=session.path,
                next_step="this host computes other numbers than the build host; do not use it",
            )
    return {
        "cases": len(cases),
        "tokens": sum(len(c["expect_ids"]) for c in cases),
        "steps": scheduler.n_steps,
    }
