"""The CPU driver: opens the artifact's code object and calls it once per step.

In: the bytes of the shared object, the mapped weights, sizes from the manifest, a ``StepBatch``.
Out: the next token of each logit row; a typed error for each status.  The structures below mirror
``templates/cpu/zl_abi.h``; change one, change the other.  Next file: ``cli.py``.

Lifetime.  A :class:`CpuEngine` holds, until :meth:`CpuEngine.close`, a buffer export on the weights
(so the mapping cannot be unmapped under it), its KV pool, its workspace and the arrays of a
batch.  The code object stays loaded for the life of the process.  An engine is used by one thread
at a time.
"""

from __future__ import annotations

import ctypes
import mmap
from array import array
from contextlib import suppress

from .buffer import ReadOnlyBuffer
from .dlopen import LoadablePath
from .errors import (
    HardwareMismatchError,
    IntegrityError,
    ResourceError,
    UnsupportedError,
    UsageError,
    ZerolayerError,
)
from .step import NO_IDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Optional

    from .step import StepBatch

ABI_VERSION = 1
_HUGE_PAGE = 2 << 20

_i32 = ctypes.c_int32
_u64 = ctypes.c_uint64
_f32 = ctypes.c_float
_ptr = ctypes.c_void_p


class ModuleInfo(ctypes.Structure):
    """``zl_module_info``."""

    _fields_ = [
        ("abi_version", ctypes.c_uint32),
        ("info_bytes", ctypes.c_uint32),
        ("target", ctypes.c_char_p),
        ("model", ctypes.c_char_p),
        ("weights_bytes", _u64),
        ("workspace_bytes", _u64),
        ("kv_block_bytes", _u64),
        ("kv_block_size", _i32),
        ("max_tokens", _i32),
        ("max_seqs", _i32),
        ("max_logit_rows", _i32),
        ("vocab_size", _i32),
        ("hidden_size", _i32),
        ("n_layers", _i32),
        ("n_taps", _i32),
        ("n_calls", _i32),
    ]


class Sampling(ctypes.Structure):
    """``zl_sampling``."""

    _fields_ = [
        ("temperature", _f32),
        ("top_p", _f32),
        ("min_p", _f32),
        ("repetition_penalty", _f32),
        ("top_k", _i32),
        ("n_history", _i32),
        ("history", _ptr),
        ("seed", _u64),
        ("draw", _u64),
    ]


class Batch(ctypes.Structure):
    """``zl_batch``."""

    _fields_ = [
        ("n_tokens", _i32),
        ("n_seqs", _i32),
        ("max_blocks", _i32),
        ("n_logit_rows", _i32),
        ("tokens", _ptr),
        ("positions", _ptr),
        ("seq_starts", _ptr),
        ("block_table", _ptr),
        ("logit_rows", _ptr),
        ("sampling", _ptr),
        ("next", _ptr),
        ("logits", _ptr),
        ("taps", _ptr),
        ("call_ns", _ptr),
    ]


class Decoding(ctypes.Structure):
    """``zl_decoding``."""

    _fields_ = [
        ("n_steps", _i32),
        ("n_stops", _i32),
        ("stops", _ptr),
        ("next", _ptr),
        ("n_done", _i32),
    ]


class CreateArgs(ctypes.Structure):
    """``zl_create_args``."""

    _fields_ = [
        ("weights", _ptr),
        ("weights_bytes", _u64),
        ("kv", _ptr),
        ("kv_blocks", _u64),
        ("workspace", _ptr),
        ("workspace_bytes", _u64),
        ("n_threads", _i32),
        ("n_cpus", _i32),
        ("cpus", _ptr),
    ]


