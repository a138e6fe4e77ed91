"""The numbers of rows or pages that are free, and the check of what a caller frees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from graphkit.config import is_int
from graphkit.errors import AttentionError


class FreeList:
    """Allocates the numbers 1 to ``count``, the last freed first.

    Every call takes time in proportion to the numbers that it allocates or frees. The memory is a
    byte per number, and eight bytes per number that was freed.

    Args:
        count: Largest number.

    Attributes:
        count: As passed.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._freed: list[int] = []
        self._next = 1
        """Smallest number that was never allocated."""
        self._is_allocated = bytearray(count + 1)

    def __len__(self) -> int:
        """Return how many numbers are free."""
        return len(self._freed) + self.count + 1 - self._next

    def is_allocated(self, number: int) -> bool:
        """Return whether a number is allocated; False for a number out of range."""
        return 1 <= number <= self.count and bool(self._is_allocated[number])

    def alloc(self, n: int) -> list[int]:
        """Allocate ``n`` numbers, at most as many as are free; smallest first in a new list."""
        assert n <= len(self), "the caller checks that there are enough"
        freed = min(n, len(self._freed))
        numbers = self._freed[len(self._freed) - freed :][::-1]
        del self._freed[len(self._freed) - freed :]
        new = n - freed
        numbers += range(self._next, self._next + new)
        self._next += new
        for number in numbers:
            self._is_allocated[number] = 1
        return numbers

    def free(self, numbers: Sequence[int]) -> None:
        """Free distinct numbers that are allocated. ``alloc`` returns them in the same order."""
        for number in numbers:
            assert self._is_allocated[number], "the caller checks what it frees"
            self._is_allocated[number] = 0
        self._freed.extend(reversed(numbers))


def ints_to_free(owner: str, values: object) -> list[int]:
    """Return the rows or slots to free as a list.

    Args:
        owner: Name of the pool's class.
        values: A tensor, or an iterable of ints.

    Raises:
        AttentionError: It is neither.
    """
    listed = values.tolist() if isinstance(values, torch.Tensor) else values
    if isinstance(listed, Iterable):
        numbers = list(listed)
        if all(map(is_int, numbers)):
            return numbers
    raise AttentionError(f"{owner} cannot free {values!r}. Pass what alloc returned.")
