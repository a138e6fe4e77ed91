"""Memory that graphs take, predicted before their capture or measured after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.record import Count, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeMemory:
    """Memory of the graphs of one runner.

    Attributes:
        mode: Name of the forward mode.
        batch_sizes: Sizes that the runner captures, ascending; empty if the mode stays eager.
        measured_sizes: Sizes that were captured. The memory of the others is predicted.
        pool_bytes: Bytes that the graphs add to the memory pool.
        executable_bytes: Bytes of the instantiated graphs, which the driver allocates.
    """

    mode: str
    batch_sizes: tuple[Count, ...]
    measured_sizes: tuple[Count, ...]
    pool_bytes: Count
    executable_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate(Record):
    """Device memory of a runner or an engine, in bytes, without the weights of its models.

    Memory that several parts use counts once, in the first of these that it belongs to: ``kv``,
    ``recurrent_state``, ``workspace``, ``static_buffers``.

    Attributes:
        backend: ``cuda`` or ``recorder``.
        graphs: Memory of the graphs of each runner.
        kv: KV pools.
        recurrent_state: States of recurrent layers; of a runner, other ``mutable_state``, too.
        workspace: What attention backends hold besides their pools.
        static_buffers: Inputs of the runners, tables of KV slots, state of the requests, and
            tensors of the drafter.
    """

    KIND: ClassVar[str] = "memory"
    backend: str
    graphs: tuple[ModeMemory, ...]
    kv: Count
    recurrent_state: Count
    workspace: Count
    static_buffers: Count

    @property
    def graph_pools(self) -> int:
        """Bytes of the memory pool of the graphs."""
        return sum(mode.pool_bytes for mode in self.graphs)

    @property
    def executables(self) -> int:
        """Bytes of the instantiated graphs. The recorder has none."""
        return sum(mode.executable_bytes for mode in self.graphs)

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self._parts().values())

    def to_dict(self) -> dict[str, int]:
        """Return the bytes of each part by name, and their ``total``."""
        return {**self._parts(), "total": self.total}

    def __str__(self) -> str:
        """Return the parts in MiB, and the total."""
        texts = [f"{part.replace('_', ' ')} {n / 2**20:,.1f}" for part, n in self._parts().items()]
        return f"{', '.join(texts)}; total {self.total / 2**20:,.1f} MiB"

    def _parts(self) -> dict[str, int]:
        return {
            "graph_pools": self.graph_pools,
            "executables": self.executables,
            "static_buffers": self.static_buffers,
            "kv": self.kv,
            "recurrent_state": self.recurrent_state,
            "workspace": self.workspace,
        }
