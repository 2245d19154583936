"""Target files: what they must say, what is refused, and where the message points."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerolayer.runtime_stub.errors import HardwareMismatchError, InputFileError, UsageError
from zerolayer.targets import facts, yaml_file
from zerolayer.targets.facts_schema import DEFAULTS, FAMILIES

H100 = """\
name: h100-sxm
family: cuda
facts:
  compute_capability: {value: 90, unit: major*10+minor, source: NVIDIA}
  sms: {value: 132, unit: SMs, source: NVIDIA}
  registers_per_sm: {value: 65536, unit: registers, source: NVIDIA}
  max_warps_per_sm: {value: 64, unit: warps, source: NVIDIA}
  max_blocks_per_sm: {value: 32, unit: blocks, source: NVIDIA}
  shared_memory_per_sm: {value: 233472, unit: byte, source: NVIDIA}
  shared_memory_per_block: {value: 232448, unit: byte, source: NVIDIA}
  l2_bytes: {value: 52428800, unit: byte, source: NVIDIA}
  memory_bytes: {value: 85899345920, unit: byte, source: NVIDIA}
  memory_bus_bits: {value: 5120, unit: bit, source: NVIDIA}
  memory_rate_mts: {value: 5234, unit: MT/s, source: NVIDIA}
  memory_bandwidth_gbps: {value: 3350, unit: GB/s, source: NVIDIA}
  dense_bf16_tflops: {value: 989, unit: TFLOP/s, source: NVIDIA}
  nvlink_generation: {value: 4, unit: generation, source: NVIDIA}
  nvlink_links: {value: 18, unit: links, source: NVIDIA}
  nvlink_gbps_per_link: {value: 50, unit: GB/s, source: NVIDIA}
  nvlink_total_gbps: {value: 900, unit: GB/s, source: NVIDIA}
requires: {arch: sm_90a, limits: [sms, shared_memory_per_block]}
defaults: {kv_block_size: 64, max_tokens: 2048, max_seqs: 256, max_logit_rows: 256, max_context:
8192, dim_bound: 512, activations: bf16, kv_dtype: bf16, fusion: balanced}
"""


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def refused(folder: Path, text: str) -> str:
    with pytest.raises(InputFileError) as e:
        facts.load_target(write(folder, text))
    return str(e.value)


# --- the targets that come with zerolayer -------------------------------------------------------


def test_named_targets() -> None:
    assert facts.list_targets() == ["sapphirerapids", "x86-64-v3", "x86-64-v4", "zen3", "zen4"]
    for name in facts.list_targets():
        target = facts.load_target(name)
        assert target.name == name and target.family == "cpu"
        for fact in target.facts:
            assert fact.unit and len(fact.source) > 8, fact


def test_published_numbers() -> None:
    """Figures of the vendors' data sheets, written down here independently of the files."""
    zen4 = facts.load_target("zen4")
    assert zen4.fact("memory_bandwidth_gbps").value == 460.8
    assert zen4.fact("l2_bytes").value == 1 << 20 and zen4.fact("l3_bytes").value == 32 << 20
    assert zen4.fact("datapath_bits").value == 256 and zen4.fact("register_bits").value == 512
    zen3 = facts.load_target("zen3")
    assert zen3.fact("memory_bandwidth_gbps").value == 204.8
    assert zen3.fact("l2_bytes").value == 512 << 10 and zen3.fact("l3_bytes").value == 32 << 20
    assert zen3.fact("register_bits").value == 256 and "avx512f" not in zen3.features
    spr = facts.load_target("sapphirerapids")
    assert spr.fact("memory_bandwidth_gbps").value == 307.2
    assert "amx-int8" in spr.features and "amx-int8" not in zen4.features


