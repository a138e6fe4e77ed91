"""Request rows and KV slots of the running requests.

Token p of a request uses the slot that its row of the request pool holds at column p, in the KV
pools of target and draft model alike. Slots are allocated and freed in whole pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from graphkit.engine.kv import RequestPool, TokenSlotAllocator
from graphkit.engine.request import Request
from graphkit.graphs.devices import to_device

_STEPS_AHEAD = 1024
"""Steps for which slots are reserved where the pool has many: 16 of the longest usual launches, so
that writing the table, which is about eight CUDA calls, costs less than one per launch."""


@dataclass(frozen=True, slots=True)
class StepSlots:
    """KV slots that the steps of a request need.

    Attributes:
        max_path: Most tokens that one step accepts.
        ahead: Slots that one step writes behind the committed tokens.
    """

    max_path: int
    ahead: int

    def needed(self, request: Request, steps: int) -> int:
        """Return the slots that a request needs for steps whose tokens the host does not know.

        Args:
            request: The request, with the tokens that the host knows.
            steps: Steps in flight and to come; a first token on its way counts as one.
        """
        return min(request.num_tokens + steps * self.max_path, request.max_tokens) + self.ahead

    def most(self, request: Request) -> int:
        """Return the slots of the longest possible text and of what steps write ahead."""
        return request.max_tokens + self.max_path + self.ahead


class RequestMemory:
    """Allocates a row and KV slots to each admitted request.

    ``allocate_row`` promises a request all slots that it can ever use as long as the pool has so
    many. Further requests may be admitted, without a promise; then ``reserve`` may find too few
    slots.

    Columns of the table without a slot contain 0 before their slots are allocated again, so that no
    slot is in two rows.

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
        self._stale: dict[int, int] = {}
        """First column of a row that may contain a slot which has been freed."""
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
        self.pool.free(self._rows)
        self._rows = []  # after the call, which an interrupt may prevent

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

    @property
    def available_slots(self) -> int:
        """Slots that no request holds."""
        return self._allocator.available

    def can_promise(self, max_tokens: int) -> bool:
        """Return whether the pool can hold ``max_tokens`` beside the most of all other requests."""
        return self._total_promised + self.whole_pages(max_tokens) <= self.total_slots

    def allocate_row(self, max_tokens: int) -> int:
        """Allocate a row to a request of at most ``max_tokens``; requires a free one."""
        row = self._free_rows.pop()
        self._slots[row], self._promised[row] = [], self.whole_pages(max_tokens)
        self._total_promised += self._promised[row]
        return row

    def reserve(self, lengths: Iterable[tuple[int, int]]) -> bool:
        """Allocate slots so that each row has them for its first ``length`` tokens.

        Slots of a page that extends behind the last column of the table are held without a column.

        Args:
            lengths: Pairs of row and length.

        Returns:
            Whether there were enough slots; if not, none were allocated.
        """
        ends = [(row, self.whole_pages(length)) for row, length in lengths]
        missing = [(held, row, end) for row, end in ends if end > len(held := self._slots[row])]
        total = sum([end - len(held) for held, _, end in missing])
        if total > self._allocator.available:
            return False
        if not total:
            return True
        self._clear_stale()
        new = self._allocator.alloc(total).tolist()
        rows: list[int] = []
        columns: list[int] = []
        slots: list[int] = []
        begin, most = 0, self.pool.max_context_len
        for held, row, end in missing:
            first, count = len(held), end - len(held)
            held += new[begin : begin + count]
            begin += count
            last = min(end, most)
            rows += [row] * (last - first)
            columns += range(first, last)
            slots += held[first:last]
        index = to_device([*rows, *columns, *slots], self.pool.device).view(3, -1)  # in one copy
        table = self.pool.req_to_token
        table[index[0], index[1]] = index[2].to(table.dtype)
        return True

    def _clear_stale(self) -> None:
        """Clear the columns of freed slots, as late as this: a step may still use the slots."""
        if not self._stale:
            return
        table = self.pool.req_to_token
        freed = [row for row, first in self._stale.items() if not first]
        if freed:
            table.index_fill_(0, to_device(freed, self.pool.device), 0)
        for row, first in self._stale.items():
            if first:
                table[row, first:] = 0
        self._stale = {}

    def shrink(self, lengths: Iterable[tuple[int, int]]) -> None:
        """Free the pages behind the first ``length`` tokens of rows.

        Args:
            lengths: Pairs of row and length.
        """
        freed: list[int] = []
        for row, length in lengths:
            held, keep = self._slots[row], self.whole_pages(length)
            if len(held) > keep:
                self._stale[row] = min(keep, self._stale.get(row, keep))
            freed += held[keep:]
            del held[keep:]
        self._allocator.free(freed)

    def free_row(self, row: int) -> None:
        """Free a row and all its slots."""
        self.shrink([(row, 0)])
        self._total_promised -= self._promised.pop(row)
        del self._slots[row]
        self._free_rows.append(row)

    def free_all(self) -> None:
        """Free all rows and slots. Repairs what an exception in another method left behind."""
        self._slots, self._promised, self._total_promised = {}, {}, 0
        self._allocator = TokenSlotAllocator(self._size, self.page_size)
        self._stale = dict.fromkeys(self._rows, 0)
        self._free_rows = self._rows[::-1]  # the lowest one is allocated first


