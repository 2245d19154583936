"""The loader on CPUs that are not here: under qemu the lesser CPU's own CPUID answers.

/proc/cpuinfo still shows the real machine there, so a loader that asked it would load code that the
CPU cannot run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import loader_fake
import pytest

QEMU = shutil.which("qemu-x86_64-static")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Needs AVX2 and FMA (x86-64-v3)."""
    return loader_fake.build(tmp_path_factory.mktemp("qemu") / "fake.zla", vendor=False)


def on(cpu: str, artifact: Path, *args: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, JSON of the last line, stderr) of the artifact on ``cpu``."""
    assert QEMU is not None, "install qemu-user-static (tests/system_packages.py does)"
    python = str(Path(sys.executable).resolve())
    run = subprocess.run(
        [QEMU, "-cpu", cpu, python, "-I", "-S", str(artifact), *args, "--json"],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return run.returncode, json.loads(run.stdout.splitlines()[-1]), run.stderr


def test_a_cpu_without_avx2_is_refused_by_name(artifact: Path) -> None:
    code, data, err = on("Nehalem", artifact, "generate", "--tokens", "1,2")
    assert code == 5
    assert data["error"] == "hardware"
    assert "lacks avx2, fma" in data["what"] and "fake-target" in data["what"]
    assert "Traceback" not in err and "Illegal" not in err


def test_a_cpu_that_has_it_runs(artifact: Path) -> None:
    code, data, _err = on("Haswell", artifact, "generate", "--tokens", "1,2", "-n", "5")
    assert code == 0
    assert data["tokens"] == loader_fake.expected([1, 2], 5)


def test_features_are_the_emulated_cpus(artifact: Path) -> None:
    code, data, _err = on("Haswell", artifact, "check")
    assert code == 0
    host = data["host"]
    assert host["features_source"] == "cpuid"
    assert "Haswell" in host["cpu_model"]
    assert {"avx2", "fma", "f16c", "bmi2"} <= set(host["features"])
    assert not [f for f in host["features"] if f.startswith(("avx512", "amx"))]
