"""Manifest, header page, vendored packages, loader sources, inspect."""

from __future__ import annotations

import ast
import copy
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from zerolayer.compiler.artifact import inspect, inspect_show, vendor
from zerolayer.compiler.artifact.loader_sources import blank_comments, loader_members
from zerolayer.compiler.artifact.manifest import (
    WRITER_KEYS,
    ManifestInputs,
    TensorQuantization,
    build_manifest,
    header_text,
    tokenizer_members,
)
from zerolayer.compiler.artifact.vendor import collect_vendor, strip_elf
from zerolayer.compiler.artifact.writer import WeightEntry, write_artifact
from zerolayer.compiler.frontends.config import Layer, ModelConfig, SourceFile, TokenizerAssets
from zerolayer.compiler.memory.plan import MemoryNeed
from zerolayer.runtime_stub import layout
from zerolayer.runtime_stub.container import open_artifact
from zerolayer.runtime_stub.errors import (
    InputFileError,
    IntegrityError,
    UnsupportedError,
    ZerolayerError,
)
from zerolayer.runtime_stub.layout import HEADER_BYTES
from zerolayer.targets.facts import load_target
from zerolayer.targets.program import Buffer, BufferKind, EntryPoint, KernelCall, KvLayout, Program

ARTIFACTS = Path(__file__).parent.parent / "artifacts"
SCHEMA = json.loads((ARTIFACTS / "manifest.schema.json").read_text("utf-8"))


# -- a validator for the subset of JSON Schema that ours uses ------------------------------------

_KINDS: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
    "boolean": bool, "null": type(None),
}  # fmt: skip
_KNOWN = {
    "$schema", "$id", "title", "description", "type", "properties", "required", "items", "const",
    "enum", "pattern", "maxLength", "minimum", "multipleOf", "anyOf", "additionalProperties",
}  # fmt: skip


def violations(value: Any, schema: dict[str, Any], place: str = "$") -> list[str]:
    """Every place where ``value`` breaks ``schema``."""
    assert set(schema) <= _KNOWN, set(schema) - _KNOWN
    out: list[str] = []
    kinds = schema.get("type")
    if kinds is not None:
        names = [kinds] if isinstance(kinds, str) else kinds
        fits = [n for n in names if isinstance(value, _KINDS[n])]
        if isinstance(value, bool):
            fits = [n for n in fits if n == "boolean"]
        if not fits:
            return [f"{place}: {value!r} is not {kinds}"]
    if "anyOf" in schema:
        tried = [violations(value, s, place) for s in schema["anyOf"]]
        out += [] if any(not t for t in tried) else tried[0]
    if "const" in schema and value != schema["const"]:
        out.append(f"{place}: {value!r} is not {schema['const']!r}")
    if "enum" in schema and value not in schema["enum"]:
        out.append(f"{place}: {value!r} is not one of {schema['enum']}")
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            out.append(f"{place}: {value!r} does not match")
        if len(value) > schema.get("maxLength", len(value)):
            out.append(f"{place}: too long")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            out.append(f"{place}: {value} is too small")
        if "multipleOf" in schema and value % schema["multipleOf"]:
            out.append(f"{place}: {value} is not a multiple")
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            out += violations(item, schema["items"], f"{place}[{i}]")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        out += [f"{place}: no {key}" for key in schema.get("required", ()) if key not in value]
        rest = schema.get("additionalProperties", {})
        for key, item in value.items():
            out += violations(item, properties.get(key, rest), f"{place}.{key}")
    return out


# -- a small artifact ----------------------------------------------------------------------------

RECORD = {
    "kernel": "k0 linear",
    "facts": [{"name": "l2_bytes", "value": 1024, "unit": "byte", "source": "a datasheet"}],
    "constants": [{"name": "K", "value": 576, "origin": "model"}],
    "derived": [
        {"name": "tile_bytes", "value": 256, "formula": "l2_bytes // 4", "uses": ["l2_bytes"]}
    ],
}


