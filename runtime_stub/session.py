"""From a file to a running engine, each phase timed.

In: the artifact's path, options.  Out: :class:`Session` (artifact, facts, memory plan; then engine
and scheduler).  Next file: ``cli.py``.  The order is fixed: structure of the file, host against
``requires``, memory; only then code and weights (whose pages ``ahead.py`` may touch before).
"""

from __future__ import annotations

import os
import sys
import time

from .errors import IntegrityError, ResourceError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Optional

    from .ahead import Ahead
    from .driver_cpu import CpuEngine
    from .profile import Profile
    from .requires import Mismatch
    from .scheduler import Scheduler
    from .step import Limits
    from .text import TextCodec


#: the parts of the manifest that the loader reads, and their types; a ``None`` type may be absent.
#: The reader has proved the file's structure, but a digest is no signature: anyone can write one.
_SHAPES: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("model", (dict,)),
    ("model.parameters", (int,)),
    ("model.vocab_size", (int,)),
    ("target", (dict,)),
    ("target.requires", (dict,)),
    ("target.requires.features[]", (str,)),
    ("target.defaults", (dict, type(None))),
    ("limits", (dict,)),
    ("limits.symbols", (dict,)),
    ("memory", (dict,)),
    ("entry_points", (list,)),
    ("entry_points[]", (dict,)),
    ("entry_points[].name", (str,)),
    ("entry_points[].inputs", (list,)),
    ("entry_points[].inputs[]", (str,)),
    ("entry_points[].outputs", (list,)),
    ("entry_points[].outputs[]", (str,)),
    ("entry_points[].dims", (list, type(None))),
    ("entry_points[].dims[]", (str,)),
    ("entry_points[].calls", (list,)),
    ("entry_points[].calls[]", (dict,)),
    ("entry_points[].calls[].constants", (dict, type(None))),
    ("entry_points[].calls[].inputs", (list, type(None))),
    ("entry_points[].calls[].weight_bytes", (int,)),
    ("entry_points[].calls[].activation_bytes_per_row", (int,)),
    ("entry_points[].calls[].flops_per_row", (int,)),
    ("buffers", (list,)),
    ("buffers[]", (dict,)),
    ("buffers[].name", (str,)),
    ("buffers[].dtype", (str,)),
    ("buffers[].nbytes", (int, type(None))),
    ("buffers[].shape", (list,)),
    ("buffers[].shape[]", (int, str)),
    ("code", (dict, type(None))),
    ("tokenizer", (dict, type(None))),
    ("tokenizer.file", (str, type(None))),
    ("tokenizer.table", (dict, type(None))),
    ("tokenizer.table.file", (str, type(None))),
    ("tokenizer.chat_template", (str, type(None))),
    ("tokenizer.bos_id", (int, type(None))),
    ("tokenizer.eos_ids", (list,)),
    ("tokenizer.eos_ids[]", (int,)),
    ("tokenizer.bos_token", (str, type(None))),
    ("tokenizer.eos_token", (str, type(None))),
    ("tokenizer.generation", (dict, type(None))),
    ("golden", (str, type(None))),
    ("vendor", (list, type(None))),
    ("vendor[]", (dict,)),
    ("roofline", (dict, type(None))),
    ("roofline.calls", (list, type(None))),
    ("numerics", (dict, type(None))),
    ("options", (dict, type(None))),
    ("tools", (dict, type(None))),
)


def check_shapes(manifest: dict[str, Any], where: str) -> None:
    """IntegrityError naming the first part of the manifest that has another type than expected."""
    for path, types in _SHAPES:
        found: list[Any] = [manifest]
        for step in path.split("."):
            name = step.rstrip("[]")
            found = [f.get(name) for f in found if isinstance(f, dict)]
            for _ in range(step.count("[]")):
                found = [item for f in found if isinstance(f, list) for item in f]
        for value in found:
            if type(value) not in types:
                raise IntegrityError(
                    f"the manifest's {path} is {type(value).__name__}, not "
                    f"{' or '.join(t.__name__ for t in types)}",
                    where=where,
                    next_step="build the artifact again",
                )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(p) for p in text.split(".") if p.isdigit())


