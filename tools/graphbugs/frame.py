"""What the programs of GraphBugs share: a device, graphs and captures, on CUDA or on a CPU.

On CUDA a program captures with ``torch.cuda.CUDAGraph``. Without a device it captures with
``RecordedCUDAGraph``, which has the same interface and records operations. The audit follows both.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar

import torch

from graphkit.audit.foreign import AuditOptions, following
from graphkit.audit.foreign.audits.device import CudaDevice
from graphkit.audit.foreign.audits.program_audit import ProgramAudit
from graphkit.audit.foreign.hooks import observe_captures, observe_replays
from graphkit.graphs import driver, environment as environment_of, inspect_graph
from graphkit.graphs.capture_state import compilation_disabled, recording
from graphkit.graphs.host_calls import HostCallsMode
from graphkit.graphs.operations import tensors_in
from graphkit.graphs.recorded_graph import OutputPool, RecordedGraph
from graphkit.graphs.recorder import _Recorder
from graphkit.records import AuditReport

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""The device of all programs."""


class RecordedCUDAGraph:
    """Operations that are recorded on a CPU, with the interface of ``torch.cuda.CUDAGraph``."""

    _pools = itertools.count(1)

    def __init__(self, keep_graph: bool = False) -> None:
        self._exits, self._pool = ExitStack(), (0, next(self._pools))
        self.recorded: Any = None

    def capture_begin(self, pool: Any = None) -> None:
        self._recorder = recorder = _Recorder()
        for block in (compilation_disabled(), recording(), HostCallsMode(recorder.host), recorder):
            self._exits.enter_context(block)
        RecorderDevice.counter = lambda: len(recorder.ops)

    def capture_end(self) -> None:
        RecorderDevice.counter = None
        self._exits.close()
        own = self._recorder
        self.recorded = RecordedGraph(
            None, own.ops, None, OutputPool(), lambda: None, own.host.storages
        )

    def instantiate(self) -> None:
        """Do nothing: recorded operations have no executable."""

    def raw_cuda_graph(self) -> int:
        return id(self)

    def pool(self) -> tuple[int, int]:
        return self._pool

    def replay(self) -> None:
        self.recorded.replay()

    def reset(self) -> None:
        self.recorded.close()


class RecorderDevice(CudaDevice):
    """The CPU in the place of a CUDA device: memory is the storages that graphs use."""

    backend = "recorder"
    counter: Any = None
    graphs: ClassVar[list[RecordedCUDAGraph]] = []

    def __init__(self) -> None:
        self.index, self.torch_device = 0, torch.device("cpu")

    def environment(self) -> Any:
        return environment_of(self.torch_device)

    def inspect(self, graph: Any, origins: Any, name: str) -> Any:
        if graph not in self.graphs:
            self.graphs.append(graph)
        return inspect_graph(graph.recorded, attribution=origins, name=name, captured_at=name)

    def launch_us(self, graph: Any, prepare: Any) -> float:
        return 1.0

    def segments(self) -> list[dict[str, Any]]:
        spans: dict[int, tuple[int, tuple[int, int]]] = {}
        for graph in self.graphs:
            ops = graph.recorded.ops if graph.recorded is not None else ()
            own = {tensor.untyped_storage().data_ptr() for op in ops for tensor in op.results}
            for tensor in (
                t for op in ops for t in (*tensors_in((op.args, op.kwargs)), *op.results)
            ):
                storage = tensor.untyped_storage()
                begin = storage.data_ptr()
                pool = graph.pool() if begin in own else (0, 0)
                if storage.nbytes() and spans.get(begin, (0, (0, 0)))[1] == (0, 0):
                    spans[begin] = storage.nbytes(), pool
        return [
            {
                "address": begin, "total_size": size, "active_size": size, "segment_pool_id": pool,
                "blocks": [{"address": begin, "size": size, "state": "active_allocated"}],
            }
            for begin, (size, pool) in sorted(spans.items())
        ]  # fmt: skip

    def is_mapped(self, address: int) -> bool:
        return True

    def allocation_at(self, address: int) -> None:
        return None

    def device_bytes(self, begin: int, end: int) -> torch.Tensor:
        return self.host_bytes(begin, end)

    def free_bytes(self) -> int:
        return 16 << 30

    @contextmanager
    def own_memory(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        """Do nothing: operations have finished."""

    def is_capturing(self) -> bool:
        return self.counter is not None

    def random_states(self, generators: Any) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(one.get_state() for one in generators)]

    def set_random_states(self, states: Any, generators: Any) -> None:
        torch.set_rng_state(states[0])
        for one, state in zip(generators, states[1:], strict=True):
            one.set_state(state)

    def num_streams(self) -> int:
        return 1


_graph_class: Any = torch.cuda.CUDAGraph if device.type == "cuda" else RecordedCUDAGraph


def new_graph() -> Any:
    """Return an empty graph."""
    return _graph_class()


class _Capture:
    """Captures what runs in a block, as ``torch.cuda.graph`` does."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        self._graph.capture_begin()

    def __exit__(self, *exc: object) -> None:
        self._graph.capture_end()


capture: Any = torch.cuda.graph if device.type == "cuda" else _Capture
"""A context manager that captures what runs in its block into a graph."""


def is_capturing() -> bool:
    """Return whether a graph captures now."""
    on_cuda = device.type == "cuda"
    return torch.cuda.is_current_stream_capturing() if on_cuda else bool(RecorderDevice.counter)


def tensor(*shape: int, value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of equal numbers on the device."""
    return torch.full(shape, value, dtype=dtype, device=device)


def numbered(rows: int, columns: int = 4) -> torch.Tensor:
    """Return a float matrix whose rows differ, on the device."""
    return torch.arange(rows * columns, dtype=torch.float32, device=device).view(rows, columns) / 8


def load(path: Path) -> Any:
    """Import a program from its file."""
    name = f"graphbugs_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def audited(path: Path, report: Path) -> AuditReport:
    """Run a program under the audit, and return the report.

    Args:
        path: The file of the program.
        report: A file that the audit may name; it is not written.
    """
    on_cpu = device.type == "cpu"
    new_device: Any = RecorderDevice if on_cpu else CudaDevice.current
    audit = ProgramAudit(AuditOptions(report=report, every=1), None, new_device)
    RecorderDevice.graphs = []
    before, methods = driver.captured_node_counter, dict(vars(_graph_class))
    if on_cpu:
        driver.captured_node_counter = lambda: RecorderDevice.counter
    observe_captures(_graph_class, audit.new_capture)
    observe_replays(_graph_class, lambda: audit)
    following._audits[:] = [audit]
    torch.manual_seed(0)
    try:
        with torch.no_grad() if on_cpu else nullcontext():
            load(path).program()
    finally:
        driver.captured_node_counter = before
        following._audits.clear()
        for name in vars(_graph_class).keys() - methods.keys():
            delattr(_graph_class, name)
        for name, method in methods.items():
            if vars(_graph_class)[name] is not method:
                setattr(_graph_class, name, method)
    audit.end()
    return audit.results.current()