ROOFLINE = {
    "tokens_per_second": 12.5,
    "tokens": 1,
    "context": 0,
    "ns": 80_000,
    "weight_bytes": 1024,
    "prefill": {"tokens_per_second": 99.5, "tokens": 512, "ns": 5},
    "injected": {"facts": [{"name": "peak", "value": 3, "unit": "GB/s", "source": "s"}]},
    "calls": [
        {"name": "a", "row": "r", "flops": 10, "bytes": 2048, "ns": 30.0, "bound": "memory"},
        {"name": "b", "row": "r", "flops": 10, "bytes": 1024, "ns": 30.0, "bound": "compute"},
        {"name": "c", "row": "q", "flops": 5, "bytes": 5, "ns": 20.0, "bound": "compute"},
    ],
}


def _program() -> Program:
    call = KernelCall(
        name="layers.0.mlp.down", op="Linear_Q4_1_int8", row="linear.q4_1", inputs=("x", "w", None),
        outputs=("y",), constants=(("K", 576), ("epsilon", 1e-5), ("act", "silu")), rows="T",
        phase=3, layer=0, aliases=(("y", "x"),), flops=2 * 576 * 64, weight_bytes=23040,
        activation_bytes=640,
    )  # fmt: skip
    return Program(
        model="tiny",
        buffers=(
            Buffer(
                "w", BufferKind.WEIGHT, "u8", (23040,), 23040, 0, "packed", ("w",), "Q4_1",
                (64, 576),
            ),
            Buffer("x", BufferKind.ACTIVATION, "f32", ("T", 576), 2304, 0),
            Buffer("k_cache.0", BufferKind.KV, "f32", (16, 64), 4096, 0),
            Buffer("y", BufferKind.OUTPUT, "f32", ("R", 100), 400, None),
        ),
        entry_points=(EntryPoint("step", ("tokens",), ("y",), (call,)),),
        bounds=(("T", 512), ("S", 16), ("R", 16), ("B", 128)),
        fusion="balanced",
        workspace_bytes=4096,
        weights_bytes=23040,
        kv=KvLayout(16, 8192, "f32"),
        vocab_size=100,
        hidden_size=576,
        n_layers=1,
        taps=("x",),
    )  # fmt: skip


def _inputs(**changes: Any) -> ManifestInputs:
    found = ManifestInputs(
        name="tiny",
        program=_program(),
        target=load_target("x86-64-v3"),
        code="kernels/x86-64-v3.so",
        memory=MemoryNeed(23040, 4096, 512, 8192, ((1 << 30, 2048),)),
        sources=(SourceFile("tiny.gguf", "ab" * 32, 12345),),
        tools={"zerolayer": "0.1.0", "ziglang": "0.17"},
        options={"quantize": "keep", "activations": "int8", "verify": True},
        config=ModelConfig("llama", 100, 576, 64, 9, 3, 64, 1024, (Layer(),)),
        parameters=36864,
        tokenizer=TokenizerAssets(
            b"{}", "{{ x }}", 1, (2, 3), True, "<s>", "</s>", (("top_p", 0.9),)
        ),
        kernels=(RECORD,),
        roofline=ROOFLINE,
        quantization=(TensorQuantization("w", ("blk.0.down",), ("Q4_1",), "Q4_1", "packed"),),
        numerics={"status": "passed", "top1": 1.0},
        batch_invariant=True,
        vendor=collect_vendor("x86_64").packages,
        licenses=("LICENSE",),
        golden=True,
    )  # fmt: skip
    return replace(found, **changes)


def _note_object(tmp_path: Path, record: dict[str, Any]) -> bytes:
    """A shared object with an injection note, by the system's own tools where there are any."""
    document = json.dumps({"target": "t", "kernels": [record]}, sort_keys=True).encode()
    source = tmp_path / "note.s"
    body = ",".join(map(str, document))
    source.write_text(
        '.section .note.zerolayer,"a",@note\n.balign 4\n'
        f".long 10\n.long {len(document)}\n.long 1\n"
        f'.asciz "zerolayer"\n.balign 4\n.byte {body}\n.balign 4\n'
    )
    out = tmp_path / "note.so"
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.17", "-shared"]
    env = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(tmp_path / "zig")}
    subprocess.run([*command, "-nostdlib", "-o", out, source], check=True, env=env)
    return out.read_bytes()


