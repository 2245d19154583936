"""The GGUF frontend: a file becomes a graph, its description and a tokenizer.

In: the path of a ``.gguf`` file.  Out: :class:`LoadedModel`.  The file is checked by
``gguf_file.py``, named by ``gguf_architectures.py``, its text side converted by
``gguf_tokenizer.py``.  Next file: ``decoder.py``, which builds the graph.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError
from zerolayer.targets import formats

from .config import LoadedModel, ModelConfig
from .decoder import build_decoder
from .gguf_architectures import ROPE_FACTORS, read_config, weight_parts
from .gguf_file import FETCH_AGAIN, GgufFile, TensorInfo, read_gguf
from .gguf_tokenizer import read_tokenizer
from .sources import model_name, source_file
from .weights import PLAIN_FORMATS, Weight, mapped_tensor


def load_gguf(path: Path) -> LoadedModel:
    """Loads the model in the GGUF file at ``path``; tensors' bytes stay in the file.

    Raises :class:`InputFileError` for a damaged or inconsistent file and :class:`UnsupportedError`
    for an architecture, key, tensor type or tokenizer without an exact implementation.
    """
    file = read_gguf(path)
    config = read_config(file)
    weights = read_weights(file, config)
    name = _name(file)
    tokenizer = read_tokenizer(file)
    return LoadedModel(
        name=name,
        graph=build_decoder(config, weights, name),
        config=config,
        tokenizer=tokenizer,
        sources=(source_file(path),),
        licenses=_licenses(file),
        parameters=sum(weight.size for weight in weights.values()),
        source_formats=tuple((weight.name, weight.format) for weight in weights.values()),
    )


def read_weights(file: GgufFile, config: ModelConfig) -> dict[str, Weight]:
    """Every tensor of the file under its canonical name; fused tensors as slices of their rows.

    Raises :class:`InputFileError` for a tensor that the architecture has no use for.
    """
    weights: dict[str, Weight] = {}
    for info in file.tensors.values():
        if info.name in ROPE_FACTORS:
            continue  # read into the configuration
        parts = weight_parts(info.name, info.shape[0], config)
        if parts is None:
            raise InputFileError(
                f"architecture {config.architecture} has no place for a tensor of this name and "
                f"shape {list(info.shape)}",
                where=f"{file.name}: tensor {info.name!r}",
                next_step=FETCH_AGAIN,
            )
        whole = _weight(file, info, parts[0][0])
        for name, start, stop in parts:
            if name in weights:
                raise InputFileError(
                    f"it and {weights[name].source!r} are both {name}",
                    where=f"{file.name}: tensor {info.name!r}",
                    next_step=FETCH_AGAIN,
                )
            weights[name] = whole if len(parts) == 1 else whole.rows(start, stop, name)
    return weights


def _name(file: GgufFile) -> str:
    title = file.metadata.get("general.name")
    return model_name(title if isinstance(title, str) and title.strip() else file.path.stem)


def _weight(file: GgufFile, info: TensorInfo, name: str) -> Weight:
    plain = PLAIN_FORMATS.get(info.format)
    if plain is not None:
        tensor = mapped_tensor(file.path, info.offset, plain, info.shape, name)
    elif len(info.shape) == 2 and info.format in formats.FILE_FORMATS:
        stored = (info.rows, info.row_bytes)
        tensor = mapped_tensor(file.path, info.offset, ir.DataType.UINT8, stored, name)
    else:
        raise UnsupportedError(
            f"a tensor of shape {list(info.shape)} in block format {info.format}",
            where=f"{file.name}: tensor {info.name!r}",
            next_step="only matrices may be quantized; convert the model again",
        )
    return Weight(name, info.format, info.shape, tensor, info.name)


def _licenses(file: GgufFile) -> tuple[tuple[str, bytes], ...]:
    """What the file says of its license; GGUF holds no license texts."""
    lines = [
        f"{key.removeprefix('general.')}: {value}\n"
        for key, value in file.metadata.items()
        if key.startswith("general.license") and isinstance(value, str)
    ]
    return (("model-license.txt", "".join(lines).encode()),) if lines else ()
