"""Executes a graph, before or after any pass, with onnxruntime: the oracle.

In: an ``onnx_ir.Model`` and numpy feeds.  Out: numpy arrays by value name.  Next file:
``feeds.py``.

Weights are never copied into the model that onnxruntime gets: they become inputs, given as numpy
arrays, so that a model of any size runs.  With ``fold_weights`` (default) a weight is decoded by
numpy (``targets/formats.py``) and ``Linear_Q4_1_int8`` runs as ``Linear_F32_int8``: the same
numbers, faster.  Without it the operators' own bodies decode the raw bytes.

:func:`run_layerwise` runs layer by layer with one layer's weights in memory at a time, and builds
one session per distinct structure of a layer instead of one for the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from zerolayer.runtime_stub.errors import InputFileError
from zerolayer.targets import formats as weight_formats
from zerolayer.targets.program import EMBEDS

from . import domain
from .places import layer_of, needed_nodes, residual_taps

if TYPE_CHECKING:
    import onnxruntime as ort  # in functions: a compile whose verdict is cached runs nothing

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]

#: initializers of at most this many elements (shapes, axes, scalars) stay constants of the model
_SMALL = 16


@dataclass(frozen=True)
class _Weight:
    """An initializer as an input; ``format`` is what to decode it from, empty to pass it as is."""

    value: ir.Value
    format: str

    def load(self) -> ort.OrtValue:
        tensor = self.value.const_value
        if tensor is None:
            raise InputFileError("the weight has no data", where=self.value.name or "")
        array = tensor.numpy()
        if self.format:
            return _ort_value(dequantize_tensor(array, self.format))
        return _ort_value(array)


class WeightCache:
    """Decoded weights kept between executions of related graphs, up to ``limit`` bytes."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self._left = limit
        # The tensor itself is kept too: an id is only unique among living objects.
        self._kept: dict[tuple[int, str], tuple[object, ort.OrtValue]] = {}

    def load(self, weight: _Weight) -> ort.OrtValue:
        tensor = weight.value.const_value
        key = (id(tensor), weight.format)
        found = self._kept.get(key)
        if found is not None:
            return found[1]
        loaded = weight.load()
        size = loaded.tensor_size_in_bytes()
        if size <= self._left:
            self._left -= size
            self._kept[key] = (tensor, loaded)
        return loaded


def dequantize_tensor(array: Array, format: str) -> npt.NDArray[np.float32]:
    """A stored weight (raw bytes, or FLOAT / FLOAT16 / BFLOAT16 elements) as float32."""
    if format in weight_formats.FORMATS:
        return weight_formats.dequantize(format, array)
    if weight_formats.SAME_VALUES.get(format, format) == "BF16":
        bits = np.ascontiguousarray(array).view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return np.asarray(array, dtype=np.float32)


def _ort_value(array: Array) -> ort.OrtValue:
    import onnxruntime as ort

    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
            array.view(np.uint16), onnx.TensorProto.BFLOAT16
        )
    return ort.OrtValue.ortvalue_from_numpy(array)


@dataclass
class _Part:
    """A piece of a graph as a self-contained ONNX model plus the weights it takes as inputs."""

    proto: onnx.ModelProto
    weights: dict[str, _Weight]  # input name -> weight
    inputs: dict[str, str]  # the other inputs: name in the model -> name in the whole graph
    outputs: list[str]


@cache
def _function_proto(op_type: str) -> onnx.FunctionProto:
    return ir.serde.serialize_function(domain.function(op_type))


def _no_rename(name: str) -> str:
    return name


