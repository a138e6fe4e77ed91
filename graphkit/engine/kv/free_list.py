"""The numbers of rows or pages that are free, and the check of what a caller frees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from graphkit.config import is_int
from graphkit.errors import AttentionError, short_repr


class FreeList:
    """Allocates the numbers 1 to ``count``, the last freed first.

    Every call takes time in proportion to the numbers that it allocates or frees. An interrupt
    before the end of a call allocates or frees nothing.

    Args:
        count: Largest number.

    Attributes:
        count: As passed.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._freed: dict[int, None] = {}
        self._next = 1
        """Smallest number that was never allocated."""

    def __len__(self) -> int:
        """Return how many numbers are free."""
        return len(self._freed) + self.count + 1 - self._next

    def is_allocated(self, number: int) -> bool:
        """Return whether a number is allocated; False for a number out of range."""
        return 1 <= number < self._next and number not in self._freed

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
        assert all(map(self.is_allocated, numbers)), "the caller checks what it frees"
        self._freed |= dict.fromkeys(reversed(numbers))


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
    raise AttentionError(f"{owner} cannot free {short_repr(values)}. Pass what alloc returned.")
