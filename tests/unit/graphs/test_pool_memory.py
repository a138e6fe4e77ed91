"""Memory of a capture: of the host, of its pool and of its executable graphs."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest
import torch

from graphkit.errors import DeviceError
from graphkit.graphs import Attribution, RecorderBackend, driver
from graphkit.graphs.host_memory import HostMemory, fill_stack


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's memory")
def test_the_heap_is_host_memory():
    buffer = ctypes.create_string_buffer(1 << 22)  # large enough for its own mapping
    memory = HostMemory()
    assert id(buffer) in memory
    assert ctypes.addressof(buffer) in memory


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's memory")
def test_code_of_libraries_is_host_memory():
    memory = HostMemory()
    code = ctypes.cast(ctypes.PyDLL(None).getpid, ctypes.c_void_p).value
    assert code in memory
    assert 0 not in memory
    assert (1 << 64) - 1 not in memory


def test_files_mapped_below_4_gib_are_left_out(monkeypatch):
    """Sizes and counts look like addresses there. The heap is kept."""
    lines = "00400000-00800000 r-xp 0 08:01 77 /bin/x\n01000000-01800000 rw-p 0 00:00 0 [heap]\n"
    monkeypatch.setattr("pathlib.Path.read_text", lambda _path: lines)
    memory = HostMemory()
    assert 0x500000 not in memory
    assert 0x1234567 in memory


@pytest.mark.parametrize("byte", [0, 0xA5, 0xFF])
def test_filling_the_stack_does_not_affect_the_caller(byte):
    before = [1, "two", 3.0]
    for _ in range(100):
        fill_stack(byte)
    assert before == [1, "two", 3.0]


X = torch.ones(4)


def capture(function, attribution=None):
    return RecorderBackend().capture(function, attribution)


def test_the_memory_of_a_recorded_graph_is_that_of_its_results():
    graph = capture(lambda: (X + 1).view(2, 2).neg())
    blocks = graph.pool_memory()
    results = [tensor for op in graph.ops for tensor in op.results]
    assert [block.begin for block in blocks] == [tensor.data_ptr() for tensor in results]
    assert [block.end - block.begin for block in blocks] == [16, 16]
    assert all(block.is_live for block in blocks)
    blocks[-1].data.zero_()
    assert not graph.output.any(), "the bytes are the memory itself"
    graph.close()
    assert graph.pool_memory() == []


def test_an_attributed_capture_lists_its_allocations():
    def step():
        memory = torch.empty(4, dtype=torch.float64)
        memory[1:].copy_(X[1:])  # a view and a write allocate nothing
        return memory.sort(), torch.split(X, 2)

    graph = capture(step, Attribution())
    (values, indices), _ = graph.output
    empty, *sorted_ = graph.allocations
    assert (empty.op, empty.dtype, empty.is_initialised) == (
        "aten::empty.memory_format", torch.float64, False,
    )  # fmt: skip
    assert empty.source.endswith("in step")
    assert empty.end - empty.begin == 32
    assert [(each.begin, each.dtype) for each in sorted_] == [
        (values.data_ptr(), torch.float64),
        (indices.data_ptr(), torch.int64),
    ]
    assert all(each.is_initialised and each.source.endswith("in step") for each in sorted_)
    assert capture(step).allocations == ()


def test_each_capture_has_its_own_allocations():
    attribution = Attribution()
    first = capture(lambda: X + 1, attribution)
    second = capture(lambda: X.sum() * 2, attribution)
    assert [len(graph.allocations) for graph in (first, second)] == [1, 2]


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
