"""Artifacts are byte-identical before and after a change that is not meant to change them.

``python tests/replay.py [BASE]``: compiles the demo model with this work tree and with commit BASE
(default HEAD), each in its own process and folder, and compares.  A commit after BASE whose
message has a line ``Changes-codegen: <why>`` announces a difference, which is then only printed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("compiler", "targets", "runtime_stub", "templates")
#: one compile per target and set of options; all can be built on any machine
CASES = (
    ("x86-64-v3",),
    ("zen4",),
    ("zen4", "--activations", "f32", "--fusion", "conservative"),
)
ANNOUNCES = "Changes-codegen:"


def git(*arguments: str) -> str:
    """Output of a git command in this repository."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def compile_with(tree: Path, scratch: Path, model: Path) -> list[str]:
    """The sha256 of each case's artifact, compiled by the sources in ``tree``."""
    packages = scratch / "import" / "zerolayer"
    packages.mkdir(parents=True)
    for name in PACKAGES:
        (packages / name).symlink_to(tree / name)
    env = {**os.environ, "PYTHONPATH": str(packages.parent)}
    code = (
        "import sys; from zerolayer.compiler import cli; "
        "assert cli.__file__.startswith(sys.argv.pop(1)), cli.__file__; cli.main()"
    )
    digests = []
    for target, *options in CASES:
        out = scratch / "out.zla"
        command = [sys.executable, "-c", code, str(packages), "compile", str(model)]
        command += ["--target", target, "--no-verify", "-o", str(out), *options]
        subprocess.run(command, cwd=scratch, env=env, check=True, stdout=subprocess.DEVNULL)
        digests.append(hashlib.sha256(out.read_bytes()).hexdigest())
        out.unlink()
    return digests


def main(base: str) -> int:
    """0 when equal or announced, 1 otherwise."""
    from zerolayer.compiler.demo import fetch_demo_model

    commit = git("rev-parse", "--verify", f"{base}^{{commit}}")
    model = fetch_demo_model()
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        before = Path(name, "before")
        git("worktree", "add", "--detach", str(before), commit)
        try:
            for folder in ("old", "new"):
                Path(name, folder).mkdir()
            old = compile_with(before, Path(name, "old"), model)
            new = compile_with(ROOT, Path(name, "new"), model)
        finally:
            git("worktree", "remove", "--force", str(before))
    differing = [c for c, o, n in zip(CASES, old, new, strict=True) if o != n]
    for case in differing:
        print(f"differs from {commit[:12]}: {' '.join(case)}")
    if not differing:
        print(f"{len(CASES)} artifacts are byte-identical to those of {commit[:12]}")
        return 0
    log = git("log", "--format=%B", f"{commit}..HEAD")
    announced = [line for line in log.splitlines() if line.startswith(ANNOUNCES)]
    print("\n".join(announced) or f"no commit since says {ANNOUNCES}")
    return 0 if announced else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "HEAD"))
