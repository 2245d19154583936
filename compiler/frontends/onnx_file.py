"""Loads an ONNX file.

In: a ``.onnx`` file, with its weights inside or in external files beside it.  Out: a
:class:`LoadedModel` with ``config=None``: a checked graph at our opset, functions inlined, types
and shapes inferred.  Next file: ``../passes``.

External weights stay in their files; weights inside the ``.onnx`` are in memory, where protobuf
puts them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import version_converter
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError, ZerolayerError

from .config import LoadedModel
from .decoder import IR_VERSION, OPSET
from .json_file import read_bytes
from .sources import find_licenses, model_name, source_file
from .weights import PLAIN_FORMATS, mapped_tensor

MAX_MODEL_BYTES = 2**31 - 1  # protobuf's own limit
_DOMAINS = ("", "ai.onnx")
_FORMATS = {dtype: name for name, dtype in PLAIN_FORMATS.items()}
_FETCH_AGAIN = "export or fetch the model again"


def load_onnx(path: Path) -> LoadedModel:
    """The graph in ``path``.

    Raises InputFileError for a damaged file or external data outside the model's directory,
    UnsupportedError naming the operator, opset or type that has no exact implementation.
    """
    data = read_bytes(path, MAX_MODEL_BYTES)
    quiet = [logging.getLogger(name) for name in ("onnx_ir", "onnxscript")]
    levels = [logger.level for logger in quiet]
    for logger in quiet:  # what they warn of becomes an error below
        logger.setLevel(logging.CRITICAL)
    try:
        model, files = _read(data, path)
    except ZerolayerError:
        raise
    except Exception as error:  # the libraries' own errors have no common base
        raise InputFileError(
            f"is not a valid ONNX model: {str(error)[:300] or type(error).__name__}",
            where=str(path),
            next_step=_FETCH_AGAIN,
        ) from error
    finally:
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)
    formats: list[tuple[str, str]] = []
    parameters = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in _FORMATS and len(tensor.shape):
            value.metadata_props["source"] = value.name or ""
            value.metadata_props["format"] = _FORMATS[tensor.dtype]
            formats.append((value.name or "", _FORMATS[tensor.dtype]))
            parameters += tensor.size
    return LoadedModel(
        name=model_name(path.stem),
        graph=model,
        config=None,
        tokenizer=None,
        sources=tuple(source_file(p) for p in (path, *files)),
        licenses=find_licenses(path.parent),
        parameters=parameters,
        source_formats=tuple(formats),
    )


def _read(data: bytes, path: Path) -> tuple[ir.Model, list[Path]]:
    """The checked model and the external files that it uses."""
    where = str(path)
    try:
        proto = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's errors differ between its implementations
        raise InputFileError("is not an ONNX file", where=where, next_step=_FETCH_AGAIN) from error
    proto = _raise_old_opset(proto, where)
    model = ir.from_proto(proto)
    files = _map_external(model, path)
    common.InlinePass()(model)
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    common.RemoveInitializersFromInputsPass()(model)
    common.LiftConstantsToInitializersPass()(model)
    _check_nodes(model, where)
    common.RemoveUnusedOpsetsPass()(model)
    if model.opset_imports.get("", OPSET) != OPSET:
        version_converter.convert_version(model, OPSET, fallback=False)
    if model.opset_imports.get("", OPSET) != OPSET:
        raise UnsupportedError(
            f"opset {model.opset_imports['']} cannot be converted to {OPSET}",
            where=where,
            next_step=f"export the model with opset {OPSET}",
        )
    model.ir_version = IR_VERSION
    common.NameFixPass()(model)
    common.ShapeInferencePass()(model)  # leaves the model as it is when it fails
    _check_types(model, where)
    common.CheckerPass()(model)
    return model, files


def _raise_old_opset(proto: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Models before opset 18 go through onnx's converter, which knows the changes up to there."""
    versions = [o.version for o in proto.opset_import if o.domain in _DOMAINS]
    if len(versions) != 1 or not versions[0] >= 1:
        raise InputFileError(
            "must import one version of the ONNX operators", where=where, next_step=_FETCH_AGAIN
        )
    if versions[0] > OPSET:
        raise UnsupportedError(
            f"opset {versions[0]} is newer than {OPSET}",
            where=where,
            next_step=f"export the model with opset {OPSET}",
        )
    if versions[0] >= 18:
        return proto
    external = any(t.data_location == onnx.TensorProto.EXTERNAL for t in proto.graph.initializer)
    if versions[0] < 7 or external:
        raise UnsupportedError(
            f"opset {versions[0]} is too old"
            + (" for a model with external data" if external else ""),
            where=where,
            next_step=f"export the model with opset {OPSET}",
        )
    try:
        return onnx.version_converter.convert_version(proto, 18)
    except Exception as error:  # the converter raises several types
        raise UnsupportedError(
            f"opset {versions[0]} cannot be converted to {OPSET}: {str(error)[:200]}",
            where=where,
            next_step=f"export the model with opset {OPSET}",
        ) from error


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _map_external(model: ir.Model, path: Path) -> list[Path]:
    """Replace external tensors by checked, lazily mapped ones; the sorted files they are in."""
    files: set[Path] = set()
    for node in _nodes(model):
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR and isinstance(
                attribute.value, ir.ExternalTensor
            ):
                raise UnsupportedError(
                    f"node {node.name or node.op_type} keeps a constant in external data",
                    where=str(path),
                    next_step="store the constant inside the model",
                )
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None:
                raise _damaged(path, f"initializer {value.name} has no data")
            if any(type(d) is not int or d < 0 for d in tensor.shape.dims):
                raise _damaged(path, f"initializer {value.name} has an unusable shape")
            if isinstance(tensor, ir.ExternalTensor):
                file = _external_file(tensor, path)
                files.add(file)
                shape = tuple(int(d) for d in tensor.shape.numpy())
                value.const_value = mapped_tensor(
                    file, tensor.offset or 0, tensor.dtype, shape, tensor.name
                )
            elif tensor.dtype != ir.DataType.STRING and len(tensor.tobytes()) != tensor.nbytes:
                raise _damaged(
                    path, f"initializer {value.name} does not have the size of its shape"
                )
    return sorted(files)


