"""Makes the hostile artifacts whose verdicts are in ``verdicts.json``.

Run it as ``python artifacts/attacks/generate.py FOLDER``; with ``--pin`` it also writes the
verdicts and each file's SHA-256 to ``verdicts.json`` beside it.  The files are not committed: each
is mostly a 64 KiB header.  The bytes are made with the standard library alone, so that a mistake
shared by zerolayer's writer and reader does not hide here.  A test makes them, compares the hashes,
and opens each.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADER = 65536
INPUT, INTEGRITY = 3, 6

Manifest = dict[str, Any]
Edit = Callable[[Manifest], None]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def header(version: str = "1.0", needs: str = "0.1") -> bytes:
    text = (
        f"#!/usr/bin/env python3\n# zerolayer artifact, format {version}, "
        f"needs zerolayer {needs} or later\nA test file.\n"
    )
    return text.encode().ljust(HEADER, b"\0")


MEMBERS = {"__main__.py": b"print('hello')\n", "kernels/a.so": b"\x7fELF", "tokenizer.json": b"{}"}
WEIGHTS = bytes(range(256)) * 256  # one 64 KiB section: 'a' 100 bytes, 'b' the rest


def base_manifest(page: bytes, weights: bytes, members: dict[str, bytes]) -> Manifest:
    return {
        "digest": "0" * 64,
        "format": {"name": "zerolayer-artifact", "major": 1, "minor": 0},
        "header": {"size": HEADER, "sha256": sha(page)},
        "files": [
            {"name": n, "size": len(d), "sha256": sha(d)} for n, d in sorted(members.items())
        ],
        "weights": {
            "offset": HEADER,
            "size": len(weights),
            "sections": [{"name": "s", "offset": 0, "size": len(weights), "sha256": sha(weights)}],
            "tensors": [
                {"name": "a", "section": "s", "offset": 0, "nbytes": 100, "dtype": "u8",
                 "shape": [100], "layout": "row_major", "format": "F32"},
                {"name": "b", "section": "s", "offset": 128, "nbytes": len(weights) - 128,
                 "dtype": "u8", "shape": [1], "layout": "row_major", "format": "F32"},
            ],
        },
    }  # fmt: skip


def encode(manifest: Any, sealed: bool = True) -> bytes:
    """Canonical JSON, with its digest set when ``sealed``."""
    raw = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    return seal(raw) if sealed else raw


def seal(raw: bytes) -> bytes:
    zeros = b'"digest":"' + b"0" * 64 + b'"'
    return raw.replace(zeros, b'"digest":"' + sha(raw).encode() + b'"')


def zipped(members: list[tuple[str, bytes]]) -> bytes:
    """A ZIP by the standard library, in the order given."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, data in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o100644 << 16
            info.create_system = 3
            z.writestr(info, data)
    return out.getvalue()


def build(
    edit: Edit | None = None,
    *,
    page: bytes | None = None,
    weights: bytes = WEIGHTS,
    members: dict[str, bytes] | None = None,
    manifest: bytes | None = None,
    order: Callable[[list[str]], list[str]] = sorted,
) -> bytes:
    """A whole artifact; valid when nothing is asked for."""
    page = header() if page is None else page
    members = dict(MEMBERS if members is None else members)
    if manifest is None:
        data = base_manifest(page, weights, members)
        if edit is not None:
            edit(data)
        manifest = encode(data)
    members["manifest.json"] = manifest
    return page + weights + zipped([(n, members[n]) for n in order(list(members))])


def patched(data: bytes, find: bytes, replacement: bytes, at: int = 0) -> bytes:
    """``data`` with ``replacement`` written ``at`` bytes behind the last place of ``find``."""
    place = data.rindex(find) + at
    return data[:place] + replacement + data[place + len(replacement) :]


def renamed(name: str) -> bytes:
    """An artifact whose member ``tokenizer.json`` is called ``name`` everywhere."""
    members = {n: d for n, d in MEMBERS.items() if n != "tokenizer.json"}
    return build(members={**members, name: b"{}"})


def with_duplicate() -> bytes:
    """Two members of the same name."""
    return build(members={**MEMBERS, "tokenizer.jsox": b"{}"}).replace(
        b"tokenizer.jsox", b"tokenizer.json"
    )


