"""The driver's memory of executables, measured on a driver that takes it in blocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphkit.errors import DeviceError
from graphkit.graphs import driver

BLOCK, PER_NODE = 2 << 20, 4000
DEVICE = torch.device("cuda", 0)


class FakeDriver:
    """Allocates executables in blocks. ``free`` is what destroyed ones have left."""

    cudaGraph_t = staticmethod(int)  # noqa: N815

    def __init__(self, free=0, refused=0):
        self.taken, self.free, self.refused, self.made, self.open = 0, free, refused, 0, 0

    def cudaGraphInstantiate(self, nodes, _flags):  # noqa: N802
        self.made += 1
        if self.made == self.refused:
            return (2, None)
        self.free -= nodes * PER_NODE
        while self.free < 0:
            self.free, self.taken = self.free + BLOCK, self.taken + BLOCK
        self.open += 1
        return (0, nodes)

    def cudaGraphUpload(self, _executable, _stream):  # noqa: N802
        return (0,)

    def cudaGraphExecDestroy(self, _executable):  # noqa: N802
        self.open -= 1
        return (0,)


@pytest.fixture
def measure(monkeypatch):
    def run(fake, *nodes):
        monkeypatch.setattr(driver, "runtime", lambda: fake)
        monkeypatch.setattr(driver, "driver_bytes", lambda _device: 5000 + fake.taken)
        monkeypatch.setattr(driver, "runtime_stream", lambda _stream: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
        graphs = [(SimpleNamespace(raw_cuda_graph=lambda n=n: n), n) for n in nodes]
        return driver.executable_bytes_per_node(graphs, DEVICE)

    return run


@pytest.mark.parametrize("free", [0, 1000, 50 * BLOCK])
def test_blocks_are_counted_from_the_first_on(measure, free):
    fake = FakeDriver(free)
    assert measure(fake, 3, 100, 220) == pytest.approx(PER_NODE, rel=0.05)
    assert fake.open == 0


def test_it_ends_without_growth(measure):
    fake = FakeDriver(free=1 << 40)
    assert measure(fake, 100) == 0.0
    assert fake.made < 1000
    assert fake.open == 0


def test_a_refused_call_leaves_no_executable(measure):
    fake = FakeDriver(refused=5)
    with pytest.raises(DeviceError, match="a CUDA call failed"):
        measure(fake, 10)
    assert (fake.made, fake.open) == (5, 0)


def test_nothing_is_measured_without_graphs_or_bindings(measure):
    fake = FakeDriver()
    assert measure(fake) == measure(fake, 0) == measure(None, 10) == 0.0
    assert fake.made == 0
