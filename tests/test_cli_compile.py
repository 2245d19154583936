"""``compile``, ``inspect`` and ``verify`` as commands: the whole pipeline on a tiny model."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_run import zerolayer
from rich.console import Console
from tiny_models import make_model
from zerolayer.compiler.progress import RichProgress
from zerolayer.runtime_stub import detect, errors
from zerolayer.runtime_stub.container import open_artifact
from zerolayer.runtime_stub.layout import ARTIFACT_LINE, SHEBANG


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    command = [str(Path(sys.executable).with_name("zerolayer")), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)


def test_summary_and_progress(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = (
        "compile",
        tiny_llama,
        "--target",
        "x86-64-v3",
        "--no-verify",
        "--max-context",
        "64",
    )
    done = zerolayer(*arguments)
    assert done.code == 0, done.err
    out = tmp_path / "artifacts" / "tiny-llama.x86-64-v3.zla"  # the default name
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [out]
    assert os.access(out, os.X_OK)
    for word in ("tiny-llama", "x86-64-v3", "memory", "tokens/s", "not run (--no-verify)"):
        assert word in done.out
    for stage in ("read model", "passes", "lower", "kernels", "write"):
        assert stage in done.err
    assert "\x1b" not in done.out + done.err  # no colours outside a terminal
    assert not any(line.endswith(" ") for line in (done.out + done.err).splitlines())


def test_json_is_all_there_is_on_stdout(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zla"
    config = tmp_path / "system_config.toml"
    config.write_text(
        '[kernel]\nfusion_level = "conservative"\n[hardware]\nnvlink_enabled = false\n'
    )
    options = ("--config", config, "--activations", "f32", "-o", out, "--json")
    done = zerolayer("compile", tiny_llama, "--target", "x86-64-v3", *options)
    assert done.code == 0, done.err
    result = done.json()
    assert result["output"] == str(out)
    assert result["size"] == out.stat().st_size
    assert result["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert result["options"]["fusion"] == "conservative"
    assert result["options"]["activations"] == "f32"
    assert result["numerics"]["status"] == "passed"
    assert result["decisions"] == [
        "target = x86-64-v3 (command line)",
        "model = tiny-llama (command line)",
        "quantize = keep (default)",
        "fusion = conservative (system_config.toml:2)",
        "activations = f32 (command line)",
        "hardware.nvlink_enabled = false (system_config.toml:4)",
        "kv_dtype = f32 (as float32 activations need it)",
        "screen_head = auto (default)",
        "max_context = 96 (the model's)",
    ]


def test_the_same_bytes_from_other_places(
    tiny_llama: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    """Two at once, in other folders, homes, time zones and locales, sharing an empty cache."""
    started = []
    for name, zone in (("one", "Asia/Tokyo"), ("two", "America/New_York")):
        place = tmp_path / name
        shutil.copytree(tiny_llama, place / "models" / "tiny-llama")
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(place / "home"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "TZ": zone,
            "LC_ALL": "C" if name == "one" else "C.UTF-8",
            "PYTHONHASHSEED": "7" if name == "one" else "8",
        }
        options = ("--target", "x86-64-v3", "--no-verify", "-o", f"{name}.zla")
        process = start("compile", "models/tiny-llama", *options, cwd=place, env=env, umask=0o77)
        started.append((process, place / f"{name}.zla"))
    notes = [process.communicate(timeout=300)[1] for process, _ in started]
    assert [process.returncode for process, _ in started] == [0, 0], notes
    digests = {hashlib.sha256(out.read_bytes()).hexdigest() for _, out in started}
    assert digests == {hashlib.sha256(tiny_artifact.read_bytes()).hexdigest()}


def test_what_the_target_decides_is_told_too(tiny_llama: Path, tmp_path: Path) -> None:
    from zerolayer.targets.facts import resolve_host

    options = ("--target", "host", "--no-verify", "--max-context", "64", "-o", tmp_path / "a.zla")
    target = resolve_host()
    result = zerolayer("compile", tiny_llama, *options, "--json").json()
    assert result["decisions"] == [
        f"target = {target.name} (host, command line)",
        "model = tiny-llama (command line)",
        "quantize = keep (default)",
        "max_context = 64 (command line)",
        f"fusion = {target.choice('fusion')} (target's default)",
        f"activations = {target.choice('activations')} (target's default)",
        f"kv_dtype = {target.choice('kv_dtype')} (target's default)",
        "screen_head = auto (default)",
    ]


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads have 32 elements."""
    folder = tmp_path_factory.mktemp("models") / "wide-heads"
    folder.mkdir()
    make_model("llama", folder, head_dim=32)
    return folder


