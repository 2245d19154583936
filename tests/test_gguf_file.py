"""The GGUF reader: right on good files, a named error on every other."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zerolayer.compiler.frontends.gguf import load_gguf
from zerolayer.compiler.frontends.gguf_file import GgufFile, read_gguf
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError, ZerolayerError
from zerolayer.targets import formats

# --- a minimal writer, so that every field can be wrong ----------------------------------------

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def text(value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: bytes | str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(
    name: bytes | str,
    dims: tuple[int, ...],
    kind: int = 0,
    offset: int = 0,
    n_dims: int | None = None,
) -> bytes:
    count = len(dims) if n_dims is None else n_dims
    return (text(name) + struct.pack("<I", count) + struct.pack(f"<{len(dims)}Q", *dims)
            + struct.pack("<IQ", kind, offset))  # fmt: skip


def build(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_pairs: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    )
    head += b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], GgufFile]:
    def read_bytes(data: bytes) -> GgufFile:
        path = tmp_path / "file.gguf"
        path.write_bytes(data)
        return read_gguf(path)

    return read_bytes


Read = Callable[[bytes], GgufFile]


# --- right on good files -------------------------------------------------------------------------


def test_everything_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -128)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -32768)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_bool("a.no", False)
    writer.add_string("a.text", "größe 你好 🙂\0x")
    writer.add_string("a.empty", "")
    writer.add_array("a.texts", ["", "a", "ü"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [1.5, -2.5])
    writer.add_array("a.bools", [True, False])
    rng = np.random.default_rng(0)
    for name in (*formats.FILE_FORMATS, *formats.PLAIN_FILE_FORMATS):
        kind = gguf.GGMLQuantizationType[name]
        size = formats.row_bytes(name, 512)
        writer.add_tensor(f"t.{name}", rng.integers(0, 256, (3, size), np.uint8), raw_dtype=kind)
    writer.add_tensor("one", np.arange(5, dtype=np.float32))
    writer.add_tensor("four", np.zeros((2, 3, 4, 5), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in theirs.fields.items()
                if not name.startswith("GGUF.")}  # fmt: skip
    assert {k: v.tolist() if isinstance(v, np.ndarray) else v
            for k, v in ours.metadata.items()} == expected  # fmt: skip
    assert isinstance(ours.metadata["a.yes"], bool)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    raw = path.read_bytes()
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert info.format == t.tensor_type.name
        assert info.shape == tuple(int(d) for d in reversed(t.shape))
        assert raw[info.offset : info.offset + info.size] == t.data.tobytes()
        assert info.rows * info.row_bytes == info.size


def test_version_2_and_other_alignments(read: Read) -> None:
    aligned = pair("general.alignment", U32, struct.pack("<I", 256))
    one, two = tensor("a", (8,)), tensor("b", (8,), offset=256)
    data = bytes(range(32)) + b"\0" * 224 + bytes(range(32))
    file = read(build((aligned,), (one, two), data, version=2, alignment=256))
    assert (file.version, file.alignment, file.tensors["b"].offset) == (2, 256, 512)
    assert file.size == 512 + 32


def test_arrays_nest_to_a_limit(read: Read) -> None:
    inner = struct.pack("<IQ", U8, 2) + b"\1\2"

    def nested(depth: int) -> bytes:
        value = inner
        for _ in range(depth):
            value = struct.pack("<IQ", ARRAY, 1) + value
        return build((pair("deep", ARRAY, value),))

    deep = read(nested(3)).metadata["deep"]
    assert isinstance(deep, list) and isinstance(deep[0], list)
    with pytest.raises(InputFileError, match=r"key 'deep'.*nested deeper than 4"):
        read(nested(4))
    with pytest.raises(InputFileError, match="nested deeper than 4"):
        read(nested(5_000))


# --- a named error on every other ----------------------------------------------------------------

GOOD = tensor("t", (8,))
DATA = bytes(32)
HUGE = struct.pack("<Q", 2**63)

HOSTILE: dict[str, tuple[bytes, type[ZerolayerError], str]] = {
    "empty": (b"", InputFileError, "not a GGUF file"),
    "short magic": (b"GG", InputFileError, "not a GGUF file"),
    "other format": (b"ggjt" + bytes(64), InputFileError, "not a GGUF file.*ggjt"),
    "magic only": (b"GGUF", InputFileError, "byte 4, version.*needs 4 bytes, 0 are left"),
    "version 1": (build(version=1), UnsupportedError, "version 1"),
    "version 4": (build(version=4), UnsupportedError, "version 4"),
    "big-endian": (build(version=3 << 24), UnsupportedError, "big-endian"),
    "many tensors": (build(n_tensors=2**63), InputFileError, "tensor count.*9223372036854775808"),
    "many pairs": (build(n_pairs=2**63), InputFileError, "metadata count.*9223372036854775808"),
    "one pair too many": (build(n_pairs=1) + bytes(40), InputFileError, "empty key"),
    "long key": (build((HUGE + bytes(40),)), InputFileError, "key 0.*text of 9223372036854775808"),
    "key of a gibibyte": (
        build((struct.pack("<Q", 1 << 30) + bytes(40),)), InputFileError, "text of 1073741824 b",
    ),
    "key too long": (
        build((text(b"k" * 65536) + bytes(40),)), InputFileError, "65536 bytes; at most 65535",
    ),
    "long text": (build((pair("k", STRING, HUGE),)), InputFileError, "key 'k'.*claims a text"),
    "long array": (
        build((pair("k", ARRAY, struct.pack("<IQ", F64, 2**62)),)), InputFileError, "'k'.*claims",
    ),
    "long text array": (
        build((pair("k", ARRAY, struct.pack("<IQ", STRING, 2**61) + bytes(64)),)),
        InputFileError, "key 'k'.*claims 2305843009213693952 entries",
    ),
    "long text in array": (
        build((pair("k", ARRAY, struct.pack("<IQ", STRING, 1) + struct.pack("<Q", 1 << 30)),)),
        InputFileError, r"key 'k'\[0\].*1073741824",
    ),
    "value type": (build((pair("k", 13, bytes(8)),)), InputFileError, "unknown value type 13"),
    "array type": (
        build((pair("k", ARRAY, struct.pack("<IQ", 99, 1) + bytes(9)),)),
        InputFileError, "unknown array element type 99",
    ),
    "boolean": (build((pair("k", BOOL, b"\2"),)), InputFileError, "key 'k'.*neither 0 nor 1"),
    "booleans": (
        build((pair("k", ARRAY, struct.pack("<IQ", BOOL, 2) + b"\1\2"),)),
        InputFileError, "neither 0 nor 1",
    ),
    "key not text": (build((pair(b"\xff", U8, b"\0"),)), InputFileError, "not valid UTF-8"),
    "value not text": (
        build((pair("k", STRING, text(b"\xc3")),)), InputFileError, "key 'k'.*not valid UTF-8",
    ),
    "texts not text": (
        build((pair("k", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff")),)),
        InputFileError, r"key 'k'\[0\].*not valid UTF-8",
    ),
    "key twice": (
        build((pair("k", U8, b"\0"), pair("k", U8, b"\1"))), InputFileError, "key 'k'.*twice",
    ),
    "name twice": (
        build((), (GOOD, tensor("t", (8,), offset=32)), DATA * 2), InputFileError, "'t'.*twice",
    ),
    "no name": (build((), (tensor("", (8,)), ), DATA), InputFileError, "may not be called ''"),
    "control name": (build((), (tensor("a\nb", (8,)),), DATA), InputFileError, r"called 'a\\nb'"),
    "long name": (build((), (tensor("n" * 256, (8,)),), DATA), InputFileError, "256 bytes"),
    "no dimensions": (
        build((), (tensor("t", (), n_dims=0) + bytes(8),), DATA), InputFileError, "0 dimensions",
    ),
    "five dimensions": (
        build((), (tensor("t", (1, 1, 1, 1, 1)),), DATA), InputFileError, "'t'.*5 dimensions",
    ),
    "2**32 - 1 dimensions": (
        build((), (tensor("t", (8,), n_dims=2**32 - 1),), DATA), InputFileError, "4294967295 dim",
    ),
    # 88 bytes: the size of the file that once crashed a well-known reader
    "zero dimension": (build((), (tensor("t", (0,)),))[:88], InputFileError, "impossible dim"),
    "zero of two": (build((), (tensor("t", (8, 0)),), DATA), InputFileError, "impossible dim"),
    "product overflows": (
        build((), (tensor("t", (2**32, 2**32)),), DATA), InputFileError, "impossible dim",
    ),
    "product wraps to 8": (
        build((), (tensor("t", (8, 2**61 + 1, 1, 1)),), DATA), InputFileError, "impossible dim",
    ),
    "half a block": (build((), (tensor("t", (48,), 2),), DATA), InputFileError, "'t'.*Q4_0.*48"),
    "removed type": (build((), (tensor("t", (8,), 4),), DATA), UnsupportedError, "'t'.*Q4_2"),
    "IQ2_XXS": (build((), (tensor("t", (256,), 16),), DATA), UnsupportedError, "IQ2_XXS.*Q6_K"),
    "integers": (build((), (tensor("t", (8,), 26),), DATA), UnsupportedError, "I32"),
    "unknown type": (build((), (tensor("t", (8,), 9999),), DATA), InputFileError, "type 9999"),
    "overlap": (
        build((), (GOOD, tensor("u", (8,), offset=0)), DATA * 2), InputFileError, "'u'.*overlaps",
    ),
    "hole": (
        build((), (GOOD, tensor("u", (8,), offset=64)), DATA * 3), InputFileError, "'u'.*follow",
    ),
    "hole first": (build((), (tensor("t", (8,), offset=32),), DATA * 2), InputFileError, "header"),
    "misaligned": (
        build((), (GOOD, tensor("u", (8,), offset=33)), DATA * 3), InputFileError, "'u'.*byte 129",
    ),
    "offset overflows": (
        build((), (tensor("t", (8,), offset=2**64 - 32),), DATA), InputFileError, "'t'",
    ),
    "truncated": (build((), (GOOD,), DATA[:-1]), InputFileError, "'t'.*truncated"),
    "no data": (build((), (GOOD,)), InputFileError, "'t'.*truncated"),
    "a byte more": (build((), (GOOD,), DATA + b"\0"), InputFileError, "1 bytes after 't'"),
    "a lot more": (build((), (GOOD,), DATA + bytes(9999)), InputFileError, "9999 bytes after"),
    "bytes after no tensors": (build() + bytes(100), InputFileError, "bytes after the header"),
    "alignment 0": (
        build((pair("general.alignment", U32, bytes(4)),)), InputFileError, "alignment 0",
    ),
    "alignment 24": (
        build((pair("general.alignment", U32, b"\x18\0\0\0"),)), InputFileError, "alignment 24",
    ),
    "alignment huge": (
        build((pair("general.alignment", U64, HUGE),)), InputFileError, "alignment 92233720368547",
    ),
    "alignment text": (
        build((pair("general.alignment", STRING, text("x")),)), InputFileError, "alignment 'x'",
    ),
}  # fmt: skip


@contextmanager
def bounded(seconds: float = 1.0, mebibytes: float = 8.0) -> Iterator[None]:
    """Fails when the block takes long or allocates much."""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        yield
    finally:
        took = time.perf_counter() - start
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert took < seconds, f"{took:.2f} s"
    assert peak < mebibytes * 2**20, f"{peak / 2**20:.1f} MiB"


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_headers(name: str, tmp_path: Path) -> None:
    data, kind, message = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with bounded(), pytest.raises(kind, match=f"(?s)hostile.gguf.*{message}") as error:
        read_gguf(path)
    assert error.value.next_step or "hostile.gguf" in error.value.where
    with pytest.raises(ZerolayerError):  # the front door too
        load_gguf(path)


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("absent.gguf", ".", "fifo", "loop", "a\0b"):
        with pytest.raises(InputFileError) as error:
            read_gguf(tmp_path / name)
        assert error.value.exit_code == 3


# --- fuzzing -------------------------------------------------------------------------------------


def seed_file(directory: Path, kind: str) -> bytes:
    """A small whole model: all kinds of metadata, a tokenizer of ``kind``, several formats."""
    path = directory / "seed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("seed")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(2.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(4)), "a", "b", "ab", "\u2581"]
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges(["a b"])
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([2, 3, 3, 6, 6, 6, 6, 1, 1, 1, 4])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (11, 32), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32),
              "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (32, 32),
              "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32)}  # fmt: skip
    for i, (name, shape) in enumerate(shapes.items()):
        format = gguf.GGMLQuantizationType[("Q8_0", "Q4_1", "F16")[i % 3]]
        raw = gguf.quantize(rng.standard_normal(shape).astype(np.float32), format)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=format)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def seed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("seed")
    data = seed_file(directory, request.param)
    assert load_gguf(directory / "seed.gguf").tokenizer is not None
    return data


def header_size(data: bytes, directory: Path) -> int:
    path = directory / "size.gguf"
    path.write_bytes(data)
    return min(info.offset for info in read_gguf(path).tensors.values())


def step_of(seed: bytes) -> int:
    """Every byte of one seed; of the other, which differs in its tokenizer, a sample."""
    return 7 if b"smollm" in seed else 1


def outcome(data: bytes, path: Path) -> str:
    """Loads ``data``: "ok", or the class of the documented error; anything else propagates."""
    path.write_bytes(data)
    try:
        load_gguf(path)
    except ZerolayerError as error:
        assert error.exit_code in (3, 4) and error.what
        return error.kind
    return "ok"


def test_every_truncation_is_an_error(seed: bytes, tmp_path: Path) -> None:
    """At every byte of the header, and around every tensor's end."""
    header = header_size(seed, tmp_path)
    path = tmp_path / "cut.gguf"
    ends = {len(seed) - n for n in range(1, 70)} | set(range(header, len(seed), 97))
    for end in sorted({*range(0, header, step_of(seed)), *ends}):
        assert outcome(seed[:end], path) == "input", end
    for extra in (1, 31, 32, 4096):
        assert outcome(seed + bytes(extra), path) == "input", extra


