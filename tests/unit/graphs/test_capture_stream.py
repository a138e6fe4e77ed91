"""Which stream ``CudaBackend`` uses for what. torch.cuda is replaced, so that it runs anywhere."""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from graphkit.graphs import CaptureFailure, CudaBackend
from graphkit.graphs.cuda import allocate_workspaces


class FakeCuda:
    """One device with the caller's stream and new ones; notes what happens on which stream."""

    def __init__(self):
        self.calls = []
        self.caller = self.current = FakeStream(self, "caller")

    def note(self, call):
        self.calls.append((call, self.current.name))

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def device(self, _device):
        yield

    def graph(self, **_):
        noted = ("capture_begin", "capture_end", "instantiate", "reset", "replay")
        methods = {name: lambda name=name, **_: self.note(name) for name in noted}
        return SimpleNamespace(**methods)


class FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name, self.cuda_stream, self.device = cuda, name, id(self), "cpu"

    def wait_stream(self, other):
        self.cuda.calls.append((f"wait for {other.name}", self.name))

    def synchronize(self):
        self.cuda.calls.append(("synchronize", self.name))


class FakeBindings:
    """The runtime's captures; ``accepted`` is whether CUDA accepts what was captured."""

    cudaStreamCaptureMode = SimpleNamespace(  # noqa: N815
        cudaStreamCaptureModeRelaxed=2, cudaStreamCaptureModeThreadLocal=2
    )

    def __init__(self, cuda, *, accepted):
        self.cuda, self.accepted = cuda, accepted

    def cudaStreamBeginCapture(self, stream, mode):  # noqa: N802
        assert (stream, mode) == (self.cuda.current, 2)
        self.cuda.note("begin")
        return (0,)

    def cudaStreamEndCapture(self, _stream):  # noqa: N802
        self.cuda.note("end")
        return (0, "template") if self.accepted else (901, None)

    def cudaGraphDestroy(self, template):  # noqa: N802
        self.cuda.note(f"destroy {template}")
        return (0,)


def use_bindings(monkeypatch, bindings):
    for module in ("cuda", "driver"):
        monkeypatch.setattr(f"graphkit.graphs.{module}.runtime", lambda: bindings)
        monkeypatch.setattr(f"graphkit.graphs.{module}.runtime_stream", lambda stream: stream)


@pytest.fixture
def cuda(monkeypatch):
    """Replace what the backend uses of torch.cuda; there are no bindings."""
    fake = FakeCuda()
    generator = SimpleNamespace(get_offset=lambda: 0)
    replaced = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: (0, 1),
        "Stream": lambda _device: FakeStream(fake, "capture"),
        "stream": fake.stream,
        "current_stream": lambda _device=None: fake.current,
        "device": fake.device,
        "synchronize": lambda _device: fake.note("device"),
        "get_rng_state": lambda _device: torch.zeros(1),
        "set_rng_state": lambda _state, _device: None,
        "empty_cache": lambda: fake.note("empty_cache"),
        "memory_snapshot": lambda *_, **__: [],
        "CUDAGraph": fake.graph,
        "default_generators": [generator],
        "current_blas_handle": lambda: fake.note("workspace"),
        "mem_get_info": lambda _device: (0, 0),
        "memory_reserved": lambda _device: 0,
    }
    for name, each in replaced.items():
        monkeypatch.setattr(torch.cuda, name, each)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, None, raising=False)
    monkeypatch.setattr("graphkit.graphs.cuda.note_eager_step", lambda _device: None)
    monkeypatch.setattr("graphkit.graphs.driver.runtime", lambda: None)
    monkeypatch.setattr("graphkit.graphs.cuda.runtime", lambda: None)
    return fake


@pytest.fixture
def backend(cuda):
    return CudaBackend()


