"""Records of captured graphs: nodes, origins, pointers and refused graphs."""

from __future__ import annotations

import struct
import sys

import pytest
import torch

import graphkit as gk
from graphkit.errors import InspectError
from graphkit.graphs import Attribution, RecorderBackend
from graphkit.graphs.attribution import NodeOrigin
from graphkit.graphs.walk import cuda_walk, inspect
from graphkit.graphs.walk.timing import Span
from graphkit.records import Environment

ENVIRONMENT = Environment(device="fake", torch="", triton="", cuda="", driver="", graphkit="")
POOL = (0, 7)
SEGMENT = 1 << 44


class Captured:
    """A captured graph with the handle of its template."""

    output, pool_bytes, executable_bytes, num_nodes, allocations = None, 64, 0, 0, ()

    def __init__(self, handle, *modules):
        self.handle, self.origins = handle, tuple(NodeOrigin(module=each) for each in modules)

    def raw_cuda_graph(self):
        return self.handle

    def pool(self):
        return POOL


@pytest.fixture
def allocator(monkeypatch, driver):
    """The fake driver, and an allocator with one segment in the graph's pool and one outside."""
    snapshot = [
        {"address": address, "total_size": 4096, "active_size": 512, "segment_pool_id": pool,
         "blocks": []}
        for address, pool in ((SEGMENT, POOL), (2 * SEGMENT, (0, 0)))
    ]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda *_, **__: snapshot)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(inspect, "environment", lambda _device: ENVIRONMENT)
    return driver


def test_a_kernel_node_is_described_in_full(allocator):
    model = torch.nn.Linear(2, 2)
    data = struct.pack("<QQq", model.weight.data_ptr(), SEGMENT + 256, 3)
    func = allocator.function("void ns::add<float>(float*)", (0, 24))
    node = allocator.kernel_node(func, extra=allocator.extra(data))
    record = gk.inspect_graph(
        Captured(allocator.graph(node)), names=model, name="mine", captured_at="a.py:3 in f"
    )
    assert (record.name, record.captured_at, record.backend) == ("mine", "a.py:3 in f", "cuda")
    assert record.environment == ENVIRONMENT
    (found,) = record.nodes
    assert (found.name, found.short_name) == ("void ns::add<float>(float*)", "add")
    assert [p.name for p in found.arguments[0].pointers] == ["weight", "pool+0x100"]
    assert (record.memory.pool_bytes, record.memory.graph_bytes) == (4096, 64)
    assert [segment.address for segment in record.memory.segments] == [SEGMENT]
    assert record.timing is None
    assert gk.GraphRecord.from_json(record.to_json()) == record


def test_the_kind_of_unnamed_memory_comes_from_the_driver(allocator):
    pinned = 1 << 46
    allocator.host = range(pinned, pinned + 64)
    func = allocator.function("k", (0, 8), (8, 8))
    words = (struct.pack("<Q", pinned + 8), struct.pack("<Q", pinned + 4096))
    node = allocator.kernel_node(func, pointers=allocator.parameters(*words))
    (found,) = gk.inspect_graph(Captured(allocator.graph(node))).nodes
    assert [argument.kind for argument in found.arguments] == ["pointer", "number"]
    assert found.arguments[0].text == "host memory"


def test_nodes_inside_of_a_node_have_its_origin(allocator):
    inner = allocator.graph(allocator.node("HOST"), allocator.node("EMPTY"))
    nodes = [allocator.node("EMPTY"), allocator.node("GRAPH", graph=inner), allocator.node("HOST")]
    record = gk.inspect_graph(Captured(allocator.graph(*nodes), "a", "b", "c"))
    assert [node.module for node in record.nodes] == ["a", "b", "c", "b", "b"]
    assert [node.parent for node in record.nodes] == [None, None, None, 1, 1]


def test_a_given_attribution_overrides_that_of_the_graph(allocator):
    attribution = Attribution()
    attribution.origins = [NodeOrigin(module="mine", op="aten::add", source="f.py:1", scope="s")]
    graph = Captured(allocator.graph(allocator.node("HOST"), allocator.node("HOST")), "its")
    found = gk.inspect_graph(graph, attribution=attribution).nodes
    assert [(n.module, n.op, n.source, n.scope) for n in found] == [
        ("mine", "aten::add", "f.py:1", "s"), ("", "", "", ""),
    ]  # fmt: skip


