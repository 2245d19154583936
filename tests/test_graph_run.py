"""Graphs that are not language models, from the ONNX file to arrays out of the artifact."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli_run import zerolayer
from onnx import helper, numpy_helper

Shape = Sequence[int | str]
FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, Shape]],
    outputs: dict[str, Shape],
    **weights: np.ndarray,
) -> Path:
    """An ONNX file of ``nodes``; ``inputs`` are name -> (type, shape)."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info(n, FLOAT, s) for n, s in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 22)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    return path


def compile_graph(model: Path, *options: object) -> Path:
    out = model.with_suffix(".zla")
    done = zerolayer("compile", model, "--target", "x86-64-v3", "-o", out, *options)
    assert done.code == 0, done.err
    return out


def run(artifact: Path, **arrays: np.ndarray) -> subprocess.CompletedProcess[str]:
    """``artifact run``; outputs land beside it."""
    command = [sys.executable, "-I", str(artifact), "run", "--json", "--output-dir"]
    command.append(str(artifact.parent))
    for name, array in arrays.items():
        path = artifact.parent / f"in_{name}.npy"
        np.save(path, array)
        command += ["--input", f"{name}={path}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_graph_without_weights(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    model = save(tmp_path / "m.onnx", [node], {"x": (FLOAT, ["n", 20])}, {"y": ["n", 20]})
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    done = run(compile_graph(model), x=x)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.maximum(x, 0))


def test_an_input_that_no_kernel_reads_still_has_its_dimension(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Shape", ["u"], ["size"])]
    inputs: dict[str, tuple[int, Shape]] = {"x": (FLOAT, [3, 4]), "u": (FLOAT, ["q", 4])}
    model = save(tmp_path / "m.onnx", nodes, inputs, {"y": [3, 4]})
    x = np.ones((3, 4), np.float32)
    done = run(compile_graph(model), x=-x, u=np.ones((5, 4), np.float32))
    assert done.returncode == 0, done.stderr
    assert not np.load(tmp_path / "y.npy").any()


@pytest.mark.parametrize("stored", [True, False], ids=["a weight", "an input"])
def test_indices_outside_the_table_are_refused(tmp_path: Path, stored: bool) -> None:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], axis=0),
        helper.make_node("Relu", ["rows"], ["y"]),
    ]
    table = np.arange(40, dtype=np.float32).reshape(10, 4)
    inputs: dict[str, tuple[int, Shape]] = {"ids": (INT64, ["n"])}
    weights, arrays = ({"table": table}, {}) if stored else ({}, {"table": table})
    if not stored:
        inputs["table"] = (FLOAT, ["m", 4])
    artifact = compile_graph(save(tmp_path / "m.onnx", nodes, inputs, {"y": ["n", 4]}, **weights))
    done = run(artifact, ids=np.array([9, 0, 4], np.int32), **arrays)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), table[[9, 0, 4]])
    for wrong in (10, 2_000_000_000, -1):
        done = run(artifact, ids=np.array([0, wrong], np.int32), **arrays)
        assert done.returncode == 2, done.stderr
        assert f"holds {wrong}" in json.loads(done.stdout.splitlines()[-1])["what"]
        assert "rows 0 to 9" in done.stderr


@pytest.mark.parametrize(
    ("node", "outputs", "weights", "expect"),
    [
        (
            helper.make_node("LayerNormalization", ["x", "s", "b"], ["y"]),
            {"y": ["n", 8]},
            {"s": np.ones(1, np.float32), "b": np.ones(8, np.float32)},
            "a weight of shape [1] for 8 columns",
        ),
        (
            helper.make_node("LayerNormalization", ["x", "s", "b"], ["y"]),
            {"y": ["n", 8]},
            {"s": np.ones(8, np.float32), "b": np.ones(1, np.float32)},
            "a bias of shape [1] for 8 columns",
        ),
        (
            helper.make_node("LayerNormalization", ["x", "s"], ["y", "mean"]),
            {"y": ["n", 8], "mean": ["n", 1]},
            {"s": np.ones(8, np.float32)},
            "LayerNormalization with output mean",
        ),
    ],
)
def test_what_no_kernel_does_is_refused(
    tmp_path: Path,
    node: onnx.NodeProto,
    outputs: dict[str, Shape],
    weights: dict[str, np.ndarray],
    expect: str,
) -> None:
    model = save(tmp_path / "m.onnx", [node], {"x": (FLOAT, ["n", 8])}, outputs, **weights)
    done = zerolayer("compile", model, "--target", "x86-64-v3", "-o", tmp_path / "m.zla")
    done.one_error(4, expect)


def test_a_named_output_that_nobody_reads_is_left_out(tmp_path: Path) -> None:
    node = helper.make_node("LayerNormalization", ["x", "s"], ["y", "mean"])
    scale = np.linspace(1, 2, 8, dtype=np.float32)
    model = save(tmp_path / "m.onnx", [node], {"x": (FLOAT, ["n", 8])}, {"y": ["n", 8]}, s=scale)
    compile_graph(model)


@pytest.mark.parametrize("name", ["s0 + 1", "a*b", "slots", "2", 'q"*/x'])
def test_a_dimension_without_a_plain_name_is_refused(tmp_path: Path, name: str) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    model = save(tmp_path / "m.onnx", [node], {"x": (FLOAT, [name, 8])}, {"y": [name, 8]})
    done = zerolayer("compile", model, "--target", "x86-64-v3", "-o", tmp_path / "m.zla")
    done.one_error(4, "not a plain name")


def test_a_bound_for_an_unknown_dimension_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    model = save(tmp_path / "m.onnx", [node], {"x": (FLOAT, ["n", 8])}, {"y": ["n", 8]})
    options = ("--target", "x86-64-v3", "-o", tmp_path / "m.zla", "--dim")
    zerolayer("compile", model, *options, "rows=5").one_error(2, "--dim rows", "n")
    zerolayer("compile", tiny_llama, *options, "T=5").one_error(2, "--dim T")


@pytest.mark.parametrize(
    ("option", "code"),
    [
        (("--kv-dtype", "q8_0"), 4),
        (("--activations", "int8"), 4),
        (("--quantize", "int4"), 4),
        (("--screen-head", "on"), 4),
        (("--max-context", "64"), 2),
    ],
)
def test_what_only_a_language_model_has_is_refused(
    tmp_path: Path, option: tuple[str, str], code: int
) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    model = save(tmp_path / "m.onnx", [node], {"x": (FLOAT, [4, 8])}, {"y": [4, 8]})
    out = tmp_path / "m.zla"
    done = zerolayer("compile", model, "--target", "x86-64-v3", *option, "-o", out)
    done.one_error(code, option[0], "for language models")
    assert not out.exists()
