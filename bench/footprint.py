"""What an artifact weighs and how soon it answers.

``python bench/footprint.py [FILE]`` (default: compiles the demo model for this host): prints one
JSON object with the sizes of the parts, the time of ``check`` and the time from the start of the
process to the first character of generated text, medians over processes with a warm page cache.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from bench.needs import need

RUNS = 7
HEADER = 64 * 1024  # the page of text in front of the weights
PROMPT = "The capital of France is"


def part(member: str) -> str:
    """Which part of the artifact a member of its ZIP belongs to."""
    first = member.split("/", maxsplit=1)[0]
    if first in {"__main__.py", "zerolayer_stub"}:
        return "loader"
    if first in {"tokenizer.json", "chat_template.jinja"}:
        return "tokenizer"
    return first.split(".")[0]


def sizes(path: Path) -> dict[str, int]:
    """Bytes per part; ``loader_zipped`` is the loader compressed, as it would be shipped alone."""
    counts: Counter[str] = Counter()
    packed = io.BytesIO()
    with zipfile.ZipFile(path) as archive:
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as loader:
            for info in archive.infolist():
                counts[part(info.filename)] += info.compress_size
                if part(info.filename) == "loader":
                    loader.writestr(info.filename, archive.read(info))
        start = min(i.header_offset for i in archive.infolist())
    total = path.stat().st_size
    other = {"header": HEADER, "weights": start - HEADER, "zip_directory": 0, "total": total}
    other["zip_directory"] = total - start - sum(counts.values())
    return {**counts, **other, "loader_zipped": len(packed.getvalue())}


def seconds(command: list[str], *, first_byte: bool) -> float:
    """Median seconds until the first byte of stdout, or until the process ends."""
    taken = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            got = child.stdout.read(1)
            at_first = time.perf_counter() - start
            got += child.stdout.read()
        at_end = time.perf_counter() - start
        if child.returncode != 0 or not got:
            raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
        taken.append(at_first if first_byte else at_end)
    return round(statistics.median(taken[1:]), 4)  # the first warms the page cache


def report(path: Path) -> dict[str, object]:
    """Everything about one artifact."""
    run = ["/usr/bin/env", "python3", str(path)]
    generate = [*run, "generate", PROMPT, "--raw", "-n", "8"]
    return {
        "artifact": path.name,
        "bytes": sizes(path),
        "check_seconds": seconds([*run, "check"], first_byte=False),
        "first_token_seconds": seconds(generate, first_byte=True),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="an artifact; without one, the demo model is fetched and compiled for this host",
    )
    file = parser.parse_args().file
    if file is not None:
        if not zipfile.is_zipfile(file):
            parser.error(f"{file} is not an artifact")
        print(json.dumps(report(file)))
        return 0
    demo = need("zerolayer.compiler.demo")
    with tempfile.TemporaryDirectory(prefix="footprint-") as name:
        out = Path(name, "smollm2.zla")
        command = [sys.executable, "-c", "from zerolayer.compiler.cli import main; main()"]
        command += ["compile", str(demo.fetch_demo_model()), "--target", "host", "-o", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(json.dumps(report(out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