def test_a_cache_of_8_bits(wide_heads: Path, tmp_path: Path) -> None:
    """34 bytes for 32 elements, said by everything that speaks of the cache; the gate passes with
    its row; the artifact generates."""
    out = tmp_path / "a.zla"
    options = ("--target", "x86-64-v3", "--kv-dtype", "q8_0", "--activations", "f32", "-o", out)
    done = zerolayer("compile", wide_heads, *options)
    assert done.code == 0, done.err
    assert "KV q8_0" in done.out and "kv_dtype = q8_0 (command line)" in done.out
    manifest = open_artifact(str(out)).manifest
    config = json.loads((wide_heads / "config.json").read_text())
    elements = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 32
    assert manifest["memory"]["kv_bytes_per_token"] == elements * 34 // 32
    assert manifest["memory"]["kv_dtype"] == "q8_0"
    shown = " ".join(zerolayer("inspect", out, "--memory").out.split())
    assert f"KV per token {elements * 34 // 32} B, q8_0" in shown
    assert manifest["numerics"]["bounds"]["name"] == "q8_0 cache, f32 activations"
    assert 1e-4 < manifest["numerics"]["logit_error"] < 0.05


def test_half_a_cache_beside_float32_activations(wide_heads: Path, tmp_path: Path) -> None:
    """The gate allows what rounding keys and values to f16 costs, and little more."""
    out = tmp_path / "a.zla"
    options = ("--target", "x86-64-v3", "--kv-dtype", "f16", "--activations", "f32", "-o", out)
    assert zerolayer("compile", wide_heads, *options).code == 0
    numerics = open_artifact(str(out)).manifest["numerics"]
    assert numerics["bounds"]["name"] == "f16 cache, f32 activations"
    assert numerics["bounds"]["kl"] == 1e-5 and numerics["logit_error"] < 1e-3


@pytest.mark.parametrize(
    ("model", "kv_dtype", "why"),
    [
        ("tiny_llama", "q8_0", "head_dim = 16 is not a multiple of 32, which a q8_0 cache needs"),
        ("wide_heads", "bf16", "does not read a bf16 cache"),
    ],
    ids=["heads", "instructions"],
)
def test_a_cache_that_the_target_has_no_kernel_for(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, kv_dtype: str, why: str
) -> None:
    path, out = request.getfixturevalue(model), tmp_path / "a.zla"
    done = zerolayer("compile", path, "--target", "x86-64-v3", "--kv-dtype", kv_dtype, "-o", out)
    assert done.code == 4 and not out.exists()
    assert f"nearest: CacheWrite.avx2 ({why})" in done.err
    assert "choose another --kv-dtype, or another target" in done.err
    assert "avx512" not in done.err  # what the target cannot run is not near


def test_the_progress_and_the_summary_tell_the_same_seconds(
    tiny_llama: Path, tmp_path: Path
) -> None:
    done = zerolayer("compile", tiny_llama, "--target", "x86-64-v3", "-o", tmp_path / "a.zla")
    assert done.code == 0, done.err
    shown = dict(re.findall(r"^([a-z ]+?) +([0-9.]+) s", done.err, re.MULTILINE))
    (line,) = re.findall(r"^time +(.*)$", done.out, re.MULTILINE)
    told = dict(re.findall(r"([a-z ]+?) ([0-9.]+) s", line.replace(", ", ",").replace(",", "\n")))
    assert list(shown) == list(told) and {"numerics", "write"} <= set(told)
    for name, seconds in told.items():
        assert abs(float(shown[name]) - float(seconds)) <= 0.0551, name  # 0.05 and 0.005 rounded
    assert re.search(r"^artifact .* digest [0-9a-f]{16}$", done.out, re.MULTILINE)
    raw = (tmp_path / "a.zla").read_bytes()
    assert re.search(rf"^sha256 +{hashlib.sha256(raw).hexdigest()}$", done.out, re.MULTILINE)


