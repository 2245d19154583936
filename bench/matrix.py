"""What is measured: the peers, the suites, and the lines of the table with what each must reach.

In: nothing.  Out: :data:`PEERS`, :data:`SUITES`, :data:`LINES`.  Next file: ``measure.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

OURS = "zerolayer"


@dataclass(frozen=True)
class Peer:
    """How a peer is installed and run; its environment is ``venv`` in the peers' folder, made from
    the same Python as all, with nothing else in it."""

    venv: str
    runner: str
    install: tuple[str, ...]  # arguments of pip install
    environment: tuple[tuple[str, str], ...] = ()


PEERS = {
    OURS: Peer("venv-zerolayer", "ours.py", ()),
    "llama.cpp": Peer(
        "venv-llamacpp",
        "llamacpp.py",
        ("--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),
        (("CMAKE_ARGS", "-DGGML_NATIVE=ON -DGGML_BLAS=OFF"),),
    ),
    "OpenVINO": Peer("venv-openvino", "ov.py", ("openvino-genai==2026.4.1.0",)),
    "ONNX Runtime": Peer("venv-ort", "ort.py", ("onnxruntime-genai==0.18.0",)),
}
"""The first is this project, whose environment stays empty: a deployment host has only Python.  The
others come with the command that installs them."""

CONVERTERS = {
    "venv-conv-ov": ("torch==2.13.0", "optimum-intel[openvino]", "nncf"),
    "venv-conv-ort": (
        "torch==2.13.0",
        "onnxruntime-genai==0.18.0",
        "transformers==5.24.0",
        "onnx==1.23.2",
        "onnx-ir==1.1.0",
    ),
}
"""Environments that only convert models, and what pip installs into them."""


@dataclass(frozen=True)
class System:
    """A peer with a model; ``bits`` is the class of weights: 4, 8 or 16."""

    peer: str
    label: str
    model: str  # under the peers' models; for this project the GGUF file that is compiled
    bits: int
    options: tuple[str, ...] = ()  # of zerolayer compile
    kv: str = ""  # what the KV cache keeps, where it is not the peer's default; in no line

    @property
    def name(self) -> str:
        return f"{self.peer} {self.label}"

    @property
    def artifact(self) -> str:
        """File name of the compiled model."""
        stem = self.model.removesuffix(".gguf")
        return "-".join([stem, *(o for o in self.options if o[:2] != "--")]) + ".zla"


@dataclass(frozen=True)
class Suite:
    """Systems that are run in turn, each in a new process."""

    name: str
    title: str
    threads: int
    prompt: int
    new: int
    batch: int
    systems: tuple[System, ...]
    keep_state: bool = False  # the peer's prompt KV is read from a file after the first run
    text: int = 0  # words of the models, whose prompts are text; 0: pseudo-random ids
    vocabulary: int = 0  # of pseudo-random ids, where it is smaller than their usual one
    drawn: bool = False  # decode pseudo-random ids, not the tokens chosen; this project only
    steps: bool = False  # also the time of a decode step inside the kernels; this project only

    def arguments(self) -> list[str]:
        """Options of a runner."""
        values = {"prompt": self.prompt, "new": self.new, "threads": self.threads}
        values["batch"] = self.batch
        if self.vocabulary:
            values["vocabulary"] = self.vocabulary
        flags = ["--drawn"] * self.drawn + ["--steps"] * self.steps
        return [f"--{k}={v}" for k, v in values.items()] + flags


def gguf(peer: str, model: str, *kinds: str, kv: str = "") -> tuple[System, ...]:
    """The GGUF formats of a model."""
    bits = {"q4_0": 4, "q4_1": 4, "q4_k_m": 4, "q8_0": 8, "bf16": 16}
    more = f", KV {kv}" if kv else ""
    options = ("--kv-dtype", kv) if kv and peer == OURS else ()
    return tuple(
        System(peer, k.upper() + more, f"{model}-{k}.gguf", bits[k], options, kv) for k in kinds
    )


def openvino(model: str, *kinds: str) -> tuple[System, ...]:
    """OpenVINO's formats of a model."""
    bits = {"int4": 4, "int8": 8, "fp16": 16}
    return tuple(System("OpenVINO", k, f"ov-{model}-{k}", bits[k]) for k in kinds)