def test_every_flipped_header_byte_is_survived(seed: bytes, tmp_path: Path) -> None:
    """Most flips are errors; one in a number or a text may be another valid model."""
    header = header_size(seed, tmp_path)
    path = tmp_path / "flip.gguf"
    kinds = []
    for at in range(0, header, step_of(seed)):
        data = bytearray(seed)
        data[at] ^= 0xFF
        kinds.append(outcome(bytes(data), path))
    assert "ok" not in kinds[: 24 // step_of(seed)]  # magic, version and counts
    assert kinds.count("input") > len(kinds) // 3


EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
fuzz = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(data=st.data())
def test_fuzz_edits(seed: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Bytes overwritten, inserted and removed; interesting integers in any field."""
    raw = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(raw) - 1, 2600)))
        size = data.draw(st.sampled_from([1, 2, 4, 8]))
        value = data.draw(
            st.one_of(
                st.binary(min_size=size, max_size=size),
                st.sampled_from([(v % 2 ** (8 * size)).to_bytes(size, "little") for v in EDGES]),
            )
        )
        action = data.draw(st.sampled_from(["write", "insert", "remove"]))
        raw[at : at + (0 if action == "insert" else size)] = b"" if action == "remove" else value
    with bounded(seconds=5.0, mebibytes=32.0):
        outcome(bytes(raw), tmp_path / "fuzz.gguf")


@fuzz
@given(tail=st.binary(max_size=200))
def test_fuzz_from_the_magic(tmp_path: Path, tail: bytes) -> None:
    outcome(b"GGUF" + tail, tmp_path / "fuzz.gguf")
    outcome(b"GGUF\3\0\0\0" + tail, tmp_path / "fuzz.gguf")


def test_memory_is_bounded_by_the_file(tmp_path: Path) -> None:
    """A header of tiny strings, booleans or nested arrays stays within a small multiple."""
    n = 30_000
    bodies: dict[str, bytes] = {
        "strings": struct.pack("<IQ", STRING, n) + bytes(8 * n),
        "booleans": struct.pack("<IQ", BOOL, 8 * n) + bytes(8 * n),
        "arrays": struct.pack("<IQ", ARRAY, n) + struct.pack("<IQ", U8, 0) * n,
    }
    for name, body in bodies.items():
        path = tmp_path / "large.gguf"
        path.write_bytes(build((pair("k", ARRAY, body),)))
        with bounded(seconds=20.0, mebibytes=12.0):
            value: Any = read_gguf(path).metadata["k"]
        assert len(value) == (8 * n if name == "booleans" else n)
