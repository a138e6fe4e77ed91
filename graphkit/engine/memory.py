"""Which KV slots each running request holds.

Token p of a request lies in the slot that its row of the request pool names at p, in the pools of
target and draft model alike. Slots come and go in whole pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from graphkit.config import BufferSizes
from graphkit.errors import ConfigError
from graphkit.kv import ReqToTokenPool, TokenSlotAllocator
from graphkit.spec import SpecConfig


class RequestMemory:
    """Rows and slots of the running requests.

    Every request is promised the slots that it can come to hold, so that none runs dry halfway.

    Args:
        req_to_token_pool: The table that attention backends read.
        size: KV slots of the smallest pool.
        page_size: Slots per page.
    """

    def __init__(self, req_to_token_pool: ReqToTokenPool, size: int, page_size: int) -> None:
        self.pool = req_to_token_pool
        self.page_size = page_size
        self._allocator = TokenSlotAllocator(size, page_size)
        self._slots: dict[int, list[int]] = {}
        self._promised: dict[int, int] = {}
        self.total_slots = self._allocator.available
        """Slots of all requests together."""

    @property
    def available_slots(self) -> int:
        """Slots that no request holds."""
        return self._allocator.available

    @property
    def available_rows(self) -> int:
        """Rows that no request holds."""
        return self.pool.available

    @property
    def held_slots(self) -> int:
        """Slots that requests hold."""
        return sum(len(slots) for slots in self._slots.values())

    def whole_pages(self, tokens: int) -> int:
        """Slots of the pages that so many tokens begin."""
        return -(-tokens // self.page_size) * self.page_size

    def has_room(self, tokens: int) -> bool:
        """Whether a request of up to so many tokens can be promised its slots now."""
        promised = sum(self._promised.values()) + self.whole_pages(tokens)
        return self.available_rows > 0 and promised <= self.total_slots

    def open(self, tokens: int) -> int:
        """A row for a new request of up to so many tokens; ``has_room`` said that there is one."""
        (row,) = self.pool.alloc(1)
        self._slots[row], self._promised[row] = [], self.whole_pages(tokens)
        return row

    def reserve(self, lengths: Iterable[tuple[int, int]]) -> None:
        """See to it that each row has slots for its first ``length`` tokens.

        Where the table ends within a page, the page's other slots are held without a place in it.

        Args:
            lengths: Pairs of row and length.
        """
        rows: list[int] = []
        places: list[int] = []
        slots: list[int] = []
        for row, length in lengths:
            held = self._slots[row]
            missing = self.whole_pages(length) - len(held)
            if missing > 0:
                new = range(len(held), min(len(held) + missing, self.pool.max_context_len))
                held += self._allocator.alloc(missing).tolist()
                rows += [row] * len(new)
                places += new
                slots += held[new.start : new.stop]
        if slots:
            index = to_device([rows, places, slots], self.pool.device)
            self.pool.req_to_token[index[0], index[1]] = index[2].int()

    def shrink(self, row: int, length: int) -> None:
        """Give back the pages behind the first ``length`` tokens of a row."""
        held = self._slots[row]
        keep = self.whole_pages(length)
        self._allocator.free(held[keep:])
        del held[keep:]

    def close(self, row: int) -> None:
        """Give back all that a row holds, and the row."""
        self.shrink(row, 0)
        del self._slots[row], self._promised[row]
        self.pool.free([row])


def check_pools(pool: ReqToTokenPool, spec: SpecConfig, sizes: BufferSizes) -> None:
    """Refuse pools and settings that do not belong together.

    Raises:
        ConfigError: They do not.
    """
    if pool.max_context_len < sizes.max_context_len or pool.size < sizes.max_batch_size:
        raise ConfigError(
            f"req_to_token_pool holds {pool.size} requests of {pool.max_context_len} tokens; the "
            f"sizes ask for {sizes.max_batch_size} of {sizes.max_context_len}. Make it larger.",
            field="sizes",
        )
    if spec.page_size != sizes.page_size:
        raise ConfigError(
            f"SpecConfig.page_size is {spec.page_size} and BufferSizes.page_size "
            f"{sizes.page_size}. Give both the pools' page size.",
            field="page_size",
        )


def to_device(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Host numbers as a tensor on the device, without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
