"""The artifact reader: every rule is broken once, by bytes that zerolayer did not write."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerolayer.runtime_stub import container, layout
from zerolayer.runtime_stub.container import open_artifact
from zerolayer.runtime_stub.errors import InputFileError, IntegrityError, ZerolayerError
from zerolayer.runtime_stub.layout import HEADER_BYTES

ARTIFACTS = Path(__file__).parent.parent / "artifacts"


def _load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "attack_generator", ARTIFACTS / "attacks" / "generate.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _load_generator()
VERDICTS: dict[str, dict[str, Any]] = json.loads(
    (ARTIFACTS / "attacks" / "verdicts.json").read_text(encoding="utf-8")
)


def examine(path: Path) -> tuple[int, str, str]:
    """(exit code, when it was found, message) of opening and verifying a file."""
    when = "open"
    try:
        with open_artifact(str(path)) as artifact:
            when = "verify"
            artifact.verify_all()
    except ZerolayerError as e:
        return e.exit_code, when, e.one_line()
    return 0, when, ""


@pytest.fixture(scope="module")
def attack_files() -> dict[str, tuple[bytes, int, str, str]]:
    files: dict[str, tuple[bytes, int, str, str]] = generate.attacks()
    return files


@pytest.mark.parametrize("name", sorted(VERDICTS))
def test_attack_gets_its_verdict(
    name: str, attack_files: dict[str, tuple[bytes, int, str, str]], tmp_path: Path
) -> None:
    verdict = VERDICTS[name]
    data = attack_files[name][0]
    assert generate.sha(data) == verdict["sha256"], "the generator no longer makes the pinned file"
    path = tmp_path / name
    path.write_bytes(data)
    code, when, message = examine(path)
    assert (code, when) == (verdict["exit_code"], verdict["found_at"]), message
    assert verdict["says"] in message
    assert code == 0 or str(path) in message


def test_every_attack_has_a_verdict(
    attack_files: dict[str, tuple[bytes, int, str, str]],
) -> None:
    assert sorted(attack_files) == sorted(VERDICTS)


def _good(tmp_path: Path) -> tuple[Path, bytes]:
    data: bytes = generate.build()
    path = tmp_path / "x.zla"
    path.write_bytes(data)
    return path, data


def test_one_flipped_byte_anywhere_outside_weights_and_members_is_found_at_open(
    tmp_path: Path,
) -> None:
    """Every byte of every ZIP record and of the manifest, and samples of the header page."""
    path, data = _good(tmp_path)
    with open_artifact(str(path)) as artifact:
        content = [artifact.member_range(n) for n in artifact.names if n != "manifest.json"]
    zip_start = HEADER_BYTES + len(generate.WEIGHTS)
    places = [*range(200), *range(200, HEADER_BYTES, 4001), HEADER_BYTES - 1]
    places += [
        i for i in range(zip_start, len(data)) if not any(o <= i < o + n for o, n in content)
    ]
    with path.open("r+b") as f:
        for place in places:
            for mask in (0x01, 0x80):
                f.seek(place)
                f.write(bytes([data[place] ^ mask]))
                f.flush()
                with pytest.raises((IntegrityError, InputFileError)) as error:
                    open_artifact(str(path))
                assert str(path) in error.value.one_line(), place
            f.seek(place)
            f.write(data[place : place + 1])
            f.flush()
    open_artifact(str(path)).close()


def test_one_flipped_byte_in_content_is_found_by_name(tmp_path: Path) -> None:
    path, data = _good(tmp_path)
    with open_artifact(str(path)) as artifact:
        ranges = [
            (f"member {n}", *artifact.member_range(n))
            for n in artifact.names
            if n != "manifest.json"
        ]
    ranges.append(("weights section s", HEADER_BYTES, len(generate.WEIGHTS)))
    for name, offset, size in ranges:
        for place in {offset, offset + size // 2, offset + size - 1}:
            path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            code, when, message = examine(path)
            assert (code, when) == (6, "verify")
            assert name in message


def test_truncation_at_every_boundary(tmp_path: Path) -> None:
    path, data = _good(tmp_path)
    with open_artifact(str(path)) as artifact:
        edges = {0, 1, 23, HEADER_BYTES, HEADER_BYTES + len(generate.WEIGHTS), len(data) - 22}
        for name in artifact.names:
            offset, size = artifact.member_range(name)
            edges |= {offset - 30 - len(name), offset, offset + size}
    cuts = {c + d for c in edges for d in (-1, 0, 1) if 0 <= c + d < len(data)}
    for cut in sorted(cuts):
        path.write_bytes(data[:cut])
        with pytest.raises((IntegrityError, InputFileError)):
            open_artifact(str(path))


def test_bytes_inserted_or_removed_at_every_boundary(tmp_path: Path) -> None:
    path, data = _good(tmp_path)
    zip_start = HEADER_BYTES + len(generate.WEIGHTS)
    for place in (0, 23, HEADER_BYTES, zip_start, zip_start + 30, len(data) - 22, len(data)):
        for extra in (1, 64, 65536):
            path.write_bytes(data[:place] + bytes(extra) + data[place:])
            with pytest.raises((IntegrityError, InputFileError)):
                open_artifact(str(path))
            path.write_bytes(data[:place] + data[place + extra :] if place < len(data) else b"")
            with pytest.raises((IntegrityError, InputFileError)):
                open_artifact(str(path))


@given(
    edits=st.lists(
        st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=12)), max_size=6
    ),
    cut=st.integers(0, 300),
)
def test_fuzz_only_known_errors(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, bytes]], cut: int
) -> None:
    base: bytes = generate.build(weights=b"", edit=_no_weights)
    data = bytearray(base)
    for place, new in edits:
        at = HEADER_BYTES + place % (len(base) - HEADER_BYTES)
        data[at : at + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "fuzz.zla"
    path.write_bytes(data[: len(data) - cut] if cut < 100 else data)
    code, _, message = examine(path)
    assert code in (0, 3, 6)
    if bytes(data) != base or 0 < cut < 100:
        assert code, message


def _no_weights(manifest: dict[str, Any]) -> None:
    manifest["weights"].update(sections=[], tensors=[])


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    key=st.sampled_from(
        ["digest", "format", "header", "files", "weights", "sections", "tensors", "offset", "size",
         "nbytes", "name", "sha256", "section", "major"]
    ),
    value=_json,
)  # fmt: skip
def test_fuzz_manifest_values(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    """A manifest with a right digest and one wrong value is refused, or means the same."""

    def edit(node: Any) -> None:
        if isinstance(node, dict):
            for k in node:
                if k == key:
                    node[k] = value
                else:
                    edit(node[k])
        elif isinstance(node, list):
            for child in node:
                edit(child)

    path = tmp_path_factory.getbasetemp() / "fuzz-manifest.zla"
    path.write_bytes(generate.build(edit))
    assert examine(path)[0] in (0, 6)


def test_standard_tools_read_it(tmp_path: Path) -> None:
    import shutil
    import zipfile

    path, _ = _good(tmp_path)
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None
        assert z.read("kernels/a.so") == b"\x7fELF"
    unzip = shutil.which("unzip")
    if unzip:
        listing = subprocess.run([unzip, "-l", path], capture_output=True, text=True, check=False)
        assert listing.returncode in (0, 1)  # 1: notes the bytes in front
        assert "kernels/a.so" in listing.stdout


def test_members_are_bounded_and_named(tmp_path: Path) -> None:
    path, _ = _good(tmp_path)
    with open_artifact(str(path)) as artifact:
        assert artifact.member("kernels/a.so") == b"\x7fELF"
        with pytest.raises(ZerolayerError, match="limit of 2"):
            artifact.member("kernels/a.so", limit=2)
        with pytest.raises(InputFileError, match="no member 'nope'"):
            artifact.member("nope")


def test_mapped_weights_are_the_weights_and_outlive_the_file(tmp_path: Path) -> None:
    path, _ = _good(tmp_path)
    with open_artifact(str(path)) as artifact:
        mapped, offset = artifact.map_weights()
    assert mapped[offset : offset + len(generate.WEIGHTS)] == generate.WEIGHTS
    with pytest.raises(TypeError):
        mapped[offset] = 1
    mapped.close()


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "unreadable"])
def test_not_a_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.zla"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "unreadable":
        path.write_bytes(b"x")
        path.chmod(0)
    with pytest.raises(InputFileError) as error:
        open_artifact(str(path))
    assert error.value.exit_code == 3


def test_descriptors_are_closed(tmp_path: Path) -> None:
    path, data = _good(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    open_artifact(str(path)).close()
    path.write_bytes(data[:-1])
    with pytest.raises(IntegrityError):
        open_artifact(str(path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("gib", [0, 5])
def test_runs_at_any_size(gib: int, tmp_path: Path) -> None:
    """``python3 FILE`` and ``./FILE`` with weights beyond 4 GiB (a sparse file)."""
    size = gib << 30 or 65536
    stub = Path(container.__file__).parent
    main = (
        "import sys\n"
        "from stub.container import open_artifact, running_artifact_path\n"
        "with open_artifact(running_artifact_path()) as a:\n"
        "    m, o = a.map_weights()\n"
        "    print(a.weights_size, m[o], m[o + a.weights_size - 1], sys.argv[1:])\n"
    )
    members = {
        "__main__.py": main.encode(),
        "stub/__init__.py": b"",
        "stub/ahead.py": (stub / "ahead.py").read_bytes(),
        "stub/buffer.py": (stub / "buffer.py").read_bytes(),
        "stub/container.py": (stub / "container.py").read_bytes(),
        "stub/layout.py": (stub / "layout.py").read_bytes(),
        "stub/errors.py": (stub / "errors.py").read_bytes(),
    }

    def edit(manifest: dict[str, Any]) -> None:
        w = manifest["weights"]
        w["size"] = w["sections"][0]["size"] = size
        w["tensors"][1]["nbytes"] = size - 128

    whole: bytes = generate.build(edit, weights=b"", members=members)
    path = tmp_path / "big.zla"
    with path.open("wb") as f:
        f.write(whole[:HEADER_BYTES])
        f.truncate(HEADER_BYTES + size)
        f.seek(HEADER_BYTES + size)
        f.write(whole[HEADER_BYTES:])
    path.chmod(0o755)
    expected = f"{size} 0 0 ['a', 'b']\n"
    for command in ([sys.executable, "-I", str(path)], [str(path)]):
        result = subprocess.run(
            [*command, "a", "b"], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert (result.stdout, result.stderr) == (expected, "")


def test_names() -> None:
    good = ["a", "a/b.c", "__main__.py", "licenses/x+y-1.0/LICENSE", "...", ".hidden", "a..b/c"]
    bad = ["", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/./b", "a\\b", "a b", "a\0", "ä",
           "a\n", "C:a", "a" * 201]  # fmt: skip
    assert [n for n in good if layout.name_problem(n)] == []
    assert [n for n in bad if not layout.name_problem(n)] == []


@given(st.binary(max_size=60))
def test_json_reader_raises_only_value_errors(raw: bytes) -> None:
    try:
        value = layout.parse_json(raw)
    except ValueError:
        return
    assert value == json.loads(raw)


@given(_json)
def test_json_reader_agrees_with_the_standard_library(value: object) -> None:
    raw = json.dumps(value).encode()
    try:
        assert layout.parse_json(raw) == value
    except ValueError as e:  # the documented limits only
        assert "digits" in str(e)


@given(
    st.lists(
        st.one_of(
            st.text('[]{}"\\\\ 1', max_size=30),
            st.integers(10**18, 10**22),
            st.just("1" * 25),
            st.integers(0, 30).map(lambda n: json.loads("[" * n + "]" * n) if n else 0),
        ),
        max_size=6,
    )
)
def test_json_reader_looks_into_no_string(value: list[object]) -> None:
    """Brackets, quotes and digits in strings count for nothing; outside, the limits hold."""
    raw = json.dumps(value).encode()
    numbers = [v for v in value if isinstance(v, int)]

    def depth(v: object) -> int:
        return 1 + max(map(depth, v), default=0) if isinstance(v, list) else 0

    try:
        assert layout.parse_json(raw) == value
        assert all(n < 10**20 for n in numbers) and depth(value) <= 24
    except ValueError:
        assert any(n >= 10**20 for n in numbers) or depth(value) > 24


@pytest.mark.parametrize(
    "raw",
    [b"[" * (16 << 20), b"[" * (8 << 20) + b"]" * (8 << 20), b"[{" * (8 << 20), b"[]" * (8 << 20)],
    ids=["open", "nested", "kinds", "flat"],
)
def test_nothing_but_brackets_is_refused_at_once(raw: bytes) -> None:
    begin = time.process_time()
    with pytest.raises(ValueError, match=r"nested deeper than 24|more than one value"):
        layout.parse_json(raw)
    assert time.process_time() - begin < 5


def test_depth_counts_both_kinds_of_brackets() -> None:
    """24 levels of lists and objects by turns are read, a 25th is refused."""
    most = b'{"a":[' * 12 + b"]}" * 12
    layout.parse_json(most)
    for more in (b"[" + most + b"]", b'{"a":[' * 12 + b"{}" + b"]}" * 12, b"[{}," + most + b",1]"):
        with pytest.raises(ValueError, match="nested deeper than 24"):
            layout.parse_json(more)


@pytest.mark.parametrize("text", ["1e999", "-1e999", '{"a": [1.5, 2e308]}'])
def test_numbers_beyond_a_double_are_refused(text: str) -> None:
    assert layout.parse_json(b'{"a": [1.5, 1.7e308, -1e-999]}') == {"a": [1.5, 1.7e308, 0.0]}
    with pytest.raises(ValueError, match="more than a number can be"):
        layout.parse_json(text.encode())


@pytest.mark.parametrize("words", [0, -1, 1 << 31, 10**19, True, "9", None, 5.0])
def test_a_language_models_vocabulary_is_a_count(tmp_path: Path, words: object) -> None:
    """A graph has none; a language model's ids are not negative and fit 32 bits."""
    path = tmp_path / "x.zla"

    def with_words(value: object, entry: str) -> None:
        changes = {"model": {"vocab_size": value}, "entry_points": [{"name": entry}]}
        path.write_bytes(generate.build(lambda m: m.update(changes)))

    with_words(0, "run")
    open_artifact(str(path)).close()
    with_words(words, "step")
    with pytest.raises(IntegrityError, match=r"model.vocab_size is"):
        open_artifact(str(path))


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of the table in artifacts/README.md that no small attack file can reach."""
    path = tmp_path / "x.zla"

    def refused(data: bytes, says: str) -> None:
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match=says):
            open_artifact(str(path))

    many = {f"m{i}": b"" for i in range(4096)}  # and the manifest
    refused(generate.build(members=many), "entries is 4097")
    refused(generate.build(lambda m: m.update(x="y" * (16 << 20))), "more than 16777216")
    deep: Any = []
    for _ in range(24):
        deep = [deep]
    refused(generate.build(lambda m: m.update(x=deep)), "nested deeper than 24")
    path.write_bytes(generate.build(lambda m: m.update(x=deep[0][0])))
    open_artifact(str(path)).close()
    monkeypatch.setattr(container, "MAX_TENSORS", 1)
    refused(generate.build(), "tensors has 2 entries, more than 1")
    monkeypatch.setattr(container, "MAX_MEMBER_BYTES", 14)
    refused(generate.build(), "reach beyond the members")
    monkeypatch.setattr(container, "MAX_ZIP_BYTES", 100)
    refused(generate.build(), "points outside the file")
    monkeypatch.setattr(container, "MAX_FILE_BYTES", 100_000)
    refused(generate.build(), "more than an artifact can have")
