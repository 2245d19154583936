"""Runs the suites: systems in turn, one process for each measurement, results as JSON lines.

In: suites, the peers' folder.  Out: lines appended to the results file, each one a process:
``{"suite", "system", "round", "commit", "date", "wall_s", ...what the runner printed}``, or with
``error``.  Next file: ``results.py``.

Artifacts are compiled first, and again when the compiler's sources have changed.  Then every file
of a suite is dropped from the page cache, and one process of each system, not counted, brings it
back, as a first start on a host does: how a file lies there, in small pages or in huge ones,
depends on who read or wrote it and changes starts and decoding by a tenth and more.  Where the
page cache has lost of it since (some hosts take idle pages back), such a process brings it back
before it is measured again.  Before each round of a suite the machine's ceilings are measured at
the suite's thread count, so that a figure and its ceiling are of the same minutes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench import prompts
from bench.matrix import OURS, PEERS, Suite, System
from bench.rounds import CEILINGS, first_round, runs

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 240
LOST = 0.001  # share of a model that the page cache may lose until it is brought back


@dataclass(frozen=True)
class Place:
    """Where things are; ``gate`` is off for quick trials only."""

    peers: Path
    results: Path
    gate: bool = True

    @property
    def artifacts(self) -> Path:
        return self.peers / "artifacts"

    def model(self, system: System) -> Path:
        """What the runner opens."""
        if system.peer == OURS:
            return self.artifacts / system.artifact
        return self.peers / "models" / system.model

    def missing(self, system: System) -> str:
        """What the system lacks, "" if nothing."""
        venv = PEERS[system.peer].venv
        if not (self.peers / venv / "bin" / "python").exists():
            return f"not installed ({venv})"
        source = self.peers / "models" / system.model
        return "" if source.exists() else f"no model {system.model}"

    def command(self, system: System, suite: Suite) -> list[str]:
        """One measurement."""
        peer = PEERS[system.peer]
        python = self.peers / peer.venv / "bin" / "python"
        runner = ROOT / "bench" / "runners" / peer.runner
        out = [str(python), str(runner), f"--model={self.model(system)}", *suite.arguments()]
        models = self.peers / "models"
        ids = prompts.ids_file(models, suite.text) if suite.text else None
        if ids:
            out.append(f"--ids={ids}")
        if system.kv and system.peer != OURS:
            out.append(f"--kv={system.kv}")
        if suite.keep_state and system.peer == "llama.cpp":
            of = f"{suite.prompt}.{prompts.digest(ids) if ids else 'random'}{system.kv}"
            out.append(f"--state={models / system.model}.{of}.kv")
        return out

    def first_command(self, system: System, suite: Suite) -> list[str]:
        """The system's first process: the model from the disk, one token."""
        short = replace(suite, prompt=16, new=1, batch=1, keep_state=False, steps=False)
        return self.command(system, short)


