"""Declared state under watch: put back before each replay, and looked at for writes after it.

Nobody declares what the rows of a state tensor stand for, and layouts differ. So what a replay
changes is judged leniently: a tensor is as it should be if only rows of the batch's slots and the
dummy's changed, or of its requests and the dummy's, or as many as the batch has requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Write:
    """A row of state that a replay changed although its batch does not name it."""

    name: str
    row: int
    before: str
    after: str


class WatchedState:
    """State tensors and a copy of each.

    Args:
        state: By name.
        page_size: Slots of the first page, which is the dummy's.
        last_slot: The largest slot that batches name; it tells which dimension counts slots.
        last_request: The largest row of the request pool that they name.
    """

    def __init__(
        self, state: Mapping[str, torch.Tensor], page_size: int, last_slot: int, last_request: int
    ) -> None:
        self._page_size, self._last_request = page_size, last_request
        self._watched = [
            _Watched(name, tensor, *_slot_dims(tensor, page_size, last_slot))
            for name, tensor in state.items()
            if tensor.numel()
        ]
        self._pools: list[_Watched] = []
        self._tables: list[_Watched] = []

    def restore(self) -> None:
        """Put everything back."""
        for each in self._watched:
            each.tensor.copy_(each.saved)

    def learn(self, batch: Any) -> None:
        """Tell KV pools and request tables by what a replay of the batch has just written.

        A pool was written at the batch's slots. A table of whole numbers with a row per request was
        only read.
        """
        slots, _, _ = self._named(batch)
        for each in self._watched:
            rows = each.changed_rows()
            if rows <= {*slots} and rows & {*slots[self._page_size :]}:
                self._pools.append(each)
            elif not rows and each.is_table(self._last_request):
                self._tables.append(each)

    def poison(self, value: float) -> None:
        """Fill the dummy slots of KV pools; whole numbers there are left alone."""
        for each in self._pools:
            if each.tensor.is_floating_point():
                # fill_ refuses what a dtype lacks, such as an infinity of eight bits.
                each.dummy(self._page_size).copy_(torch.tensor(value))

    def mislead(self, batch: Any) -> bool:
        """Let the dummy request's row of request tables name slots of a request not in the batch.

        Returns whether there is such a table and such a request.
        """
        _, requests, _ = self._named(batch)
        others = [row for row in range(1, self._last_request + 1) if row not in requests]
        for each in self._tables if others else ():
            each.tensor[0] = each.tensor[others[-1]]
        return bool(self._tables and others)

    def stray_write(self, batch: Any) -> Write | None:
        """The first row that changed although the batch does not name it."""
        named = [torch.tensor(rows) for rows in self._named(batch)]
        stray = [each.stray(named) for each in self._watched]
        if not stray or not bool(torch.stack([rows.any() for rows in stray]).any()):
            return None
        each, rows = next(
            (each, rows) for each, rows in zip(self._watched, stray, strict=True) if rows.any()
        )
        row = int(rows.nonzero()[0])
        return Write(each.name, row, *each.values(row))

    def _named(self, batch: Any) -> tuple[list[int], list[int], list[int]]:
        """Rows that a replay may change: by slot, by request, by place in the batch."""
        dummies = list(range(self._page_size))
        slots, requests = batch.out_cache_loc.tolist(), batch.req_pool_indices.tolist()
        return [*dummies, *slots], [0, *requests], list(range(batch.batch_size))


class _Watched:
    """One tensor, its copy, and both as rows of bytes."""

    def __init__(self, name: str, tensor: torch.Tensor, dim: int, dims: int) -> None:
        self.name, self.tensor, self.saved = name, tensor, tensor.clone()
        self._dim, self._dims = dim, dims

    def changed(self) -> torch.Tensor:
        """Which rows differ from the copy, bool [rows]. To the bit: NaN equals itself."""
        return (self._words(self.tensor) != self._words(self.saved)).any(2).any(0)

    def changed_rows(self) -> set[int]:
        """The same as numbers."""
        return {*self.changed().nonzero().flatten().tolist()}

    def stray(self, named: list[torch.Tensor]) -> torch.Tensor:
        """Rows that changed and are not named, by the way of naming that explains most of them."""
        changed = self.changed()
        # One row more stands for names beyond the last; no mask is indexed, so nothing waits.
        ways = changed.new_zeros(len(named), len(changed) + 1)
        ways[:, :-1] = changed
        for way, rows in zip(ways, named, strict=True):
            way[rows.to(changed.device).clamp(max=len(changed))] = False
        return ways.index_select(0, ways.sum(1).argmin()[None])[0, :-1]

    def values(self, row: int) -> tuple[str, str]:
        """What the first changed number of a row was, and is."""
        both = [self._rows(tensor)[:, row].flatten() for tensor in (self.saved, self.tensor)]
        bits = [numbers.view(torch.uint8).view(len(numbers), -1) for numbers in both]
        at = int((bits[0] != bits[1]).any(1).nonzero()[0])
        before, after = (numbers[at].item() for numbers in both)
        return f"{before:.6g}", f"{after:.6g}"

    def dummy(self, page_size: int) -> torch.Tensor:
        """The dummy slots, as a view."""
        return self.tensor.narrow(self._dim, 0, page_size if self._dims == 1 else 1)

    def is_table(self, last_request: int) -> bool:
        """Whether it may hold a row of slots per request."""
        tensor = self.tensor
        is_whole = tensor.dtype in (torch.int32, torch.int64)
        return is_whole and tensor.ndim == 2 and len(tensor) > last_request

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[before, rows, numbers of a row], contiguous."""
        shape, end = tensor.shape or (1,), self._dim + self._dims
        rows = prod(shape[self._dim : end])
        return tensor.reshape(prod(shape[: self._dim]), rows, -1).contiguous()

    def _words(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows as whole numbers, of eight bytes if possible: it makes comparing cheap."""
        rows = self._rows(tensor).view(torch.uint8)
        is_even = rows.shape[2] % 8 == 0 and rows.storage_offset() % 8 == 0
        return rows.view(torch.int64) if is_even else rows


def _slot_dims(tensor: torch.Tensor, page_size: int, last_slot: int) -> tuple[int, int]:
    """The first dimension that counts slots, and over how many they are spread.

    Keys and values, or layers, may come before it; a pool may count pages, and slots inside them.
    """
    shape = tensor.shape
    for dim in range(min(tensor.ndim - 1, 2)):
        if shape[dim] > last_slot:
            return dim, 1
        if shape[dim + 1] == page_size > 1 and shape[dim] * page_size > last_slot:
            return dim, 2
    return 0, 1
