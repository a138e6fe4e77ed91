"""CUDA objects that a loop makes and destroys. Bindings are replaced, so that it runs anywhere."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

from graphkit.errors import DeviceError
from graphkit.graphs import cuda_loop, driver
from graphkit.graphs.cuda_loop import CudaLoop

CALLS = 12
"""Calls that make a loop over two sizes."""


class FakeBindings:
    """Runtime and driver. Refuses the call of number ``refused``; ``open`` has what exists."""

    cudaGraph_t = cudaGraphNode_t = staticmethod(int)  # noqa: N815
    CUgraph = CUgraphNode = staticmethod(int)
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace
    cudaError_t = SimpleNamespace(cudaSuccess=0)  # noqa: N815
    cudaGraphNodeType = SimpleNamespace(cudaGraphNodeTypeConditional=13)  # noqa: N815
    cudaGraphConditionalNodeType = SimpleNamespace(  # noqa: N815
        cudaGraphCondTypeWhile=1, cudaGraphCondTypeSwitch=2
    )

    def __init__(self):
        self.refused, self.calls, self.open = 0, 0, []

    def __getattr__(self, name):
        """Return a call that makes a node, a handle, or nothing."""
        return lambda *_: self.result(7)

    def result(self, value):
        self.calls += 1
        return (1, None) if self.calls == self.refused else (0, value)

    def opened(self, kind):
        error, value = self.result(kind)
        if not error:
            self.open.append(kind)
        return error, value

    def cudaGraphCreate(self, _flags):  # noqa: N802
        return self.opened("graph")

    def cudaGraphInstantiate(self, _graph, _flags):  # noqa: N802
        return self.opened("executable")

    def cudaGraphDestroy(self, graph):  # noqa: N802
        self.open.remove(graph)
        return (0,)

    cudaGraphExecDestroy = cudaGraphDestroy  # noqa: N815

    def cudaGraphNodeParams(self):  # noqa: N802
        return SimpleNamespace(conditional=SimpleNamespace())

    def cudaGraphAddNode(self, _graph, _after, _data, _count, params):  # noqa: N802
        params.conditional.phGraph_out = [4] * params.conditional.size
        return self.result(5)


@pytest.fixture
def bindings(monkeypatch):
    fake = FakeBindings()
    package = ModuleType("cuda.bindings")
    package.driver = fake
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setattr(cuda_loop, "runtime", lambda: fake)
    monkeypatch.setattr(driver, "runtime", lambda: fake)
    monkeypatch.setattr(cuda_loop, "runtime_stream", lambda _stream: None)
    used = iter((1000, 1640))
    monkeypatch.setattr(cuda_loop, "driver_bytes", lambda _device: next(used))
    monkeypatch.setattr(cuda_loop, "_set_condition_kernel", lambda _index: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    return fake


def loop_of(bodies):
    def captured():
        graph = SimpleNamespace(raw_cuda_graph=lambda: 6)
        return SimpleNamespace(graph=graph, output=None, num_nodes=3)

    condition = torch.zeros(1, dtype=torch.int32)
    pool = SimpleNamespace(device_index=0, device="cuda")
    return CudaLoop(pool, captured(), [captured() for _ in range(bodies)], condition, condition)


@pytest.mark.parametrize(("bodies", "calls"), [(1, 8), (2, CALLS)])
def test_a_loop_is_closed_once(bindings, bodies, calls):
    loop = loop_of(bodies)
    assert bindings.calls == calls
    assert bindings.open == ["graph", "executable"]
    assert loop.num_nodes == 3 * (1 + bodies)
    assert loop.executable_bytes == 640, "by which the used memory grew"
    loop.close()
    loop.close()
    assert bindings.open == []


@pytest.mark.parametrize("refused", range(1, CALLS + 1))
def test_a_call_that_fails_leaves_nothing(bindings, refused):
    bindings.refused = refused
    with pytest.raises(DeviceError, match="a CUDA call failed with 1"):
        loop_of(2)
    assert bindings.calls == refused
    assert bindings.open == []