def _write(out: Path, inputs: ManifestInputs, **members: bytes) -> dict[str, Any]:
    manifest = build_manifest(inputs)
    write_artifact(
        out,
        manifest=manifest,
        members={
            "__main__.py": b"",
            inputs.code: b"\x7fELF",
            **tokenizer_members(inputs.tokenizer, inputs.table),
            **members,
        },
        weights=[
            WeightEntry("w", 23040, "u8", (64, 576), "packed", "Q4_1", "s", lambda: bytes(23040))
        ],
        header_text=header_text(manifest),
    )
    with open_artifact(str(out)) as artifact:
        return artifact.manifest


def test_manifest_follows_the_published_schema(tmp_path: Path) -> None:
    manifest = _write(tmp_path / "x.zla", _inputs())
    assert violations(manifest, SCHEMA) == []
    assert manifest["limits"] == {
        "symbols": {"T": 512, "S": 16, "R": 16, "B": 128}, "max_tokens": 512, "max_seqs": 16,
        "max_logit_rows": 16, "max_blocks": 128, "max_context": 1024,
    }  # fmt: skip
    assert manifest["memory"]["kv_bytes_per_token"] == 512
    call = manifest["entry_points"][0]["calls"][0]
    assert call["inputs"] == ["x", "w", None]
    assert call["constants"] == {"K": 576, "epsilon": 1e-5, "act": "silu"}
    assert [b["name"] for b in manifest["buffers"]] == ["x", "k_cache.0", "y"]
    assert manifest["weights"]["tensors"][0]["shape"] == [64, 576]
    assert set(WRITER_KEYS) <= set(SCHEMA["required"])


def test_a_graph_without_tokenizer_follows_it_too(tmp_path: Path) -> None:
    program = replace(_program(), kv=None, bounds=(("batch", 8),), taps=())
    inputs = _inputs(program=program, config=None, tokenizer=None, golden=False,
                     numerics=None, batch_invariant=None)  # fmt: skip
    manifest = _write(tmp_path / "x.zla", inputs)
    assert violations(manifest, SCHEMA) == []
    assert manifest["numerics"] == {"status": "not run"}
    assert manifest["limits"] == {"symbols": {"batch": 8}}


def test_schema_refuses_what_is_wrong(tmp_path: Path) -> None:
    manifest = _write(tmp_path / "x.zla", _inputs())
    for key, value in [("digest", "x"), ("files", {}), ("model", None), ("golden", "../x")]:
        assert violations({**manifest, key: value}, SCHEMA)
    for key in SCHEMA["required"]:
        assert violations({k: v for k, v in manifest.items() if k != key}, SCHEMA)


def test_manifest_has_no_path_user_or_time(tmp_path: Path) -> None:
    text = json.dumps(_write(tmp_path / "x.zla", _inputs()))
    for forbidden in (str(Path.cwd()), str(Path.home()), str(tmp_path), sys.prefix):
        assert forbidden == "/" or forbidden not in text
    assert not re.search(r"\b20[23]\d-[01]\d-[0-3]\d\b", text.split('"facts"')[0])