def test_strict_finds_out_before_the_kernels_that_the_gate_cannot_run(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("compile", tiny_llama, "--target", "x86-64-v3", "-o", tmp_path / "a.zla")
    done = zerolayer(*arguments, "--strict", "--no-verify")
    done.one_error(4, "numerics gate not run: --no-verify")
    assert "read model" in done.err and "kernels" not in done.err
    facts = detect.host_facts(mask=["avx2"])
    monkeypatch.setattr(detect, "host_facts", lambda: facts)
    done = zerolayer(*arguments, "--strict")
    done.one_error(4, "the build host cannot execute x86-64-v3 code")
    assert "read model" in done.err and "kernels" not in done.err
    assert not (tmp_path / "a.zla").exists()


def test_inspect(tiny_artifact: Path) -> None:
    summary = zerolayer("inspect", tiny_artifact)
    assert (summary.code, summary.err) == (0, "")
    assert "x86-64-v3" in summary.out
    assert "max_context the model's (96)" in summary.out
    told = zerolayer("targets", "x86-64-v3").out
    assert "the model's; 4,096 where a model names none" in told
    as_json = zerolayer("inspect", tiny_artifact, "--json").json()
    assert as_json["target"] == "x86-64-v3"
    assert as_json["bytes"] == tiny_artifact.stat().st_size
    for view in ("kernels", "injected", "memory", "roofline", "manifest"):
        shown = zerolayer("inspect", tiny_artifact, f"--{view}")
        assert (shown.code, shown.err) == (0, ""), view
        assert shown.out.strip()
        done = zerolayer("inspect", tiny_artifact, f"--{view}", "--json")
        assert list(done.json()) == [view]
    zerolayer("inspect", tiny_artifact, "--kernels", "--memory").one_error(2, "--kernels, --memory")


def test_a_gate_that_is_left_out_is_not_counted(tiny_llama: Path, tmp_path: Path) -> None:
    target = ("--target", "x86-64-v3", "-o", tmp_path / "a.zla")
    done = zerolayer("compile", tiny_llama, *target, "--no-verify")
    (line,) = [line for line in done.err.splitlines() if line.startswith("numerics  ")]
    assert line.endswith(" s  not run")


def test_max_context_is_rounded_aloud_and_checked_early(tiny_llama: Path, tmp_path: Path) -> None:
    command = ("compile", tiny_llama, "--target", "x86-64-v3", "--no-verify", "--json")
    place = ("-o", tmp_path / "a.zla", "--max-context")
    said = "max_context = 64 (40 rounded up to whole KV blocks of 32)"
    found = zerolayer(*command, *place, 40).json()["decisions"]
    assert [line.startswith(said) for line in found if "max_context" in line] == [False, True]
    exact = zerolayer(*command, *place, 64).json()["decisions"]
    assert not any("rounded" in line for line in exact)
    refused = zerolayer(*command, *place, 10**6)
    refused.one_error(2, "--max-context 1000000 is not between 1 and the model's")
    assert "passes" not in refused.err


def test_max_context_is_never_more_than_the_models(tiny_llama: Path, tmp_path: Path) -> None:
    """80 positions are two and a half KV blocks of 32."""
    model = tmp_path / "m"
    shutil.copytree(tiny_llama, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 80}))
    out = tmp_path / "a.zla"
    command = ("compile", model, "--target", "x86-64-v3", "--no-verify", "--json", "-o", out)
    found = zerolayer(*command, "--max-context", 70).json()["decisions"]
    said = "max_context = 80 (70 rounded up to whole KV blocks of 32, at most the model's)"
    assert said in found
    assert zerolayer("inspect", out, "--json").json()["max_context"] == 80
    whole = zerolayer(*command, "--max-context", 80).json()["decisions"]
    assert not any("rounded" in line for line in whole)