class _PartBuilder:
    """Cuts the nodes between ``given`` and ``outputs`` out of a graph."""

    def __init__(
        self,
        model: ir.Model,
        given: frozenset[ir.Value],
        fold_weights: bool,
        rename: Callable[[str], str] = _no_rename,
    ) -> None:
        self.model = model
        self.given = given
        self.fold = fold_weights
        self.rename = rename
        self.weights: dict[str, _Weight] = {}
        self.inputs: dict[str, ir.Value] = {}
        self.constants: dict[str, ir.Value] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.functions: set[str] = set()

    def build(self, outputs: Sequence[ir.Value]) -> _Part:
        for node in needed_nodes(self.model.graph, outputs, self.given):
            self._node(node)
        rename = self.rename
        proto = onnx.ModelProto(ir_version=min(self.model.ir_version, onnx.IR_VERSION))
        for name, version in {"": domain.OPSET, **self.model.graph.opset_imports}.items():
            proto.opset_import.add(domain=name, version=version)
        if self.functions and domain.DOMAIN not in self.model.graph.opset_imports:
            proto.opset_import.add(domain=domain.DOMAIN, version=domain.DOMAIN_VERSION)
        graph = proto.graph
        graph.name = "part"
        graph.node.extend(self.nodes)
        for name, value in self.inputs.items():
            graph.input.append(_value_info(name, value))
        for name, weight in self.weights.items():
            dtype = ir.DataType.FLOAT if weight.format else weight.value.dtype
            assert dtype is not None
            graph.input.append(onnx.helper.make_tensor_value_info(name, int(dtype), None))
        for name, value in self.constants.items():
            assert value.const_value is not None
            tensor = ir.serde.serialize_tensor(value.const_value)
            tensor.name = name
            graph.initializer.append(tensor)
        names = [rename(v.name or "") for v in outputs]
        made = {o for n in self.nodes for o in n.output}
        for name, value in zip(names, outputs, strict=True):
            if name in self.weights or name not in made:
                raise InputFileError(f"{name} is not computed by the graph", where=graph.name)
            graph.output.append(_value_info(name, value))
        for op_type in sorted(self.functions):
            proto.functions.append(_function_proto(op_type))
        for function in self.model.functions.values():
            if function.domain != domain.DOMAIN:
                proto.functions.append(ir.serde.serialize_function(function))
        inputs = {name: value.name or "" for name, value in self.inputs.items()}
        return _Part(proto, self.weights, inputs, names)

    def _node(self, node: ir.Node) -> None:
        if self._is_folded_view(node):
            return
        proto = ir.serde.serialize_node(node)
        op_type = node.op_type
        formats: dict[int, str] = {}  # input index -> format of the weight to decode
        if node.domain == domain.DOMAIN:
            sig = domain.parse(op_type)
            names = [n.rstrip("?") for n in domain.input_names(op_type)]
            at = [names.index(w) for w in domain.OPERATORS[sig.base].weights]
            stored = all((v := node.inputs[i]) is not None and v.is_initializer() for i in at)
            if self.fold and stored and sig.base not in (*EMBEDS, "Dequantize"):
                formats = dict(zip(at, sig.formats, strict=True))
                plain = ["F32"] * len(at)
                op_type = domain.op_name(sig.base, plain, sig.activations, sig.variant)
            self.functions.add(op_type)
            proto.op_type = op_type
        for i, value in enumerate(node.inputs):
            if value is not None:
                proto.input[i] = self._input(value, formats.get(i, ""))
        for i, output in enumerate(node.outputs):
            proto.output[i] = self.rename(output.name or "")
        proto.name = self.rename(node.name or "")
        del proto.metadata_props[:]
        proto.ClearField("doc_string")
        self.nodes.append(proto)

    def _is_folded_view(self, node: ir.Node) -> bool:
        """Whether a node is ``Cast`` or ``Dequantize_F`` of an initializer, decoded by numpy."""
        return self.fold and bool(_view_format(node))

    def _input(self, value: ir.Value, format: str) -> str:
        name = self.rename(value.name or "")
        producer = value.producer()
        if value in self.given:
            self.inputs[name] = value
        elif producer is not None:
            view = _view_format(producer) if self.fold else ""
            if view:
                weight = producer.inputs[0]
                assert weight is not None
                self.weights[name] = _Weight(weight, view)
        elif value.is_initializer():
            if format and format != "F32":
                name = f"{name}.f32"
                self.weights[name] = _Weight(value, format)
            elif _is_small(value):
                self.constants[name] = value
            else:
                self.weights[name] = _Weight(value, "")
        else:
            self.inputs[name] = value
        return name


