"""Rows and KV slots of requests: their free lists, and the table of slots by request and token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

import torch

from graphkit.config import is_int, require_int
from graphkit.engine.kv.contracts import require_device
from graphkit.errors import AttentionError, short_repr
from graphkit.graphs.devices import to_device
from graphkit.ops.inference import allocates


class FreeList:
    """Allocates the numbers 1 to ``count``, the last freed first.

    Every call takes time in proportion to the numbers that it allocates or frees. An interrupt
    before the end of a call allocates or frees nothing.

    Args:
        count: Largest number.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._freed: dict[int, None] = {}
        self._next = 1
        """Smallest number that was never allocated."""

    def __len__(self) -> int:
        """Return how many numbers are free."""
        return len(self._freed) + self.count + 1 - self._next

    def first_free(self, numbers: Collection[int]) -> int | None:
        """Return the first of some numbers that is free or out of range; ``None`` if none is."""
        is_inside = not numbers or (min(numbers) >= 1 and max(numbers) < self._next)
        if is_inside and self._freed.keys().isdisjoint(numbers):  # without a loop of Python
            return None
        return next(n for n in numbers if not 1 <= n < self._next or n in self._freed)

    def alloc(self, n: int) -> list[int]:
        """Allocate ``n`` numbers, at most as many as are free; smallest first in a new list."""
        assert n <= len(self), "the caller checks that there are enough"
        reused, begin = list(islice(reversed(self._freed), n)), self._next
        try:
            for number in reused:
                del self._freed[number]
            self._next += n - len(reused)
            return [*reused, *range(begin, self._next)]
        except BaseException:  # an interrupt
            self._next = begin
            self._freed |= dict.fromkeys(reversed(reused))
            raise

    def free(self, numbers: Sequence[int]) -> None:
        """Free distinct numbers that are allocated. ``alloc`` returns them in the same order."""
        assert self.first_free(numbers) is None, "the caller checks what it frees"
        self._freed |= dict.fromkeys(reversed(numbers))


def ints_to_free(owner: str, values: object) -> list[int]:
    """Return the rows or slots to free as a list."""
    listed = values.tolist() if isinstance(values, torch.Tensor) else values
    if isinstance(listed, Iterable):
        numbers = list(listed)
        one_of_each_type = dict(zip(map(type, numbers), numbers, strict=True)).values()
        if all(map(is_int, one_of_each_type)):
            return numbers
    raise AttentionError(f"{owner} cannot free {short_repr(values)}. Pass what alloc returned.")


