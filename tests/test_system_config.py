"""system_config.toml: what decides, what is asserted, what is refused and with which line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerolayer.compiler.system_config import (
    Decision,
    check_assertions,
    choose,
    load_system_config,
)
from zerolayer.runtime_stub.errors import (
    InputFileError,
    UnsupportedError,
    UsageError,
    ZerolayerError,
)
from zerolayer.targets.facts import Fact, Requires, Target, load_target

FULL = """\
# the file of the original design
[hardware]
default_gpu_family = "h100"
nvlink_enabled = true
hbm3_bandwidth_gbps = 3350

[model]
default_version = "models/smollm2.gguf"
quantization_scheme = "int8"

[kernel]
fusion_level = "balanced"
"""


def target(family: str, **facts: tuple[float, str]) -> Target:
    return Target(
        name=f"some-{family}",
        family=family,
        description="",
        facts=tuple(Fact(n, v, unit, "data sheet") for n, (v, unit) in facts.items()),
        requires=Requires("x86_64"),
        defaults=(),
    )


GPU = target(
    "cuda",
    sms=(132, "SMs"),
    memory_bandwidth_gbps=(3350, "GB/s"),
    nvlink_total_gbps=(900, "GB/s"),
)
CPU = target("cpu", cores=(2, "cores"), memory_bandwidth_gbps=(40.5, "GB/s"))


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "system_config.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def gpus() -> list[str]:
    return ["h100"]


def test_the_original_file(tmp_path: Path) -> None:
    path = write(tmp_path, FULL)
    config = load_system_config(path)
    chosen = choose(config, model=None, target=None, quantize=None, fusion=None, gpu_targets=gpus)
    assert chosen.model == tmp_path / "models/smollm2.gguf"  # relative to the file
    assert (chosen.target, chosen.quantize, chosen.fusion) == ("h100", "int8", "balanced")
    assert chosen.decisions == (
        Decision("target", "h100", "system_config.toml:3"),
        Decision("model", "models/smollm2.gguf", "system_config.toml:8"),
        Decision("quantize", "int8", "system_config.toml:9"),
        Decision("fusion", "balanced", "system_config.toml:12"),
    )
    assert [d.name for d in check_assertions(config, GPU)] == [
        "hardware.nvlink_enabled",
        "hardware.hbm3_bandwidth_gbps",
    ]


def test_the_command_line_wins_and_that_is_recorded(tmp_path: Path) -> None:
    path = write(tmp_path, FULL)
    chosen = choose(
        load_system_config(path),
        model=Path("other.gguf"),
        target="zen4",
        quantize="keep",
        fusion="aggressive",
        gpu_targets=list,  # the overridden GPU need not exist here
    )
    assert chosen.model == Path("other.gguf")
    assert (chosen.target, chosen.quantize, chosen.fusion) == ("zen4", "keep", "aggressive")
    assert {d.source for d in chosen.decisions} == {"command line"}
    assert [d.overrides for d in chosen.decisions] == [
        "hardware.default_gpu_family = h100 (system_config.toml:3)",
        "model.default_version = models/smollm2.gguf (system_config.toml:8)",
        "model.quantization_scheme = int8 (system_config.toml:9)",
        "kernel.fusion_level = balanced (system_config.toml:12)",
    ]
    assert chosen.decisions[0].line() == (
        "target = zen4 (command line, over"
        " hardware.default_gpu_family = h100 (system_config.toml:3))"
    )


def test_the_documented_file_fits_the_target_it_is_given_with(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "system_config.md").read_text(encoding="utf-8")
    first, gpu = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (target,) = re.findall(r"--target (\S+) --config", page)
    config = load_system_config(write(tmp_path, first))
    agreed = check_assertions(config, load_target(target))
    assert [d.name for d in agreed] == ["hardware.cores", "hardware.memory_bandwidth_gbps"]
    wrong = first.replace("460.8", "230")
    with pytest.raises(InputFileError) as caught:
        check_assertions(load_system_config(write(tmp_path, wrong)), load_target(target))
    shown = str(caught.value.one_line()).partition("system_config.toml")[2]
    assert f"error: system_config.toml{shown.partition(';')[0]}"[:120] in page
    config = load_system_config(write(tmp_path, gpu))  # checked, though no target fits
    with pytest.raises(UnsupportedError, match="this version has no such target"):
        choose(config, model=Path("m"), target=None, quantize=None, fusion=None, gpu_targets=list)


def test_without_a_file() -> None:
    chosen = choose(
        None, model=Path("m"), target="zen4", quantize=None, fusion=None, gpu_targets=gpus
    )
    assert (chosen.quantize, chosen.fusion) == ("keep", None)
    assert [d.line() for d in chosen.decisions] == [
        "target = zen4 (command line)",
        "model = m (command line)",
        "quantize = keep (default)",
    ]
    with pytest.raises(UsageError, match="no target"):
        choose(None, model=Path("m"), target=None, quantize=None, fusion=None, gpu_targets=gpus)
    with pytest.raises(UsageError, match="no model"):
        choose(None, model=None, target="t", quantize=None, fusion=None, gpu_targets=gpus)


def test_a_gpu_family_nobody_knows_or_that_is_not_here(tmp_path: Path) -> None:
    unknown = load_system_config(write(tmp_path, '[hardware]\ndefault_gpu_family = "h101"\n'))
    for given_target in (None, "zen4"):
        with pytest.raises(InputFileError, match=r":2: .*'h101'.*known: a100, h100, h200"):
            choose(
                unknown,
                model=Path("m"),
                target=given_target,
                quantize=None,
                fusion=None,
                gpu_targets=gpus,
            )
    absent = load_system_config(write(tmp_path, '[hardware]\ndefault_gpu_family = "a100"\n'))
    with pytest.raises(UnsupportedError, match=r":2: .*'a100'"):
        choose(absent, model=Path("m"), target=None, quantize=None, fusion=None, gpu_targets=gpus)


@pytest.mark.parametrize(
    ("line", "on", "words"),
    [
        # the famous one: NVLink in one direction is not its total
        ("nvlink_total_gbps = 450", GPU, ["450 GB/s", "900 GB/s", "nvlink_total_gbps"]),
        ("hbm3_bandwidth_gbps = 3300", GPU, ["3300 GB/s", "3350 GB/s"]),
        ("hbm3_bandwidth_gbps = 3368", GPU, ["3368 GB/s", "3350 GB/s"]),
        ("hbm3_bandwidth_gbps = -3350", GPU, ["-3350 GB/s", "3350 GB/s"]),
        ("hbm3_bandwidth_gbps = 40.5", CPU, ["some-cpu", "family cpu", "does not have"]),
        ("sms = 114", GPU, ["114 SMs", "132 SMs"]),
        ("sms = 132", CPU, ["some-cpu", "does not have"]),
        ("cores = 1e3", CPU, ["1000 cores", "2 cores"]),
        ("nvlink_enabled = true", CPU, ["no NVLink", "some-cpu"]),
    ],
)
def test_assertions_that_fail(tmp_path: Path, line: str, on: Target, words: list[str]) -> None:
    config = load_system_config(write(tmp_path, f"[hardware]\n\n{line}\n"))
    with pytest.raises(InputFileError) as raised:
        check_assertions(config, on)
    message = raised.value.one_line()
    assert f"{config.path}:3" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("line", "on"),
    [
        ("hbm3_bandwidth_gbps = 3350", GPU),
        ("hbm3_bandwidth_gbps = 3_350.0", GPU),
        ("hbm3_bandwidth_gbps = 3352", GPU),  # the same number, rounded otherwise
        ("nvlink_total_gbps = 900", GPU),
        ("nvlink_enabled = false", GPU),
        ("nvlink_enabled = false", CPU),
        ("memory_bandwidth_gbps = 40.5", CPU),
    ],
)
def test_assertions_that_hold(tmp_path: Path, line: str, on: Target) -> None:
    path = write(tmp_path, f"[hardware]\n{line}\n")
    (decision,) = check_assertions(load_system_config(path), on)
    assert decision.source == "system_config.toml:2"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[hardware]\nnvlink = true\n", 2, ["unknown key 'nvlink'", "nvlink_enabled"]),
        ("[hardware]\n[hardwear]\n", 2, ["unknown section", "[hardware]", "[kernel]"]),
        ("fusion_level = 'balanced'\n", 1, ["unknown section or key 'fusion_level'"]),
        ("\nkernel = 3\n", 2, ["must be a section"]),
        ("[[kernel]]\n", 1, ["must be a section"]),
        ("[kernel]\nfusion_level = 'max'\n", 2, ["'max'", '"conservative"', '"aggressive"']),
        ("[kernel]\nfusion_level = true\n", 2, ["True", '"balanced"']),
        ("[kernel]\nfusion_level = ['balanced']\n", 2, ["one of"]),
        ("[kernel]\nnvlink_enabled = true\n", 2, ["unknown key", "fusion_level"]),
        ("[hardware]\nnvlink_enabled = 1\n", 2, ["true or false"]),
        ("[hardware]\nnvlink_enabled = 'yes'\n", 2, ["true or false"]),
        ("[hardware]\nhbm3_bandwidth_gbps = '3350'\n", 2, ["a number"]),
        ("[hardware]\nhbm3_bandwidth_gbps = true\n", 2, ["a number"]),
        ("[hardware]\nhbm3_bandwidth_gbps = nan\n", 2, ["a number"]),
        ("[hardware]\nhbm3_bandwidth_gbps = -inf\n", 2, ["a number"]),
        ("[hardware]\nhbm3_bandwidth_gbps = 2024-01-01\n", 2, ["a number"]),
        ("[model]\ndefault_version = ''\n", 2, ["a text"]),
        ('[model]\ndefault_version = "a\\nb"\n', 2, ["a text"]),
        ("[model]\nquantization_scheme = 'int3'\n", 2, ["'int3'", '"int4"']),
        ("[model]\nquantization_scheme = 'int4\n", 2, ["not TOML"]),
        ("[model]\n[kernel]\n[model]\n", 3, ["not TOML"]),
        ("[kernel]\nfusion_level = 'balanced'\nfusion_level = 'balanced'\n", 3, ["not TOML"]),
        (b"[model]\n# \xff\n", 2, ["not UTF-8"]),
        ("[model]\n# \x00\n", 2, ["not TOML"]),
        # the line is the key's, not that of a text or comment which mentions it
        ("# nope\n[model]\ndefault_version='''\nnope = 1'''\nnope = 1\n", 5, ["'nope'"]),
        ("model.default_version = 'a'\nmodel.nope = 2\n", 2, ["'nope'"]),
        ("[model]\n" + "a" * 200 + " = 1\n", 2, ["aaa..."]),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str | bytes, line: int, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputFileError) as raised:
        load_system_config(path)
    assert raised.value.where == f"{path}:{line}"
    for word in words:
        assert word in raised.value.one_line()


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5000 + "]" * 5000,
        "x" + ".x" * 5000 + " = 1",
        "[hardware]\nhbm3_bandwidth_gbps = " + "9" * 60000,
        "#" * 70000,
        b"\xff\xfe",
        b"\x1f\x8b\x08",
    ],
)
def test_hostile_files(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(InputFileError):
        load_system_config(write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path, Path("a\0b")):
        with pytest.raises(InputFileError, match="cannot be read"):
            load_system_config(path)
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for a writer
    with pytest.raises(InputFileError, match="not a regular file"):
        load_system_config(tmp_path / "pipe")


LINES = st.sampled_from([line for line in FULL.splitlines() if line])
TOKENS = st.sampled_from(
    ["[", "]", "=", '"', "'", '"""', ".", ",", "{", "}", "\n", "#", "true", "1e9", "nan", "h100"]
)


@given(st.lists(st.one_of(LINES, TOKENS, st.text(max_size=6)), max_size=20), st.booleans())
def test_any_text_is_a_config_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], lines: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    text = ("\n" if lines else " ").join(parts)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        config = load_system_config(path)
        for on in (GPU, CPU):
            check_assertions(config, on)
    except ZerolayerError as e:
        assert e.exit_code == 3
        assert e.where.startswith(str(path))
        assert "\n" not in e.one_line()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_config_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_bytes(raw)
    try:
        load_system_config(path)
    except InputFileError as e:
        assert e.where.startswith(str(path))