def test_memory_of_executables_is_measured_once(backend, monkeypatch):
    """The driver keeps the memory of a measurement."""
    measured = iter([0.0, 4000.0])
    monkeypatch.setattr(
        "graphkit.graphs.cuda.executable_bytes_per_node", lambda _graphs, _device: next(measured)
    )
    found = [backend.executable_bytes_per_node() for _ in range(3)]
    assert found == [0.0, 4000.0, 4000.0]


def test_only_the_capture_itself_is_on_the_capture_stream(cuda, backend):
    with backend.session():
        backend.warm_up(lambda: cuda.note("warm-up"))
        backend.capture(lambda: cuda.note("step"))
        backend.diagnose(lambda: cuda.note("diagnosis"))
    on_capture_stream = [call for call, stream in cuda.calls if stream == "capture"]
    assert on_capture_stream == [
        "workspace", "wait for caller", "capture_begin", "step", "capture_end"
    ]  # fmt: skip
    on_callers = [call for call, stream in cuda.calls if stream == "caller"]
    assert on_callers == [
        "device", "warm-up", "synchronize", "wait for capture", "instantiate", "replay",
        "synchronize", "diagnosis", "device", "device", "empty_cache",
    ]  # fmt: skip


def test_a_session_leaves_the_callers_stream_as_that_of_the_replays(cuda, backend):
    own = FakeStream(cuda, "own")
    with cuda.stream(own), backend.session():
        backend.capture(lambda: None)
    assert ("replay", "own") in cuda.calls
    assert backend.pool.last_handle == own.cuda_stream


def test_a_failed_capture_is_abandoned_on_the_capture_stream(cuda, backend):
    def fails():
        raise ValueError("no such field")

    with backend.session(), pytest.raises(CaptureFailure, match="no such field"):
        backend.capture(fails)
    assert cuda.calls[3:6] == [
        ("capture_begin", "capture"), ("capture_end", "capture"), ("reset", "capture")
    ]  # fmt: skip
    assert cuda.current is cuda.caller
    assert not backend.pool.graphs


def test_a_capture_that_does_not_begin_leaves_the_stream_and_says_why(cuda, backend, monkeypatch):
    """torch has no capture to end, neither its own nor the empty one."""

    def refuse(*_, **__):
        raise RuntimeError("Capture must end on the same stream it began on.")

    def begin(**_):
        raise TypeError("incompatible arguments")

    graph = SimpleNamespace(capture_begin=begin, capture_end=refuse, reset=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda **_: graph)
    monkeypatch.setattr("graphkit.graphs.cuda.allocate_workspaces", lambda _stream: None)
    use_bindings(monkeypatch, FakeBindings(cuda, accepted=True))
    with pytest.raises(CaptureFailure, match="incompatible arguments"):
        backend.capture(lambda: None)
    ends = [("begin", "capture"), ("end", "capture"), ("destroy template", "capture")]
    assert cuda.calls[-3:] == ends


def test_the_id_of_a_pool_outlives_lists_of_its_segments(cuda, backend, monkeypatch):
    """torch 2.11 drops a reference to what it is given."""
    number = int("1000")  # CPython never frees those to 256
    backend.pool.id = (0, number)

    def snapshot(pool_id, *, include_traces):
        for value in (*pool_id, include_traces):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))
        return []

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    before = sys.getrefcount(number)
    assert [backend.pool.num_bytes() for _ in range(3)] == [0, 0, 0]
    assert sys.getrefcount(number) == before


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_workspaces_are_allocated_in_a_capture_that_is_dropped(cuda, monkeypatch, error):
    bindings = FakeBindings(cuda, accepted=error is None)

    def product(*_):
        cuda.note("product")
        if error is not None:
            raise error

    monkeypatch.setattr(torch, "addmm", product)
    use_bindings(monkeypatch, bindings)
    interrupted = error is KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        allocate_workspaces(FakeStream(cuda, "new"))
    expected = ["workspace", "begin", "product", "end"]
    expected += ["destroy template"] if error is None else []
    assert cuda.calls == [(call, "new") for call in expected]
    assert cuda.current is cuda.caller
