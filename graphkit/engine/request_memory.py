"""Request rows and KV slots of the running requests.

Token p of a request uses the slot that its row of the request pool holds at column p, in the KV
pools of target and draft model alike. Slots are allocated and freed in whole pages.
"""

from __future__ import annotations

from collections.abc import Iterable

from graphkit.kv import RequestPool, TokenSlotAllocator
from graphkit.step.step_tensors import to_device


class RequestMemory:
    """Allocates a row and KV slots to each running request.

    ``allocate_row`` promises a request all the slots that it can ever use, so that ``reserve``
    cannot run out of slots in the middle of a request.

    Life: ``open`` takes all free rows of the pool -> requests -> ``close`` returns them.

    Args:
        req_to_token_pool: The table that attention backends read.
        size: KV slots of the smallest pool.
        page_size: Slots per page.
    """

    def __init__(self, req_to_token_pool: RequestPool, size: int, page_size: int) -> None:
        self.pool = req_to_token_pool
        self.page_size = page_size
        self._size = size
        self._rows: list[int] = []
        self._free_rows: list[int] = []
        self._allocator = TokenSlotAllocator(size, page_size)
        self._slots: dict[int, list[int]] = {}
        self._promised: dict[int, int] = {}
        self._total_promised = 0
        self.total_slots = self._allocator.available
        """Slots available to all requests together."""

    def open(self) -> None:
        """Take all free rows of the pool."""
        self._rows = self.pool.alloc(self.pool.available)
        self.free_all()

    def close(self) -> None:
        """Free all rows and slots, and return the rows to the pool. May be called repeatedly."""
        self.free_all()
        rows, self._rows = self._rows, []
        self.pool.free(rows)

    @property
    def available_rows(self) -> int:
        """Rows that no request holds."""
        return len(self._free_rows)

    @property
    def held_slots(self) -> int:
        """Slots that requests hold."""
        return self.total_slots - self._allocator.available

    def whole_pages(self, num_tokens: int) -> int:
        """Round a number of tokens up to slots of whole pages."""
        return -(-num_tokens // self.page_size) * self.page_size

    def has_room(self, max_tokens: int) -> bool:
        """Return whether a request of at most ``max_tokens`` can be promised its slots now."""
        promised = self._total_promised + self.whole_pages(max_tokens)
        return self.available_rows > 0 and promised <= self.total_slots

    def allocate_row(self, max_tokens: int) -> int:
        """Allocate a row to a request of at most ``max_tokens``; requires ``has_room``."""
        row = self._free_rows.pop()
        self._slots[row], self._promised[row] = [], self.whole_pages(max_tokens)
        self._total_promised += self._promised[row]
        return row

    def reserve(self, lengths: Iterable[tuple[int, int]]) -> None:
        """Allocate slots so that each row has them for its first ``length`` tokens.

        Slots of a page that extends behind the last column of the table are held without a column.

        Args:
            lengths: Pairs of row and length.
        """
        rows: list[int] = []
        columns: list[int] = []
        slots: list[int] = []
        for row, length in lengths:
            held = self._slots[row]
            missing = self.whole_pages(length) - len(held)
            if missing > 0:
                new = range(len(held), min(len(held) + missing, self.pool.max_context_len))
                held += self._allocator.alloc(missing).tolist()
                rows += [row] * len(new)
                columns += new
                slots += held[new.start : new.stop]
        if slots:
            index = to_device([rows, columns, slots], self.pool.device)
            table = self.pool.req_to_token
            table[index[0], index[1]] = index[2].to(table.dtype)

    def shrink(self, row: int, length: int) -> None:
        """Free the pages behind the first ``length`` tokens of a row."""
        held = self._slots[row]
        keep = self.whole_pages(length)
        self._allocator.free(held[keep:])
        del held[keep:]

    def free_row(self, row: int) -> None:
        """Free a row and all its slots."""
        self.shrink(row, 0)
        self._total_promised -= self._promised.pop(row)
        del self._slots[row]
        self._free_rows.append(row)

    def free_all(self) -> None:
        """Free all rows and slots. Repairs what an exception in another method left behind."""
        self._slots, self._promised, self._total_promised = {}, {}, 0
        self._allocator = TokenSlotAllocator(self._size, self.page_size)
        self._free_rows = self._rows[::-1]  # the lowest one is allocated first