class Timings:
    """Milliseconds by phase, in order."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._last = self._start
        self.phases: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """The time since the previous mark belongs to ``name``."""
        now = time.perf_counter()
        self.phases[name] = self.phases.get(name, 0.0) + (now - self._last) * 1e3
        self._last = now

    def skip(self) -> None:
        """The time since the previous mark belongs to nobody."""
        self._last = time.perf_counter()

    def as_dict(self) -> dict[str, float]:
        return {f"{k}_ms": round(v, 3) for k, v in self.phases.items()}


def since_process_start() -> Optional[float]:
    """Seconds since the kernel started this process (10 ms steps); None when /proc is not there."""
    try:
        with open("/proc/self/stat", "rb") as f:
            ticks = int(f.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


class Session:
    """An artifact on this host.  ``mask`` hides CPU features (tests play a lesser machine);
    without ``ahead`` nothing touches the weights before :meth:`start`."""

    def __init__(self, path: str, mask: Iterable[str] = (), ahead: bool = True) -> None:
        self.timings = Timings()
        start = since_process_start()
        if start is not None:
            self.timings.phases["interpreter"] = start * 1e3
        self._ahead: Optional[Ahead] = None
        self.engine: Optional[CpuEngine] = None
        self.profile: Optional[Profile] = None
        self._codec: Optional[TextCodec] = None
        if ahead:
            from .ahead import Ahead

            self._ahead = Ahead(path)
        try:
            self._open(path, mask)
        except BaseException:
            if self._ahead is not None:
                self._ahead.close()
            raise

    def _open(self, path: str, mask: Iterable[str]) -> None:
        """The file and the host.  The modules are compiled now, while pages come."""
        from .container import open_artifact
        from .detect import host_facts
        from .memory import MemoryPlan

        self.timings.mark("loader")
        self.artifact = open_artifact(path)
        self.manifest: dict[str, Any] = self.artifact.manifest
        self.path = path
        check_shapes(self.manifest, path)
        self.timings.mark("open")
        self.facts = host_facts(mask)
        self.memory = MemoryPlan(self.manifest, self.facts)
        self.timings.mark("detect")

    # what the manifest says ---------------------------------------------------------------------

    @property
    def target(self) -> dict[str, Any]:
        target = self.manifest.get("target")
        return target if isinstance(target, dict) else {}

    @property
    def mismatches(self) -> list[Mismatch]:
        requires = self.target.get("requires")
        if not isinstance(requires, dict):
            raise IntegrityError("the manifest says not what the target requires", where=self.path)
        from .requires import compare

        return compare(requires, self.facts)

    def require_host(self) -> None:
        """HardwareMismatchError unless this host is of the kind that the artifact is for,
        ResourceError when its memory does not even hold one token.  Comes before anything is
        loaded: native code that runs out of memory ends the process without a word."""
        from .requires import refuse

        refuse(str(self.target.get("name", "?")), self.mismatches, self.facts, self.path)
        self.memory.require(1, self.path)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        settings = self.manifest.get("tokenizer") or {}
        return tuple(i for i in settings.get("eos_ids", ()) if isinstance(i, int))

    @property
    def text_needs(self) -> str:
        """The oldest Python that takes and gives text; '' when there are only token ids."""
        settings = self.manifest.get("tokenizer")
        vendor = self.manifest.get("vendor") or []
        if not settings or not (vendor or settings.get("table")):
            return ""
        if settings.get("table"):
            return "3.9"
        return max((str(v.get("min_python", "3.9")) for v in vendor), key=_version, default="3.9")

    @property
    def vocab_size(self) -> int:
        return int(self.manifest.get("model", {}).get("vocab_size", 0))

    def entry_point(self, name: str) -> dict[str, Any]:
        """The manifest's entry point; UsageError when the artifact has another kind."""
        entries = self.manifest.get("entry_points") or []
        if isinstance(entries, dict):
            entries = [dict(value, name=key) for key, value in entries.items()]
        for entry in entries:
            if entry.get("name") == name:
                return dict(entry)
        graph = any(entry.get("name") == "run" for entry in entries)
        raise UsageError(
            "this artifact is a graph, not a language model"
            if graph
            else "this artifact is a language model, not a graph",
            where=self.path,
            next_step="use run --input NAME=FILE.npy" if graph else "use generate or chat",
        )

    def calls(self, engine: CpuEngine, entry: str) -> list[dict[str, Any]]:
        """The kernel calls of an entry point, as many as the code object has."""
        calls: list[dict[str, Any]] = self.entry_point(entry).get("calls") or []
        engine.code.check_against({"n_calls": len(calls)}, self.path)
        return calls

    def limits(self) -> Limits:
        """The limits of one step; UsageError for a model that is not a language model."""
        from .step import Limits

        self.entry_point("step")
        limits = self.manifest.get("limits", {})
        try:
            names = ("max_tokens", "max_seqs", "max_logit_rows", "max_context")
            return Limits(block_size=self.memory.block_size, **{n: int(limits[n]) for n in names})
        except (KeyError, TypeError, ValueError) as e:
            raise IntegrityError(f"the manifest's limits are wrong: {e}", where=self.path) from None

    def context(self, asked: Optional[int]) -> int:
        """The longest sequence; UsageError when more is asked for than the artifact has."""
        longest = self.limits().max_context
        if asked is not None and asked > longest:
            raise UsageError(
                f"--max-context {asked} is more than the artifact's {longest}",
                where=self.path,
                next_step=f"use {longest} or less; compiled with a longer --max-context, which "
                "the model's own context bounds, it takes more",
            )
        return asked or longest

    def code_member(self) -> str:
        """The name of the code object."""
        path = (self.manifest.get("code") or {}).get("path")
        if isinstance(path, str):
            return path
        found = [n for n in self.artifact.names if n.startswith("kernels/") and n.endswith(".so")]
        if len(found) != 1:
            raise IntegrityError(
                f"the artifact has {len(found)} code objects, must have one", where=self.path
            )
        return found[0]

    # running ------------------------------------------------------------------------------------

    def threads(self, asked: Optional[int]) -> tuple[int, str]:
        """(threads, why).  One per physical core that affinity and quota leave, at most what the
        target's facts say saturates its memory."""
        facts = self.facts
        if asked is not None:
            return asked, "as asked"
        count = facts.usable_threads()
        quota = "no quota" if facts.cpu_quota is None else f"quota {facts.cpu_quota:g}"
        why = f"{facts.cores_affinity} cores, {len(facts.cpus_affinity)} CPUs allowed, {quota}"
        cap = (self.target.get("defaults") or {}).get("max_threads")
        if isinstance(cap, int) and 1 <= cap < count:
            return cap, f"{why}; memory saturates at {cap}"
        return count, why

    def start(self, kv_blocks: int, threads: int, pin: bool = False) -> CpuEngine:
        """Loads the code, maps the weights, allocates memory, creates the engine."""
        from .driver_cpu import CodeObject, CpuEngine

        self.timings.skip()
        name = self.code_member()
        code = CodeObject(self.artifact.member(name))
        expected = {
            "weights_bytes": self.memory.weights,
            "workspace_bytes": self.memory.workspace,
            "kv_block_bytes": self.memory.block_bytes,
            "kv_block_size": self.memory.block_size,
        }
        limits = self.manifest.get("limits", {})
        if any(e.get("name") == "step" for e in self.manifest["entry_points"]):
            expected["vocab_size"] = self.vocab_size
        for key in ("max_tokens", "max_seqs", "max_logit_rows"):
            if key in limits:
                expected[key] = limits[key]
        code.check_against(expected, f"{self.path}:{name}")
        self.timings.mark("code")
        weights, offset, size = None, 0, 0
        if self.memory.weights:
            weights, offset = self.artifact.map_weights(self._ahead)
            size = self.artifact.weights_size
        self.timings.mark("map_weights")
        self.engine = CpuEngine(
            code,
            weights,
            offset,
            size,
            kv_blocks=kv_blocks,
            n_threads=threads,
            cpus=self.facts.cpus_affinity[:threads] if pin else (),
        )
        self.timings.mark("create")
        cpus = self.facts.usable_cpus()
        if threads > cpus:
            which = f"{cpus} CPU{'s' if cpus > 1 else ''}"
            sys.stderr.write(
                f"note: {threads} threads are more than the {which} that this process may use: "
                "they wait for each other\n"
            )
        return self.engine

    def scheduler(
        self,
        kv_blocks: int,
        threads: int,
        *,
        pin: bool = False,
        max_context: Optional[int] = None,
        profile: Optional[Profile] = None,
    ) -> Scheduler:
        """The engine behind a scheduler with ``kv_blocks`` blocks; ``profile`` traces its steps."""
        from .scheduler import Scheduler

        limits = self.limits()
        limits.max_context = min(limits.max_context, max_context or limits.max_context)
        engine = self.start(kv_blocks, threads, pin)
        if profile is not None:  # a trace is of single steps
            step = profile.attach(engine).step
            return Scheduler(limits, kv_blocks, step, engine.copy_block)
        decode = engine.decode if engine.code.decodes else None
        return Scheduler(limits, kv_blocks, engine.step, engine.copy_block, decode)

    def kv_blocks(
        self, wanted: int, longest: int, max_context: Optional[int], kv_memory: Optional[int]
    ) -> int:
        """Blocks for ``wanted`` tokens in all, of which one sequence may need ``longest``.

        ``kv_memory`` (bytes) replaces the default, which is what is wanted or what fits.  Raises
        ResourceError with numbers when ``longest`` does not fit.
        """
        plan = self.memory
        longest = min(longest, max_context or plan.max_context, plan.max_context)
        if kv_memory is not None:
            blocks = kv_memory // plan.block_bytes
            if blocks < 1:
                raise UsageError(
                    f"--kv-memory {kv_memory} bytes is less than one KV block",
                    where=self.path,
                    next_step=f"use --kv-memory {plan.block_bytes} or more",
                )
            if blocks > plan.largest_blocks:
                from .memory import human

                raise ResourceError(
                    f"--kv-memory {kv_memory} bytes are more than is free: "
                    f"{human(plan.available)} are available, {human(plan.fixed)} of them for "
                    "weights, workspace and loader",
                    where=self.path,
                    next_step=f"use --kv-memory {plan.largest_blocks * plan.block_bytes} or less"
                    if plan.largest_blocks
                    else "free memory",
                )
            return min(blocks, (1 << 31) - 1)
        plan.require(longest, self.path)
        return max(plan.blocks_for(longest), min(plan.blocks_for(wanted), plan.largest_blocks))

    def codec(self) -> TextCodec:
        """The tokenizer, loaded when first asked for."""
        if self._codec is None:
            from .text import TextCodec

            self.timings.skip()
            self._codec = TextCodec(self.artifact)
            self.timings.mark("tokenizer")
        return self._codec

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        if self.profile is not None:
            self.profile.discard()
        if self._ahead is not None:
            self._ahead.close()
        self.artifact.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
