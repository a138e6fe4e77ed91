"""Tests of the search by switched-off nodes, on simulated graphs that add to host memory."""

# ruff: noqa: N802 - names of the bindings
from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from graphkit.audit import node_switches
from graphkit.audit.audit_log import NotChecked
from graphkit.audit.node_switches import bisected
from graphkit.audit.shadow import first_results
from graphkit.audit.shadow.first_results import first_memory_difference
from graphkit.graphs import Stage
from graphkit.records import Argument, Node, Pointer

CPU = torch.device("cpu")
NODES, REFRESHING, SIZE = 9, 3, 64


class Graph:
    """A graph whose node i adds ``steps[i]`` to byte ``i % 4`` of its pool, after a refresh."""

    def __init__(self, steps, kinds=("kernel",) * NODES, size=SIZE):
        self.steps, self.pool = steps, torch.full((size,), 9, dtype=torch.uint8)
        self.enabled, self.runs = [True] * len(steps), []
        self.graph = SimpleNamespace(raw_cuda_graph=lambda: self, raw_cuda_graph_exec=lambda: self)
        self.nodes = [self._node(i, kind) for i, kind in enumerate(kinds)]

    def _node(self, index, kind):
        pointer = Pointer(address=self.pool.data_ptr() + index % 4, memory="pool", name="pool")
        argument = Argument(size=8, kind="pointer", text="pool", pointers=(pointer,))
        module = Stage.REFRESH if index < REFRESHING else ""
        return Node(
            index=index, kind=kind, name="add", short_name="add", module=module,
            arguments=(argument,),
        )  # fmt: skip

    def run(self):
        self.runs.append(sum(self.enabled))
        for i, step in enumerate(self.steps):
            if self.enabled[i]:
                self.pool[i % 4] += step


