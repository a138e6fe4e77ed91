"""Nodes, edges and arguments of recorded graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.graphs import RecorderBackend

X, Y = torch.ones(4), torch.arange(4.0)
INPUTS = {"input": {"x": X, "y": Y}}


def record_of(function, names=INPUTS):
    return gk.inspect_graph(RecorderBackend().capture(function), names=names)


def edges_of(function):
    return [(edge.source, edge.target) for edge in record_of(function).edges]


def arguments(node):
    return {argument.name: argument for argument in node.arguments}


def texts(node):
    return {argument.name: argument.text for argument in node.arguments}


def test_a_node_is_an_operation():
    record = record_of(lambda: (X + 1) @ Y)
    assert [(n.index, n.kind, n.name, n.short_name, n.op) for n in record.nodes] == [
        (0, "op", "aten::add.Tensor", "add", "aten::add.Tensor"),
        (1, "op", "aten::dot", "dot", "aten::dot"),
    ]  # fmt: skip
    assert (record.backend, record.environment.device, record.memory) == ("recorder", "cpu", None)
    assert gk.GraphRecord.from_json(record.to_json()) == record


def test_arguments_have_schema_names_and_results_an_arrow():
    (node,) = record_of(lambda: torch.add(X, Y, alpha=2)).nodes
    assert texts(node) == {
        "self": "float32 [4] at x", "other": "float32 [4] at y", "alpha": "2",
        "-> 0": "float32 [4] at %0",
    }  # fmt: skip
    kinds_and_sizes = {name: (a.kind, a.size) for name, a in arguments(node).items()}
    assert kinds_and_sizes == {
        "self": ("tensor", 16), "other": ("tensor", 16), "alpha": ("value", 0),
        "-> 0": ("tensor", 16),
    }  # fmt: skip
    (pointer,) = arguments(node)["self"].pointers
    assert (pointer.address, pointer.memory, pointer.name) == (X.data_ptr(), "input", "x")
    assert pointer.size == 16


def test_a_pointer_has_the_bytes_of_its_tensor_not_of_the_memory_around_it():
    (node,) = record_of(lambda: X[:2] * Y[0].expand(2)).nodes
    sizes = {name: [p.size for p in each.pointers] for name, each in arguments(node).items()}
    assert sizes == {"self": [8], "other": [4], "-> 0": [8]}


def test_an_unnamed_tensor_is_called_by_its_operation():
    def step():
        values, indices = (X + 1).sort()
        return values[2:] * indices[2:]

    _, sort, multiplied = record_of(step).nodes
    assert texts(sort)["self"] == "float32 [4] at %0"
    assert [texts(sort)[f"-> {i}"].split(" at ")[1] for i in (0, 1)] == ["%1", "%1.1"]
    assert texts(multiplied)["self"] == "float32 [2] at %1+0x8"
    assert texts(multiplied)["other"] == "int64 [2] at %1.1+0x10"
    assert {p.memory for a in multiplied.arguments for p in a.pointers} == {"pool"}


def test_a_constant_is_external_memory():
    constant = torch.full((4,), 3.0)
    (node,) = record_of(lambda: X * constant).nodes
    assert arguments(node)["other"].pointers[0].memory == "external"


def test_weights_have_their_path_in_the_model():
    model = nn.Sequential(nn.Linear(4, 2))
    graph = RecorderBackend().capture(torch.no_grad()(lambda: model(X)))
    named = {p.name for n in gk.inspect_graph(graph, names=model).nodes for a in n.arguments
             for p in a.pointers if p.memory == "weight"}  # fmt: skip
    assert named == {"0.weight", "0.bias"}


def test_a_list_of_tensors_is_one_argument():
    (node,) = record_of(lambda: torch.cat([X, Y])).nodes
    tensors = arguments(node)["tensors"]
    assert (tensors.text, tensors.size) == ("float32 [4], float32 [4]", 32)
    assert [pointer.name for pointer in tensors.pointers] == ["x", "y"]


def test_an_empty_tensor_has_no_pointer():
    (node,) = record_of(lambda: torch.cat([X[:0], Y])).nodes
    assert [pointer.name for pointer in arguments(node)["tensors"].pointers] == ["y"]


def test_a_long_value_is_truncated():
    node = record_of(lambda: X.view(1, 1, 1, 4).repeat([1] * 60)).nodes[-1]
    texts_of = [argument.text for argument in node.arguments if argument.kind == "value"]
    assert all(len(text) <= 63 for text in texts_of)
    assert any(text.startswith("[1, 1,") and text.endswith("...") for text in texts_of)


def test_an_edge_leads_from_the_last_writer():
    def step():
        y = X + 1  # 0
        y.mul_(2)  # 1
        z = y - 1  # 2
        return y + z  # 3

    assert edges_of(step) == [(0, 1), (1, 2), (1, 3), (2, 3)]


def test_views_have_the_writer_of_their_storage():
    def step():
        y = X + 1  # 0
        y[:2].neg_()  # 1
        return y[2:] * 2  # 2

    assert edges_of(step) == [(0, 1), (1, 2)]


def test_an_argument_that_is_only_read_keeps_its_writer():
    def step():
        y, z = X + 1, X + 2  # 0, 1
        z.add_(y)  # 2
        return y * 3  # 3

    assert edges_of(step) == [(1, 2), (0, 2), (0, 3)]


def test_an_out_argument_is_written():
    def step():
        y, z = X + 1, X + 2  # 0, 1
        torch.mul(y, y, out=z)  # 2
        return z - y  # 3

    assert edges_of(step) == [(0, 2), (1, 2), (2, 3), (0, 3)]


@torch.library.custom_op("graphkit_tests::fill_all_", mutates_args=("outs",))
def fill_all_(outs: list[torch.Tensor], value: torch.Tensor) -> None:
    for out in outs:
        out.copy_(value)


def test_a_list_argument_may_be_written():
    def step():
        a, b, value = X + 1, X + 2, X + 3  # 0, 1, 2
        fill_all_([a, b], value)  # 3
        return a * value, b.neg()  # 4, 5

    assert edges_of(step) == [(0, 3), (1, 3), (2, 3), (3, 4), (2, 4), (3, 5)]


@pytest.mark.parametrize("write", [lambda y, z: y.copy_(z), lambda y, z: y.add_(other=z)])
def test_the_source_of_an_in_place_operation_keeps_its_writer(write):
    def step():
        y, z = X + 1, X + 2  # 0, 1
        write(y, z)  # 2
        return z.neg()  # 3

    assert edges_of(step)[-1] == (1, 3)


def test_the_text_of_an_argument_has_no_address():
    """Lock files are compared between processes."""
    graph = RecorderBackend().capture(lambda: torch.rand(3, generator=torch.default_generator) + 1)
    texts = [argument.text for node in gk.inspect_graph(graph).nodes for argument in node.arguments]
    assert any("Generator" in text for text in texts)
    assert not any("0x" in text for text in texts)