def test_levels_are_the_psabi_levels() -> None:
    v3 = {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
    assert v3 <= facts.load_target("x86-64-v3").features
    v4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    assert facts.load_target("x86-64-v4").features - facts.load_target("x86-64-v3").features == v4
    assert facts.load_target("zen4").features >= v4 | {"avx512vnni", "avx512bf16", "avx512vbmi"}


def test_requires_uses_the_loaders_keys() -> None:
    requires = facts.load_target("zen4").requires.as_dict()
    assert set(requires) == {"arch", "system", "features", "max_page_size", "min_glibc"}
    assert requires["system"] == "Linux" and requires["max_page_size"] == 65536


# --- choosing for the host ----------------------------------------------------------------------


def features_of(name: str) -> frozenset[str]:
    return facts.load_target(name).features


@pytest.mark.parametrize(
    ("host", "best"),
    [
        (features_of("x86-64-v3"), "x86-64-v3"),
        (features_of("x86-64-v4"), "x86-64-v4"),
        (features_of("zen4") | {"gfni", "sse4a", "vaes"}, "zen4"),
        (features_of("zen3"), "zen3"),
        (features_of("zen3") - {"vaes"}, "x86-64-v3"),  # Zen 2
        (features_of("zen3") - {"sse4a"}, "x86-64-v3"),  # Alder Lake
        (features_of("sapphirerapids"), "sapphirerapids"),
        # Sapphire Rapids in a VM that hides AMX: what is left is served by the AVX-512 BF16 target
        (features_of("sapphirerapids") - {"amx-tile", "amx-int8", "amx-bf16"}, "zen4"),
        # Ice Lake: VNNI but no BF16
        (features_of("x86-64-v4") | {"avx512vnni", "avx512vbmi"}, "x86-64-v4"),
    ],
)
def test_resolve_host(host: frozenset[str], best: str) -> None:
    assert facts.resolve_host(lambda: ("x86_64", host)).name == best


def test_resolve_host_chooses_by_cost_not_by_feature_count() -> None:
    names = [t.name for t in facts.candidates("x86_64", features_of("sapphirerapids"))]
    rates = {
        n: facts.load_target(n).fact("int8_ops_per_cycle").value
        * facts.load_target(n).fact("clock_ghz").value
        for n in names
    }
    assert names == sorted(names, key=lambda n: -rates[n])


def test_resolve_host_without_a_fitting_target() -> None:
    with pytest.raises(HardwareMismatchError, match="no named target fits"):
        facts.resolve_host(lambda: ("x86_64", frozenset({"sse3"})))
    with pytest.raises(HardwareMismatchError):
        facts.resolve_host(lambda: ("riscv64", features_of("zen4")))


def test_host_is_a_named_target() -> None:
    try:
        assert facts.load_target("host").name in facts.list_targets()
    except HardwareMismatchError as e:
        assert "--target" in str(e)


def test_with_defaults() -> None:
    zen4 = facts.load_target("zen4")
    assert facts.with_defaults(zen4, max_tokens=7, kv_dtype="f32").default("max_tokens") == 7
    for wrong in ({"tokens": 7}, {"max_tokens": 0}, {"max_tokens": "many"}, {"kv_dtype": "f8"}):
        with pytest.raises(UsageError):
            facts.with_defaults(zen4, **wrong)


def test_unknown_name() -> None:
    with pytest.raises(UsageError, match="zen4"):
        facts.load_target("zen5")
    for name in ("../zen4", "ZEN4", "", "a" * 300, "zen4\0"):
        with pytest.raises((UsageError, InputFileError)):
            facts.load_target(name)


# --- physics ------------------------------------------------------------------------------------


def test_h100_is_accepted(tmp_path: Path) -> None:
    target = facts.load_target(write(tmp_path, H100))
    assert target.requires.as_dict()["limits"] == {"sms": 132, "shared_memory_per_block": 232448}
    assert target.fact("nvlink_total_gbps").value == 900


def test_nvlink_450_for_900(tmp_path: Path) -> None:
    message = refused(tmp_path, H100.replace("value: 900", "value: 450"))
    assert "450" in message and "900" in message and "links x rate per link" in message
    line = next(i for i, x in enumerate(H100.splitlines(), 1) if "nvlink_total" in x)
    assert f"mine.yaml:{line}:" in message


def test_nvlink_450_made_consistent_by_the_one_direction_rate(tmp_path: Path) -> None:
    wrong = H100.replace("value: 900", "value: 450").replace(
        "nvlink_gbps_per_link: {value: 50", "nvlink_gbps_per_link: {value: 25"
    )
    assert "both directions" in refused(tmp_path, wrong)


def test_nvlink_facts_come_together(tmp_path: Path) -> None:
    text = "\n".join(x for x in H100.splitlines() if "nvlink_links" not in x)
    assert "together" in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("old", "new", "expect"),
    [
        ("value: 3350", "value: 3900", "bus width x rate"),
        ("value: 232448", "value: 240000", "shared_memory_per_sm"),
        ("value: 52428800", "value: 50", "outside the known range"),
        ("value: 132, ", "value: 132.5, ", "whole number"),
        ("value: 132, ", "value: .inf, ", "not a finite number"),
        ("value: 132, ", "value: 1e999, ", "finite"),
        ("value: 132, ", "value: true, ", "must be a number"),
        ("value: 132, ", "value: many, ", "must be a number"),
        ("value: 132, ", "", "has no value"),
        (", unit: SMs", "", "has no unit"),
        ("unit: SMs", "unit: cores", "not 'SMs'"),
        ("unit: SMs, source: NVIDIA", "unit: SMs", "has no source"),
        ("unit: SMs, source: NVIDIA", "unit: SMs, source: ''", "must be a text"),
        ("  sms:", "  smms:", "unknown key 'smms'"),
        ("family: cuda", "family: tpu", "unknown family"),
        ("sm_90a", "sm_91", "unknown arch"),
        ("limits: [sms,", "limits: [cores,", "unknown name 'cores'"),
        ("limits: [sms,", "limits: [dense_fp8_tflops,", "which facts lack"),
        ("activations: bf16", "activations: int2", "not one of"),
        ("kv_block_size: 64", "kv_block_size: 0", "outside the known range"),
        ("  sms: {value: 132, unit: SMs, source: NVIDIA}\n", "", "missing facts: sms"),
        ("name: h100-sxm", "name: H100 SXM", "lower-case"),
        ("name: h100-sxm", "names: h100-sxm", "unknown key 'names'"),
        ("family: cuda", "family: [cuda]", "must be a text"),
        ("defaults: {", "defaults: [{", "not YAML"),
    ],
)
def test_refused(tmp_path: Path, old: str, new: str, expect: str) -> None:
    assert old in H100
    message = refused(tmp_path, H100.replace(old, new, 1))
    assert expect in message
    assert "mine.yaml" in message