class Bindings:
    """Simulates ``cuda.bindings.runtime`` for such graphs."""

    def cudaGraphExec_t(self, graph):
        return graph

    def cudaGraph_t(self, graph):
        return graph

    def cudaGraphGetNodes(self, graph, count=0):
        return 0, list(range(count)), len(graph.steps)

    def cudaGraphNodeSetEnabled(self, graph, node, is_enabled):
        graph.enabled[node] = bool(is_enabled)
        return (0,)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Return ``device(*graphs)``, which adds their pools to the allocator."""
    pools = []
    monkeypatch.setattr(node_switches, "runtime", Bindings)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        torch.cuda,
        "memory_snapshot",
        lambda *_, **__: [
            {"address": pool.data_ptr(), "total_size": len(pool), "segment_pool_id": (0, i + 1)}
            for i, pool in enumerate(pools)
        ],
    )
    monkeypatch.setattr(
        first_results,
        "device_bytes",
        lambda address, size, device: next(p for p in pools if p.data_ptr() == address),
    )
    return lambda *graphs: pools.extend(graph.pool for graph in graphs)


def found(graphs):
    return first_memory_difference(graphs, tuple(g.nodes for g in graphs), lambda g: g.run(), CPU)


@pytest.mark.parametrize("wrong", range(REFRESHING, NODES))
def test_the_first_node_that_writes_another_value_is_found(device, wrong):
    steps = list(range(1, NODES + 1))
    graph, now = Graph(steps), Graph([*steps[:wrong], 100, *steps[wrong + 1 :]])
    device(graph, now)
    assert found((graph, now)) == wrong
    assert len(graph.runs) <= 1 + math.ceil(math.log2(NODES))
    assert min(graph.runs) >= REFRESHING  # the refresh always runs


def test_nodes_and_memory_are_restored(device):
    graph, now = Graph([1] * NODES), Graph([1] * (NODES - 1) + [2])
    device(graph, now)
    found((graph, now))
    assert all(graph.enabled)
    assert all(now.enabled)
    assert (graph.pool == 9).all()


def test_nodes_and_memory_are_restored_after_a_failed_replay(device):
    graph, now = Graph([1] * NODES), Graph([1] * NODES)
    device(graph, now)

    def rerun(graph):
        graph.run()
        graph.enabled[3] = False
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="gone"):
        first_memory_difference((graph, now), (graph.nodes, now.nodes), rerun, CPU)
    assert all(graph.enabled)
    assert (graph.pool == 9).all()


def test_equal_graphs_have_no_such_node(device):
    graph, now = Graph([1] * NODES), Graph([1] * NODES)
    device(graph, now)
    now.pool.fill_(77)  # memory that no node writes is ignored
    assert found((graph, now)) is None


class Rounding(Graph):
    """A graph with a float32 pool, whose node 4 rounds differently in each replay."""

    def run(self):
        super().run()
        numbers = self.pool.view(torch.float32)
        noise = torch.Generator().manual_seed(len(self.runs) + 1000 * self.steps[6])
        if self.enabled[4]:
            numbers[8:120] = 1 + 1e-6 * torch.rand(112, generator=noise)
        if self.enabled[6]:
            numbers[120:] = self.steps[6]


def test_a_large_difference_is_found_despite_rounding_of_many_numbers(device):
    graph, now = (Rounding([1] * 6 + [step] + [1] * 2, size=512) for step in (1, 2))
    device(graph, now)
    nodes = tuple(g.nodes for g in (graph, now))
    run = lambda g: g.run()  # noqa: E731
    assert first_memory_difference((graph, now), nodes, run, CPU, torch.float32) == 6
    now.steps[6] = 1
    assert first_memory_difference((graph, now), nodes, run, CPU, torch.float32) is None


def test_graphs_of_different_nodes_are_not_compared(device):
    graph, now = Graph([1] * NODES), Graph([1] * NODES)
    device(graph, now)
    with pytest.raises(NotChecked, match="have different nodes"):
        first_memory_difference((graph, now), (graph.nodes, now.nodes[:-1]), lambda g: g.run(), CPU)


def test_a_sequence_of_graphs_is_searched_as_one(device):
    graph, now = Graph([1] * NODES), Graph([1] * 6 + [5] + [1] * 2)
    device(graph, now)
    parts = []
    for each in (graph, now):
        first, second = Graph(each.steps[:4]), Graph(each.steps[4:])
        for part, begin in ((first, 0), (second, 4)):
            part.enabled = _Window(each.enabled, begin)
        parts.append(SimpleNamespace(graphs=(first, second), run=each.run))
    assert (
        first_memory_difference(tuple(parts), (graph.nodes, now.nodes), lambda g: g.run(), CPU) == 6
    )


class _Window:
    """A slice of a list that writes to the list."""

    def __init__(self, items, begin):
        self._items, self._begin = items, begin

    def __setitem__(self, index, value):
        self._items[self._begin + index] = value


def test_nodes_that_cannot_be_switched_off(device):
    kinds = ["kernel"] * (NODES - 1) + ["child graph"]
    graph, now = Graph([1] * NODES, kinds), Graph([1] * NODES, kinds)
    device(graph, now)
    with pytest.raises(NotChecked, match="node 8, a child graph, cannot be switched off"):
        found((graph, now))


def test_events_need_not_be_switched_off(device):
    kinds = ["kernel", "event record", *["memset"] * (NODES - 2)]
    graph, now = Graph([1] * NODES, kinds), Graph([1] * (NODES - 1) + [2], kinds)
    device(graph, now)
    assert found((graph, now)) == NODES - 1


def test_pools_with_different_layouts(device):
    graph, now = Graph([1] * NODES), Graph([1] * NODES)
    device(graph, now)
    other = Pointer(address=now.pool.data_ptr() + 40, memory="pool", name="pool")
    moved = Argument(size=8, kind="pointer", text="pool", pointers=(other,))
    now.nodes[5] = Node(index=5, kind="kernel", name="add", short_name="add", arguments=(moved,))
    with pytest.raises(NotChecked, match="laid out differently"):
        found((graph, now))


def test_graphs_without_a_pool(device):
    graphs = Graph([1] * NODES), Graph([1] * NODES)
    for graph in graphs:
        graph.nodes = [
            Node(index=i, kind="kernel", name="add", short_name="add") for i in range(NODES)
        ]
    with pytest.raises(NotChecked, match="no argument points to the graph's own memory"):
        found(graphs)


def test_memory_that_the_allocator_released(device):
    with pytest.raises(NotChecked, match="the allocator does not know the graph's memory"):
        found((Graph([1] * NODES), Graph([1] * NODES)))


@pytest.mark.parametrize(("count", "first"), [(n, i) for n in (1, 2, 7, 16) for i in range(n)])
def test_bisection_takes_logarithmic_steps(count, first):
    counts = []
    assert bisected(lambda n: counts.append(n) or n > first, count) == first
    assert len(counts) <= 1 + math.ceil(math.log2(count))
    assert bisected(lambda n: False, count) is None
