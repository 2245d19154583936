"""ONNX files of any age load as the same function at our opset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from ort_run import run_graph
from zerolayer.compiler.frontends import load_model
from zerolayer.compiler.frontends.decoder import OPSET
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError

RNG = np.random.default_rng(3)
W = RNG.standard_normal((6, 5)).astype(np.float32)


def model(opset: int, nodes: list[Any] | None = None, **options: Any) -> Any:
    """x[B, 6] -> z: a matrix product and what ``nodes`` do with it (y -> z)."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
        + (nodes or [helper.make_node("Relu", ["y"], ["z"])]),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 6])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(W, "w")],
    )
    imports = [helper.make_opsetid("", opset), *options.pop("imports", [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, **options)


AGED = {
    "opset 9": (9, [helper.make_node("Softmax", ["y"], ["s"], axis=1),
                    helper.make_node("Unsqueeze", ["s"], ["z"], axes=[1])]),
    "opset 11": (11, [helper.make_node("Clip", ["y", "", "hi"], ["c"]),
                      helper.make_node("ReduceMean", ["c"], ["z"], axes=[1], keepdims=1)]),
    "opset 13": (13, [helper.make_node("ReduceMax", ["y"], ["m"], axes=[1]),
                      helper.make_node("Sub", ["y", "m"], ["z"])]),
    "opset 17": (17, [helper.make_node("LayerNormalization", ["y", "hi5"], ["z"], epsilon=1e-3)]),
    "opset 20": (20, [helper.make_node("Gelu", ["y"], ["z"], approximate="tanh")]),
    "opset 24": (24, [helper.make_node("Swish", ["y"], ["z"])]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(AGED))
def test_old_opsets_keep_their_meaning(name: str, tmp_path: Path) -> None:
    opset, nodes = AGED[name]
    proto = model(opset, nodes)
    proto.graph.initializer.append(numpy_helper.from_array(np.array(0.3, np.float32), "hi"))
    proto.graph.initializer.append(numpy_helper.from_array(np.full(5, 1.5, np.float32), "hi5"))
    if opset == 9:  # before IR version 4 every initializer was an input too
        proto.ir_version = 3
        for tensor in proto.graph.initializer:
            info = helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims)
            proto.graph.input.append(info)
    path = tmp_path / "Model_A.onnx"
    path.write_bytes(proto.SerializeToString())
    x = RNG.standard_normal((3, 6)).astype(np.float32)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    loaded = load_model(path)
    assert loaded.graph.opset_imports[""] == OPSET
    assert (loaded.name, loaded.config, loaded.tokenizer) == ("model-a", None, None)
    assert dict(loaded.source_formats)["w"] == "F32"
    assert [v.name for v in loaded.graph.graph.inputs] == ["x"]
    np.testing.assert_allclose(
        run_graph(loaded.graph, {"x": x})[0], session.run(None, {"x": x})[0], rtol=1e-6, atol=1e-6
    )
    for node in loaded.graph.graph:
        assert all(o.shape is not None and o.dtype is not None for o in node.outputs)


def test_functions_are_inlined(tmp_path: Path) -> None:
    function = helper.make_function(
        "own", "Twice", ["a"], ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 21)],
    )  # fmt: skip
    own = helper.make_opsetid("own", 1)
    nodes = [helper.make_node("Twice", ["y"], ["z"], domain="own")]
    proto = model(21, nodes, imports=[own], functions=[function])
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    loaded = load_model(path)
    assert [n.op_type for n in loaded.graph.graph] == ["MatMul", "Add"]
    x = np.ones((1, 6), np.float32)
    np.testing.assert_allclose(run_graph(loaded.graph, {"x": x})[0], 2 * x @ W, rtol=1e-5)


def external(tmp_path: Path, location: str, offset: int = 0, length: int | None = None) -> Path:
    """A model whose weight lies in ``location``."""
    proto = model(21)
    tensor = proto.graph.initializer[0]
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": location, "offset": offset, "length": length or len(data)}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_external_data_stays_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(64) + W.tobytes())
    loaded = load_model(external(tmp_path, "w.bin", 64))
    value = loaded.graph.graph.initializers["w"].const_value
    assert value is not None
    np.testing.assert_array_equal(value.numpy(), W)
    assert [s.name for s in loaded.sources] == ["m.onnx", "w.bin"]
    assert loaded.sources[1].size == 64 + W.nbytes