_STATUS: dict[int, tuple[type[ZerolayerError], str, str]] = {
    1: (ZerolayerError, "the code object got a bad argument", "report this as a bug"),
    2: (ResourceError, "more tokens, sequences or rows than the artifact was built for",
        "use a smaller batch"),
    3: (UsageError, "a token id is outside the model's vocabulary",
        "use ids below the vocabulary size"),
    4: (ZerolayerError, "a KV block or position is outside the pool", "report this as a bug"),
    5: (ResourceError, "the code object could not get memory", "free memory"),
    6: (ResourceError, "the code object could not start its threads",
        "use fewer --threads or raise the process limit (ulimit -u)"),
    7: (UnsupportedError, "the artifact has no such entry point", "run its 'info' command"),
    8: (HardwareMismatchError, "the kernel does not give this process the AMX tile registers",
        "needs Linux 5.16 that allows arch_prctl(ARCH_REQ_XCOMP_PERM), or another --target"),
}  # fmt: skip


def check_status(status: int, doing: str) -> None:
    """A typed error for a status other than ZL_OK."""
    if status:
        kind, what, step = _STATUS.get(
            status, (ZerolayerError, f"unknown status {status}", "report this as a bug")
        )
        raise kind(what, where=doing, next_step=step)


class Memory:
    """Anonymous memory, zeroed on first touch, huge pages where the kernel gives them.

    ``address`` is 64-byte aligned (2 MiB for large ones).  Freed by :meth:`close`.
    """

    def __init__(self, nbytes: int, what: str) -> None:
        align = _HUGE_PAGE if nbytes >= _HUGE_PAGE else 64
        try:
            self._map = mmap.mmap(
                -1, max(nbytes, 1) + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, ValueError, OverflowError):
            raise ResourceError(
                f"cannot allocate {nbytes} bytes for the {what}",
                next_step="use a smaller --max-context or free memory",
            ) from None
        if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        first = ctypes.c_char.from_buffer(self._map)
        self.address = (ctypes.addressof(first) + align - 1) & -align
        self.nbytes = nbytes
        del first

    def close(self) -> None:
        self._map.close()
        self.address = 0


class CodeObject:
    """The loaded shared object: its functions and its ``info``."""

    def __init__(self, data: bytes, name: str = "zl-code", use_memfd: bool = True) -> None:
        with LoadablePath(name, data, use_memfd) as path:
            try:
                lib = ctypes.CDLL(path)
            except OSError as e:
                raise HardwareMismatchError(
                    f"the system's loader refuses the compiled code: {e}",
                    where=name,
                    next_step="check the artifact's architecture with its 'check' command",
                ) from None
        try:
            lib.zl_info.restype = ctypes.POINTER(ModuleInfo)
            lib.zl_info.argtypes = []
            lib.zl_create.argtypes = [ctypes.POINTER(CreateArgs), ctypes.POINTER(_ptr)]
            lib.zl_step.argtypes = [_ptr, ctypes.POINTER(Batch)]
            lib.zl_run.argtypes = [_ptr, _ptr, _ptr, _ptr, _i32, _ptr]
            lib.zl_destroy.argtypes = [_ptr]
            lib.zl_destroy.restype = None
            #: whether it can make several steps in one call; compiled by an older version it cannot
            self.decodes = hasattr(lib, "zl_decode")
            if self.decodes:
                lib.zl_decode.argtypes = [_ptr, ctypes.POINTER(Batch), ctypes.POINTER(Decoding)]
            info = lib.zl_info()
        except AttributeError as e:
            raise IntegrityError(f"not a zerolayer code object: {e}", where=name) from None
        if not info or info.contents.abi_version != ABI_VERSION:
            have = info.contents.abi_version if info else "none"
            raise UnsupportedError(
                f"the compiled code has ABI version {have}, this loader speaks {ABI_VERSION}",
                where=name,
                next_step="run the artifact with its own loader",
            )
        if info.contents.info_bytes < ctypes.sizeof(ModuleInfo):
            raise IntegrityError("the module's info record is too short", where=name)
        self.lib: Any = lib
        self.info: ModuleInfo = info.contents

    def check_against(self, expected: dict[str, int], where: str = "") -> None:
        """IntegrityError when the manifest says something else than the code object."""
        for key, value in expected.items():
            have = int(getattr(self.info, key))
            if have != value:
                raise IntegrityError(
                    f"the manifest says {key} = {value}, the code object {have}",
                    where=where,
                    next_step="build the artifact again",
                )