def _view_format(node: ir.Node) -> str:
    """The format that a node decodes an initializer from, or empty."""
    if len(node.inputs) != 1 or node.inputs[0] is None or not node.inputs[0].is_initializer():
        return ""
    weight = node.inputs[0]
    if node.domain == domain.DOMAIN:
        sig = domain.parse(node.op_type)
        return sig.formats[0] if sig.base == "Dequantize" else ""
    if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT:
        plain = {ir.DataType.FLOAT16: "F16", ir.DataType.BFLOAT16: "BF16"}
        return plain.get(weight.dtype, "") if weight.dtype is not None else ""
    return ""


def _value_info(name: str, value: ir.Value) -> onnx.ValueInfoProto:
    dtype = value.dtype if value.dtype is not None else ir.DataType.FLOAT
    shape = None if value.shape is None else [None] * len(value.shape)
    return onnx.helper.make_tensor_value_info(name, int(dtype), shape)


def _session(proto_bytes: bytes) -> ort.InferenceSession:
    import onnxruntime as ort

    options = ort.SessionOptions()
    # The oracle runs the graph as written; nothing may be fused or folded behind its back.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    return ort.InferenceSession(proto_bytes, options, providers=["CPUExecutionProvider"])


def _run(
    session: ort.InferenceSession,
    part: _Part,
    weights: Mapping[str, ort.OrtValue],
    feeds: Feeds,
) -> dict[str, Array]:
    missing = [name for name in part.inputs.values() if name not in feeds]
    if missing:
        raise InputFileError(f"no feed for the graph's input {', '.join(missing)}")
    given = {name: _ort_value(np.asarray(feeds[at])) for name, at in part.inputs.items()}
    results = session.run_with_ort_values(part.outputs, {**given, **weights})
    return {n: r.numpy() for n, r in zip(part.outputs, results, strict=True)}


def values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    """Every value that an input, an initializer or a node of ``graph`` makes."""
    found = {v.name or "": v for v in (*graph.inputs, *graph.initializers.values())}
    for node in graph:
        found.update({v.name or "": v for v in node.outputs})
    return found


def graph_without_weights(model: ir.Model) -> onnx.ModelProto:
    """``model`` as a protobuf whose weights (over 16 elements) are inputs instead of data."""
    graph = model.graph
    proto = onnx.ModelProto(ir_version=model.ir_version, producer_name="zerolayer")
    for name, version in graph.opset_imports.items():
        proto.opset_import.add(domain=name, version=version)
    for function in model.functions.values():
        proto.functions.append(ir.serde.serialize_function(function))
    out = proto.graph
    out.name = graph.name or "graph"
    out.node.extend(ir.serde.serialize_node(n) for n in graph)
    out.input.extend(ir.serde.serialize_value(v) for v in graph.inputs)
    for value in graph.initializers.values():
        if value.const_value is not None and _is_small(value):
            tensor = ir.serde.serialize_tensor(value.const_value)
            tensor.name = value.name or ""
            out.initializer.append(tensor)
        else:
            info = ir.serde.serialize_value(value)
            del info.metadata_props[:]
            out.input.append(info)
    out.output.extend(ir.serde.serialize_value(v) for v in graph.outputs)
    made = {v.name for v in graph.outputs}
    out.value_info.extend(
        ir.serde.serialize_value(v)
        for n in graph
        for v in n.outputs
        if v.name not in made and v.dtype is not None
    )
    return proto


def _is_small(value: ir.Value) -> bool:
    shape = value.shape
    return shape is not None and shape.is_static() and math.prod(shape.numpy()) <= _SMALL