def environment(threads: int) -> dict[str, str]:
    """The same for every process."""
    extra = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    extra |= {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    return os.environ | extra | {"BENCH_START": repr(time.monotonic())}


def measured(command: list[str], threads: int) -> dict[str, Any]:
    """What the process printed, or its error."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=environment(threads),
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"more than {TIMEOUT_S} s", "wall_s": float(TIMEOUT_S)}
    wall = round(time.monotonic() - start, 2)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        text = (done.stderr or done.stdout).strip()[-300:]
        return {"error": f"exit code {done.returncode}: {text}", "wall_s": wall}
    return {**json.loads(lines[-1]), "wall_s": wall}


def append(place: Place, line: dict[str, Any]) -> None:
    """One more line of results."""
    with place.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def make_environment(place: Place) -> None:
    """Ours, where it is missing: the same Python as the peers', nothing installed."""
    venv = place.peers / PEERS[OURS].venv
    if not (venv / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)


def build_ceilings(place: Place) -> Path:
    """The program that measures the machine."""
    source, binary = ROOT / "bench" / "ceilings.c", place.artifacts / "ceilings"
    command = [sys.executable, "-m", "ziglang", "cc", "-O3", "-march=native", "-pthread"]
    subprocess.run([*command, str(source), "-o", str(binary)], check=True)
    return binary


def sources_digest() -> str:
    """Of everything that decides an artifact's content."""
    digest = hashlib.sha256()
    for folder in ("compiler", "targets", "templates", "runtime_stub"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(path.relative_to(ROOT).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_all(place: Place, systems: list[System]) -> None:
    """Artifacts that are missing or older than the compiler; a failure is that system's error."""
    sources = sources_digest()
    for system in dict.fromkeys(s for s in systems if s.peer == OURS and not place.missing(s)):
        out = place.model(system)
        made_by = out.with_suffix(".digest")
        if out.exists() and made_by.exists() and made_by.read_text(encoding="ascii") == sources:
            continue
        print(f"compiling {out.name}", flush=True)
        command = [sys.executable, "-c", "from zerolayer.compiler.cli import main; main()"]
        command += ["compile", str(place.peers / "models" / system.model), "--target", "host"]
        command += [*system.options, "-o", str(out), *([] if place.gate else ["--no-verify"])]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            print(f"  failed: {done.stderr.strip()[-300:]}", flush=True)
            out.unlink(missing_ok=True)
            continue
        made_by.write_text(sources, encoding="ascii")


def drop_cached(path: Path) -> None:
    """Takes a file, or all of a folder, out of the page cache."""
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        with file.open("rb", buffering=0) as opened:
            os.fdatasync(opened.fileno())  # what is not on the disk yet would stay
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(path: Path) -> float:
    """The share of a file, or of all of a folder, that the page cache holds, in whole pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    held = pages = 0
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        size = file.stat().st_size
        if not size:
            continue
        count = -(-size // mmap.PAGESIZE)
        seen = ctypes.create_string_buffer(count)
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), size, flags=mmap.MAP_PRIVATE) as mapped,
        ):
            place = ctypes.c_char.from_buffer(mapped)
            failed = libc.mincore(ctypes.addressof(place), size, seen)
            del place
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore of {file}")
        held += sum(b & 1 for b in seen.raw[:count])
        pages += count
    return held / pages if pages else 1.0


def commit() -> str:
    """The commit that this is run from; ``-dirty`` where anything but the report's own pages was
    changed since."""
    git, pages = ["git", "-C", str(ROOT)], (":!docs", ":!README.md")
    name = [*git, "describe", "--always"]
    named = subprocess.run(name, check=False, capture_output=True, text=True)
    status = [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", *pages]
    changed = subprocess.run(status, check=False, capture_output=True, text=True)
    found = named.stdout.strip()
    return f"{found}{'-dirty' if changed.stdout else ''}" if found else "unknown"


def today() -> str:
    """The date, in UTC."""
    return datetime.now(timezone.utc).date().isoformat()


def measure(place: Place, suite: Suite, rounds: int, ceilings: Path) -> None:
    """So many more rounds of a suite."""
    there = [s for s in suite.systems if not place.missing(s)]
    for path in {place.model(s) for s in there}:
        drop_cached(path)
    held = {}
    for first in there:
        outcome = measured(place.first_command(first, suite), suite.threads)
        if "error" in outcome:
            print(f"{suite.name} first {first.name}: {outcome['error']}", flush=True)
        held[first] = cached_share(place.model(first))
    when = {"commit": commit(), "date": today()}
    for index, system in runs(suite, first_round(place.results, suite), rounds):
        line: dict[str, Any] = {"suite": suite.name, "round": index, **when}
        if system is None:
            line["system"] = CEILINGS
            line |= measured([str(ceilings), str(suite.threads)], suite.threads)
        else:
            line["system"] = system.name
            missing = place.missing(system)
            if missing:
                line["error"] = missing
            else:
                if cached_share(place.model(system)) < held[system] - LOST:
                    measured(place.first_command(system, suite), suite.threads)
                line |= measured(place.command(system, suite), suite.threads)
        append(place, line)
        print(f"{suite.name} {index} {line['system']}: {brief(suite, line)}", flush=True)


def brief(suite: Suite, line: dict[str, Any]) -> str:
    """One result for the terminal."""
    if "error" in line:
        return str(line["error"]).replace("\n", " ")[:200]
    if line["system"] == CEILINGS:
        return f"{line['read_memory']} GB/s, int8 {line.get('int8', '-')} GOP/s"
    decode = suite.batch * suite.new / line["decode_s"]
    prefill = line["prefill_s"]
    first = f", prefill {suite.batch * suite.prompt / prefill:.0f}" if prefill else ""
    return f"decode {decode:.1f}{first} tokens/s, first {line['first_token_s']:.2f} s"


def profile(place: Place, suite: Suite, system: System) -> dict[str, Any]:
    """One of our systems with each kernel call timed."""
    return measured([*place.command(system, suite), "--calls"], suite.threads)
