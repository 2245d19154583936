"""The Debian packages that tests use besides what pip installs.

Run before the tests (``nox -s tests`` does): installs what is missing if it may, else says what to
install and fails, so that no test is left out silently.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

#: program -> the package it is in, and what the tests do with it
NEEDED = {
    "qemu-x86_64-static": ("qemu-user-static", "run artifacts on CPUs with fewer features"),
    "objdump": ("binutils", "read the machine code of kernels"),
    "unzip": ("unzip", "read artifacts with a tool that is not ours"),
}


def main() -> int:
    missing = {p: why for p, why in NEEDED.items() if shutil.which(p) is None}
    if not missing:
        return 0
    packages = sorted({package for package, _ in missing.values()})
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    if os.geteuid() == 0 and shutil.which("apt-get"):
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        print(f"installing {' '.join(packages)}", flush=True)
        subprocess.run(["apt-get", "update", "--quiet=2"], env=env, check=False)
        subprocess.run([*command, "--quiet=2"], env=env, check=False, stdout=subprocess.DEVNULL)
        missing = {p: why for p, why in missing.items() if shutil.which(p) is None}
    for program, (package, why) in missing.items():
        print(f"error: the tests need {program} (package {package}) to {why}", file=sys.stderr)
    if missing:
        print(f"install it: sudo {' '.join(command)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
