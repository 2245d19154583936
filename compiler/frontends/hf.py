"""Loads a Hugging Face model directory.

In: a directory with ``config.json``, safetensors weights and ``tokenizer.json``.  Out: a
:class:`LoadedModel` whose weights are still in their files.  Next file: ``decoder.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import numpy as np
from zerolayer.runtime_stub.errors import InputFileError

from .architectures import Architecture, TensorRow
from .config import LoadedModel, ModelConfig
from .decoder import build_decoder, expected_weights
from .hf_config import find_architecture, read_config
from .hf_tokenizer import read_tokenizer
from .json_file import read_json_object
from .safetensors_file import SafetensorsFile, open_safetensors
from .sources import find_licenses, model_name, source_file
from .weights import Weight

MAX_INDEX_BYTES = 64 << 20
MAX_SHARDS = 4096
_COMPARED_BYTES = 16 << 20
_FETCH_AGAIN = "fetch the model again"


def load_hf(directory: Path) -> LoadedModel:
    """The model in ``directory``.

    Raises InputFileError for missing, damaged or contradictory files, UnsupportedError for an
    architecture, key, dtype or tokenizer without an exact implementation.
    """
    config_path = directory / "config.json"
    raw = read_json_object(config_path)
    row = find_architecture(raw, str(config_path))
    config = read_config(row, raw, str(config_path))
    tokenizer, tokenizer_files = read_tokenizer(directory, raw)
    if tokenizer.add_bos and (tokenizer.bos_id or 0) >= config.vocab_size:
        raise InputFileError(
            f"the tokenizer's BOS token {tokenizer.bos_id} is beyond the model's vocabulary of "
            f"{config.vocab_size}",
            where=str(directory),
            next_step="the tokenizer belongs to another model; " + _FETCH_AGAIN,
        )
    shards, index_files = _open_shards(directory)
    weights = _weights(row, config, shards, str(directory))
    name = model_name(directory.resolve().name)
    graph = build_decoder(config, weights, name)
    files = [
        config_path,
        *tokenizer_files,
        *index_files,
        *sorted({s.path for s in shards.values()}),
    ]
    return LoadedModel(
        name=name,
        graph=graph,
        config=config,
        tokenizer=tokenizer,
        sources=tuple(source_file(path) for path in files),
        licenses=find_licenses(directory),
        parameters=sum(weight.size for weight in weights.values()),
        source_formats=tuple((weight.name, weight.format) for weight in weights.values()),
    )


def _open_shards(directory: Path) -> tuple[dict[str, SafetensorsFile], tuple[Path, ...]]:
    """Tensor name -> the checked file that holds it, and the index file if there is one."""
    single = directory / "model.safetensors"
    index_path = directory / "model.safetensors.index.json"
    if single.is_file():
        file = open_safetensors(single)
        return dict.fromkeys(file.entries, file), ()
    if not index_path.is_file():
        pickled = sorted(p.name for p in directory.glob("*.bin")) + sorted(
            p.name for p in directory.glob("*.pt*")
        )
        raise InputFileError(
            "has no model.safetensors"
            + (
                f"; {pickled[0]} is a pickle, which can run code, and is not read"
                if pickled
                else ""
            ),
            where=str(directory),
            next_step="convert the weights to safetensors with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
        )
    where = str(index_path)
    mapping = read_json_object(index_path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(mapping, dict) or not all(_is_file_name(v) for v in mapping.values()):
        raise InputFileError(
            "must map tensor names to file names in this directory under weight_map",
            where=where,
            next_step=_FETCH_AGAIN,
        )
    names = sorted(set(mapping.values()))
    if len(names) > MAX_SHARDS:
        raise InputFileError(f"names {len(names)} files", where=where, next_step=_FETCH_AGAIN)
    opened = {name: open_safetensors(directory / name) for name in names}
    for tensor, name in mapping.items():
        if tensor not in opened[name].entries:
            raise InputFileError(
                f"tensor {tensor[:200]} is not in {name}", where=where, next_step=_FETCH_AGAIN
            )
    for name, file in opened.items():
        for tensor in file.entries:
            if mapping.get(tensor) != name:
                raise InputFileError(
                    f"tensor {tensor} in {name} is not in the index",
                    where=where,
                    next_step=_FETCH_AGAIN,
                )
    return {tensor: opened[name] for tensor, name in mapping.items()}, (index_path,)


def _is_file_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and value.endswith(".safetensors")
        and PurePosixPath(value).name == value
        and "\\" not in value
        and value.isprintable()
    )


def _weights(
    row: Architecture, config: ModelConfig, shards: Mapping[str, SafetensorsFile], where: str
) -> dict[str, Weight]:
    """Canonical name -> weight, for every tensor of the files."""
    shapes = expected_weights(config)
    table: dict[str, TensorRow] = {}
    for tensor_row in row.tensors:
        for i in range(len(config.layers)) if "{i}" in tensor_row.source else (0,):
            targets = tuple(t.replace("{i}", str(i)) for t in tensor_row.targets)
            table[tensor_row.source.replace("{i}", str(i))] = TensorRow(
                tensor_row.source, targets, tensor_row.transform
            )
    weights: dict[str, Weight] = {}
    unused: list[str] = []
    for name, file in shards.items():
        known = table.get(name.removeprefix(row.prefix))
        if known is None:
            if not name.endswith(row.buffers):
                unused.append(name)
            continue
        for weight in _transformed(file.weight(name, known.targets[0]), known, shapes):
            if weight.name in weights:
                raise InputFileError(
                    f"{weight.source} and {weights[weight.name].source} are the same weight",
                    where=where,
                    next_step=_FETCH_AGAIN,
                )
            weights[weight.name] = weight
    if unused:
        raise InputFileError(
            f"{len(unused)} tensor(s) have no use in a {row.name}: {', '.join(unused[:4])}",
            where=where,
            next_step="the configuration and the weights disagree; " + _FETCH_AGAIN,
        )
    if config.tied_embeddings and {"embed.weight", "lm_head.weight"} <= weights.keys():
        _check_tied(weights["embed.weight"], weights.pop("lm_head.weight"), where)
    return weights


_TRANSFORMS: dict[str, Callable[[Weight, str], Weight]] = {
    "": lambda weight, _name: weight,
    "transpose": Weight.transposed,
    "plus_one": Weight.plus_one,
}


def _transformed(
    weight: Weight, row: TensorRow, shapes: Mapping[str, tuple[int, ...]]
) -> list[Weight]:
    """The canonical weights that one tensor of the file holds."""
    weight = _TRANSFORMS[row.transform](weight, row.targets[0])
    if len(row.targets) == 1:
        return [weight]
    out: list[Weight] = []
    at = 0
    for target in row.targets:
        rows = shapes[target][0]
        out.append(weight.rows(at, at + rows, target))
        at += rows
    if at != weight.shape[0]:
        raise InputFileError(
            f"has {weight.shape[0]} rows, the configuration says {at}",
            where=weight.source,
            next_step="the configuration and the weights disagree; " + _FETCH_AGAIN,
        )
    return out


def _check_tied(embedding: Weight, head: Weight, where: str) -> None:
    """A stored output projection must repeat the embedding that it is tied to."""
    same = (embedding.shape, embedding.format) == (head.shape, head.format)
    if same:
        a, b = (w.tensor.numpy().reshape(-1).view(np.uint8) for w in (embedding, head))
        same = all(
            np.array_equal(a[i : i + _COMPARED_BYTES], b[i : i + _COMPARED_BYTES])
            for i in range(0, a.size, _COMPARED_BYTES)
        )
    if not same:
        raise InputFileError(
            f"{head.source} differs from {embedding.source}, but tie_word_embeddings is true",
            where=where,
            next_step="set tie_word_embeddings to what the model was trained with",
        )