def ort(model: str) -> tuple[System, ...]:
    """ONNX Runtime GenAI's 4-bit format of a model."""
    return (System("ONNX Runtime", "int4", f"ort-{model}-int4", 4),)


def fused(level: str) -> System:
    """The demo model at one fusion level."""
    options = ("--fusion", level)
    return System(OURS, f"Q4_1 {level}", "smollm2-135m-q4_1.gguf", 4, options)


SMOL, TINY = "smollm2-135m", "tinyllama"
SMOL_4 = ("q4_1", "q4_0")
SMOL_ALL = (
    *gguf(OURS, SMOL, *SMOL_4, "q8_0", "bf16"),
    *gguf("llama.cpp", SMOL, *SMOL_4, "q8_0", "bf16"),
    *openvino("smollm2", "int4", "int8", "fp16"),
    *ort("smollm2"),
)
TINY_ALL = (
    *gguf(OURS, TINY, "q4_0", "q8_0", "bf16"),
    *gguf("llama.cpp", TINY, "q4_0", "q4_k_m", "q8_0", "bf16"),
    *openvino("tinyllama", "int4", "int8", "fp16"),
    *ort("tinyllama"),
)
SMOL_BATCH = (
    *gguf(OURS, SMOL, "q4_0", "q8_0"),
    *gguf("llama.cpp", SMOL, "q4_0", "q8_0"),
    *openvino("smollm2", "int4", "int8"),
    *ort("smollm2"),
)
TINY_BATCH = (
    *gguf(OURS, TINY, "q4_0", "q8_0"),
    *gguf("llama.cpp", TINY, "q4_0"),
    *openvino("tinyllama", "int4", "int8"),
    *ort("tinyllama"),
)
NARROW = tuple(s for s in TINY_ALL if s.bits < 16 and s.label != "Q4_K_M")
LONG = (
    *gguf(OURS, SMOL, *SMOL_4),
    *gguf(OURS, SMOL, "q4_0", kv="q8_0"),
    *gguf("llama.cpp", SMOL, *SMOL_4),
    *gguf("llama.cpp", SMOL, "q4_0", kv="q8_0"),
)
FUSION = (fused("conservative"), fused("balanced"), fused("aggressive"))

SMOL_WORDS, TINY_WORDS = 49152, 32000

SUITES = (
    Suite("smollm2-2", "SmolLM2-135M, 2 threads", 2, 512, 128, 1, SMOL_ALL, text=SMOL_WORDS),
    Suite("smollm2-1", "SmolLM2-135M, 1 thread", 1, 512, 64, 1, SMOL_ALL, text=SMOL_WORDS),
    Suite("tinyllama-2", "1.1B, 2 threads", 2, 512, 48, 1, TINY_ALL, text=TINY_WORDS),
    Suite("tinyllama-1", "1.1B, 1 thread", 1, 256, 24, 1, NARROW, text=TINY_WORDS),
    Suite("smollm2-batch", "SmolLM2-135M, batch 8, 2 threads", 2, 64, 64, 8, SMOL_BATCH,
          text=SMOL_WORDS),
    Suite("tinyllama-batch", "1.1B, batch 8, 2 threads", 2, 64, 24, 8, TINY_BATCH, text=TINY_WORDS),
    Suite("smollm2-8k", "SmolLM2-135M, 8k tokens of KV, 2 threads", 2, 8064, 64, 1, LONG, True,
          text=SMOL_WORDS),
    Suite("fusion", "SmolLM2-135M Q4_1 by fusion level, 2 threads", 2, 512, 128, 1, FUSION,
          text=SMOL_WORDS),
    Suite("smollm2-random", "SmolLM2-135M, 2 threads, random tokens throughout", 2, 512, 128, 1,
          gguf(OURS, SMOL, "q4_1", "q8_0"), drawn=True),
)  # fmt: skip
"""The prompts of all but the last are text.  What is decoded decides how much of an output
projection ours has to read: tokens drawn at random throughout are a bad case for it."""