class Executable:
    """A graph ready to run many times; its weights stay decoded in memory."""

    def __init__(
        self, model: ir.Model, outputs: Iterable[str] | None = None, *, fold_weights: bool = True
    ) -> None:
        if outputs is None:
            wanted = list(model.graph.outputs)
        else:
            values = values_by_name(model.graph)
            wanted = [values[name] for name in outputs]
        self._part = _PartBuilder(model, frozenset(), fold_weights).build(wanted)
        self._session = _session(self._part.proto.SerializeToString())
        cache = WeightCache(1 << 62)
        self._weights = {name: cache.load(w) for name, w in self._part.weights.items()}

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Outputs by name.  Feeds that the graph does not read are ignored."""
        return _run(self._session, self._part, self._weights, feeds)


def run(
    model: ir.Model,
    feeds: Feeds,
    outputs: Iterable[str] | None = None,
    *,
    fold_weights: bool = True,
) -> dict[str, Array]:
    """Execute ``model`` once: outputs (or the values named by ``outputs``) by name.

    Raises InputFileError for a missing feed or a name that the graph does not compute.
    """
    return Executable(model, outputs, fold_weights=fold_weights).run(feeds)


def _layer_names(layer: int | None, tap: str) -> Callable[[str], str]:
    """Names without the layer's number, so that layers of one structure are one model."""
    prefixes = {f"layers.{layer}.": "layers.N.", f"k_cache.{layer}": "k_cache.N",
                f"v_cache.{layer}": "v_cache.N"}  # fmt: skip

    def rename(name: str) -> str:
        if name == tap:
            return "residual"
        for prefix, neutral in prefixes.items():
            if name.startswith(prefix):
                return neutral + name[len(prefix) :]
        return name

    return rename


def run_layerwise(
    model: ir.Model,
    feeds: Sequence[Feeds],
    *,
    fold_weights: bool = True,
    cache: WeightCache | None = None,
) -> list[dict[str, Array]]:
    """Execute a decoder on several feeds at once, one layer in memory at a time.

    Per feed: every residual tap (``residual_taps(model)``) and every graph output by name.  Peak
    memory is one layer's float32 weights (or the output projection's) plus the taps, and what
    ``cache`` keeps.
    """
    graph = model.graph
    taps = residual_taps(model)
    values = values_by_name(graph)
    results: list[dict[str, Array]] = [{} for _ in feeds]
    sessions: dict[bytes, ort.InferenceSession] = {}
    side: dict[int, list[ir.Value]] = {}  # graph outputs that a layer makes (updated caches)
    last: list[ir.Value] = []
    for value in graph.outputs:
        producer = value.producer()
        layer = layer_of(producer.name) if producer is not None else None
        if layer is None:
            last.append(value)
        else:
            side.setdefault(layer, []).append(value)
    stages: list[tuple[list[ir.Value], int | None]] = [([values[taps[0]]], None)]
    stages += [([values[t], *side.get(i, [])], i) for i, t in enumerate(taps[1:])]
    stages.append((last, None))
    for step, (outputs, layer) in enumerate(stages):
        given = frozenset({values[taps[step - 1]]}) if step else frozenset()
        rename = _layer_names(layer, taps[step - 1]) if step else _no_rename
        part = _PartBuilder(model, given, fold_weights, rename).build(outputs)
        key = part.proto.SerializeToString(deterministic=True)
        if key not in sessions:
            sessions[key] = _session(key)
        load = cache.load if cache is not None else _Weight.load
        weights = {name: load(w) for name, w in part.weights.items()}
        for feed, result in zip(feeds, results, strict=True):
            inputs = {**feed, taps[step - 1]: result[taps[step - 1]]} if step else feed
            made = _run(sessions[key], part, weights, inputs)
            result.update(zip([v.name or "" for v in outputs], made.values(), strict=True))
    return results