def test_header_page_explains_the_file(tmp_path: Path) -> None:
    out = tmp_path / "x.zla"
    _write(out, _inputs(name="evil\n\x1b[31mname\0" + "x" * 5000))
    page = out.read_bytes()[:HEADER_BYTES]
    text = page.rstrip(b"\0").decode("utf-8")
    assert text.startswith("#!/usr/bin/env python3\n# zerolayer artifact, format 1.0")
    assert "\x1b" not in text and "evil??[31mname?" in text
    for part in ("check", "generate", "verify", "x86-64-v3", "36,864 param", "Licences", "avx2"):
        assert part in text
    assert max(map(len, text.splitlines()[3:])) <= 500
    manifest = build_manifest(_inputs())
    manifest["model"] |= {"kind": "graph", "name": "m", "licenses": []}
    text = header_text(manifest)
    assert "FILE run --input" in text and "chat" not in text and "tokenizer" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_python_shows_what_is_wrong_with_a_file_without_its_end(tmp_path: Path) -> None:
    """The weights may be any bytes; text behind the line has what Python complains about."""
    out = tmp_path / "x.zla"
    _write(out, _inputs(name="3m'(model"))
    data = out.read_bytes()
    line = data.split(b"\n")[2].decode()
    for size in (2000, HEADER_BYTES, HEADER_BYTES + 999, len(data) - 1):
        out.write_bytes(data[:size])
        done = subprocess.run(
            [sys.executable, "-I", out, "check"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1 and "SyntaxError" in done.stderr and line in done.stderr
    assert "copy the file again" in line


def test_artifacts_of_released_formats_still_open() -> None:
    for path in sorted((ARTIFACTS / "golden").glob("*.zla")):
        with open_artifact(str(path)) as artifact:
            artifact.verify_all()
            assert violations(artifact.manifest, SCHEMA) == []


# -- vendor --------------------------------------------------------------------------------------

VENDOR_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1] + "/vendor")
import importlib.machinery, importlib.util, os, zipfile
import jinja2, jinja2.sandbox, markupsafe
assert jinja2.__file__.startswith(sys.argv[1]), jinja2.__file__
env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True)
print(env.from_string("{% for m in messages %}<{{ m|e }}>{% endfor %}").render(messages=["a", "&"]))
data = zipfile.ZipFile(sys.argv[1]).read("vendor/tokenizers/tokenizers.abi3.so")
fd = os.memfd_create("tokenizers")
os.write(fd, data)
path = f"/proc/self/fd/{fd}"
loader = importlib.machinery.ExtensionFileLoader("tokenizers", path)
spec = importlib.util.spec_from_file_location("tokenizers", path, loader=loader)
module = importlib.util.module_from_spec(spec)
loader.exec_module(module)
tiny = '{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,' \\
    '"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,' \\
    '"model":{"type":"WordLevel","vocab":{"hello":0,"world":1},"unk_token":"hello"}}'
