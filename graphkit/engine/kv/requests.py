"""The table of KV slots, by request and token."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from graphkit.config import is_int, require_int
from graphkit.engine.kv.contracts import require_device
from graphkit.engine.kv.free_list import FreeList, ints_to_free
from graphkit.errors import AttentionError
from graphkit.ops.inference import allocates


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
            if row in freed or not self._rows.is_allocated(row):
                raise AttentionError(
                    f"ReqToTokenPool row {row} is already free. Free each row once."
                )
            freed.add(row)
        self._rows.free(rows)
