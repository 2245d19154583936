"""Readers of other people's model files.

In: a path.  Out: :class:`~.config.LoadedModel`.  :func:`load_model` looks at the content, not at
the name, and hands over to ``gguf.py``, ``hf.py`` or ``onnx_file.py``.  Next file: ``config.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError

if TYPE_CHECKING:
    from .config import LoadedModel

_SAFETENSORS_NEXT = "give the directory that holds config.json, tokenizer.json and the weights"
_FORMATS_NEXT = (
    "give a .gguf file, a Hugging Face directory (config.json, safetensors, tokenizer.json) "
    "or an .onnx file"
)


def load_model(path: Path) -> LoadedModel:
    """The model at ``path``: a GGUF file, a Hugging Face directory or an ONNX file.

    Raises InputFileError (missing, damaged, not a model) or UnsupportedError (a model that has no
    exact implementation), both naming the thing, the place and the next step.
    """
    # imports are local so that only the needed reader's libraries are loaded
    try:
        if path.is_dir():
            return _load_directory(path)
        if not path.is_file():
            raise InputFileError(
                "there is no such file or directory", where=str(path), next_step=_FORMATS_NEXT
            )
        with path.open("rb") as file:
            head = file.read(16)
    except (OSError, ValueError) as error:
        raise InputFileError(
            f"cannot be read: {error}",
            where=str(path),
            next_step="check the path and its permissions",
        ) from error
    if head[:4] == b"GGUF":
        from .gguf import load_gguf

        return load_gguf(path)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06") or head[:1] == b"\x80":
        raise UnsupportedError(
            "is a pickled checkpoint, which can run code when it is read",
            where=str(path),
            next_step="convert it to safetensors with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
        )
    if len(head) > 8 and head[8:9] == b"{" and head[5:8] == b"\0\0\0":
        raise InputFileError(
            "is a bare safetensors file, without the model's configuration and tokenizer",
            where=str(path),
            next_step=_SAFETENSORS_NEXT,
        )
    if path.suffix == ".onnx" or _looks_like_onnx(head):
        from .onnx_file import load_onnx

        return load_onnx(path)
    raise InputFileError(
        "is not a model file that can be read", where=str(path), next_step=_FORMATS_NEXT
    )


def _load_directory(path: Path) -> LoadedModel:
    if (path / "config.json").is_file():
        from .hf import load_hf

        return load_hf(path)
    single = sorted(p.name for p in path.iterdir() if p.suffix in (".gguf", ".onnx"))
    raise InputFileError(
        "has no config.json" + (f", but it has {single[0]}" if single else ""),
        where=str(path),
        next_step=f"give {path / single[0]}" if single else _FORMATS_NEXT,
    )


def _looks_like_onnx(head: bytes) -> bool:
    """A ModelProto begins with field 1 (ir_version, a small number) and then field 2, 3, 7 or 8."""
    return (
        len(head) > 3 and head[0] == 0x08 and head[1] < 0x20 and head[2] in (0x12, 0x1A, 0x3A, 0x42)
    )
