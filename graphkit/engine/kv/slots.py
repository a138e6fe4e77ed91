"""The free list of KV slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.config import is_int, require_int
from graphkit.engine.kv.contracts import require_device
from graphkit.engine.kv.free_list import FreeList, ints_to_free
from graphkit.errors import AttentionError


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
        first = torch.tensor(self._pages.alloc(count), dtype=torch.int64)
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
        pages = list(dict.fromkeys(slot // self.page_size for slot in numbers))
        for page in pages:
            if not self._pages.is_allocated(page):
                raise AttentionError(
                    f"TokenSlotAllocator cannot free slot {page * self.page_size}: it is "
                    "already free or was never allocated. Free each slot of alloc once."
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
