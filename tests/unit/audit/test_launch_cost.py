"""Graphs of trivial kernels, built through a fake driver."""
# ruff: noqa: N802 - names of the driver API

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

from graphkit.audit.launch_cost import TrivialGraphs, driver_executable, launch_us
from graphkit.errors import DeviceError


class FakeDriver:
    """Graphs are lists of the dependencies of each node; ``live`` has the executables."""

    CUgraph = CUgraphExec = CUstream = int

    def __init__(self):
        self.graphs, self.live, self.launched = {}, [], []
        self.error = 0

    def cuGraphGetNodes(self, graph, count):
        assert graph == 0xA
        return 0, ["the kernel", None][:count], 1

    def cuGraphKernelNodeGetParams(self, node):
        return 0, f"parameters of {node}"

    def cuGraphCreate(self, flags):
        handle = object()
        self.graphs[handle] = []
        return 0, handle

    def cuGraphAddKernelNode(self, graph, before, count, parameters):
        assert count == len(before) == len(set(before))
        assert parameters == "parameters of the kernel"
        self.graphs[graph].append(tuple(before))
        return self.error, len(self.graphs[graph]) - 1

    def cuGraphInstantiate(self, graph, flags):
        self.live.append(tuple(self.graphs[graph]))
        return 0, self.live[-1]

    def cuGraphDestroy(self, graph):
        del self.graphs[graph]

    def cuGraphExecDestroy(self, executable):
        self.live.remove(executable)

    def cuGraphLaunch(self, executable, stream):
        assert stream == 5
        self.launched.append(executable)
        return (self.error,)


class FakeBackend:
    """Runs the function that it captures."""

    device = torch.device("cpu")

    def __init__(self):
        self.closed = 0

    @contextmanager
    def session(self):
        yield

    def warm_up(self, function):
        function()

    def capture(self, function):
        function()
        graph = SimpleNamespace(raw_cuda_graph=lambda: 0xA, raw_cuda_graph_exec=lambda: 0xE)
        return SimpleNamespace(graph=graph, close=self._close)

    def _close(self):
        self.closed += 1


@pytest.fixture
def driver(monkeypatch):
    """The fake driver, installed as ``cuda.bindings.driver``."""
    fake = FakeDriver()
    cuda, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    cuda.bindings, bindings.driver = bindings, fake
    monkeypatch.setitem(sys.modules, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
    return fake


def test_graphs_have_the_dependencies_that_they_are_given(driver):
    backend = FakeBackend()
    with TrivialGraphs(backend) as trivial:
        assert trivial.word == 2, "the kernel must be loaded before it is captured"
        assert trivial.chain(3) == ((), (0,), (1,))
        # Node 0 waits for 2, so it is added after it; a repeated dependency counts once.
        built = trivial.build({0: [2, 2], 1: [0, 3], 2: [], 3: [2]})
        assert sorted(map(len, built)) == [0, 1, 1, 2]
        assert built[0] == ()
        assert len(driver.live) == 2
        assert not driver.graphs, "executables do not need their templates"
    assert (driver.live, backend.closed) == ([], 1)


def test_a_refused_call_is_a_device_error_and_leaves_no_graph(driver):
    with TrivialGraphs(FakeBackend()) as trivial:
        driver.error = 700
        with pytest.raises(DeviceError, match="700"):
            trivial.chain(2)
        assert not driver.graphs


def test_variants_take_turns(driver):
    prepared = []
    own = driver_executable(FakeBackend().capture(lambda: None))
    times = launch_us({"own": [own], "linear": ["a", "b"]}, prepared.append)
    assert set(times) == {"own", "linear"}
    assert prepared == ["own", "linear"] * (len(prepared) // 2)
    assert driver.launched == [0xE, "a", "b"] * (len(prepared) // 2)


def test_a_failed_launch_is_a_device_error(driver):
    driver.error = 700
    with pytest.raises(DeviceError, match="700"):
        launch_us({"own": ["a"]}, lambda _name: None)
