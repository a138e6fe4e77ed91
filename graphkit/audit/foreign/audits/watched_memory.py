"""Memory in chunks: which of them a replay writes, and how to restore those.

All memory of the program may be read by a checksum, but only a part of it may be copied. Before the
program's own replay, checksums of all chunks are taken, and copies of chunks up to a limit. The
replay shows which chunks it writes. Only these are copied afterwards: that is the state to restore.

A check then repeats the replay several times from one state: chunks with a copy return to their
content before the program's replay, the other written ones to their content after it. What a
repeated replay computes may therefore differ from the program's result, but not from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from graphkit.audit.stale_memory.pool_memory import Range

CHUNK = 1 << 20
"""Bytes that are compared and copied as one."""
_WORDS = CHUNK // 8
_BATCH = 256
"""Chunks that are summed at once, which bounds the temporary memory to 256 MiB."""

Chunk = tuple[int, int]
"""Index of a part, and of a chunk in it."""


class WatchedMemory:
    """Parts of memory before, between and after replays.

    Args:
        parts: Memory, uint8, of any devices. On CUDA its addresses are multiples of 8.
        copied: For each part, the ranges of bytes in it that are copied, ascending.
    """

    def __init__(self, parts: Sequence[torch.Tensor], copied: Sequence[Sequence[Range]]) -> None:
        self._parts = parts
        self._sums = [chunk_sums(part) for part in parts]
        self._before = {
            (index, chunk): self._data((index, chunk)).clone()
            for index, ranges in enumerate(copied)
            for chunk in sorted({at for span in ranges for at in _chunks(span)})
        }
        self._after: dict[Chunk, torch.Tensor] = {}

    @property
    def written(self) -> Sequence[Chunk]:
        """The chunks that the replay wrote; empty before ``note_replay``."""
        return tuple(self._after)

    def note_replay(self, max_bytes: int) -> int:
        """Find what a replay wrote and copy its content.

        Args:
            max_bytes: Bytes that the copies may take.

        Returns:
            The bytes that were written. If they are more than ``max_bytes``, nothing was copied.
        """
        sums = [chunk_sums(part) for part in self._parts]
        written = list(_different(self._sums, sums))
        self._sums = sums
        num_bytes = sum(len(self._data(chunk)) for chunk in written)
        if num_bytes > max_bytes:
            return num_bytes
        # A poisoned index is zero: it addresses the beginning of an allocation.
        first = [(index, 0) for index in range(len(self._parts))]
        for chunk in dict.fromkeys((*written, *first)):
            self._after[chunk] = self._data(chunk).clone()
        return num_bytes

    def rewind(self) -> None:
        """Restore the state that every repeated replay begins from."""
        for chunk, after in self._after.items():
            self._data(chunk).copy_(self._before.get(chunk, after))

    def restore(self) -> None:
        """Restore the state after the program's replay."""
        for chunk, after in self._after.items():
            self._data(chunk).copy_(after)

    def contents(self) -> dict[Chunk, torch.Tensor]:
        """Return copies of the written chunks as they are now."""
        return {chunk: self._data(chunk).clone() for chunk in self._after}

    def first_difference(self, contents: dict[Chunk, torch.Tensor]) -> int | None:
        """Return the address of the first byte that differs from ``contents``, if one does."""
        for chunk, expected in sorted(contents.items()):
            now = self._data(chunk)
            if not torch.equal(now, expected):
                return int(now.data_ptr()) + int((now != expected).nonzero()[0, 0])
        return None

    def changed_chunks(self) -> list[Chunk]:
        """Return the chunks that differ from the state after the program's replay."""
        return list(_different(self._sums, [chunk_sums(part) for part in self._parts]))

    def _data(self, chunk: Chunk) -> torch.Tensor:
        part, index = chunk
        return self._parts[part][index * CHUNK : (index + 1) * CHUNK]


def chunk_sums(data: torch.Tensor) -> torch.Tensor:
    """Return a number for each chunk that depends on its bytes and on their order.

    Args:
        data: uint8 [n], contiguous.

    Returns:
        int64 [ceil(n / CHUNK)], zero for chunks of zeros.
    """
    odd = torch.arange(1, 2 * _WORDS, 2, device=data.device)
    whole = len(data) // CHUNK
    sums = torch.zeros(-(-len(data) // CHUNK), dtype=torch.int64, device=data.device)
    grid = data[: whole * CHUNK].view(torch.int64).view(whole, _WORDS)
    for at in range(0, whole, _BATCH):
        end = min(at + _BATCH, whole)
        sums[at:end] = (grid[at:end] * odd).sum(1)
    rest = data[whole * CHUNK :]
    if len(rest):
        padded = torch.zeros(-(-len(rest) // 8) * 8, dtype=torch.uint8, device=data.device)
        padded[: len(rest)] = rest
        words = padded.view(torch.int64)
        sums[whole] = (words * odd[: len(words)]).sum()
    return sums


def _different(before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> Iterator[Chunk]:
    for part, (expected, got) in enumerate(zip(before, now, strict=True)):
        for chunk in (expected != got).nonzero()[:, 0].tolist():
            yield part, chunk


def _chunks(span: Range) -> range:
    return range(span[0] // CHUNK, -(-span[1] // CHUNK))
