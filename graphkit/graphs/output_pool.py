"""Outputs of recorded graphs, overwritten when other graphs of their pool are replayed.

CUDA graphs of a backend share one memory pool: a replay writes memory that outputs of other graphs
occupy. Recorded graphs have separate memory, so the recorder overwrites it on purpose. Code that
reads an output too late then fails on the CPU as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_leaves

from graphkit.graphs.operations import storage_id

_NAN_BYTE = 0xFF
"""All bits set are NaN in every floating-point dtype that has one."""
_INT_BYTE = 0x80
"""Gives large negative integers, which are not an index, token or padding value."""


class GraphOutput:
    """The memory of one graph's output that its capture allocated.

    Attributes:
        session: Number of the capture session of the graph.
        memory: The memory by storage, each with the dtype of a tensor in it.
    """

    def __init__(self, output: Any, allocated: Collection[int], session: int) -> None:
        self.session = session
        self.memory: dict[int, torch.Tensor] = {}
        for leaf in tree_leaves(output):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            storage = storage_id(leaf)
            if storage in allocated and storage not in self.memory:
                self.memory[storage] = _flat(leaf.untyped_storage(), leaf.dtype)

    def keep(self, storages: Collection[int]) -> None:
        """Never overwrite these storages: another graph reads them, so they stay allocated."""
        for storage in self.memory.keys() & storages:
            del self.memory[storage]

    def overwrite(self) -> None:
        """Write values that no step computes."""
        for memory in self.memory.values():
            if memory.dtype is torch.bool:
                memory.logical_not_()
            else:
                is_float = memory.dtype.is_floating_point or memory.dtype.is_complex
                memory.view(torch.uint8).fill_(_NAN_BYTE if is_float else _INT_BYTE)


def _flat(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


class OutputPool:
    """The outputs of all graphs of a recorder. Call its methods under ``replay_context``."""

    def __init__(self) -> None:
        self._outputs: WeakSet[GraphOutput] = WeakSet()
        self._current: WeakSet[GraphOutput] = WeakSet()
        """The outputs of graphs that ran after their memory was overwritten last."""
        self._session = 0

    def begin_session(self) -> None:
        """Begin a session: its captures overwrite outputs of graphs that were captured before."""
        self._session += 1

    def add(self, output: Any, allocated: Collection[int], read: Collection[int]) -> GraphOutput:
        """Add the output of a graph that has been captured and has run.

        Args:
            output: The output.
            allocated: Storages that the capture allocated.
            read: Other storages that the graph uses.
        """
        for earlier in self._outputs:
            earlier.keep(read)
        self._overwrite([earlier for earlier in self._current if earlier.session < self._session])
        own = GraphOutput(output, allocated, self._session)
        self._outputs.add(own)
        self._current.add(own)
        return own

    def overwrite_others(self, own: GraphOutput) -> None:
        """Overwrite all outputs except the one of the graph that runs now."""
        self._overwrite([output for output in self._current if output is not own])
        self._current.add(own)

    def remove(self, own: GraphOutput) -> None:
        """Remove the output of a graph that is closed, and release its memory."""
        self._outputs.discard(own)
        self._current.discard(own)
        own.memory.clear()

    def _overwrite(self, outputs: Iterable[GraphOutput]) -> None:
        for output in outputs:
            output.overwrite()
            self._current.discard(output)
