"""The CUDA device as the audits of foreign graphs see it: the one file that asks torch and CUDA.

Checked on torch 2.11 and cuda-bindings 13.3.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from graphkit.audit.launch import launch_us
from graphkit.audit.node_switches import NodeSwitches
from graphkit.errors import DeviceError
from graphkit.graphs import Attribution, environment, inspect_graph
from graphkit.graphs.driver import checked
from graphkit.graphs.pool_memory import device_bytes, memory_segments
from graphkit.graphs.streams import streams_in_use
from graphkit.records import Environment, GraphRecord, Node

PoolId = tuple[int, int]
Segments = Sequence[Mapping[str, Any]]


class CudaDevice:
    """The current CUDA device of the program."""

    backend = "cuda"

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = torch.device("cuda", index)

    @classmethod
    def current(cls) -> CudaDevice:
        """Return the device that is current in this thread."""
        return cls(torch.cuda.current_device())

    def environment(self) -> Environment:
        """Return the device's name and the versions of its libraries."""
        return environment(self.torch_device)

    # Graphs.

    def pool_id(self, graph: Any) -> PoolId:
        """Return the id of the memory pool of a captured graph."""
        first, second = graph.pool()
        return int(first), int(second)

    def inspect(self, graph: Any, attribution: Attribution | None, name: str) -> GraphRecord:
        """Return the record of a graph that kept its template; see ``inspect_graph``."""
        return inspect_graph(graph, attribution=attribution, name=name, captured_at=name)

    def node_switches(self, graph: Any, nodes: Sequence[Node]) -> NodeSwitches:
        """Return switches of the nodes of a graph.

        Raises:
            NotChecked: A node cannot be switched off.
        """
        return NodeSwitches(_Replayed(graph), nodes)

    def launch_us(self, graph: Any, prepare: Callable[[], None]) -> float:
        """Return the median host time of launches of a graph in microseconds.

        Args:
            graph: A graph with an executable. It is launched ``launch.REPETITIONS`` times.
            prepare: Called before each launch.
        """
        return launch_us(_Replayed(graph), prepare)

    # Memory.

    def segments(self) -> Segments:
        """Return the segments of torch's allocator on this device."""
        return [segment for segment in memory_segments() if segment["device"] == self.index]

    def is_mapped(self, address: int) -> bool:
        """Return whether device memory is mapped at an address; reading other memory faults."""
        return bool(_pointer_attribute("MAPPED", address))

    def allocation_at(self, address: int) -> tuple[int, int] | None:
        """Return beginning and end of the driver's allocation around an address, if it has one."""
        begin = _pointer_attribute("RANGE_START_ADDR", address)
        size = _pointer_attribute("RANGE_SIZE", address)
        return (int(begin), int(begin) + int(size)) if begin and size else None

    def device_bytes(self, begin: int, end: int) -> torch.Tensor:
        """Return device memory as a tensor that does not own it, uint8 [end - begin]."""
        return device_bytes(begin, end - begin, self.torch_device)

    @staticmethod
    def host_bytes(begin: int, end: int) -> torch.Tensor:
        """Return host memory as a tensor that does not own it, uint8 [end - begin]."""
        memory = (ctypes.c_uint8 * (end - begin)).from_address(begin)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def free_bytes(self) -> int:
        """Return the bytes of device memory that no process uses."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    @contextmanager
    def own_memory(self) -> Iterator[None]:
        """Allocate the tensors of a block from a pool of their own, which ends with the block.

        The program's blocks, and its choice of addresses, do not change.
        """
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool, self.torch_device):
            yield

    # Order of work, and random numbers.

    def synchronize(self) -> None:
        """Wait for all work of the device.

        Raises:
            Exception: An earlier asynchronous call failed.
        """
        torch.cuda.synchronize(self.torch_device)

    def is_capturing(self) -> bool:
        """Return whether the current stream captures a graph."""
        return torch.cuda.is_current_stream_capturing()

    def random_states(self, generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
        """Return the states of the device's default generator and of others."""
        return [
            torch.cuda.get_rng_state(self.torch_device),
            *(generator.get_state() for generator in generators),
        ]

    def set_random_states(
        self, states: Sequence[torch.Tensor], generators: Sequence[torch.Generator]
    ) -> None:
        """Restore what ``random_states`` returned."""
        torch.cuda.set_rng_state(states[0], self.torch_device)
        for generator, state in zip(generators, states[1:], strict=True):
            generator.set_state(state)

    def num_streams(self) -> int:
        """Return the number of streams that this process is known to use."""
        return len(streams_in_use(self.torch_device))

    def num_ranks(self) -> int:
        """Return the number of processes that exchange data with this one, itself included."""
        import torch.distributed as dist

        is_running = dist.is_available() and dist.is_initialized()
        return dist.get_world_size() if is_running else 1

    def fault(self) -> str:
        """Return the error of an earlier asynchronous call as one line; empty if there is none."""
        try:
            self.synchronize()
        except Exception as error:
            return str(error).splitlines()[0].rstrip(".")
        return ""


class _Replayed:
    """A ``torch.cuda.CUDAGraph`` in the place of a ``CudaGraph``."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph


def _pointer_attribute(name: str, address: int) -> Any:
    """Return an attribute of a pointer (``cuPointerGetAttribute``); ``None`` if it has none."""
    from cuda.bindings import driver

    which = getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    with suppress(DeviceError):
        (value,) = checked(driver.cuPointerGetAttribute(which, address))
        return value
    return None
