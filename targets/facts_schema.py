"""What a target file may say: names, units, ranges and the physics between the numbers.

In: nothing.  Out: the vocabulary of each family (:data:`FAMILIES`) and :func:`inconsistencies`.
Next file: ``facts.py``, which reads the files against it.

A range is the family's known range with room for the next generation, there to catch a slipped unit
(MB for bytes, Gbit/s for GB/s), not to judge hardware.  All bandwidths are decimal GB/s and both
directions together; all sizes are bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

Number = int | float
Facts = Mapping[str, Number]


@dataclass(frozen=True)
class FactKind:
    """A fact that a family knows: its unit, its range, whether it must be whole, and whether every
    target of the family has to state it."""

    unit: str
    low: float
    high: float
    whole: bool = True
    required: bool = True


@dataclass(frozen=True)
class Family:
    """The vocabulary of one family.  ``archs`` are the machine names ``requires.arch`` may use,
    ``mcpus`` those that ``build.mcpu`` may use, each with the features that a code generator then
    uses unasked.  ``kv_block_step``: KV blocks are a multiple of so many positions."""

    facts: Mapping[str, FactKind]
    archs: frozenset[str]
    features: frozenset[str]
    checks: tuple[Callable[[Facts, frozenset[str]], Iterator[tuple[str, str]]], ...]
    mcpus: Mapping[str, frozenset[str]] = field(default_factory=dict)
    kv_block_step: int = 1


CPU_KV_BLOCK_STEP = 16  # positions of a vector


#: LLVM's names, as the loader's detection reports them
X86_FEATURES = frozenset(
    [
        "sse3",
        "ssse3",
        "sse4.1",
        "sse4.2",
        "cx16",
        "popcnt",
        "movbe",
        "lzcnt",
        "bmi",
        "bmi2",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "sse4a",
        "vaes",
        "avxvnni",
        "gfni",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512dq",
        "avx512cd",
        "avx512vnni",
        "avx512bf16",
        "avx512vbmi",
        "avx512vbmi2",
        "avx512ifma",
        "avx512bitalg",
        "avx512vpopcntdq",
        "avx512fp16",
        "amx-tile",
        "amx-int8",
        "amx-bf16",
        "amx-fp16",
    ]
)
ARM_FEATURES = frozenset(
    [
        "neon",
        "crc",
        "lse",
        "fullfp16",
        "rdm",
        "jsconv",
        "complxnum",
        "rcpc",
        "dotprod",
        "fp16fml",
        "bf16",
        "i8mm",
        "sve",
        "sve2",
        "sve2-bitperm",
    ]
)

#: the levels of the x86-64 psABI, section 3.1.1, and plain 64-bit ARM
_V2 = frozenset({"sse3", "ssse3", "sse4.1", "sse4.2", "cx16", "popcnt"})
_V3 = _V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
CPU_MCPUS: Mapping[str, frozenset[str]] = {
    "x86_64": frozenset(),
    "x86_64_v2": _V2,
    "x86_64_v3": _V3,
    "x86_64_v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "generic": frozenset({"neon"}),
}

#: GB/s of one NVLink, both directions together, by generation.  Half of it is the one-direction
#: figure that is often quoted: 18 links of generation 4 are 900 GB/s, not 450.
NVLINK_GBPS_PER_LINK = {1: 40, 2: 50, 3: 50, 4: 50, 5: 100}

DEFAULTS: Mapping[str, tuple[float, float] | tuple[str, ...]] = {
    "kv_block_size": (1, 256),  # positions in one KV block
    "max_tokens": (1, 65536),  # tokens in one step
    "max_seqs": (1, 4096),  # sequences in one step
    "max_logit_rows": (1, 65536),  # rows of one step that want logits
    "max_context": (1, 1 << 24),  # used when the model does not say
    "dim_bound": (1, 1 << 24),  # bound of a symbolic dimension of `run` that nothing else bounds
    "activations": ("int8", "bf16", "f32"),
    "kv_dtype": ("f32", "f16", "bf16", "q8_0"),
    "fusion": ("conservative", "balanced", "aggressive"),
}


def _off(actual: float, expected: float, tolerance: float) -> bool:
    return abs(actual - expected) > tolerance * abs(expected)


def _product(
    total: str, factors: tuple[str, ...], scale: float, tolerance: float, text: str
) -> Callable[[Facts, frozenset[str]], Iterator[tuple[str, str]]]:
    """A check that ``total`` = the product of ``factors`` x ``scale`` within ``tolerance``."""

    def check(facts: Facts, _features: frozenset[str]) -> Iterator[tuple[str, str]]:
        if total not in facts or any(f not in facts for f in factors):
            return
        expected = scale
        for f in factors:
            expected *= facts[f]
        if _off(facts[total], expected, tolerance):
            stated = ", ".join(f"{f} = {facts[f]:g}" for f in factors)
            yield total, f"{total} is {facts[total]:g}, but {text} gives {expected:g} ({stated})"

    return check


def _ascending(
    *names: str,
) -> Callable[[Facts, frozenset[str]], Iterator[tuple[str, str]]]:
    def check(facts: Facts, _features: frozenset[str]) -> Iterator[tuple[str, str]]:
        present = [n for n in names if n in facts]
        for small, large in itertools.pairwise(present):
            if facts[small] >= facts[large]:
                yield (
                    large,
                    (f"{large} = {facts[large]:g} is not larger than {small} = {facts[small]:g}"),
                )

    return check


def _at_most(part: str, whole: str) -> Callable[[Facts, frozenset[str]], Iterator[tuple[str, str]]]:
    def check(facts: Facts, _features: frozenset[str]) -> Iterator[tuple[str, str]]:
        if part in facts and whole in facts and facts[part] > facts[whole]:
            yield part, f"{part} = {facts[part]:g} is larger than {whole} = {facts[whole]:g}"

    return check


def _cpu_vectors(facts: Facts, features: frozenset[str]) -> Iterator[tuple[str, str]]:
    bits = facts.get("register_bits")
    if bits is None:
        return
    if bits not in (128, 256, 512, 1024, 2048):
        yield "register_bits", f"register_bits is {bits:g}, not a vector length"
    if "sve" in features:
        return
    expected = 512 if "avx512f" in features else 256 if "avx2" in features else 128
    if bits != expected:
        yield (
            "register_bits",
            (f"register_bits is {bits:g}, but requires.features say {expected} bit registers"),
        )


def _cpu_l3(facts: Facts, _features: frozenset[str]) -> Iterator[tuple[str, str]]:
    cores, sharers = facts.get("cores"), facts.get("l3_sharers")
    if cores is not None and sharers is not None and cores % sharers:
        yield "l3_sharers", f"cores = {cores:g} is not a multiple of l3_sharers = {sharers:g}"


def _cpu_stream(facts: Facts, _features: frozenset[str]) -> Iterator[tuple[str, str]]:
    ahead, line = facts.get("stream_prefetch_bytes", 0), facts.get("cache_line_bytes", 0)
    if 0 < ahead < line:
        yield (
            "stream_prefetch_bytes",
            f"stream_prefetch_bytes = {ahead:g} is less than a cache line of {line:g}, and not 0",
        )


def _cuda_nvlink(facts: Facts, _features: frozenset[str]) -> Iterator[tuple[str, str]]:
    generation, rate = facts.get("nvlink_generation"), facts.get("nvlink_gbps_per_link")
    known = NVLINK_GBPS_PER_LINK.get(int(generation)) if generation is not None else None
    if known is not None and rate is not None and rate != known:
        yield (
            "nvlink_gbps_per_link",
            (
                f"nvlink_gbps_per_link is {rate:g}, but NVLink {generation:g} has {known} GB/s per "
                "link, both directions together"
            ),
        )
    given = [n for n in facts if n.startswith("nvlink_")]
    if given and len(given) != 4:
        yield (
            given[0],
            (
                "NVLink needs nvlink_generation, nvlink_links, nvlink_gbps_per_link and "
                f"nvlink_total_gbps together, not only {', '.join(sorted(given))}"
            ),
        )


def _cuda_registers(facts: Facts, _features: frozenset[str]) -> Iterator[tuple[str, str]]:
    warps = facts.get("max_warps_per_sm")
    if warps is not None and "registers_per_sm" in facts and facts["registers_per_sm"] < warps * 32:
        yield "registers_per_sm", "registers_per_sm is less than one register per thread"


_CPU = Family(
    facts={
        "cores": FactKind("cores", 1, 1024),
        "threads_per_core": FactKind("threads", 1, 8),
        "clock_ghz": FactKind("GHz", 0.4, 7.0, whole=False),
        "register_bits": FactKind("bit", 128, 2048),
        "datapath_bits": FactKind("bit", 128, 2048),
        "fma_pipes": FactKind("pipes", 1, 8),
        "f32_ops_per_cycle": FactKind("op/cycle/core", 4, 4096),
        "int8_ops_per_cycle": FactKind("op/cycle/core", 8, 65536),
        # the most that products of blocks with scales of their own can reach, where it is less
        "int8_block_ops_per_cycle": FactKind("op/cycle/core", 8, 65536, required=False),
        "bf16_ops_per_cycle": FactKind("op/cycle/core", 4, 65536, required=False),
        "peak_f32_gflops": FactKind("GFLOP/s", 1, 1e6, whole=False),
        "peak_int8_gops": FactKind("GOP/s", 1, 1e7, whole=False),
        "l1d_bytes": FactKind("byte/core", 8 * KIB, 1 * MIB),
        "l2_bytes": FactKind("byte/core", 128 * KIB, 64 * MIB),
        "l3_bytes": FactKind("byte", 1 * MIB, 4 * GIB),
        "l3_sharers": FactKind("cores", 1, 1024),
        "cache_line_bytes": FactKind("byte", 32, 256),
        "memory_channels": FactKind("channels", 1, 32),
        "memory_channel_bits": FactKind("bit", 16, 1024),
        "memory_rate_mts": FactKind("MT/s", 400, 20000),
        "memory_bandwidth_gbps": FactKind("GB/s", 3, 10000, whole=False),
        "sve_bits": FactKind("bit", 128, 2048, required=False),
        # how far ahead one or two tokens ask for weights; without it, or 0: left to the machine
        "stream_prefetch_bytes": FactKind("byte", 0, 1 * MIB, required=False),
        # streams of weights that a thread reads side by side for one or two tokens; without it 1
        "weight_streams": FactKind("streams", 1, 2, required=False),
    },
    archs=frozenset({"x86_64", "aarch64"}),
    features=X86_FEATURES | ARM_FEATURES,
    checks=(
        _at_most("datapath_bits", "register_bits"),
        _at_most("int8_block_ops_per_cycle", "int8_ops_per_cycle"),
        _product(
            "memory_bandwidth_gbps",
            ("memory_channels", "memory_channel_bits", "memory_rate_mts"),
            1 / 8000,
            0.02,
            "channels x width x rate",
        ),
        _product(
            "f32_ops_per_cycle", ("fma_pipes", "datapath_bits"), 2 / 32, 0.001, "pipes x lanes x 2"
        ),
        _product(
            "peak_f32_gflops",
            ("cores", "f32_ops_per_cycle", "clock_ghz"),
            1,
            0.02,
            "cores x operations per cycle x clock",
        ),
        _product(
            "peak_int8_gops",
            ("cores", "int8_ops_per_cycle", "clock_ghz"),
            1,
            0.02,
            "cores x operations per cycle x clock",
        ),
        _ascending("l1d_bytes", "l2_bytes", "l3_bytes"),
        _at_most("l3_sharers", "cores"),
        _cpu_l3,
        _cpu_stream,
        _cpu_vectors,
    ),
    mcpus=CPU_MCPUS,
    kv_block_step=CPU_KV_BLOCK_STEP,
)

_CUDA = Family(
    facts={
        "compute_capability": FactKind("major*10+minor", 70, 130),
        "sms": FactKind("SMs", 1, 512),
        "registers_per_sm": FactKind("registers", 16384, 1 << 20),
        "max_warps_per_sm": FactKind("warps", 16, 128),
        "max_blocks_per_sm": FactKind("blocks", 8, 64),
        "shared_memory_per_sm": FactKind("byte", 32 * KIB, 4 * MIB),
        "shared_memory_per_block": FactKind("byte", 32 * KIB, 4 * MIB),
        "l2_bytes": FactKind("byte", 1 * MIB, 1 * GIB),
        "memory_bytes": FactKind("byte", 4 * 10**9, 2 * 10**12),
        "memory_bus_bits": FactKind("bit", 64, 16384),
        "memory_rate_mts": FactKind("MT/s", 1000, 40000),
        "memory_bandwidth_gbps": FactKind("GB/s", 100, 40000, whole=False),
        "dense_bf16_tflops": FactKind("TFLOP/s", 10, 20000, whole=False),
        "dense_fp8_tflops": FactKind("TFLOP/s", 10, 40000, whole=False, required=False),
        "dense_int8_tops": FactKind("TOP/s", 10, 40000, whole=False, required=False),
        "nvlink_generation": FactKind("generation", 1, 8, required=False),
        "nvlink_links": FactKind("links", 1, 144, required=False),
        "nvlink_gbps_per_link": FactKind("GB/s", 20, 400, whole=False, required=False),
        "nvlink_total_gbps": FactKind("GB/s", 40, 20000, whole=False, required=False),
        "driver_minimum": FactKind("version*10", 1000, 99999, required=False),
    },
    archs=frozenset(
        {"sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_103a", "sm_120a"}
    ),
    features=frozenset(),
    checks=(
        _product(
            "nvlink_total_gbps",
            ("nvlink_links", "nvlink_gbps_per_link"),
            1,
            0.001,
            "links x rate per link",
        ),
        _cuda_nvlink,
        _product(
            "memory_bandwidth_gbps",
            ("memory_bus_bits", "memory_rate_mts"),
            1 / 8000,
            0.02,
            "bus width x rate",
        ),
        _at_most("shared_memory_per_block", "shared_memory_per_sm"),
        _ascending("shared_memory_per_sm", "l2_bytes", "memory_bytes"),
        _cuda_registers,
    ),
)

_NEURON = Family(
    facts={
        "cores": FactKind("cores", 1, 64),
        "partitions": FactKind("partitions", 128, 128),
        "sbuf_bytes": FactKind("byte", 1 * MIB, 1 * GIB),
        "sbuf_partition_bytes": FactKind("byte", 8 * KIB, 8 * MIB),
        "psum_bytes": FactKind("byte", 256 * KIB, 256 * MIB),
        "psum_partition_bytes": FactKind("byte", 2 * KIB, 2 * MIB),
        "psum_banks": FactKind("banks", 1, 64),
        "psum_bank_bytes": FactKind("byte", 256, 64 * KIB),
        "tensor_bf16_tflops": FactKind("TFLOP/s/core", 10, 2000, whole=False),
        "memory_bytes": FactKind("byte", 4 * GIB, 1024 * GIB),
        "memory_bandwidth_gbps": FactKind("GB/s", 50, 20000, whole=False),
        "neuronlink_gbps": FactKind("GB/s", 10, 10000, whole=False, required=False),
    },
    archs=frozenset({"neuron-v2", "neuron-v3"}),
    features=frozenset(),
    checks=(
        _product("sbuf_bytes", ("partitions", "sbuf_partition_bytes"), 1, 0, "partitions x size"),
        _product("psum_bytes", ("partitions", "psum_partition_bytes"), 1, 0, "partitions x size"),
        _product(
            "psum_partition_bytes", ("psum_banks", "psum_bank_bytes"), 1, 0, "banks x bank size"
        ),
        _ascending("psum_bytes", "sbuf_bytes", "memory_bytes"),
    ),
)

FAMILIES: Mapping[str, Family] = {"cpu": _CPU, "cuda": _CUDA, "neuron": _NEURON}


def inconsistencies(
    family: str, facts: Facts, features: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """(fact name, what contradicts what) for every pair of numbers that cannot both be true."""
    for check in FAMILIES[family].checks:
        yield from check(facts, features)
