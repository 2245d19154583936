"""What the host is: instruction set, CPUs, memory, page size, libc, kernel.

In: the machine (CPUID and XGETBV, getauxval and prctl, /proc, /sys).  Out: :class:`HostFacts`.
Next file: ``requires.py``, which compares them with what the artifact was compiled for.

x86 features come from the CPUID *instruction*, run from a few bytes of machine code, and count
only when the operating system saves their registers (XCR0; for AMX also the ``arch_prctl``
permission).  The instruction is asked first because /proc/cpuinfo describes the kernel's machine
even when the process runs under an emulator with a lesser CPU.  Where executable memory is
forbidden, the flags of /proc/cpuinfo are used; those already reflect what the kernel enabled.
``features_source`` says which.

Feature names are LLVM's (``avx512bf16``, ``amx-int8``, ``sve2-bitperm``).

This module imports nothing heavy: it is on the path of every start.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# (leaf, subleaf, register, bit, name, needs): register 0..3 is EAX, EBX, ECX, EDX; ``needs`` is the
# part of XCR0 that the OS must have switched on.
_XCR0_NEEDS = {"": 0x0, "avx": 0x6, "avx512": 0xE6, "amx": 0x60000}
_EVERY_STATE = 0x600E6  # all of them
_X86_BITS = (
    (1, 0, 2, 0, "sse3", ""),
    (1, 0, 2, 9, "ssse3", ""),
    (1, 0, 2, 12, "fma", "avx"),
    (1, 0, 2, 13, "cx16", ""),
    (1, 0, 2, 19, "sse4.1", ""),
    (1, 0, 2, 20, "sse4.2", ""),
    (1, 0, 2, 22, "movbe", ""),
    (1, 0, 2, 23, "popcnt", ""),
    (1, 0, 2, 28, "avx", "avx"),
    (1, 0, 2, 29, "f16c", "avx"),
    (7, 0, 1, 3, "bmi", ""),
    (7, 0, 1, 5, "avx2", "avx"),
    (7, 0, 1, 8, "bmi2", ""),
    (7, 0, 1, 16, "avx512f", "avx512"),
    (7, 0, 1, 17, "avx512dq", "avx512"),
    (7, 0, 1, 21, "avx512ifma", "avx512"),
    (7, 0, 1, 28, "avx512cd", "avx512"),
    (7, 0, 1, 30, "avx512bw", "avx512"),
    (7, 0, 1, 31, "avx512vl", "avx512"),
    (7, 0, 2, 1, "avx512vbmi", "avx512"),
    (7, 0, 2, 6, "avx512vbmi2", "avx512"),
    (7, 0, 2, 8, "gfni", ""),
    (7, 0, 2, 9, "vaes", "avx"),
    (7, 0, 2, 11, "avx512vnni", "avx512"),
    (7, 0, 2, 12, "avx512bitalg", "avx512"),
    (7, 0, 2, 14, "avx512vpopcntdq", "avx512"),
    (7, 0, 3, 22, "amx-bf16", "amx"),
    (7, 0, 3, 23, "avx512fp16", "avx512"),
    (7, 0, 3, 24, "amx-tile", "amx"),
    (7, 0, 3, 25, "amx-int8", "amx"),
    (7, 1, 0, 4, "avxvnni", "avx"),
    (7, 1, 0, 5, "avx512bf16", "avx512"),
    (7, 1, 0, 21, "amx-fp16", "amx"),
    (0x80000001, 0, 2, 5, "lzcnt", ""),
    (0x80000001, 0, 2, 6, "sse4a", ""),
)
# /proc/cpuinfo spells some of them its own way
_CPUINFO_NAMES = {
    "pni": "sse3", "sse4_1": "sse4.1", "sse4_2": "sse4.2", "bmi1": "bmi", "abm": "lzcnt",
    "avx512_vbmi2": "avx512vbmi2", "avx512_vnni": "avx512vnni", "avx512_bitalg": "avx512bitalg",
    "avx512_vpopcntdq": "avx512vpopcntdq", "avx512_bf16": "avx512bf16", "avx512_fp16": "avx512fp16",
    "avx_vnni": "avxvnni", "amx_tile": "amx-tile", "amx_int8": "amx-int8", "amx_bf16": "amx-bf16",
    "amx_fp16": "amx-fp16",
}  # fmt: skip
# aarch64: (bit, name) of AT_HWCAP and AT_HWCAP2, asm/hwcap.h
_ARM_HWCAP = (
    (1, "neon"), (3, "aes"), (6, "sha2"), (7, "crc"), (8, "lse"), (10, "fullfp16"), (12, "rdm"),
    (13, "jsconv"), (14, "complxnum"), (15, "rcpc"), (17, "sha3"), (18, "sm3"), (19, "sm4"),
    (20, "dotprod"), (22, "sve"), (23, "fp16fml"),
)  # fmt: skip
_ARM_HWCAP2 = (
    (1, "sve2"), (2, "sve2-aes"), (4, "sve2-bitperm"), (5, "sve2-sha3"), (6, "sve2-sm4"),
    (9, "svei8mm"), (10, "f32mm"), (11, "f64mm"), (12, "svebf16"), (13, "i8mm"), (14, "bf16"),
    (16, "rand"), (17, "bti"), (23, "sme"),
)  # fmt: skip
# what disappears with a feature, for masks: a CPU without X has none of these either
_DEPENDS = {
    "avx": ("avx2", "fma", "f16c", "vaes", "avxvnni", "avx512"),
    "avx2": ("avxvnni", "avx512"),
    "avx512f": ("avx512",),
    "amx-tile": ("amx-",),
    "sve": ("sve", "f32mm", "f64mm"),
    "sve2": ("sve2-",),
}

_X86_CODE = bytes.fromhex(
    # void cpuid(uint32 leaf edi, uint32 subleaf esi, uint32 *out rdx)
    "53"  # push rbx
    "4989d0"  # mov r8, rdx
    "89f8"  # mov eax, edi
    "89f1"  # mov ecx, esi
    "0fa2"  # cpuid
    "418900"  # mov [r8], eax
    "41895804"  # mov [r8+4], ebx
    "41894808"  # mov [r8+8], ecx
    "4189500c"  # mov [r8+12], edx
    "5b"  # pop rbx
    "c3"  # ret
    + "909090909090"
    # uint64 xgetbv(void): XCR0, only called when CPUID says OSXSAVE
    + "31c9"  # xor ecx, ecx
    "0f01d0"  # xgetbv
    "48c1e220"  # shl rdx, 32
    "4809d0"  # or rax, rdx
    "c3"  # ret
)
_XGETBV_OFFSET = 32
#: what a thread team can have (ZL_MAX_THREADS in zl_team.h)
MAX_THREADS = 1024


class HostFacts:
    """The host as far as an artifact can care.  Treat as read-only.

    ``cpus_online`` logical CPUs of the machine, ``cpus_affinity`` the ids this process may run on,
    ``cores_affinity`` the distinct physical cores behind them, ``cpu_quota`` the cgroup limit in
    CPUs (None: no limit).  Bytes: ``memory_total`` (machine or cgroup limit, the lesser),
    ``memory_available`` (free now, the lesser of machine, cgroup and address-space limit),
    ``memory_limit`` (the cgroup's or address-space limit, None: none), ``page_size``.
    ``sve_vector_bits`` is 0 without SVE.  ``masked`` lists features hidden on request, ``withheld``
    those that the CPU has and the operating system does not let this process use.
    """

    __slots__ = (
        "arch",
        "cores_affinity",
        "cpu_model",
        "cpu_quota",
        "cpus_affinity",
        "cpus_online",
        "features",
        "features_source",
        "kernel",
        "libc",
        "masked",
        "memory_available",
        "memory_limit",
        "memory_total",
        "page_size",
        "python",
        "sve_vector_bits",
        "system",
        "withheld",
    )

    arch: str
    system: str
    kernel: str
    libc: str
    python: str
    cpu_model: str
    features: frozenset[str]
    features_source: str
    masked: tuple[str, ...]
    withheld: tuple[str, ...]
    sve_vector_bits: int
    cpus_online: int
    cpus_affinity: tuple[int, ...]
    cores_affinity: int
    cpu_quota: float | None
    memory_total: int
    memory_available: int
    memory_limit: int | None
    page_size: int

    def __init__(self, **facts: object) -> None:
        for name in self.__slots__:
            setattr(self, name, facts.pop(name))
        if facts:
            raise TypeError(f"unknown facts: {', '.join(sorted(facts))}")

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON, keys sorted."""
        out: dict[str, object] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            out[name] = sorted(value) if isinstance(value, (frozenset, tuple)) else value
        return out

    def usable_threads(self) -> int:
        """Threads that can run at once without sharing a core: physical cores, affinity, quota."""
        quota = len(self.cpus_affinity) if self.cpu_quota is None else int(self.cpu_quota)
        allowed = min(self.cores_affinity, len(self.cpus_affinity), MAX_THREADS)
        return max(1, min(allowed, max(1, quota)))

    def usable_cpus(self) -> int:
        """CPUs that this process may use at once: affinity, quota (rounded up)."""
        cpus = len(self.cpus_affinity)
        return cpus if self.cpu_quota is None else max(1, min(cpus, -int(-self.cpu_quota // 1)))


def host_facts(
    mask: Iterable[str] = (),
    overrides: Mapping[str, object] | None = None,
    root: str = "/",
) -> HostFacts:
    """The facts of this host.

    ``mask`` hides features (and those that depend on them), ``overrides`` replaces whole facts by
    name: both exist so that tests can play a lesser machine through the same code.  ``root`` is
    where /proc and /sys are looked for.
    """
    uname = os.uname()
    arch = _arch(uname.machine)
    features, withheld, source, model, sve_bits = _features(arch, root)
    hidden = _expand_mask(mask, features)
    affinity = _affinity()
    total, available, limit = memory_facts(root)
    facts: dict[str, object] = {
        "arch": arch,
        "system": uname.sysname,
        "kernel": uname.release,
        "libc": _libc(),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "cpu_model": model,
        "features": features - hidden,
        "features_source": source,
        "masked": tuple(sorted(hidden)),
        "withheld": tuple(sorted(withheld - hidden)),
        "sve_vector_bits": sve_bits if "sve" not in hidden else 0,
        "cpus_online": os.cpu_count() or 1,
        "cpus_affinity": affinity,
        "cores_affinity": _physical_cores(affinity, root),
        "cpu_quota": cpu_quota(root),
        "memory_total": total,
        "memory_available": available,
        "memory_limit": limit,
        "page_size": os.sysconf("SC_PAGESIZE"),
    }
    if overrides:
        facts.update(overrides)
    return HostFacts(**facts)


def _arch(machine: str) -> str:
    """The process's architecture: a 32-bit Python on a 64-bit kernel cannot load 64-bit code."""
    name = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())
    if sys.maxsize < 2**32 and name in ("x86_64", "aarch64"):
        return name + "-32bit"
    return name


def _expand_mask(mask: Iterable[str], features: frozenset[str]) -> frozenset[str]:
    hidden = set(mask)
    for name in tuple(hidden):
        for prefix in _DEPENDS.get(name, ()):
            hidden.update(f for f in features if f.startswith(prefix))
    return frozenset(hidden)


def _read(path: str, limit: int = 1 << 16) -> str:
    """A small text file, or '' when it cannot be read."""
    try:
        with open(path, "rb") as f:
            return f.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.lstrip("-").isdigit() else None


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except (ValueError, OSError, AttributeError):
        return "unknown"


# ---------------------------------------------------------------------------------- instruction set


def _features(arch: str, root: str) -> tuple[frozenset[str], frozenset[str], str, str, int]:
    """(features, those withheld, where they were read, CPU name, SVE vector bits)."""
    if arch == "x86_64":
        found = _x86_from_cpuid()
        if found is not None:
            return found[0], found[1], "cpuid", found[2], 0
        flags, model = _cpuinfo(root)
        features = x86_from_flags(flags)
        withheld = x86_from_flags(flags, lambda: True) - features
        return features, withheld, "/proc/cpuinfo", model, 0
    if arch == "aarch64":
        features, bits = _arm_features()
        return features, frozenset(), "getauxval", _cpuinfo(root)[1], bits
    return frozenset(), frozenset(), "none", "", 0


def _cpuinfo(root: str) -> tuple[list[str], str]:
    flags: list[str] = []
    model = ""
    for line in _read(os.path.join(root, "proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        key = key.strip()
        if key == "flags":
            flags = value.split()
        elif key in ("model name", "CPU part") and not model:
            model = value.strip()
        elif not key and (flags or model):
            break  # the first CPU is enough
    return flags, model


def x86_from_flags(
    flags: Iterable[str], amx_permission: Callable[[], bool] | None = None
) -> frozenset[str]:
    """LLVM's names of /proc/cpuinfo flags; AMX only with the kernel's permission."""
    known = {bit[4] for bit in _X86_BITS}
    names = {_CPUINFO_NAMES.get(flag, flag) for flag in flags} & known
    if "amx-tile" in names and not (amx_permission or _amx_permission)():
        names = {n for n in names if not n.startswith("amx-")}
    return frozenset(names)


def _executable(code: bytes) -> int | None:
    """The address of ``code`` in executable memory, never unmapped; None where forbidden."""
    import ctypes
    import mmap

    try:
        fd = os.memfd_create("zl-cpuid", os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        return None
    try:
        os.write(fd, code)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        c_int = ctypes.c_int
        libc.mmap.argtypes = (
            [ctypes.c_void_p, ctypes.c_size_t, c_int, c_int, c_int, ctypes.c_long]
        )  # fmt: skip
        # a private file mapping, never writable: allowed where writable-and-executable is not
        address = libc.mmap(
            None, len(code), mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, 0
        )
    except (OSError, AttributeError):
        return None
    finally:
        os.close(fd)
    return None if address in (None, ctypes.c_void_p(-1).value) else int(address)


def _x86_from_cpuid() -> tuple[frozenset[str], frozenset[str], str] | None:
    try:
        import ctypes
    except ImportError:
        return None
    address = _executable(_X86_CODE)
    if address is None:
        return None
    out = (ctypes.c_uint32 * 4)()
    cpuid_t = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
    call = cpuid_t(address)
    out_address = ctypes.addressof(out)
    known: dict[tuple[int, int], tuple[int, int, int, int]] = {}  # the instruction traps in a VM

    def cpuid(leaf: int, subleaf: int = 0) -> tuple[int, int, int, int]:
        if (leaf, subleaf) not in known:
            call(leaf, subleaf, out_address)
            known[leaf, subleaf] = (out[0], out[1], out[2], out[3])
        return known[leaf, subleaf]

    xcr0 = 0
    if cpuid(1)[2] >> 27 & 1:  # OSXSAVE: XGETBV exists and the OS uses it
        xcr0 = ctypes.CFUNCTYPE(ctypes.c_uint64)(address + _XGETBV_OFFSET)()
    features = features_from_cpuid(cpuid, xcr0, _amx_permission)
    withheld = features_from_cpuid(cpuid, _EVERY_STATE, lambda: True) - features
    return features, withheld, _brand(cpuid)


def features_from_cpuid(
    cpuid: Callable[[int, int], tuple[int, int, int, int]],
    xcr0: int,
    amx_permission: Callable[[], bool],
) -> frozenset[str]:
    """Features that the CPU has and the operating system enabled.

    ``cpuid(leaf, subleaf)`` returns EAX, EBX, ECX, EDX.
    """
    highest = {0: cpuid(0, 0)[0], 0x80000000: cpuid(0x80000000, 0)[0]}
    subleaves = cpuid(7, 0)[0] if highest[0] >= 7 else 0
    names = set()
    for leaf, subleaf, register, bit, name, needs in _X86_BITS:
        if leaf > highest[leaf & 0x80000000] or (leaf == 7 and subleaf > subleaves):
            continue
        need = _XCR0_NEEDS[needs]
        if cpuid(leaf, subleaf)[register] >> bit & 1 and xcr0 & need == need:
            names.add(name)
    if "amx-tile" in names and not amx_permission():
        names = {n for n in names if not n.startswith("amx-")}
    return frozenset(names)


def _brand(cpuid: Callable[..., tuple[int, int, int, int]]) -> str:
    if cpuid(0x80000000)[0] < 0x80000004:
        return ""
    words = [word for leaf in (2, 3, 4) for word in cpuid(0x80000000 + leaf)]
    raw = b"".join(word.to_bytes(4, "little") for word in words)
    return " ".join(raw.split(b"\0")[0].decode("ascii", "replace").split())


def _amx_permission() -> bool:
    """Ask the kernel to enable the AMX tile state for this process (Linux >= 5.16)."""
    import ctypes

    sys_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata = 158, 0x1023, 18
    try:
        libc = ctypes.CDLL(None)
        return int(libc.syscall(sys_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata)) == 0
    except (OSError, AttributeError):
        return False


def _arm_features() -> tuple[frozenset[str], int]:
    import ctypes

    try:
        libc = ctypes.CDLL(None)
        libc.getauxval.restype = ctypes.c_ulong
        libc.getauxval.argtypes = [ctypes.c_ulong]
        hwcap, hwcap2 = libc.getauxval(16), libc.getauxval(26)
        vector_length = libc.prctl(51, 0, 0, 0, 0)  # PR_SVE_GET_VL
    except (OSError, AttributeError):
        return frozenset(), 0
    return features_from_hwcap(hwcap, hwcap2, vector_length)


def features_from_hwcap(hwcap: int, hwcap2: int, vector_length: int) -> tuple[frozenset[str], int]:
    """(features, SVE vector bits).  ``vector_length`` is what PR_SVE_GET_VL returned: the low 16
    bits are bytes; negative means that SVE is absent or switched off for this process."""
    names = {name for bit, name in _ARM_HWCAP if hwcap >> bit & 1}
    names |= {name for bit, name in _ARM_HWCAP2 if hwcap2 >> bit & 1}
    bits = 8 * (vector_length & 0xFFFF) if vector_length > 0 else 0
    if "sve" not in names or not bits:
        bits = 0
        names = {n for n in names if not n.startswith("sve") and n not in ("f32mm", "f64mm")}
    return frozenset(names), bits


# ------------------------------------------------------------------------------- CPUs and cgroups


def _affinity() -> tuple[int, ...]:
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except (OSError, AttributeError):
        return tuple(range(os.cpu_count() or 1))


def parse_cpu_list(text: str) -> list[int]:
    """``0-2,5`` -> [0, 1, 2, 5]; malformed parts are ignored."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        low = _number(first)
        high = _number(last) if last else low
        if low is not None and high is not None and 0 <= low <= high < 1 << 16:
            cpus.extend(range(low, high + 1))
    return cpus


def _physical_cores(affinity: tuple[int, ...], root: str) -> int:
    """Distinct physical cores behind the CPUs of ``affinity``."""
    seen: set[int] = set()
    cores = 0
    for cpu in affinity:
        if cpu in seen:
            continue
        cores += 1
        path = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        seen.update(parse_cpu_list(_read(os.path.join(root, path))))
        seen.add(cpu)
    return max(1, cores)


def _cgroup_dirs(root: str, controller: str) -> tuple[int, list[str]]:
    """(version, directories of this process's group and its ancestors) for ``controller``.

    Inside a container the group's path may not exist below the mount; then the mount point is the
    group.
    """
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        base = os.path.join(root, "sys/fs/cgroup")
        if version == 1:
            bases = [os.path.join(base, controllers), os.path.join(base, controller)]
            base = next((b for b in bases if os.path.isdir(b)), "")
        elif not os.path.exists(os.path.join(base, "cgroup.controllers")):
            base = os.path.join(base, "unified")
        if not base or not os.path.isdir(base):
            continue
        dirs = [base]
        for part in path.split("/"):
            if part in ("", ".", ".."):
                continue
            child = os.path.join(dirs[-1], part)
            if not os.path.isdir(child):
                break
            dirs.append(child)
        if version == 2 and not any(os.path.exists(os.path.join(d, "cgroup.procs")) for d in dirs):
            continue
        if version == 1 or _v2_has(dirs, controller):
            return version, dirs
    return 0, []


def _v2_has(dirs: list[str], controller: str) -> bool:
    name = {"cpu": "cpu.max", "memory": "memory.max"}[controller]
    return any(os.path.exists(os.path.join(d, name)) for d in dirs)


def cpu_quota(root: str = "/") -> float | None:
    """CPUs that the cgroup may use per period, the least over the group and its ancestors."""
    version, dirs = _cgroup_dirs(root, "cpu")
    limits = []
    for d in dirs:
        if version == 2:
            words = _read(os.path.join(d, "cpu.max")).split()
            quota, period = (_number(w) for w in words) if len(words) == 2 else (None, None)
        else:
            quota = _number(_read(os.path.join(d, "cpu.cfs_quota_us")))
            period = _number(_read(os.path.join(d, "cpu.cfs_period_us")))
        if quota is not None and period and quota > 0 and period > 0:
            limits.append(quota / period)
    return min(limits) if limits else None


def memory_facts(root: str = "/") -> tuple[int, int, int | None]:
    """(total, available, limit) in bytes; see :class:`HostFacts`."""
    info: dict[str, int] = {}
    for line in _read(os.path.join(root, "proc/meminfo")).splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        number = _number(words[0]) if words else None
        if number is not None:
            info[key] = number * 1024
    total = info.get("MemTotal", 0)
    available = info.get("MemAvailable", info.get("MemFree", 0))
    if not info and root == "/":  # no /proc: the C library asks the kernel, file cache not counted
        total, available = _pages("SC_PHYS_PAGES"), _pages("SC_AVPHYS_PAGES")
    limits = []
    version, dirs = _cgroup_dirs(root, "memory")
    for d in dirs:
        names = ("memory.max", "memory.current") if version == 2 else (
            "memory.limit_in_bytes", "memory.usage_in_bytes")  # fmt: skip
        limit, used = (_number(_read(os.path.join(d, name))) for name in names)
        if limit is None or limit >= 1 << 60:  # v1 spells "no limit" as a huge number
            continue
        limits.append(limit)
        available = min(available, max(0, limit - (used or 0) + _reclaimable(d)))
    address_space = _address_space_left(root)
    if address_space is not None:
        limits.append(address_space[0])
        available = min(available, address_space[1])
    limit_bytes = min(limits) if limits else None
    return (min(total, limit_bytes) if limit_bytes is not None else total), available, limit_bytes


def _pages(name: str) -> int:
    """A ``sysconf`` count of pages in bytes, 0 when it is not known."""
    try:
        return max(0, os.sysconf(name)) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _reclaimable(group: str) -> int:
    """File cache that counts as used but is given back under pressure."""
    for line in _read(os.path.join(group, "memory.stat")).splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return _number(value) or 0
    return 0


def _address_space_left(root: str) -> tuple[int, int] | None:
    """(RLIMIT_AS, what is left of it), or None when unlimited."""
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit in (resource.RLIM_INFINITY, -1):
        return None
    words = _read(os.path.join(root, "proc/self/statm")).split()
    used = (_number(words[0]) or 0) * os.sysconf("SC_PAGESIZE") if words else 0
    return limit, max(0, limit - used)