def test_a_verdict_from_the_cache_says_so(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = ("compile", tiny_llama, "--target", "x86-64-v3", "-o", tmp_path / "a.zla")
    first, again = zerolayer(*command, "--json"), zerolayer(*command, "--json")
    assert (first.json()["numerics_cached"], again.json()["numerics_cached"]) == (False, True)
    assert first.json()["sha256"] == again.json()["sha256"]
    shown = zerolayer(*command)
    assert ", from the cache" in shown.out
    (line,) = [line for line in shown.err.splitlines() if line.startswith("numerics  ")]
    assert line.endswith("  from the cache")


def test_the_live_display_has_a_note_where_nothing_is_counted() -> None:
    out = io.StringIO()
    bars = RichProgress(Console(file=out, force_terminal=True, width=100))
    with bars as progress, progress.stage("numerics") as stage:
        stage.note("not run")
    assert "not run" in out.getvalue() and "1/1" not in out.getvalue()


def test_a_promise_that_no_gate_checked_says_so(tiny_artifact: Path) -> None:
    shown = zerolayer("inspect", tiny_artifact).out
    assert "yes (promised, not checked: the numerics gate did not run)" in shown
    info = subprocess.run(
        [sys.executable, "-I", tiny_artifact, "info"], capture_output=True, text=True, check=True
    )
    assert "not run, batch-invariant as promised, not checked" in info.stdout


def test_verify(tiny_artifact: Path, tmp_path: Path) -> None:
    assert "ok" in zerolayer("verify", tiny_artifact).out
    found = zerolayer("verify", tiny_artifact, "--json").json()
    assert (found["status"], found["golden"]) == ("ok", "not run")
    assert found["golden_why"] == "--no-verify"
    raw = bytearray(tiny_artifact.read_bytes())
    raw[70_000] ^= 1  # in the weights
    damaged = tmp_path / "damaged.zla"
    damaged.write_bytes(raw)
    zerolayer("verify", damaged).one_error(errors.EXIT_INTEGRITY, "damaged.zla")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_artifact(command: str, tiny_artifact: Path, tmp_path: Path) -> None:
    raw = tiny_artifact.read_bytes()
    cases = {
        "empty": b"",
        "text": b"hello\n" * 20_000,
        "cut": raw[: len(raw) // 2],
        "long": raw + b"\0",
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
    for path in (*cases, ".", "absent"):
        done = zerolayer(command, tmp_path / path)
        assert done.code in {errors.EXIT_INPUT, errors.EXIT_INTEGRITY}, (path, done)
        done.one_error(done.code)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("absent.gguf", None),
        ("empty.gguf", b""),
        ("text.gguf", b"not a model\n"),
        ("cut.gguf", b"GGUF\x03\0\0\0"),
        ("folder", "folder"),
        ("some.onnx", b"\x08"),
        ("what.pt", b"PK\x03\x04"),
    ],
)
def test_what_is_no_model(path: str, content: bytes | str | None, tmp_path: Path) -> None:
    if content == "folder":
        (tmp_path / path).mkdir()
    elif isinstance(content, bytes):
        (tmp_path / path).write_bytes(content)
    out = tmp_path / "out.zla"
    before = SHEBANG + ARTIFACT_LINE + b"0.9: what was there before"
    out.write_bytes(before)
    done = zerolayer("compile", tmp_path / path, "--target", "x86-64-v3", "-o", out)
    assert done.code in {errors.EXIT_INPUT, errors.EXIT_UNSUPPORTED}, done
    done.one_error(done.code, path)
    assert out.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} <= {path, "out.zla"}


@pytest.mark.parametrize("stage", ["read model", "lower"])  # then: passes; the C compiler
def test_interrupted(stage: str, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zla"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with start("compile", tiny_llama, "--target", "zen4", "-o", out, "--json", env=env) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(stage):
                break
        process.send_signal(signal.SIGINT)
        said, notes = process.communicate(timeout=60)
    assert process.returncode == errors.EXIT_INTERRUPTED, notes
    assert said.count("\n") == 1 and json.loads(said)["error"] == "interrupted"
    assert notes.splitlines()[-1] == "interrupted"
    assert "Traceback" not in notes
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == []


def test_weights_that_cannot_be_quantized_are_named(tmp_path: Path) -> None:
    from tiny_models import make_model

    folder = tmp_path / "odd"
    folder.mkdir()
    make_model("llama", folder, hidden_size=72, head_dim=24, num_hidden_layers=1)
    options = ("--target", "x86-64-v3", "--no-verify", "--quantize", "int4")
    done = zerolayer("compile", folder, *options, "-o", tmp_path / "a.zla", "--json")
    (warning, _not_verified) = done.json()["warnings"]
    said = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert said == [f"warning: {text}" for text in done.json()["warnings"]]
    assert "embed.weight and 6 more weights keep their format: rows of 72" in warning
    options = ("--target", "x86-64-v3", "--strict", "--quantize", "int4")
    done = zerolayer("compile", folder, *options, "-o", tmp_path / "b.zla")
    done.one_error(4, "--strict", "rows of 72 are not whole blocks")
    assert not (tmp_path / "b.zla").exists()


def test_quantizing_what_has_no_more_bits_is_said(smollm2_gguf: Path, tmp_path: Path) -> None:
    options = ("--target", "x86-64-v3", "--quantize", "int8", "--strict", "-o", tmp_path / "o.zla")
    zerolayer("compile", smollm2_gguf, *options).one_error(4, "quantize int8 changes nothing")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source", ["{{ x", "{{ " + "(" * 5000])
def test_a_damaged_chat_template_is_named(tiny_llama: Path, tmp_path: Path, source: str) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    (folder / "chat_template.jinja").write_text(source)
    arguments = ("compile", folder, "--target", "x86-64-v3", "-o", tmp_path / "a.zla")
    done = zerolayer(*arguments, "--strict")
    done.one_error(4, "chat template is damaged")