@pytest.mark.parametrize(
    "location",
    ["../w.bin", "sub/../../w.bin", "/etc/hostname", "link.bin", "a\\b", "", "a\nb", "."],
)
def test_external_data_cannot_escape(location: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (tmp_path / "w.bin").write_bytes(W.tobytes())
    (directory / "link.bin").symlink_to(tmp_path / "w.bin")
    with pytest.raises(InputFileError) as caught:
        load_model(external(directory, location))
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 119), (0, 121), (4, 120), (-8, 120), (2**62, 120)]
)
def test_external_data_must_fit(offset: int, length: int, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(W.tobytes())
    with pytest.raises(InputFileError):
        load_model(external(tmp_path, "w.bin", offset, length))


def refuse(proto: Any, path: Path) -> str:
    path.write_bytes(proto.SerializeToString())
    with pytest.raises((UnsupportedError, InputFileError)) as caught:
        load_model(path)
    return caught.value.one_line()


def test_what_is_refused_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    microsoft = helper.make_opsetid("com.microsoft", 1)
    nodes = [helper.make_node("FusedThing", ["y"], ["z"], "fast", domain="com.microsoft")]
    text = refuse(model(21, nodes, imports=[microsoft]), path)
    assert "FusedThing" in text and "com.microsoft" in text and "fast" in text
    assert "opset 27 is newer" in refuse(model(27), path)
    assert "too old" in refuse(model(6), path)
    assert "one version" in refuse(model(21, imports=[helper.make_opsetid("", 20)]), path)
    text = refuse(model(21, [helper.make_node("Nonsense", ["y"], ["z"])]), path)
    assert "Nonsense" in text
    sequence = [
        helper.make_node("SequenceConstruct", ["y", "y"], ["s"]),
        helper.make_node("ConcatFromSequence", ["s"], ["z"], axis=0),
    ]
    assert "SequenceConstruct" in refuse(model(21, sequence), path)
    broken = model(21)
    broken.graph.initializer[0].raw_data = broken.graph.initializer[0].raw_data[:-4]
    assert "w does not have the size" in refuse(broken, path)
    dangling = model(21, [helper.make_node("Relu", ["nowhere"], ["z"])])
    assert "nowhere" in refuse(dangling, path)
    cyclic = model(
        21, [helper.make_node("Add", ["y", "z"], ["q"]), helper.make_node("Relu", ["q"], ["z"])]
    )
    refuse(cyclic, path)


def test_recursive_functions_end(tmp_path: Path) -> None:
    function = helper.make_function(
        "own", "Loop", ["a"], ["b"], [helper.make_node("Loop", ["a"], ["b"], domain="own")],
        [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)],
    )  # fmt: skip
    nodes = [helper.make_node("Loop", ["y"], ["z"], domain="own")]
    own = helper.make_opsetid("own", 1)
    refuse(model(21, nodes, imports=[own], functions=[function]), tmp_path / "m.onnx")


def test_torch_export(tmp_path: Path) -> None:
    """What ``torch.onnx.export(dynamo=True)`` writes runs as the module does."""
    import warnings

    import torch

    class Mlp(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 20), torch.nn.Linear(20, 8)
            self.norm = torch.nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h: torch.Tensor = self.down(torch.nn.functional.silu(self.up(self.norm(x))))
            return x + h

    torch.manual_seed(0)
    module, x = Mlp().eval(), torch.randn(3, 8)
    path = tmp_path / "mlp.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (x,), path, dynamo=True, verbose=False,
            dynamic_shapes=({0: torch.export.Dim("B")},),
        )  # fmt: skip
    loaded = load_model(path)
    assert loaded.parameters == sum(p.numel() for p in module.parameters())
    many = torch.randn(7, 8)
    got = run_graph(loaded.graph, {"x": many.numpy()})[0]
    np.testing.assert_allclose(got, module(many).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_onnx_checker_accepts_what_was_loaded(tmp_path: Path) -> None:
    import onnx_ir as ir

    path = tmp_path / "m.onnx"
    path.write_bytes(model(17).SerializeToString())
    onnx.checker.check_model(ir.to_proto(load_model(path).graph), full_check=True)