def with_hole() -> bytes:
    """Eight undeclared bytes between the members and the directory."""
    data = build()
    end = struct.unpack("<4s4H2IH", data[-22:])
    start = len(data) - 22 - end[5]
    record = struct.pack("<4s4H2IH", *end[:6], end[6] + 8, 0)
    return data[:start] + b"\0" * 8 + data[start:-22] + record


def with_directory_slack() -> bytes:
    """Bytes after the directory's last entry that its size includes."""
    data = build()
    end = struct.unpack("<4s4H2IH", data[-22:])
    record = struct.pack("<4s4H2IH", *end[:5], end[5] + 8, end[6], 0)
    return data[:-22] + b"\0" * 8 + record


def with_zip64() -> bytes:
    """An end record whose fields say: look at the ZIP64 record."""
    data = build()
    return data[:-22] + struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0
    )


def with_text(**values: object) -> Callable[[str], bytes]:
    """A function that puts raw text into an otherwise valid manifest (what json.dumps cannot)."""
    page = header()
    data = {**base_manifest(page, WEIGHTS, MEMBERS), **values}
    return lambda text: build(
        manifest=seal(encode(data, sealed=False).replace(b'"HERE"', text.encode()))
    )


def tensor(index: int, **changes: object) -> Edit:
    return lambda m: m["weights"]["tensors"][index].update(changes)


def section(**changes: object) -> Edit:
    return lambda m: m["weights"]["sections"][0].update(changes)


def weights_key(**changes: object) -> Edit:
    return lambda m: m["weights"].update(changes)


def first_file(**changes: object) -> Edit:
    return lambda m: m["files"][0].update(changes)


def without(key: str) -> Edit:
    return lambda m: m.pop(key)