CPU_CHILD = """\
name: mine
family: cpu
extends: zen4
facts:
"""


@pytest.mark.parametrize(
    ("fact", "unit", "value", "expect"),
    [
        ("memory_rate_mts", "MT/s", 5600, "channels x width x rate"),
        ("memory_channels", "channels", 8, "channels x width x rate"),
        ("l1d_bytes", "byte/core", 1048576, "not larger than l1d_bytes"),
        ("clock_ghz", "GHz", 2.4, "cores x operations per cycle x clock"),
        ("fma_pipes", "pipes", 4, "pipes x lanes x 2"),
        ("register_bits", "bit", 256, "requires.features say 512"),
        ("l3_sharers", "cores", 7, "not a multiple"),
        ("datapath_bits", "bit", 1024, "larger than register_bits"),
    ],
)
def test_a_child_that_contradicts_its_parent(
    tmp_path: Path, fact: str, unit: str, value: float, expect: str
) -> None:
    text = CPU_CHILD + f"  {fact}: {{value: {value}, unit: {unit}, source: a test}}\n"
    assert expect in refused(tmp_path, text)


def test_a_consistent_child(tmp_path: Path) -> None:
    """An EPYC 9124: 16 cores at 3.0 GHz (all-core), the same memory."""
    text = CPU_CHILD + "".join(
        f"  {n}: {{value: {v}, unit: {u}, source: AMD product page}}\n"
        for n, v, u in [
            ("cores", 16, "cores"),
            ("clock_ghz", 3.6, "GHz"),
            ("l3_sharers", 4, "cores"),
            ("peak_f32_gflops", 1843.2, "GFLOP/s"),
            ("peak_int8_gops", 7372.8, "GOP/s"),
        ]
    )
    target = facts.load_target(write(tmp_path, text))
    assert target.features == features_of("zen4")
    assert target.fact("cores").value == 16 and target.fact("l2_bytes").value == 1 << 20


@pytest.mark.parametrize(
    ("text", "expect"),
    [
        ("build: {mcpu: x86_64_v4}\n", "mine.yaml:4: build.mcpu x86_64_v4 uses avx512bw, "),
        ("build: {mcpu: native}\n", "mine.yaml:4: unknown mcpu 'native'"),
        ("build: {mcpu: znver4}\n", "known: generic, x86_64, x86_64_v2, x86_64_v3, x86_64_v4"),
        ("defaults: {kv_block_size: 24}\n", "mine.yaml:4: kv_block_size is 24, not a multiple"),
        ("facts:\n  stream_prefetch_bytes: {value: 32, unit: byte, source: a test}\n",
         "mine.yaml:5: stream_prefetch_bytes = 32 is less than a cache line of 64"),
        ("facts:\n  cores: {value: 8, unit: cores, source: a test}\n",
         "mine.yaml: peak_f32_gflops is 5017.6, but"),
        ("defaults: {max_seqs: 0}\n", "value of max_seqs is 0, outside the known range 1 to 4096"),
    ],
)  # fmt: skip
def test_what_code_for_the_host_cannot_be(tmp_path: Path, text: str, expect: str) -> None:
    assert expect in refused(tmp_path, f"name: mine\nfamily: cpu\nextends: zen3\n{text}")