class TokenSlotAllocator:
    """Allocates the slots of a KV pool in whole pages.

    The free list is on the host: ``alloc`` does not wait for the device, ``free`` of a CUDA tensor
    waits for its copy (pass ints if the host has them). The time of both depends on the slots that
    they allocate or free, not on ``size``.

    Args:
        size: The pool's ``size``; an incomplete page at its end stays unused.
        page_size: The pool's ``page_size``; its first page, slot 0 included, is never allocated.
        device: Device of the slots that ``alloc`` returns.

    Raises:
        ConfigError: ``size`` or ``page_size`` is below 1.
    """

    def __init__(self, size: int, page_size: int = 1, device: torch.device | str = "cpu") -> None:
        require_int("TokenSlotAllocator", "size", size)
        require_int("TokenSlotAllocator", "page_size", page_size)
        self.page_size = page_size
        self.device = require_device(type(self).__name__, device)
        self._pages = FreeList(size // page_size)

    @property
    def available(self) -> int:
        """Number of free slots."""
        return len(self._pages) * self.page_size

    def alloc(self, n: int) -> torch.Tensor:
        """Allocate ``n`` slots, [n] int64 on the device: whole pages, the slots of each in order.

        Raises:
            AttentionError: ``n`` is not a multiple of the page size, or more than ``available``; no
                slot was allocated.
        """
        count = self._whole_pages(n, "allocate")
        if count > len(self._pages):
            raise AttentionError(
                f"TokenSlotAllocator cannot allocate {n} slots: {self.available} of "
                f"{self._pages.count * self.page_size} are free. Free the slots of finished "
                "requests, or use a larger KV pool."
            )
        first = to_device(self._pages.alloc(count), torch.device("cpu"))
        slots = (first[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        return slots.to(self.device, non_blocking=True)

    def free(self, slots: torch.Tensor | Sequence[int]) -> None:
        """Free whole pages, their slots in any order.

        Raises:
            AttentionError: A slot was not allocated, is already free or occurs twice, or part of a
                page is missing; no slot was freed.
        """
        numbers = ints_to_free("TokenSlotAllocator", slots)
        count = self._whole_pages(len(numbers), "free")
        pages = list(dict.fromkeys([slot // self.page_size for slot in numbers]))
        if (page := self._pages.first_free(pages)) is not None:
            raise AttentionError(
                f"TokenSlotAllocator cannot free slot {page * self.page_size}: it is already free "
                "or was never allocated. Free each slot of alloc once."
            )
        if len(pages) != count or len(set(numbers)) != len(numbers):
            raise AttentionError(
                f"TokenSlotAllocator got {len(numbers)} slots of {len(pages)} pages of "
                f"{self.page_size}: a slot is missing or occurs twice. Free whole pages, once."
            )
        self._pages.free(pages)

    def _whole_pages(self, n: int, verb: str) -> int:
        pages, odd = divmod(n, self.page_size) if is_int(n) else (0, True)
        if odd or n < 0:
            raise AttentionError(
                f"TokenSlotAllocator cannot {verb} {n} slots: expected whole pages of "
                f"{self.page_size}. Pass a multiple of {self.page_size}."
            )
        return pages


class ReqToTokenPool:
    """A table of KV slots, one row per running request.

    Row 0 belongs to pad rows: it is never allocated and stays zero, so that a pad row reads the
    dummy slot 0. ``req_to_token`` keeps its address for the life of the pool.

    Args:
        size: Requests that may run at once.
        max_context_len: Most tokens of one request, drafts included.
        device: Device of the table.

    Attributes:
        req_to_token: [size + 1, max_context_len] int32.

    Raises:
        ConfigError: ``size`` or ``max_context_len`` is below 1.
    """

    @allocates
    def __init__(self, size: int, max_context_len: int, device: torch.device | str) -> None:
        require_int("ReqToTokenPool", "size", size)
        require_int("ReqToTokenPool", "max_context_len", max_context_len)
        self.size = size
        self.max_context_len = max_context_len
        self.device = require_device(type(self).__name__, device)
        shape = (size + 1, max_context_len)
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self._rows = FreeList(size)

    @property
    def available(self) -> int:
        """Number of free rows."""
        return len(self._rows)

    def alloc(self, n: int) -> list[int]:
        """Allocate ``n`` rows, lowest numbers first in a new pool.

        Raises:
            AttentionError: ``n`` is not an int, negative or more than ``available``; no row was
                allocated.
        """
        if not is_int(n) or not 0 <= n <= self.available:
            raise AttentionError(
                f"ReqToTokenPool cannot allocate {n} rows: {self.available} of {self.size} are "
                "free. Free the rows of finished requests or use a larger pool."
            )
        return self._rows.alloc(n)

    def free(self, rows: Iterable[int]) -> None:
        """Free rows.

        Raises:
            AttentionError: A row is row 0, is not in the table, or is already free; no row was
                freed.
        """
        rows, freed = ints_to_free("ReqToTokenPool", rows), set[int]()
        for row in rows:
            if not 1 <= row <= self.size:
                raise AttentionError(
                    f"ReqToTokenPool cannot free row {row}: expected 1 to {self.size}, since "
                    "row 0 belongs to pad rows. Free only rows that alloc returned."
                )
            if row in freed or self._rows.first_free([row]) is not None:
                raise AttentionError(
                    f"ReqToTokenPool row {row} is already free. Free each row once."
                )
            freed.add(row)
        self._rows.free(rows)
