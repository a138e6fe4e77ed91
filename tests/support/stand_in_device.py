"""A device for audits of foreign graphs whose memory and graphs are those of the CPU.

An allocator hands out blocks of one range of addresses; a block is free again when its tensor is
gone, as on CUDA. Launches call a Python function on tensors. While a graph captures, they become
nodes, which keep addresses alone: a replay calls the functions on what is at these addresses then.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.audit.audit_log import NotChecked
from graphkit.audit.foreign.audits.device import CudaDevice
from graphkit.audit.node_switches import SWITCHABLE
from graphkit.graphs import Allocation
from graphkit.records import Argument, Environment, GraphRecord, Node, Pointer

UNIT, SEGMENT = 512, 1 << 23


@dataclass
class Block:
    begin: int
    end: int
    is_active: bool = True


@dataclass(frozen=True)
class View:
    """A tensor's place in memory, without the tensor."""

    address: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        data = CudaDevice.host_bytes(self.address, self.address + self.size)
        return data.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Launch:
    name: str
    source: str
    function: Callable[..., object]
    views: tuple[View, ...]
    pool: tuple[int, int]
    kind: str
    module: str
    leftovers: tuple[int, ...] | None


class StandInDevice:
    """A device in the place of ``CudaDevice``, with an allocator and launches for programs."""

    backend = "cuda"

    def __init__(self, num_pools: int = 4) -> None:
        size = num_pools * SEGMENT
        self._buffer = ctypes.create_string_buffer(size + SEGMENT)
        first = -(-ctypes.addressof(self._buffer) // SEGMENT) * SEGMENT
        self._segments = {
            (0, number): first + number * SEGMENT for number in range(num_pools)
        }  # the first is the default pool
        self._blocks: dict[tuple[int, int], list[Block]] = {pool: [] for pool in self._segments}
        self._num_pools = 1
        self.unmapped: set[tuple[int, int]] = set()
        self.asleep: set[tuple[int, int]] = set()
        self.pinned: list[ctypes.Array[ctypes.c_float]] = []
        self.us_per_launch = 5.0
        self.capturing: StandInGraph | None = None
        self.error = ""
        self.num_ranks_ = 1
        self.inspected = 0

    # What programs do.

    def graph_class(self) -> type[StandInGraph]:
        """Return a class in the place of ``torch.cuda.CUDAGraph`` for this device."""
        return type("Graph", (StandInGraph,), {"device": self})

    def new_pool(self) -> tuple[int, int]:
        self._num_pools += 1
        return (0, self._num_pools - 1)

    def empty(
        self, *shape: int, dtype: torch.dtype = torch.float32, source: str = ""
    ) -> torch.Tensor:
        """Return a tensor in a new block, or in one that was freed, whose content stays."""
        pool = self.capturing.its_pool if self.capturing is not None else (0, 0)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        block = self._block(pool, -(-num_bytes // UNIT) * UNIT)
        memory = (ctypes.c_uint8 * num_bytes).from_address(block.begin)
        weakref.finalize(memory, setattr, block, "is_active", False)
        if self.capturing is not None:
            self.capturing.allocations.append(
                Allocation(
                    block.begin, block.end, dtype, "aten::empty.memory_format", source, False
                )
            )
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)

    def full(self, *shape: int, value: float = 0, **options: Any) -> torch.Tensor:
        tensor = self.empty(*shape, **options)
        self.launch("fill", lambda out: out.fill_(value), tensor)
        return tensor

    def pinned_host(self, *shape: int, value: float = 0) -> torch.Tensor:
        """Return a tensor in host memory that the device can read, and that outlives it."""
        memory = (ctypes.c_float * torch.Size(shape).numel())()
        self.pinned.append(memory)
        return torch.frombuffer(memory, dtype=torch.float32).view(shape).fill_(value)

    def workspace(self, size: int) -> Block:
        """Return a block without a tensor, as libraries have."""
        return self._block((0, 0), size)

    def empty_cache(self) -> None:
        """Drop the free blocks at the end of each pool, and their memory."""
        for blocks in self._blocks.values():
            while blocks and not blocks[-1].is_active:
                blocks.pop()

    def launch(
        self,
        name: str,
        function: Callable[..., object],
        *tensors: torch.Tensor | View,
        source: str = "",
        kind: str = "kernel",
        module: str = "",
        leftovers: tuple[int, ...] | None = None,
    ) -> None:
        """Call a function on tensors, now or at each replay of the graph that captures.

        With leftovers, the node has one large struct, as kernels of torch for tensors that are
        broadcast: leftovers of the host's stack, then the addresses of the tensors.
        """
        if self.capturing is None:
            function(*tensors)
            return
        views = tuple(
            each if isinstance(each, View)
            else View(each.data_ptr(), each.nbytes, each.dtype, tuple(each.shape))
            for each in tensors
        )  # fmt: skip
        self.capturing.launches.append(
            Launch(name, source, function, views, self.capturing.its_pool, kind, module, leftovers)
        )

    def _block(self, pool: tuple[int, int], size: int) -> Block:
        blocks = self._blocks[pool]
        for block in blocks:
            if not block.is_active and block.end - block.begin == size:
                block.is_active = True
                return block
        begin = blocks[-1].end if blocks else self._segments[pool]
        assert begin + size <= self._segments[pool] + SEGMENT, "the stand-in's memory is full"
        blocks.append(Block(begin, begin + size))
        return blocks[-1]

    # What audits ask.

    def environment(self) -> Environment:
        return Environment(
            device="stand-in", torch="2", triton="3", cuda="13", driver="580", graphkit="0"
        )

    def pool_id(self, graph: Any) -> tuple[int, int]:
        return graph.pool()

    def inspect(self, graph: Any, attribution: Any, name: str) -> GraphRecord:
        self.inspected += 1
        if attribution is not None:
            attribution.allocations.extend(graph.allocations)
        nodes = tuple(
            Node(
                index=index,
                kind=launch.kind,
                name=launch.name if launch.leftovers is None else f"at::native::{launch.name}",
                short_name=launch.name,
                grid=(1, 1, 1),
                block=(32, 1, 1),
                source=launch.source,
                module=launch.module,
                arguments=tuple(self._arguments(launch)),
            )
            for index, launch in enumerate(graph.launches)
        )
        environment = self.environment()
        return GraphRecord(
            name=name, backend="cuda", environment=environment, captured_at=name, nodes=nodes
        )

    def _arguments(self, launch: Launch) -> Iterator[Argument]:
        if launch.leftovers is not None:
            # Operands of the operation have a size; see ``graphs.walk.arguments.decode``.
            sizes = dict.fromkeys(launch.leftovers, 0) | {v.address: v.size for v in launch.views}
            pointers = tuple(
                Pointer(
                    address=address, memory=self._memory(address, launch.pool), name="block",
                    offset=600 + 8 * index, size=size,
                )
                for index, (address, size) in enumerate(sizes.items())
            )  # fmt: skip
            yield Argument(size=648, kind="struct", text="648 bytes", pointers=pointers)
            return
        names = ("target", "source") if launch.kind == "memcpy" else ("",) * len(launch.views)
        for name, view in zip(names, launch.views, strict=True):
            memory = self._memory(view.address, launch.pool)
            pointer = Pointer(
                address=view.address, memory=memory, name=f"{memory} block", size=view.size
            )
            yield Argument(
                size=8, kind="pointer", text=hex(view.address), name=name,
                pointers=(pointer,) if memory else (),
            )  # fmt: skip

    def _memory(self, address: int, pool: tuple[int, int]) -> str:
        """Return the kind of memory; empty if the device cannot read it."""
        for its, blocks in self._blocks.items():
            for block in blocks:
                if block.begin <= address < block.end:
                    return "pool" if its == pool else "external" if block.is_active else "freed"
        return "host" if self.allocation_at(address) else ""

    def node_switches(self, graph: Any, nodes: Any) -> Switches:
        for node in nodes:
            if node.kind not in SWITCHABLE:
                raise NotChecked(f"node {node.index}, a {node.kind}, cannot be switched off")
        return Switches(graph)

    def launch_us(self, graph: Any, prepare: Callable[[], None]) -> float:
        for _ in range(3):
            prepare()
            graph.run()
        return self.us_per_launch

    def segments(self) -> list[dict[str, Any]]:
        return [
            {
                "address": self._segments[pool],
                "total_size": blocks[-1].end - blocks[0].begin,
                "active_size": sum(each.end - each.begin for each in blocks if each.is_active),
                "segment_pool_id": pool,
                "blocks": [
                    {
                        "address": each.begin,
                        "size": each.end - each.begin,
                        "state": "active_allocated" if each.is_active else "inactive",
                    }
                    for each in blocks
                ],
            }
            for pool, blocks in self._blocks.items()
            if blocks and pool not in self.unmapped
        ]

    def is_mapped(self, address: int) -> bool:
        return any(
            begin <= address < begin + SEGMENT
            for pool, begin in self._segments.items()
            if pool not in self.unmapped | self.asleep
        )

    def allocation_at(self, address: int) -> tuple[int, int] | None:
        for memory in self.pinned:
            begin = ctypes.addressof(memory)
            if begin <= address < begin + ctypes.sizeof(memory):
                return begin, begin + ctypes.sizeof(memory)
        return None

    def device_bytes(self, begin: int, end: int) -> torch.Tensor:
        assert self.is_mapped(begin)
        return self.host_bytes(begin, end)

    host_bytes = staticmethod(CudaDevice.host_bytes)

    def free_bytes(self) -> int:
        return 16 << 30

    @contextmanager
    def own_memory(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        if self.error:
            raise RuntimeError(f"CUDA error: {self.error}")

    def is_capturing(self) -> bool:
        return self.capturing is not None

    def random_states(self, generators: Any) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(each.get_state() for each in generators)]

    def set_random_states(self, states: Any, generators: Any) -> None:
        torch.set_rng_state(states[0])
        for generator, state in zip(generators, states[1:], strict=True):
            generator.set_state(state)

    def num_streams(self) -> int:
        return 1

    def num_ranks(self) -> int:
        return self.num_ranks_

    def fault(self) -> str:
        return self.error


class StandInGraph:
    """A graph in the place of ``torch.cuda.CUDAGraph``."""

    device: StandInDevice

    def __init__(self, keep_graph: bool = False) -> None:
        self.launches: list[Launch] = []
        self.allocations: list[Allocation] = []
        self.switched_off: set[int] = set()
        self.num_runs = 0

    def capture_begin(self, pool: tuple[int, int] | None = None) -> None:
        self.its_pool = pool or self.device.new_pool()
        self.device.capturing = self

    def capture_end(self) -> None:
        self.device.capturing = None

    def instantiate(self) -> None:
        pass

    def reset(self) -> None:
        self.launches.clear()

    def raw_cuda_graph(self) -> int:
        return id(self)

    def pool(self) -> tuple[int, int]:
        return self.its_pool

    def replay(self) -> None:
        self.run()

    def run(self) -> None:
        """Run the nodes that are switched on. An error shows later, as on CUDA."""
        self.num_runs += 1
        for index, launch in enumerate(self.launches):
            if self.device.error or index in self.switched_off:
                continue
            try:
                launch.function(*(view.tensor() for view in launch.views))
            except IndexError:
                self.device.error = "an illegal memory access was encountered"


class Switches:
    """Switches in the place of ``NodeSwitches``."""

    def __init__(self, graph: StandInGraph) -> None:
        self._graph = graph

    def keep_first(self, count: int) -> None:
        self._graph.switched_off = set(range(count, len(self._graph.launches)))

    def keep_only(self, indices: Any) -> None:
        self._graph.switched_off = set(range(len(self._graph.launches))) - set(indices)