print(module.Tokenizer.from_str(tiny).encode("hello world").ids)
"""


def test_vendored_packages_work_from_inside_the_file(tmp_path: Path) -> None:
    """In an isolated interpreter without site-packages; the stripped module must still load."""
    found = collect_vendor("x86_64")
    size = sum(len(d) for n, d in found.members if n.startswith("vendor/"))
    assert size < vendor.VENDOR_LIMIT
    out = tmp_path / "x.zla"
    _write(out, _inputs(), **dict(found.members))
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", VENDOR_PROGRAM, str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stderr == ""
    assert result.stdout == "<a><&amp;>\n[0, 1]\n"


def test_vendor_is_pinned_to_the_wheel() -> None:
    found = collect_vendor("x86_64")
    by_name = {p.name: p for p in found.packages}
    assert set(by_name) == {"tokenizers", "jinja2", "markupsafe"}
    tokenizers = by_name["tokenizers"]
    assert tokenizers.min_glibc == "2.17"
    assert re.fullmatch(r"3\.\d+", tokenizers.min_python)
    assert all("abi3" in tag for tag in tokenizers.wheel_tags)
    import hashlib

    import tokenizers as installed

    original = Path(installed.__file__).with_name("tokenizers.abi3.so").read_bytes()
    assert tokenizers.files[0][1] == hashlib.sha256(original).hexdigest()
    licenses = {n.split("/")[1] for n, _ in found.members if n.startswith("licenses/")}
    assert licenses == set(by_name)


def test_vendor_refuses_another_cpu_and_a_changed_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="aarch64"):
        collect_vendor("aarch64")
    with pytest.raises(UnsupportedError, match="not a aarch64 module"):
        vendor.check_elf_arch(b"\x7fELF\x02\x01" + bytes(100), "aarch64", "x")
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda p: read(p) + (b"#" if p.name == "sandbox.py" else b"")
    )
    with pytest.raises(InputFileError, match=r"jinja2/sandbox\.py differs"):
        collect_vendor("x86_64")


def test_strip_keeps_odd_files() -> None:
    for data in (b"\x7fELF\x02\x01".ljust(64, b"\xff"), b"\x7fELF".ljust(64, b"\0")):
        assert len(strip_elf(data)) == 64


# -- loader sources ------------------------------------------------------------------------------


def test_loader_sources_mean_the_same_and_keep_their_lines() -> None:
    members = loader_members()
    package = resources.files("zerolayer.runtime_stub")
    names = sorted(e.name for e in package.iterdir() if e.name.endswith(".py"))
    own = ["__main__.py", "licenses/zerolayer/LICENSE"]
    assert sorted(members) == [*own, *(f"zerolayer_stub/{n}" for n in names)]
    assert b"Apache License" in members["licenses/zerolayer/LICENSE"]
    for name in names:
        before = package.joinpath(name).read_text("utf-8")
        after = members[f"zerolayer_stub/{name}"].decode("utf-8")
        assert _shape(before) == _shape(after), name


def _shape(source: str) -> list[tuple[str, int]]:
    """Names, attributes, constants and calls with their lines, docstrings, annotations and what
    only type checkers read left out."""
    tree = _Untyped().visit(ast.parse(source))
    skip = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                skip.add(id(first.value))
    return [
        (ast.dump(node), node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Return)
        and id(node) not in skip
    ]


class _Untyped(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], self.visit(node.value)), node)

    def visit_If(self, node: ast.If) -> ast.If | None:
        self.generic_visit(node)
        return None if ast.dump(node.test) == "Name(id='TYPE_CHECKING', ctx=Load())" else node


def test_blank_annotations_by_hand() -> None:
    source = (
        "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from typing import Any\n\n\nx: int = 3\n"
        "class A:\n    y: dict[\n        str, int\n    ]\n    é: str = 'é'; z = 1\n\n\n"
        "def f(a: int, é: str = 'é', *b: 'x', c: Any = 1, **d: int) -> 'dict[str, int]': return a\n"
        "def g(\n    a: set[\n        int\n    ],\n    b=1,\n) -> set[\n    int\n]:\n    return 1\n"
    )
    assert blank_comments(source) == (
        "TYPE_CHECKING = False\n\n\n\n\nx = 3\n"
        "class A:\n    pass\n\n\n    é = 'é'; z = 1\n\n\n"
        "def f(a, é = 'é', *b, c = 1, **d): return a\n"
        "def g(\n    a,\n\n\n    b=1,\n):\n\n\n    return 1\n"
    )


def test_blank_comments_by_hand() -> None:
    source = (
        '"""Doc."""\nfrom __future__ import annotations\n'
        'x = "# no comment"  # a comment\n\n\nclass A(Exception):\n    """Only.\n\n'
        '    Two."""\n\n\ndef f():\n    """Doc."""\n    return """# kept"""  # gone\n'
    )
    assert blank_comments(source) == (
        '\n\nx = "# no comment"\n\n\nclass A(Exception):\n    pass\n\n\n\n\ndef f():\n\n'
        '    return """# kept"""\n'
    )


# -- inspect -------------------------------------------------------------------------------------


def _shown(artifact: Any, view: str) -> str:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(inspect_show.render(artifact, view))
        return console.export_text()


def test_inspect_views(tmp_path: Path) -> None:
    out = tmp_path / "x.zla"
    inputs = _inputs()
    _write(out, inputs, **{inputs.code: _note_object(tmp_path, RECORD)})
    with open_artifact(str(out)) as artifact:
        assert [r["calls"] for r in inspect.kernels(artifact)] == [1]
        rows = {(r["kind"], r["name"]): r for r in inspect.injected(artifact)}
        assert rows["derived", "tile_bytes"]["binary"] == 256
        assert rows["derived", "tile_bytes"]["why"] == "= l2_bytes // 4"
        assert all(r["agrees"] for r in rows.values()) and len(rows) == 3
        assert inspect.memory(artifact)["weights_by_format"] == {"Q4_1": 23040}
        for view in (*inspect.VIEWS, ""):
            json.dumps(inspect.view(artifact, view))
            text = _shown(artifact, view)
            assert text.strip()
        assert "all 3 values are the same" in _shown(artifact, "injected")
        assert inspect.roofline(artifact)["kernels"] == [
            {"kernel": "r", "calls": 2, "flops": 20, "bytes": 3072, "ns": 60.0, "share": 0.75,
             "bound": "memory"},
            {"kernel": "q", "calls": 1, "flops": 5, "bytes": 5, "ns": 20.0, "share": 0.25,
             "bound": "compute"},
        ]  # fmt: skip
        shown = _shown(artifact, "roofline")
        for part in ("█", "75.0%", "GB/s", "80.0", "prefill", "99.5"):
            assert part in shown
        assert "22.5 KiB" in _shown(artifact, "kernels")
        assert "2,048 tokens" in _shown(artifact, "memory")
        for view in ("kernels", "memory", "roofline"):
            page = io.StringIO()
            Console(width=80, file=page).print(inspect_show.render(artifact, view, 80))
            assert "█" not in page.getvalue()  # no room for bars
    assert inspect.verify_file(out).as_dict()["status"] == "ok"


