"""Records of small CUDA graphs: scopes, copies, branches, child graphs, conditionals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.graphs.driver import checked, runtime

pytestmark = pytest.mark.gpu
SIZE = 8


def test_scopes_nest(kept_graph):
    x = torch.randn(8, device="cuda")

    def step():
        with gk.scope("outer"):
            y = x + 1
            with gk.scope("inner"):
                y = y * 2
        return y - 1

    where = gk.Attribution()
    record = gk.inspect_graph(kept_graph(step, where), attribution=where)
    assert [node.scope for node in record.nodes] == ["outer", "outer/inner", ""]


def test_a_copy_has_its_operands(kept_graph):
    x, y = torch.randn(1000, device="cuda"), torch.empty(1000, device="cuda")

    def step():
        y.copy_(x)
        torch.zeros(100_000, dtype=torch.uint8, device="cuda")

    record = gk.inspect_graph(kept_graph(step), names={"input": {"x": x}, "state": {"y": y}})
    copy = next(node for node in record.nodes if node.kind == "memcpy")
    assert {a.name: a.text for a in copy.arguments} == {
        "target": "y", "source": "x", "bytes": "4000",
    }  # fmt: skip


def test_a_graph_without_its_template_is_refused():
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        x.add_(1)
    with pytest.raises(gk.InspectError, match="keep_graph=True"):
        gk.inspect_graph(graph)


def test_a_graph_that_was_never_captured_is_refused():
    with pytest.raises(gk.InspectError, match="capture"):
        gk.inspect_graph(torch.cuda.CUDAGraph(keep_graph=True))


def test_parallel_branches_are_bound_by_name(kept_graph):
    x = torch.randn(1 << 20, device="cuda")
    other = torch.cuda.Stream()

    def step():
        main = torch.cuda.current_stream()
        other.wait_stream(main)
        a = x.sin()
        with torch.cuda.stream(other):
            b = x.cos()
        main.wait_stream(other)
        return a + b

    graph = kept_graph(step)
    record = gk.inspect_graph(graph, replay=graph.replay)
    assert len(record.edges) == 2
    assert record.timing.replays
    path = [record.nodes[i].short_name for i in record.timing.critical_path]
    assert len(path) == 2
    assert all(node.duration_us > 0 for node in record.nodes)


def add_to_capture(add):
    """Continue the capture after the node that ``add(graph, after)`` adds to its graph."""
    bindings = runtime()
    stream = bindings.cudaStream_t(torch.cuda.current_stream().cuda_stream)
    info = checked(bindings.cudaStreamGetCaptureInfo(stream))
    if info[1]:  # a warm-up captures nothing
        flag = bindings.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
        node = add(info[2], info[3])
        checked(bindings.cudaStreamUpdateCaptureDependencies(stream, [node], None, 1, flag))


def test_nodes_of_child_graphs_are_recorded(kept_graph):
    x = torch.zeros(64, device="cuda")
    child = kept_graph(lambda: x.add_(1))
    bindings = runtime()

    def add(graph, after):
        inner = bindings.cudaGraph_t(child.raw_cuda_graph())
        return checked(bindings.cudaGraphAddChildGraphNode(graph, after, len(after), inner))[0]

    record = gk.inspect_graph(kept_graph(lambda: (x.mul_(2), add_to_capture(add))))
    assert [node.kind for node in record.nodes] == ["kernel", "child graph", "kernel"]
    assert [node.parent for node in record.nodes] == [None, None, 1]
    assert [(edge.source, edge.target) for edge in record.edges] == [(0, 1)]


class Tiny(nn.Module):
    def forward(self, x):
        return x + 1


def test_modules_without_weights_are_named_by_their_class(kept_graph):
    x = torch.zeros(8, device="cuda")
    where, tiny = gk.Attribution(), Tiny()
    record = gk.inspect_graph(kept_graph(lambda: tiny(x), where), attribution=where)
    assert record.nodes[-1].module == "Tiny"


def test_nodes_of_conditional_bodies_are_recorded(kept_graph):
    x = torch.zeros(64, device="cuda")
    body = kept_graph(lambda: x.add_(1))
    bindings = runtime()

    def add(graph, after):
        handle = checked(bindings.cudaGraphConditionalHandleCreate(graph, 0, 1))[0]
        params = bindings.cudaGraphNodeParams()
        params.type = bindings.cudaGraphNodeType.cudaGraphNodeTypeConditional
        params.conditional.handle = handle
        params.conditional.type = bindings.cudaGraphConditionalNodeType.cudaGraphCondTypeIf
        params.conditional.size = 1
        node = checked(bindings.cudaGraphAddNode(graph, after, None, len(after), params))[0]
        inside = params.conditional.phGraph_out[0]
        inner = bindings.cudaGraph_t(body.raw_cuda_graph())
        checked(bindings.cudaGraphAddChildGraphNode(inside, None, 0, inner))
        return node

    record = gk.inspect_graph(kept_graph(lambda: (x.mul_(2), add_to_capture(add))))
    assert [node.kind for node in record.nodes] == [
        "kernel", "conditional", "child graph", "kernel",
    ]  # fmt: skip
    assert [node.parent for node in record.nodes] == [None, None, 1, 2]
    assert "CUDAFunctorOnSelf_add" in record.nodes[3].name
    pointers = [p.address for a in record.nodes[3].arguments for p in a.pointers]
    assert x.data_ptr() in pointers