def test_edges_connect_the_nodes_of_each_graph(allocator):
    def empty():
        return allocator.node("EMPTY")

    inner = allocator.graph(empty(), empty(), edges=[(0, 1)])
    nodes = [empty(), allocator.node("GRAPH", graph=inner)]
    record = gk.inspect_graph(Captured(allocator.graph(*nodes, edges=[(0, 1, 1)])))
    assert [node.index for node in record.nodes] == list(range(4))
    assert [node.parent for node in record.nodes] == [None, None, 1, 1]
    assert {(e.source, e.target) for e in record.edges} == {(0, 1), (2, 3)}
    assert {(e.source, e.target) for e in record.edges if e.kind == "programmatic"} == {(0, 1)}


def test_replays_are_measured(allocator, monkeypatch):
    node = allocator.kernel_node(allocator.function("k"), grid=(2, 1, 1))
    asked = []

    def launches(replay):
        asked.append(("profiled", replay))
        return [[Span("k", (2, 1, 1), 0, 1000)], [Span("k", (2, 1, 1), 0, 3000)]] * 2

    def unprofiled_us(replay):
        asked.append(("unprofiled", replay))
        return 1.5

    monkeypatch.setattr(cuda_walk, "profile_launches", launches)
    monkeypatch.setattr(cuda_walk, "unprofiled_us", unprofiled_us)
    graph, replay = Captured(allocator.graph(node)), print
    record = gk.inspect_graph(graph, replay=replay)
    assert asked == [("unprofiled", replay), ("profiled", replay)], (
        "a profiler slows down all later launches"
    )
    assert record.timing.unprofiled_us == 1.5
    assert record.nodes[0].duration_us == 2.0
    assert (record.timing.replays, record.timing.critical_path) == (4, (0,))


class Raises:
    """A graph that did not keep its template."""

    def raw_cuda_graph(self):
        raise RuntimeError("You cannot access the raw graph unless keep_graph was set.\nStack: ...")


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (Raises(), r"a Raises: You cannot access .* was set\. Make it with .*keep_graph=T"),
        (object(), r"a object: 'object' object has no attribute 'raw_cuda_graph'"),
        (None, r"a NoneType: .*torch\.cuda\.CUDAGraph\(keep_graph=True\) and capture first"),
    ],
)
def test_a_graph_without_a_template_is_refused(driver, graph, text):
    with pytest.raises(InspectError, match=text) as caught:
        gk.inspect_graph(graph)
    assert "Stack" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"weight": 3}, r"names\['weight'\] must be tensors by name, got 3"),
        ({"input": {"ids": 3}}, r"names\['input'\] must be tensors by name, got \{'ids': 3\}"),
    ],
)
def test_names_are_tensors_by_kind_and_name(names, text):
    graph = RecorderBackend().capture(lambda: torch.ones(2) + 1)
    with pytest.raises(InspectError, match=text):
        gk.inspect_graph(graph, names=names)


def test_missing_bindings_are_reported_with_their_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(InspectError, match=r"graphkit-cuda\[cuda\]"):
        gk.inspect_graph(Captured(1))


def test_a_closed_recorded_graph_is_refused():
    graph = RecorderBackend().capture(lambda: torch.ones(2) + 1, Attribution())
    graph.close()
    with pytest.raises(InspectError, match=r"a closed graph\. Inspect it before close"):
        gk.inspect_graph(graph)


def test_timestamps_of_the_recorder_are_switched_off_again():
    x = torch.ones(3)
    graph = RecorderBackend().capture(lambda: (x + 1) * 2)
    calls = []

    def replay():
        calls.append(graph.timestamps)
        graph.replay()

    record = gk.inspect_graph(graph, replay=replay)
    assert record.timing.replays == 3
    assert [each is None for each in calls] == [True] * 3 + [False] * 3
    assert record.timing.unprofiled_us > 0
    assert all(node.duration_us > 0 for node in record.nodes)
    assert graph.timestamps is None

    def fails():
        graph.replay()
        raise KeyError("replay")

    with pytest.raises(KeyError):
        gk.inspect_graph(graph, replay=fails)
    assert graph.timestamps is None


def test_a_replay_that_runs_another_graph_gives_no_times():
    graph = RecorderBackend().capture(lambda: torch.ones(3) + 1)
    assert gk.inspect_graph(graph, replay=lambda: None).timing is None
