"""Memory that a replay writes: which it is, and how to restore it between repetitions.

All memory of the program may be read by a checksum, but only a part of it may be copied. Before the
program's own replay, checksums of all chunks are taken, and copies of chunks up to a limit. The
replay shows which chunks it writes. Only these are copied afterwards: that is the state to restore.

A check then repeats the replay several times from one state: chunks with a copy return to their
content before the program's replay, the other written ones to their content after it. What a
repeated replay computes may therefore differ from the program's result, but not from run to run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphkit.audit.bits import CHUNK, chunk_sums, first_difference_in_bits, same_bits
from graphkit.audit.foreign.registration import Registration
from graphkit.audit.stale_memory.pool_memory import Range

Chunk = tuple[int, int]
"""Index of a part, and of a chunk in it."""


class ReplayMemory(ABC):
    """Parts of memory by key, with their content before and after the program's replay."""

    def __init__(self) -> None:
        self._before: dict[Any, torch.Tensor] = {}
        self._after: dict[Any, torch.Tensor] = {}

    @property
    def written(self) -> Sequence[Any]:
        """Keys of the parts that the replay may have written; empty before ``note_replay``."""
        return tuple(self._after)

    @abstractmethod
    def note_replay(self, max_bytes: int) -> int:
        """Find what a replay wrote and copy its content.

        Returns:
            The bytes that were written. If they are more than ``max_bytes``, nothing was copied.
        """

    @abstractmethod
    def changed(self) -> Sequence[Any]:
        """Return the keys of all parts that differ from the state after the program's replay."""

    @abstractmethod
    def _now(self, key: Any) -> torch.Tensor:
        """Return the content of a part now, which may be a view."""

    @abstractmethod
    def _put(self, contents: Mapping[Any, torch.Tensor]) -> None:
        """Write the content of parts."""

    @abstractmethod
    def _address(self, key: Any) -> int:
        """Return the address of a part."""

    def contents(self) -> dict[Any, torch.Tensor]:
        """Return copies of the written parts as they are now."""
        return {key: self._now(key).clone() for key in self._after}

    def rewind(self) -> None:
        """Restore the state that every repeated replay begins from."""
        self._put({key: self._before.get(key, after) for key, after in self._after.items()})

    def restore(self) -> None:
        """Restore the state after the program's replay."""
        self._put(self._after)

    def first_difference(self, contents: Mapping[Any, torch.Tensor]) -> int | None:
        """Return the address of the first element that differs from ``contents``, if one does."""
        for key, expected in contents.items():
            now = self._now(key)
            index = first_difference_in_bits(now, expected)
            if index is not None:
                return self._address(key) + index * now.element_size()
        return None


class WatchedMemory(ReplayMemory):
    """Memory in chunks.

    Args:
        parts: Memory, uint8, of any devices. On CUDA its addresses are multiples of 8.
        copied: For each part, the ranges of bytes in it that are copied, ascending.
    """

    def __init__(self, parts: Sequence[torch.Tensor], copied: Sequence[Sequence[Range]]) -> None:
        super().__init__()
        self._parts = parts
        self._sums = [chunk_sums(part) for part in parts]
        self._before = {
            (index, chunk): self._now((index, chunk)).clone()
            for index, ranges in enumerate(copied)
            for chunk in sorted(
                {at for begin, end in ranges for at in range(begin // CHUNK, -(-end // CHUNK))}
            )
        }

    def note_replay(self, max_bytes: int) -> int:
        """Copy the chunks whose sums have changed."""
        sums = [chunk_sums(part) for part in self._parts]
        written, self._sums = self._different(sums), sums
        num_bytes = sum(len(self._now(chunk)) for chunk in written)
        if num_bytes <= max_bytes:
            # A poisoned index is zero: it addresses the beginning of an allocation.
            chunks = {*written, *((index, 0) for index in range(len(self._parts)))}
            self._after = {chunk: self._now(chunk).clone() for chunk in sorted(chunks)}
        return num_bytes

    def changed(self) -> list[Chunk]:
        """Return the chunks whose sums differ from those that were taken last."""
        return self._different([chunk_sums(part) for part in self._parts])

    def _different(self, sums: Sequence[torch.Tensor]) -> list[Chunk]:
        return [
            (part, chunk)
            for part, (before, now) in enumerate(zip(self._sums, sums, strict=True))
            for chunk in (before != now).nonzero()[:, 0].tolist()
        ]

    def _put(self, contents: Mapping[Chunk, torch.Tensor]) -> None:
        for chunk, data in contents.items():
            self._now(chunk).copy_(data)

    def _address(self, chunk: Chunk) -> int:
        return self._now(chunk).data_ptr()

    def _now(self, chunk: Chunk) -> torch.Tensor:
        part, index = chunk
        return self._parts[part][index * CHUNK : (index + 1) * CHUNK]


class DeclaredMemory(ReplayMemory):
    """What a program has declared: inputs, outputs and the rows of state that a replay writes.

    Args:
        known: What was registered, at the replay at hand.
    """

    def __init__(self, known: Registration) -> None:
        super().__init__()
        self._tensors = {f"tensor {name}": tensor for name, tensor in known.written()}
        self._rows = {
            name: (tensor, axis, _indices(rows(), tensor.device))
            for name, (tensor, axis, rows) in (known.state or {}).items()
        }
        self._before = self._copies()

    def note_replay(self, max_bytes: int) -> int:
        """Copy all that is declared, whatever its size."""
        self._after = self._copies()
        return min(sum(tensor.nbytes for tensor in self._after.values()), max_bytes)

    def changed(self) -> list[str]:
        """Return the names of what differs from the state after the program's replay."""
        return [name for name, was in self._after.items() if not same_bits(self._now(name), was)]

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the rows of state in the declared order, with the rows first."""
        return {name: self._now(name).movedim(axis, 0) for name, (_, axis, _) in self._rows.items()}

    def _copies(self) -> dict[str, torch.Tensor]:
        return {name: self._now(name).clone() for name in (*self._tensors, *self._rows)}

    def _now(self, name: str) -> torch.Tensor:
        if name in self._tensors:
            return self._tensors[name]
        tensor, axis, index = self._rows[name]
        return tensor.index_select(axis, index)

    def _put(self, contents: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self._tensors.items():
            tensor.copy_(contents[name])
        for name, (tensor, axis, index) in self._rows.items():
            tensor.index_copy_(axis, index, contents[name])  # equal rows where one is twice

    def _address(self, name: str) -> int:
        tensor = self._tensors[name] if name in self._tensors else self._rows[name][0]
        return tensor.data_ptr()


def _indices(rows: Any, device: torch.device) -> torch.Tensor:
    if isinstance(rows, slice):
        rows = range(rows.start or 0, rows.stop, rows.step or 1)
    index = rows if isinstance(rows, torch.Tensor) else torch.tensor(list(rows), dtype=torch.int64)
    return index.to(device, torch.int64).flatten()