def _damaged(path: Path, what: str) -> InputFileError:
    return InputFileError(what, where=str(path), next_step=_FETCH_AGAIN)


def _external_file(tensor: ir.ExternalTensor, path: Path) -> Path:
    """The file of an external tensor: inside the model's directory and large enough."""
    location = str(tensor.location)
    relative = PurePosixPath(location)
    file = path.parent / relative
    if (
        not location
        or not location.isprintable()
        or "\\" in location
        or relative.is_absolute()
        or ".." in relative.parts
        or not file.resolve().is_relative_to(path.parent.resolve())
    ):
        raise InputFileError(
            f"initializer {tensor.name} keeps its data in {location[:200]!r}, "
            "outside the model's directory",
            where=str(path),
            next_step="copy the data file beside the model and name it relatively",
        )
    if not file.is_file():
        raise InputFileError(
            f"the data file {location} of initializer {tensor.name} is missing",
            where=str(path),
            next_step="fetch it too",
        )
    if tensor.dtype.bitwidth % 8:
        raise UnsupportedError(
            f"initializer {tensor.name} has type {tensor.dtype.name} in external data",
            where=str(path),
            next_step="store it inside the model",
        )
    offset, size = tensor.offset or 0, file.stat().st_size
    length = tensor.nbytes if tensor.length is None else tensor.length
    if offset < 0 or length != tensor.nbytes or offset + length > size:
        raise _damaged(
            path,
            f"initializer {tensor.name} needs {tensor.nbytes} bytes at {offset}, "
            f"has {length} in a file of {size}",
        )
    return file


def _check_nodes(model: ir.Model, where: str) -> None:
    """Every operator must be a standard one of the model's opset, and every input must exist."""
    opset = model.opset_imports.get("", OPSET)
    for node in _nodes(model):
        if node.domain not in _DOMAINS:
            raise UnsupportedError(
                f"operator {node.op_type} of domain {node.domain} "
                f"(node {node.name or '?'}) is not a standard ONNX operator",
                where=where,
                next_step="export the model without custom or runtime-specific operators",
            )
        if not onnx.defs.has(node.op_type, opset, ""):
            raise UnsupportedError(
                f"operator {node.op_type} (node {node.name or '?'}) is not in opset {opset}",
                where=where,
                next_step=_FETCH_AGAIN,
            )
        for value in node.inputs:
            if value is not None and not (
                value.producer() or value.is_graph_input() or value.is_initializer()
            ):
                raise InputFileError(
                    f"{node.op_type} (node {node.name or '?'}) reads {value.name}, "
                    "which nothing makes",
                    where=where,
                    next_step=_FETCH_AGAIN,
                )
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        for output in schema.outputs:
            if not any(kind.startswith("tensor") for kind in output.types):
                raise UnsupportedError(
                    f"operator {node.op_type} (node {node.name or '?'}) makes "
                    f"{min(output.types, default='nothing')}, not a tensor",
                    where=where,
                    next_step="export the model without sequences, optionals and maps",
                )


def _check_types(model: ir.Model, where: str) -> None:
    """Every value must be a tensor of known element type and rank."""
    for value in (*model.graph.inputs, *(o for n in model.graph.all_nodes() for o in n.outputs)):
        if not value.name and not value.uses():
            continue  # an optional output that the node does not make
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            raise UnsupportedError(
                f"value {value.name} is a {type(value.type).__name__}, not a tensor",
                where=where,
                next_step="export the model without sequences, optionals and maps",
            )
        if value.dtype is None or value.shape is None:
            raise UnsupportedError(
                f"the type or rank of value {value.name} cannot be inferred",
                where=where,
                next_step="export the model with fixed ranks",
            )