@dataclass(frozen=True)
class Line:
    """One line of the table.  ``metric`` is ``decode``, ``prefill`` (tokens/s, more is better),
    ``first_token`` (seconds) or ``memory`` (bytes; less is better).  Compared are the best of ours
    and the best of the others among the systems that ``bits`` and ``model`` leave."""

    work: str
    suite: str
    metric: str
    at_least: float
    bits: tuple[int, ...] = ()  # of ours and of the peers; none: any
    peer_bits: tuple[int, ...] | None = None  # where the peers may use others
    only: str = ""  # label that both sides must have (same file)
    roof: str = ""  # "read_memory" or "int8": the measured ceiling that also counts
    roof_at_least: float = 0.0
    below: float = 0.0  # absolute bound of ours


def _threads(work: str, model: str, *args: object, **more: object) -> list[Line]:
    """The line at 2 threads and at 1."""
    return [
        Line(f"{work}, {n} thread{'s' * (n > 1)}", f"{model}-{n}", *args, **more)  # type: ignore[arg-type]
        for n in (2, 1)
    ]


READ = {"roof": "read_memory", "roof_at_least": 0.93}
INT8 = {"roof": "int8", "roof_at_least": 0.65}
SEEN = {"roof": "read_memory"}
LINES = (
    *_threads("decode, SmolLM2 Q4_1, same file", "smollm2", "decode", 3.3, only="Q4_1", **SEEN),
    *_threads("decode, SmolLM2, 4-bit", "smollm2", "decode", 2.3, (4,), **SEEN),
    *_threads("decode, SmolLM2, 8-bit", "smollm2", "decode", 1.8, (8,), **SEEN),
    *_threads("decode, SmolLM2, 16-bit", "smollm2", "decode", 1.3, (16,), **SEEN),
    *_threads("decode, 1.1B, 4-bit", "tinyllama", "decode", 1.42, (4,), **READ),
    *_threads("decode, 1.1B, 8-bit", "tinyllama", "decode", 1.3, (8,), **SEEN),
    Line("decode, 1.1B, 16-bit, 2 threads", "tinyllama-2", "decode", 1.05, (16,), **SEEN),  # type: ignore[arg-type]
    *_threads("prefill, SmolLM2, 4-bit", "smollm2", "prefill", 1.6, (4,), **INT8),
    *_threads("prefill, SmolLM2, 8-bit", "smollm2", "prefill", 1.6, (8,), **INT8),
    *_threads("prefill, 1.1B, 4-bit", "tinyllama", "prefill", 1.3, (4,), **INT8),
    *_threads("prefill, 1.1B, 8-bit", "tinyllama", "prefill", 1.3, (8,), **INT8),
    Line("decode, batch 8, SmolLM2", "smollm2-batch", "decode", 2.0),
    Line("decode, batch 8, 1.1B", "tinyllama-batch", "decode", 1.5),
    Line("decode at 8k tokens of KV, SmolLM2", "smollm2-8k", "decode", 1.5),
    Line("start to first token, SmolLM2", "smollm2-2", "first_token", 3.0, below=0.1),
    Line("start to first token, 1.1B", "tinyllama-2", "first_token", 3.0),
    Line("peak memory, SmolLM2 Q4_1", "smollm2-2", "memory", 1.0, only="Q4_1"),
    Line("peak memory, 1.1B, 4-bit", "tinyllama-2", "memory", 1.0, (4,)),
)