def test_code_generators_names_imply_what_the_levels_say() -> None:
    for name in ("x86-64-v3", "x86-64-v4"):
        target = facts.load_target(name)
        assert FAMILIES["cpu"].mcpus[target.mcpu] == target.features


def test_the_documented_file_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "targets.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    target = facts.load_target(write(tmp_path, example))
    assert target.features == features_of("zen4") and target.default("max_seqs") == 8
    assert target.fact("memory_bandwidth_gbps").value == 2 * 5200 * 64 / 8000
    row = next(line for line in text.splitlines() if line.startswith("| `defaults`"))
    assert {n for n in re.findall(r"`(\w+)`", row) if n != "defaults"} == set(DEFAULTS)


# --- extends ------------------------------------------------------------------------------------


def test_extends_cycle_and_depth(tmp_path: Path) -> None:
    a = write(tmp_path, "name: a\nfamily: cpu\nextends: b.yaml\n", "a.yaml")
    write(tmp_path, "name: b\nfamily: cpu\nextends: a.yaml\n", "b.yaml")
    with pytest.raises(InputFileError, match="extends itself"):
        facts.load_target(a)
    for i in range(20):
        write(tmp_path, f"name: d{i}\nfamily: cpu\nextends: d{i + 1}.yaml\n", f"d{i}.yaml")
    with pytest.raises(InputFileError, match="deep"):
        facts.load_target(tmp_path / "d0.yaml")
    with pytest.raises(InputFileError, match="no such target file"):
        facts.load_target(write(tmp_path, "name: x\nfamily: cpu\nextends: gone.yaml\n", "x.yaml"))
    with pytest.raises(InputFileError, match="extends unknown target"):
        facts.load_target(write(tmp_path, "name: x\nfamily: cpu\nextends: zen9\n", "x.yaml"))
    with pytest.raises(InputFileError, match="extends a target of family"):
        facts.load_target(write(tmp_path, "name: x\nfamily: cuda\nextends: zen4\n", "x.yaml"))


# --- YAML as bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expect"),
    [
        (b"", "empty"),
        (b"\xff\xfe", "UTF-8"),
        (b"a: 1\na: 2\n", "twice"),
        (b"a: &x [1]\nb: *x\n", "anchors"),
        (b"b: *x\n", "anchors"),
        (b"a: !!python/object/apply:os.system ['true']\n", "tags"),
        (b"a: {<<: {b: 1}}\n", "merge keys"),
        (b"a: 1\n---\nb: 2\n", "more than one"),
        (b"[" * 60000, "nested deeper"),
        (b"{a: " * 15000, "nested deeper"),
        (b"? [a]\n: b\n", "plain word"),
        (b"a: [1, 2\n", "not YAML"),
        (b"a: \x00\n", "not YAML"),
        (b"- 1\n" * 5000, "more than"),
        (b"a" * 70000, "more than"),
        (b"%TAG ! tag:x,2000:\n---\na: !b 1\n", "tags"),
    ],
)
def test_hostile_yaml(data: bytes, expect: str) -> None:
    with pytest.raises(InputFileError, match=re.escape(expect)):
        yaml_file.parse(data, "x.yaml")


def test_plain_scalars() -> None:
    text = b"a: 12\nb: 1.5\nc: 2e3\nd: yes\ne: 1:30\nf: '12'\ng: 0x10\nh: true\ni:\n"
    node = yaml_file.parse(text, "x.yaml")
    values = {k: n.scalar for k, n in node.pairs}
    assert values == {
        "a": 12, "b": 1.5, "c": 2000.0, "d": "yes", "e": "1:30", "f": "12", "g": "0x10", "h": True,
        "i": None,
    }  # fmt: skip
    assert [n.line for _, n in node.pairs] == list(range(1, 10))


@given(st.binary(max_size=400))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    with contextlib.suppress(InputFileError):
        yaml_file.parse(data, "x.yaml")


@given(st.data())
def test_one_damaged_byte(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    raw = bytearray(H100.encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("t") / "mine.yaml"
    path.write_bytes(bytes(raw))
    try:
        facts.load_target(path)
    except InputFileError as e:
        assert "mine.yaml" in str(e)


def test_every_family_has_a_vocabulary() -> None:
    assert set(FAMILIES) == {"cpu", "cuda", "neuron"}