class CpuEngine:
    """A code object with its memory and threads, ready to step.

    ``weights`` is any read-only buffer, ``weights_offset``/``weights_nbytes`` the region in it.
    ``kv_blocks`` blocks of KV are reserved (touched only when used).  ``cpus`` pins the threads.
    """

    def __init__(
        self,
        code: CodeObject,
        weights: Any,
        weights_offset: int = 0,
        weights_nbytes: int = 0,
        *,
        kv_blocks: int = 0,
        n_threads: int = 1,
        cpus: Sequence[int] = (),
    ) -> None:
        info = code.info
        self.code = code
        self.kv_blocks = kv_blocks
        self.n_threads = n_threads
        self._engine = _ptr()
        self._open: list[Any] = []
        try:
            address, nbytes = self._weights(weights, weights_offset, weights_nbytes)
            kv = self._memory(kv_blocks * info.kv_block_bytes, "KV pool")
            workspace = self._memory(info.workspace_bytes, "workspace")
            self._kv_address = kv
            pins = (_i32 * max(1, len(cpus)))(*cpus)
            args = CreateArgs(
                address, nbytes, kv or None, kv_blocks, workspace or None, info.workspace_bytes,
                n_threads, len(cpus), ctypes.addressof(pins),
            )  # fmt: skip
            status = code.lib.zl_create(ctypes.byref(args), ctypes.byref(self._engine))
            check_status(status, "creating the engine")
        except BaseException:
            self.close()
            raise
        self._batch_arrays()

    def _weights(self, weights: Any, offset: int, nbytes: int) -> tuple[Optional[int], int]:
        if weights is None:
            return None, 0
        export = ReadOnlyBuffer(weights)
        self._open.append(export)
        if offset < 0 or nbytes < self.code.info.weights_bytes or offset + nbytes > export.nbytes:
            raise IntegrityError(
                f"the code object reads {self.code.info.weights_bytes} bytes of weights, "
                f"the file has {min(nbytes, max(0, export.nbytes - offset))}"
            )
        return export.address + offset, nbytes

    def _memory(self, nbytes: int, what: str) -> int:
        if not nbytes:
            return 0
        memory = Memory(nbytes, what)
        self._open.append(memory)
        return memory.address

    def _batch_arrays(self) -> None:
        """What a step passes besides the batch's own arrays, allocated once at the artifact's
        limits.  A step's Python runs from cold caches (a step has just read all weights), so it is
        as little as can be: the batch's own arrays are passed where they are."""
        info = self.code.info
        self._most_tokens, self._most_seqs = info.max_tokens, info.max_seqs
        self._most_rows, self._block_size = info.max_logit_rows, info.kv_block_size
        s, r = max(1, info.max_seqs), max(1, info.max_logit_rows)
        self._rows = (_i32 * r)()
        self._next = (_i32 * r)()
        self._sampling = (Sampling * r)()
        self._tables = (_i32 * (s * 16))()
        self._call_ns = (_u64 * max(1, info.n_calls))()
        self._tables_view = memoryview(self._tables).cast("B").cast("i")
        self._batch = Batch(
            block_table=ctypes.addressof(self._tables),
            logit_rows=ctypes.addressof(self._rows),
            next=ctypes.addressof(self._next),
        )
        self._batch_ref = ctypes.byref(self._batch)
        self._stop_ids: Optional[frozenset[int]] = NO_IDS
        self._stops = array("i")
        self._decoded = (_i32 * 1)()
        self._decoding = Decoding()

    def _fill_tables(self, tables: Sequence[Any]) -> int:
        """Copies the ragged tables into ``[S, B]``; unused columns are -1, which the code object
        refuses to use.  Returns B."""
        columns = max(map(len, tables)) if tables else 0
        need = columns * len(tables)
        if need > len(self._tables):
            self._tables = (_i32 * (2 * need))()
            self._tables_view = memoryview(self._tables).cast("B").cast("i")
            self._batch.block_table = ctypes.addressof(self._tables)
        view = self._tables_view
        at = 0
        for table in tables:
            n = len(table)
            view[at : at + n] = table if isinstance(table, array) else array("i", table)
            if n < columns:
                view[at + n : at + columns] = array("i", (-1,)) * (columns - n)
            at += columns
        return columns

    def step(
        self, batch: StepBatch, *, logits: Any = None, taps: Any = None, timed: bool = False
    ) -> list[int]:
        """Runs one batch; returns the next token of each logit row.

        ``logits`` (float32 ``[R, vocab]``) and ``taps`` (float32 ``[n_taps, T, hidden]``, of a
        batch in which every token has a logit row) are optional writable buffers to fill.
        ``timed`` fills :attr:`call_ns`.  The batch must not change meanwhile: its tokens,
        positions and sequence starts are read where they are.
        """
        c = self._batch
        self._set_batch(batch)
        n_t, n_r = c.n_tokens, c.n_logit_rows
        c.next = ctypes.addressof(self._next)
        c.call_ns = ctypes.addressof(self._call_ns) if timed else None
        if logits is None and taps is None:
            c.logits = c.taps = None
        else:
            info = self.code.info
            c.logits = _writable(logits, 4 * n_r * info.vocab_size, "logits")
            c.taps = _writable(taps, 4 * info.n_taps * n_t * info.hidden_size, "taps")
        status = self.code.lib.zl_step(self._engine, self._batch_ref)
        if status:
            check_status(status, "step")
        chosen: list[int] = self._next[:n_r]
        return chosen

    def decode(
        self, batch: StepBatch, steps: int, stop_ids: frozenset[int] = NO_IDS
    ) -> list[list[int]]:
        """Up to ``steps`` steps in one call, each sequence fed what it chose in the step before.

        Returns the tokens of each step that was made, ``[steps][S]``: the step that chooses one of
        ``stop_ids`` for any sequence is the last.  Each sequence of the batch has one token and its
        logit row, blocks for ``steps`` more positions, and no repetition penalty.  Code of an older
        compiler makes one step.
        """
        if not self.code.decodes:
            return [self.step(batch)]
        c, d = self._batch, self._decoding
        self._set_batch(batch)
        n, size = c.n_seqs, self._block_size
        # asked of each sequence here: to the code object, all tables are as long as the longest
        for table, position in zip(batch.block_tables, batch.positions):  # noqa: B905 (Python 3.9)
            if len(table) * size < position + steps:
                check_status(4, f"{steps} steps from position {position} on")
        if n * steps > len(self._decoded):
            self._decoded = (_i32 * (2 * n * steps))()
        if stop_ids is not self._stop_ids:
            self._stop_ids = None  # until all is set: an interrupt may come between
            self._stops = array("i", stop_ids)
            d.stops, d.n_stops = self._stops.buffer_info()
            self._stop_ids = stop_ids
        d.n_steps, d.next = steps, ctypes.addressof(self._decoded)
        c.next = c.call_ns = c.logits = c.taps = None
        status = self.code.lib.zl_decode(self._engine, self._batch_ref, ctypes.byref(d))
        if status:
            check_status(status, f"step {d.n_done + 1} of {steps}")
        return [self._decoded[i : i + n] for i in range(0, d.n_done * n, n)]

    def _set_batch(self, batch: StepBatch) -> None:
        """All of ``_batch`` that comes from ``batch``."""
        c = self._batch
        n_t, n_s, n_r = len(batch.tokens), len(batch.block_tables), len(batch.rows)
        if n_t > self._most_tokens or n_s > self._most_seqs or n_r > self._most_rows:
            check_status(2, f"a step of {n_t} tokens, {n_s} sequences, {n_r} logit rows")
        if len(batch.positions) != n_t or len(batch.seq_starts) != n_s + 1:
            check_status(1, "a step whose tokens, positions and sequences do not fit together")
        c.n_tokens, c.n_seqs, c.n_logit_rows = n_t, n_s, n_r
        c.tokens = batch.tokens.buffer_info()[0]
        c.positions = batch.positions.buffer_info()[0]
        c.seq_starts = batch.seq_starts.buffer_info()[0]
        c.max_blocks = self._fill_tables(batch.block_tables)
        rows, greedy = self._rows, True
        for i, row in enumerate(batch.rows):
            rows[i] = row.row
            greedy = greedy and row.params.plain_greedy
        c.sampling = None if greedy else self._fill_sampling(batch)

    def _fill_sampling(self, batch: StepBatch) -> int:
        for i, row in enumerate(batch.rows):
            p, out = row.params, self._sampling[i]
            out.temperature, out.top_p, out.min_p = p.temperature, p.top_p, p.min_p
            out.repetition_penalty, out.top_k = p.repetition_penalty, p.top_k
            out.seed, out.draw = p.seed, row.draw
            if p.repetition_penalty != 1.0:
                out.history, out.n_history = row.history.buffer_info()
            else:
                out.history, out.n_history = None, 0
        return ctypes.addressof(self._sampling)

    @property
    def call_ns(self) -> list[int]:
        """Nanoseconds of each kernel call of the last timed step, in manifest order."""
        return list(self._call_ns[: self.code.info.n_calls])

    def run(self, inputs: Sequence[Any], outputs: Sequence[Any], dims: Sequence[int]) -> None:
        """``zl_run``: writable buffers in manifest order, ``dims`` the symbols' values."""
        addresses = [[_writable(b, 0, "run") or 0 for b in group] for group in (inputs, outputs)]
        arrays = [(_ptr * max(1, len(a)))(*a) for a in addresses]
        sizes = (ctypes.c_int64 * max(1, len(dims)))(*dims)
        status = self.code.lib.zl_run(
            self._engine, arrays[0], arrays[1], sizes, len(dims), self._call_ns
        )
        check_status(status, "run")

    @property
    def handle(self) -> ctypes.c_void_p:
        """The ``zl_engine *``, for the functions that ``laps.py`` calls."""
        return self._engine

    def copy_block(self, source: int, destination: int) -> None:
        """Copies one KV block onto another (copy-on-write of a shared, partly filled block)."""
        size = self.code.info.kv_block_bytes
        if not (0 <= source < self.kv_blocks and 0 <= destination < self.kv_blocks):
            check_status(4, "copying a KV block")
        ctypes.memmove(
            self._kv_address + destination * size, self._kv_address + source * size, size
        )

    def close(self) -> None:
        """Stops the threads, frees the memory, releases the weights.  May be called twice."""
        if self._engine:
            self.code.lib.zl_destroy(self._engine)
            self._engine = _ptr()
        while self._open:
            self._open.pop().close()

    def __enter__(self) -> CpuEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _writable(buffer: Any, nbytes: int, what: str) -> Optional[int]:
    """The address of a writable buffer of at least ``nbytes``; None for None."""
    if buffer is None:
        return None
    if isinstance(buffer, int):
        return buffer
    if isinstance(buffer, ctypes.Array):
        size, address = ctypes.sizeof(buffer), ctypes.addressof(buffer)
    else:
        view = memoryview(buffer).cast("B") if not isinstance(buffer, memoryview) else buffer
        size = view.nbytes
        address = ctypes.addressof((ctypes.c_char * size).from_buffer(view)) if size else 0
    if size < nbytes:
        raise UsageError(f"the {what} buffer has {size} bytes, needs {nbytes}")
    return address