def attacks() -> dict[str, tuple[bytes, int, str, str]]:
    """name -> (bytes, exit code, 'open' or 'verify', what the message must contain)."""
    good = build()
    raw = with_text(x="HERE")
    central = b"PK\x01\x02"
    flipped = bytearray(good)
    flipped[HEADER + 200] ^= 1
    wrong_member = build().replace(b"print('hello')", b"print('jello')")
    return {
        # not ours
        "empty.zla": (b"", INPUT, "open", "not a zerolayer artifact"),
        "script.zla": (b"#!/usr/bin/env python3\nprint(1)\n", INPUT, "open", "not a zerolayer"),
        "only-zip.zla": (zipped([("a", b"b")]), INPUT, "open", "not a zerolayer artifact"),
        "format-2.zla": (build(page=header("2.0", "0.9")), INPUT, "open", "zerolayer 0.9 or later"),
        "format-1.7-header.zla": (build(page=header("1.7")), INTEGRITY, "open", "format differs"),
        # cut, extended
        "cut-in-header.zla": (good[:1000], INTEGRITY, "open", "ends inside the header"),
        "cut-in-weights.zla": (good[: HEADER + 4000], INTEGRITY, "open", "ZIP end record"),
        "cut-last-byte.zla": (good[:-1], INTEGRITY, "open", "ZIP end record"),
        "trailing-byte.zla": (good + b"\0", INTEGRITY, "open", "ZIP end record"),
        "extra-page.zla": (
            good[:HEADER] + bytes(HEADER) + good[HEADER:], INTEGRITY, "open", "weights: size",
        ),
        "extra-byte-in-weights.zla": (
            good[:HEADER] + b"\0" + good[HEADER:], INTEGRITY, "open", "the ZIP starts at",
        ),
        "text-behind-padding.zla": (
            build(page=header()[:-4] + b"evil"), INTEGRITY, "open", "behind its zero padding",
        ),
        # ZIP records
        "zip-comment.zla": (good[:-2] + b"\1\0x", INTEGRITY, "open", "ZIP end record"),
        "zip64.zla": (with_zip64(), INTEGRITY, "open", "ZIP end record"),
        "two-disks.zla": (
            patched(good, b"PK\x05\x06", b"\1", 4), INTEGRITY, "open", "disk number",
        ),
        "hole.zla": (with_hole(), INTEGRITY, "open", "between its members and its directory"),
        "directory-slack.zla": (with_directory_slack(), INTEGRITY, "open", "after its last entry"),
        "deflated.zla": (
            patched(good, central, b"\x08\0", 10), INTEGRITY, "open", "method",
        ),
        "encrypted.zla": (patched(good, central, b"\1\0", 8), INTEGRITY, "open", "flags"),
        "data-descriptor.zla": (patched(good, central, b"\x08\0", 8), INTEGRITY, "open", "flags"),
        "symlink.zla": (
            patched(good, central, struct.pack("<I", 0o120777 << 16), 38),
            INTEGRITY, "open", "external attributes",
        ),
        "member-beyond-file.zla": (
            patched(good, central, b"\xff\xff\xff\xff\xff\xff\xff\xff", 20),
            INTEGRITY, "open", "beyond the members",
        ),
        "overlapping-members.zla": (
            patched(good, central, bytes(4), 42), INTEGRITY, "open", "local header offset",
        ),
        "local-name-differs.zla": (
            good.replace(b"tokenizer.json{}", b"tokenizer.jsoX{}"), INTEGRITY, "open", "its name",
        ),
        "duplicate-member.zla": (with_duplicate(), INTEGRITY, "open", "duplicate"),
        "unsorted.zla": (
            build(order=lambda n: sorted(n, reverse=True)), INTEGRITY, "open", "sorted order",
        ),
        # names
        "name-parent.zla": (renamed("x/../y"), INTEGRITY, "open", "not a relative path"),
        "name-up.zla": (renamed("../tokenizer"), INTEGRITY, "open", "not a relative path"),
        "name-absolute.zla": (renamed("/etc/passwd"), INTEGRITY, "open", "not a relative path"),
        "name-backslash.zla": (renamed("x\\y"), INTEGRITY, "open", "not a relative path"),
        "name-drive.zla": (renamed("C:x"), INTEGRITY, "open", "not a relative path"),
        "name-newline.zla": (renamed("x\ny"), INTEGRITY, "open", "not a relative path"),
        "name-unicode.zla": (renamed("töken"), INTEGRITY, "open", "flags"),
        "name-long.zla": (renamed("x" * 201), INTEGRITY, "open", "longer than"),
        "name-empty-part.zla": (renamed("x//y"), INTEGRITY, "open", "not a relative path"),
        "name-folder.zla": (renamed("x/"), INTEGRITY, "open", "not a relative path"),
        "file-is-folder.zla": (
            build(members={**MEMBERS, "kernels": b""}), INTEGRITY, "open", "also a folder",
        ),
        # manifest
        "no-manifest.zla": (
            header() + zipped(sorted(MEMBERS.items())), INTEGRITY, "open", "no manifest.json",
        ),
        "manifest-not-json.zla": (build(manifest=b"{"), INTEGRITY, "open", "manifest.json"),
        "manifest-not-utf8.zla": (build(manifest=b'"\xff"'), INTEGRITY, "open", "manifest.json"),
        "manifest-list.zla": (build(manifest=b"[]"), INTEGRITY, "open", "not an object"),
        "manifest-deep.zla": (
            raw("[" * 5000 + "]" * 5000), INTEGRITY, "open", "nested deeper",
        ),
        "manifest-unclosed.zla": (
            build(manifest=b"[" * 100_000), INTEGRITY, "open", "nested deeper",
        ),
        "manifest-duplicate-key.zla": (raw('{"a":1,"a":2}'), INTEGRITY, "open", "occurs twice"),
        "manifest-nan.zla": (raw("NaN"), INTEGRITY, "open", "NaN is not JSON"),
        "manifest-huge-number.zla": (raw("9" * 5000), INTEGRITY, "open", "20 digits"),
        "manifest-two-digests.zla": (
            raw('{"digest":"%s"}' % ("0" * 64)), INTEGRITY, "open", "digest",
        ),
        "manifest-unsealed.zla": (
            build(manifest=encode(base_manifest(header(), WEIGHTS, MEMBERS), sealed=False)),
            INTEGRITY, "open", "digest does not match",
        ),
        "no-digest.zla": (build(without("digest")), INTEGRITY, "open", "digest is missing"),
        "no-format.zla": (build(without("format")), INTEGRITY, "open", "format is missing"),
        "no-files.zla": (build(without("files")), INTEGRITY, "open", "files is missing"),
        "no-weights.zla": (build(without("weights")), INTEGRITY, "open", "weights is missing"),
        "tokenizer-list.zla": (
            build(lambda m: m.update(tokenizer=[])), INTEGRITY, "open", "tokenizer is not of type",
        ),
        "entry-points-numbers.zla": (
            build(lambda m: m.update(entry_points=[1])), INTEGRITY, "open", "entry_points holds",
        ),
        "features-list.zla": (
            build(lambda m: m.update(target={"requires": {"features": [["avx"]]}})),
            INTEGRITY, "open", "features holds",
        ),
        "vocab-text.zla": (
            build(lambda m: m.update(model={"vocab_size": "9"})), INTEGRITY, "open", "vocab_size",
        ),
        "unlisted-member.zla": (
            build(lambda m: m["files"].pop()), INTEGRITY, "open", "not the ZIP's members",
        ),
        "listed-twice.zla": (
            build(lambda m: m["files"].append(m["files"][0])), INTEGRITY, "open", "not the ZIP's",
        ),
        "listed-not-there.zla": (build(first_file(name="x")), INTEGRITY, "open", "not in the ZIP"),
        "file-size.zla": (build(first_file(size=1)), INTEGRITY, "open", "bytes, not 1"),
        "file-size-float.zla": (build(first_file(size=15.0)), INTEGRITY, "open", "size is missing"),
        "file-hash-short.zla": (build(first_file(sha256="ab")), INTEGRITY, "open", "64 hex"),
        # weights table
        "tensor-overlap.zla": (build(tensor(1, offset=64)), INTEGRITY, "open", "an overlap"),
        "tensor-hole.zla": (build(tensor(1, offset=192)), INTEGRITY, "open", "a hole"),
        "tensor-unaligned.zla": (build(tensor(1, offset=100)), INTEGRITY, "open", "a hole"),
        "tensor-too-long.zla": (build(tensor(1, nbytes=65536)), INTEGRITY, "open", "beyond"),
        "tensor-negative.zla": (build(tensor(0, nbytes=-1)), INTEGRITY, "open", "nbytes is -1"),
        "tensor-huge.zla": (build(tensor(1, nbytes=2**63)), INTEGRITY, "open", "nbytes is"),
        "tensor-bool.zla": (build(tensor(0, offset=False)), INTEGRITY, "open", "offset is missing"),
        "tensor-duplicate.zla": (build(tensor(1, name="a")), INTEGRITY, "open", "duplicate"),
        "tensor-no-section.zla": (build(tensor(1, section="t")), INTEGRITY, "open", "section"),
        "section-short.zla": (build(section(size=100)), INTEGRITY, "open", "not a multiple"),
        "section-long.zla": (build(section(size=131072)), INTEGRITY, "open", "sections end at"),
        "section-moved.zla": (build(section(offset=64)), INTEGRITY, "open", "does not follow"),
        "no-sections.zla": (build(weights_key(sections=[])), INTEGRITY, "open", "sections end at"),
        "no-tensors.zla": (build(weights_key(tensors=[])), INTEGRITY, "open", "do not fill"),
        "weights-moved.zla": (build(weights_key(offset=0)), INTEGRITY, "open", "offset is not"),
        "weights-longer.zla": (build(weights_key(size=131072)), INTEGRITY, "open", "size is not"),
        # content: structure is right, a hash is not
        "weights-bit.zla": (bytes(flipped), INTEGRITY, "verify", "weights section s"),
        "member-bit.zla": (wrong_member, INTEGRITY, "verify", "__main__.py"),
        "good.zla": (good, 0, "verify", ""),
        "good-padded-section.zla": (build(tensor(1, nbytes=1)), 0, "verify", ""),
        "good-unknown-keys.zla": (
            build(lambda m: m.update(future={"a": [1, 2.5, None, True, "x"]})), 0, "verify", "",
        ),
    }  # fmt: skip


def main(folder: Path, pin: bool) -> None:
    """Writes every file, and the table when ``pin``."""
    table = {}
    for name, (data, code, when, says) in sorted(attacks().items()):
        (folder / name).write_bytes(data)
        table[name] = {"exit_code": code, "found_at": when, "says": says, "sha256": sha(data)}
    if pin:
        text = json.dumps(table, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        Path(__file__).with_name("verdicts.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--pin" in sys.argv)
