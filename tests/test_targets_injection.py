"""Injection: the record and the kernel cannot disagree; the ELF reader is bounded."""

from __future__ import annotations

import ast
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerolayer.runtime_stub.errors import InputFileError, IntegrityError
from zerolayer.targets import elf, injection
from zerolayer.targets.facts import load_target

TARGETS = Path(injection.__file__).parent


@pytest.fixture
def inj() -> injection.Injector:
    return injection.Injection(load_target("zen4")).kernel("k")


def test_a_fact_is_recorded_with_unit_and_source(inj: injection.Injector) -> None:
    assert inj.fact("l2_bytes") == 1 << 20
    recorded = inj.record()["facts"]
    assert isinstance(recorded, list) and len(recorded) == 1
    found = recorded[0]
    assert found["name"] == "l2_bytes" and found["unit"] == "byte/core" and "AMD" in found["source"]


def test_a_derived_constant_is_computed_and_records_what_it_used(inj: injection.Injector) -> None:
    inj.constant("K", 576)
    assert inj.derive("tile", "max(8, min(256, l2_bytes // 4 // K // 8 * 8))") == 256
    assert inj.derive("double", "tile * 2") == 512
    record = inj.record()
    assert [f["name"] for f in record["facts"]] == ["l2_bytes"]  # type: ignore[attr-defined]
    derived = {d["name"]: d for d in record["derived"]}  # type: ignore[attr-defined]
    assert derived["tile"]["uses"] == ["l2_bytes", "K"]
    assert derived["double"]["uses"] == ["tile"]


@pytest.mark.parametrize(
    "formula",
    ["__import__('os')", "l2_bytes.real", "[1][0]", "l2_bytes ** 99", "(lambda: 1)()", "'a'"],
)
def test_formulas_are_arithmetic_only(inj: injection.Injector, formula: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        inj.derive("x", formula)


def test_unknown_fact(inj: injection.Injector) -> None:
    with pytest.raises(InputFileError, match="no fact 'sms'"):
        inj.fact("sms")


def test_a_constant_has_one_value(inj: injection.Injector) -> None:
    inj.constant("N", 1)
    with pytest.raises(ValueError, match="two values"):
        inj.constant("N", 2)


@pytest.mark.parametrize("name", ["cpu.py", "cpu_compile.py", "cpu_rows.py", "cpu_layouts.py"])
def test_code_generation_reads_facts_only_through_an_injector(name: str) -> None:
    """No attribute of a Target that holds facts is touched outside injection.py and facts.py."""
    tree = ast.parse((TARGETS / name).read_text("utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        assert node.attr != "facts", f"{name}:{node.lineno}"
        if node.attr == "fact":
            owner = ast.unparse(node.value)
            assert owner in ("injector", "shared"), f"{name}:{node.lineno}: {owner}.fact"


# --- ELF ----------------------------------------------------------------------------------------


def tiny_elf(notes: bytes, note_size: int | None = None) -> bytes:
    """A shared object with a note section and a string table, made by hand from the ELF-64
    layout."""
    names = b"\0.note.zerolayer\0.shstrtab\0"
    note_at = 64
    names_at = note_at + len(notes)
    table_at = -(-(names_at + len(names)) // 8) * 8
    header = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table_at, 0, 64, 56, 0, 64, 3, 2)
    )

    def section(name: int, kind: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, 0, 0, 1, 0)

    body = (header + notes + names).ljust(table_at, b"\0")
    return (
        body
        + bytes(64)
        + section(1, 7, note_at, len(notes) if note_size is None else note_size)
        + (section(17, 3, names_at, len(names)))
    )


def note(desc: bytes, name: bytes = b"zerolayer\0") -> bytes:
    padded = name + bytes(-len(name) % 4)
    return struct.pack("<III", len(name), len(desc), 1) + padded + desc + bytes(-len(desc) % 4)


def test_read_note() -> None:
    document = {"target": "zen4", "kernels": []}
    data = tiny_elf(note(b"x", b"GNU\0") + note(json.dumps(document).encode()))
    assert injection.read_note(data) == document


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x7fELF",
        b"MZ" * 100,
        tiny_elf(b""),
        tiny_elf(note(b"{")),
        tiny_elf(note(b"[]")),
        tiny_elf(note(b"[" * 5000)),
        tiny_elf(note(b"{}", b"other\0")),
        tiny_elf(note(b"{}"), 1 << 40),
        tiny_elf(struct.pack("<III", 0xFFFFFFFF, 0xFFFFFFFF, 1)),
    ],
)
def test_damaged_objects(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        injection.read_note(data)


@given(st.data())
def test_fuzzed_objects(data: st.DataObject) -> None:
    raw = bytearray(tiny_elf(note(b'{"target":"zen4"}')))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for candidate in (bytes(raw), bytes(raw[:cut])):
        try:
            elf.read_shared_object(candidate)
            injection.read_note(candidate)
        except IntegrityError:
            pass


def test_a_real_library() -> None:
    """The dynamic section, symbols and versions of an object made by a real linker."""
    import _ctypes

    path = getattr(_ctypes, "__file__", None)
    if path is None:
        import numpy.core._multiarray_umath as module  # built-in _ctypes: use another extension

        path = module.__file__
    found = elf.read_shared_object(Path(str(path)).read_bytes())
    assert "libc.so.6" in found.needed
    assert any(v.startswith("GLIBC_2.") for v in found.versions)
    assert any(n.startswith("PyInit_") for n in found.exports)