def test_inspect_finds_a_kernel_that_was_told_something_else(tmp_path: Path) -> None:
    out = tmp_path / "x.zla"
    inputs = _inputs()
    other = {**RECORD, "constants": [{"name": "K", "value": 577, "origin": "model"}]}
    _write(out, inputs, **{inputs.code: _note_object(tmp_path, other)})
    with open_artifact(str(out)) as artifact:
        bad = [r for r in inspect.injected(artifact) if not r["agrees"]]
        assert [(r["name"], r["manifest"], r["binary"]) for r in bad] == [("K", 576, 577)]
        assert "DIFFERS: 577" in _shown(artifact, "injected")
    with pytest.raises(IntegrityError, match="K is 576 in the manifest, 577 in the code object"):
        inspect.verify_file(out)


def test_bars() -> None:
    assert inspect_show.bar(1, 1) == "█" * 24
    assert inspect_show.bar(1, 48) == "▌"
    assert inspect_show.bar(0, 5) == inspect_show.bar(5, 0) == inspect_show.bar(-1, 5) == ""
    assert [inspect_show.size(x) for x in (5, 1536, 3 << 30, 1 << 43)] == [
        "5 B", "1.5 KiB", "3.0 GiB", "8.0 TiB",
    ]  # fmt: skip


_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    10**18,
    "",
    "\x1b[31m",
    [],
    {},
    [1],
    {"a": 1},
    [[]],
    ["x"],
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, child in items:
        found.append((*path, key))
        if isinstance(child, dict | list):
            found += _paths(child, (*path, key))
    return found


@given(choice=st.integers(0, 10**6), value=st.sampled_from(_ODD), remove=st.booleans())
def test_fuzz_inspect_on_odd_manifests(choice: int, value: Any, remove: bool) -> None:
    """Any one value of the manifest may be anything: a view shows it or says what is wrong."""
    manifest = copy.deepcopy(FUZZED.manifest)
    paths = _paths(manifest)
    *parents, last = paths[choice % len(paths)]
    at: Any = manifest
    for key in parents:
        at = at[key]
    if remove and isinstance(at, dict):
        del at[last]
    else:
        at[last] = value
    artifact = FUZZED.with_manifest(manifest)
    for view in (*inspect.VIEWS, ""):
        try:
            _shown(artifact, view)
        except ZerolayerError:
            continue


class _Fuzzed:
    """Stands in for an open artifact whose manifest passed the reader's own checks."""

    path = "x.zla"
    digest = "0" * 64
    size = 70000
    weights_size = 65536
    names = ("__main__.py", "kernels/x86-64-v3.so", "manifest.json")

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest

    def with_manifest(self, manifest: dict[str, Any]) -> _Fuzzed:
        problem = layout.shape_problem(manifest)
        return _Fuzzed(self.manifest if problem else manifest)

    def member_range(self, _name: str) -> tuple[int, int]:
        return 0, 100

    def member(self, _name: str) -> bytes:
        return b"\x7fELF"


def _fuzzed() -> _Fuzzed:
    manifest = build_manifest(_inputs())
    tensor = {"name": "w", "section": "s", "nbytes": 5, "format": "Q4_1"}
    return _Fuzzed({**manifest, "weights": {"sections": [], "tensors": [tensor]}})


FUZZED = _fuzzed()
