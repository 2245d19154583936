"""Host facts: CPUID words, HWCAP words and cgroup files that the tests write themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from zerolayer.runtime_stub import detect
from zerolayer.runtime_stub.detect import (
    features_from_cpuid,
    features_from_hwcap,
    host_facts,
    parse_cpu_list,
    x86_from_flags,
)
from zerolayer.runtime_stub.errors import HardwareMismatchError
from zerolayer.runtime_stub.requires import compare, require

# From Intel's SDM, volume 2A, CPUID: leaf 1 ECX 12 FMA, 27 OSXSAVE, 28 AVX, 29 F16C; leaf 7 EBX 5
# AVX2, 8 BMI2, 16 AVX512F, 17 DQ, 28 CD, 30 BW, 31 VL; ECX 11 VNNI; EDX 22/24/25 AMX; leaf 7.1 EAX
# 5 BF16.
LEAF_1_ECX = 1 << 12 | 1 << 27 | 1 << 28 | 1 << 29
LEAF_7_EBX = 1 << 5 | 1 << 8 | 1 << 16 | 1 << 17 | 1 << 28 | 1 << 30 | 1 << 31
AMX_EDX = 1 << 22 | 1 << 24 | 1 << 25
AVX_STATE, AVX512_STATE, AMX_STATE = 0x7, 0xE7, 0x600E7


def sapphire_rapids(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
    return {
        (0, 0): (0x20, 0, 0, 0),
        (1, 0): (0, 0, LEAF_1_ECX, 0),
        (7, 0): (1, LEAF_7_EBX, 1 << 11, AMX_EDX),
        (7, 1): (1 << 5, 0, 0, 0),
        (0x80000000, 0): (0x80000001, 0, 0, 0),
        (0x80000001, 0): (0, 0, 1 << 5, 0),
    }[leaf, subleaf]


def features(xcr0: int, amx: bool = True) -> frozenset[str]:
    return features_from_cpuid(sapphire_rapids, xcr0, lambda: amx)


def test_a_feature_needs_the_cpu_and_the_operating_system() -> None:
    everything = features(AMX_STATE)
    assert {"avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq",
            "avx512cd", "avx512vnni", "avx512bf16", "amx-tile", "amx-int8", "amx-bf16",
            "lzcnt"} <= everything  # fmt: skip
    assert "avx512vbmi" not in everything
    no_amx_state = features(AVX512_STATE)
    assert "avx512bf16" in no_amx_state
    assert not any(f.startswith("amx") for f in no_amx_state)
    assert features(AMX_STATE, amx=False) == no_amx_state, "AMX needs the kernel's permission"
    avx_only = features(AVX_STATE)
    assert {"avx2", "fma", "f16c"} <= avx_only
    assert not any(f.startswith("avx512") for f in avx_only)
    assert features(0x3) == {"bmi2", "lzcnt"}, "without AVX state only integer extensions are left"


def test_what_tells_a_zen_3() -> None:
    """Linux' cpufeatures.h: bit 9 of leaf 7's ECX is VAES, bit 6 of 0x80000001's SSE4a."""

    def zen3(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        return {
            (0, 0): (0x10, 0, 0, 0),
            (1, 0): (0, 0, LEAF_1_ECX, 0),
            (7, 0): (0, 1 << 5, 1 << 9, 0),
            (0x80000000, 0): (0x80000001, 0, 0, 0),
            (0x80000001, 0): (0, 0, 1 << 5 | 1 << 6, 0),
        }[leaf, subleaf]

    assert {"sse4a", "vaes", "avx2"} <= features_from_cpuid(zen3, AVX_STATE, lambda: False)
    assert "vaes" not in features_from_cpuid(zen3, 0x3, lambda: False)
    assert {"sse4a", "vaes"} <= x86_from_flags(["sse4a", "vaes"])


def test_old_cpu_without_leaf_7() -> None:
    def old(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        assert leaf in (0, 1, 0x80000000), f"leaf {leaf:#x} must not be asked for"
        return {0: (1, 0, 0, 0), 1: (0, 0, 1 << 20, 0), 0x80000000: (0x80000000, 0, 0, 0)}[leaf]

    assert features_from_cpuid(old, 0, lambda: False) == {"sse4.2"}


def test_instruction_and_kernel_agree_here() -> None:
    facts = host_facts()
    if facts.arch != "x86_64":
        pytest.skip("not an x86 host")
    assert facts.features_source == "cpuid"
    flags, _ = detect._cpuinfo("/")
    assert facts.features == x86_from_flags(flags)


def test_without_executable_memory_cpuinfo_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = host_facts()
    monkeypatch.setattr(detect, "_executable", lambda _code: None)
    fallback = host_facts()
    if facts.arch == "x86_64":
        assert fallback.features_source == "/proc/cpuinfo"
        assert fallback.features == facts.features


def test_arm_words() -> None:
    # Linux asm/hwcap.h: HWCAP ASIMD 1, ASIMDDP 20, SVE 22; HWCAP2 SVE2 1, SVEBF16 12, I8MM 13,
    # BF16 14
    hwcap, hwcap2 = 1 << 1 | 1 << 20 | 1 << 22, 1 << 12 | 1 << 13 | 1 << 14
    graviton3 = features_from_hwcap(hwcap, hwcap2, 32)
    assert graviton3 == (
        frozenset({"neon", "dotprod", "sve", "svebf16", "i8mm", "bf16"}),
        256,
    )
    assert features_from_hwcap(hwcap, hwcap2 | 1 << 1, 16)[1] == 128
    # switched off by prctl: HWCAP still says SVE
    assert features_from_hwcap(hwcap, hwcap2, -22) == (
        frozenset({"neon", "dotprod", "i8mm", "bf16"}),
        0,
    )
    # PR_SVE_GET_VL carries flags above the length
    assert features_from_hwcap(hwcap, hwcap2, 1 << 17 | 32)[1] == 256


def test_mask_takes_dependents_along_and_refusal_names_both_sides() -> None:
    base = host_facts(overrides={"arch": "x86_64"})
    needs = ["avx2", "fma", "avx512f", "avx512bw"]
    facts = host_facts(
        mask=["avx512f"],
        overrides={
            "arch": "x86_64",
            "features": base.features - {"avx512f", "avx512bw"} | {"avx2"},
        },
    )
    target = {"name": "zen4", "requires": {"arch": "x86_64", "features": needs}}
    with pytest.raises(HardwareMismatchError) as refused:
        require(target, facts, "m.zla")
    text = str(refused.value)
    assert refused.value.exit_code == 5
    assert "zen4" in text and "avx512f, avx512bw" in text and "avx2" not in text
    if "avx512bf16" in base.features:
        assert "avx512bf16" not in host_facts(mask=["avx512f"]).features


def test_withheld_amx_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has AMX: with the kernel's permission it counts, without it or without the state in
    XCR0 it is named as withheld."""
    asked = []

    def permission() -> bool:
        asked.append(1)
        return False

    assert not any(f.startswith("amx") for f in features_from_cpuid(
        sapphire_rapids, AVX512_STATE, permission))  # fmt: skip
    assert not asked, "a kernel that does not save tiles is not asked for them"
    amx = {"amx-tile", "amx-int8", "amx-bf16"}
    assert features(AMX_STATE) - features(AMX_STATE, amx=False) == amx
    flags = ["avx2", "amx_tile", "amx_int8", "amx_bf16"]
    monkeypatch.setattr(detect, "_executable", lambda _code: None)
    monkeypatch.setattr(detect, "_cpuinfo", lambda _root: (flags, "a Xeon"))
    for allowed in (True, False):
        monkeypatch.setattr(detect, "_amx_permission", lambda allowed=allowed: allowed)
        facts = host_facts(overrides={"arch": "x86_64"})
        if facts.features_source != "/proc/cpuinfo":
            pytest.skip("not an x86 host")
        assert (amx <= facts.features) == allowed
        assert set(facts.withheld) == (set() if allowed else amx)
    target = {"name": "spr", "requires": {"arch": "x86_64", "features": ["avx512f", *sorted(amx)]}}
    with pytest.raises(HardwareMismatchError) as refused:
        require(target, facts, "m.zla")
    text = str(refused.value)
    assert refused.value.exit_code == 5
    assert "lacks avx512f;" in text and "has amx-bf16, amx-int8, amx-tile" in text
    assert "Linux 5.16" in text and "ARCH_REQ_XCOMP_PERM" in text
    assert [m.have for m in compare(target["requires"], facts)] == ["no"] + [  # type: ignore[arg-type]
        "withheld by the kernel"] * 3  # fmt: skip
    assert "withheld" not in str(compare({"features": ["amx-tile"]}, host_facts(
        mask=["amx-tile"], overrides={"arch": "x86_64"})))  # fmt: skip


def test_requirements_one_by_one() -> None:
    facts = host_facts(
        overrides={"arch": "aarch64", "page_size": 65536, "libc": "glibc 2.28", "system": "Linux",
                   "sve_vector_bits": 128, "features": frozenset({"sve"})}
    )  # fmt: skip
    ok = {"arch": "aarch64", "system": "Linux", "features": ["sve"], "sve_vector_bits": 128,
          "max_page_size": 65536, "min_glibc": "2.17"}  # fmt: skip
    assert compare(ok, facts) == []

    def names(**change: object) -> list[tuple[str, str, str]]:
        return [(m.name, m.need, m.have) for m in compare({**ok, **change}, facts)]

    assert names(arch="x86_64") == [("arch", "x86_64", "aarch64")]
    assert names(sve_vector_bits=256) == [("sve_vector_bits", "256 bits", "128 bits")]
    assert names(max_page_size=4096) == [("page size", "<= 4096 bytes", "65536 bytes")]
    assert names(min_glibc="2.34") == [("libc", "glibc >= 2.34", "glibc 2.28")]
    assert names(quantum_bits=3) == [("quantum_bits", "3", "not known to this loader")]
    here = facts.cpus_online
    assert names(limits={"cores": here}) == []
    assert names(limits={"cores": here + 1}) == [("cores", f">= {here + 1}", str(here))]
    assert names(limits={"lanes": 1}) == [("lanes", ">= 1", "not known to this loader")]
    musl = host_facts(overrides={"libc": "unknown"})
    assert [m.name for m in compare({"min_glibc": "2.17"}, musl)] == ["libc"]


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-2,5\n") == [0, 1, 2, 5]
    assert parse_cpu_list("7") == [7]
    assert parse_cpu_list("") == parse_cpu_list("x,3-1,-") == []


# cgroups ----------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


MEMINFO = "MemTotal: 16000000 kB\nMemFree: 1000000 kB\nMemAvailable: 8000000 kB\n"


def test_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kubepods/pod1"
    root = write(tmp_path, {
        "proc/self/cgroup": "0::/kubepods/pod1/box\n",
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
        "sys/fs/cgroup/cgroup.procs": "",
        "sys/fs/cgroup/kubepods/cpu.max": "max 100000\n",
        f"{group}/cpu.max": "150000 100000\n",
        f"{group}/memory.max": "2147483648\n",
        f"{group}/memory.current": "1610612736\n",
        f"{group}/memory.stat": "anon 5\ninactive_file 536870912\n",
        f"{group}/box/cpu.max": "400000 100000\n",
        f"{group}/box/memory.max": "max\n",
        f"{group}/box/memory.current": "1\n",
    })  # fmt: skip
    assert detect.cpu_quota(root) == 1.5
    gib = 1 << 30
    assert detect.memory_facts(root) == (2 * gib, gib, 2 * gib)


def test_cgroup_v1(tmp_path: Path) -> None:
    root = write(tmp_path, {
        "proc/self/cgroup": "4:cpu,cpuacct:/docker/ab\n5:memory:/docker/ab\n1:name=systemd:/x\n",
        "proc/meminfo": MEMINFO,
        # inside the container the group is the mount point itself
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "4096\n",
    })  # fmt: skip
    assert detect.cpu_quota(root) == 0.5
    assert detect.memory_facts(root) == (16000000 * 1024, 8000000 * 1024, None)
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("1048576\n")
    assert detect.memory_facts(root) == (1048576, 1048576 - 4096, 1048576)
    (tmp_path / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us").write_text("-1\n")
    assert detect.cpu_quota(root) is None


def test_no_cgroups_and_damaged_files(tmp_path: Path) -> None:
    assert detect.cpu_quota(str(tmp_path)) is None
    root = write(tmp_path, {
        "proc/self/cgroup": "0::/../../etc\nnonsense\n",
        "proc/meminfo": "MemTotal: many kB\nMemAvailable\n\xff",
        "sys/fs/cgroup/cgroup.controllers": "",
        "sys/fs/cgroup/cgroup.procs": "",
        "sys/fs/cgroup/cpu.max": "1e9 -5 x\n",
        "sys/fs/cgroup/memory.max": "\n",
    })  # fmt: skip
    assert detect.cpu_quota(root) is None
    assert detect.memory_facts(root) == (0, 0, None)


def test_threads_follow_cores_affinity_and_quota(tmp_path: Path) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = write(tmp_path, {topology.format(i): f"{i % 4},{i % 4 + 4}\n" for i in range(8)})
    assert detect._physical_cores(tuple(range(8)), root) == 4
    assert detect._physical_cores((0, 4), root) == 1
    assert detect._physical_cores((0, 1, 5), root) == 2

    def threads(**facts: object) -> int:
        base: dict[str, object] = {"cpus_affinity": tuple(range(8)), "cores_affinity": 4,
                                   "cpu_quota": None}  # fmt: skip
        return host_facts(overrides={**base, **facts}).usable_threads()

    assert threads() == 4
    assert threads(cpu_quota=2.5) == 2
    assert threads(cpu_quota=0.3) == 1
    assert threads(cpus_affinity=(3,), cores_affinity=1) == 1
    many = tuple(range(4096))  # more than a team can have
    assert threads(cpus_affinity=many, cores_affinity=4096) == detect.MAX_THREADS


def test_memory_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_read", lambda _path: "")
    total, available, _ = detect.memory_facts()
    assert total == detect._pages("SC_PHYS_PAGES") > available > 1 << 20
    assert detect._pages("SC_NO_SUCH_THING") == 0