class SlotReservation:
    """Reserves KV slots for the steps of a batch: for several at once, for fewer if few are free.

    Args:
        memory: Provides the slots.
        step_slots: Slots that steps need.
        steps_at_once: Most steps to reserve slots for when a pool that may become short is more
            than half full.
        most_slots: Slots of all requests at their longest. A pool of as many is never short.
    """

    def __init__(
        self, memory: RequestMemory, step_slots: StepSlots, steps_at_once: int, most_slots: int
    ) -> None:
        self._memory, self._step_slots, self.steps_at_once = memory, step_slots, steps_at_once
        self._is_never_short = memory.total_slots >= most_slots
        self._requests: Sequence[Request] = ()
        """The batch that slots are reserved for."""
        self._steps_left = 0
        """Steps of this batch that have slots."""

    def make_room(self, requests: Sequence[Request], in_flight: int) -> bool:
        """Reserve slots for the next steps of a batch; return whether one step has them.

        Args:
            requests: The batch, the same object as long as it does not change.
            in_flight: Steps whose tokens the host does not know.
        """
        if requests is not self._requests:
            self._requests, self._steps_left = requests, 0
        if not self._steps_left:
            self._steps_left = self._reserve(in_flight)
        return self._steps_left > 0

    def take(self, most: int) -> int:
        """Use up the slots of ``most`` steps, or of as many as have slots; return how many."""
        steps = min(self._steps_left, most)
        self._steps_left -= steps
        return steps

    def give_back(self, requests: Sequence[Request]) -> None:
        """Free the slots that the next step does not need. No step is in flight."""
        self._memory.shrink(self._lengths(requests, 1))
        self.forget_batch()

    def forget_batch(self) -> None:
        """Reserve slots again before the next step."""
        self._requests = ()

    def _reserve(self, in_flight: int) -> int:
        """Reserve slots for as many steps as possible, and return how many.

        While most of the pool is free, or if it is never short, that is for several launches: the
        table on the device is then rarely written.
        """
        steps, memory = self.steps_at_once, self._memory
        most = max(steps, _STEPS_AHEAD)
        lengths = self._lengths(self._requests, in_flight + most)
        has_many = self._is_never_short or 2 * memory.held_slots <= memory.total_slots
        if has_many and memory.reserve(lengths):
            return most
        while steps and not memory.reserve(self._lengths(self._requests, in_flight + steps)):
            steps //= 2
        return steps

    def _lengths(self, requests: Sequence[Request], steps: int) -> Iterator[tuple[int, int]]:
        return ((request.row, self._step_slots.needed(request, steps)) for request in requests)
