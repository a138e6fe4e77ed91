"""Declared state under watch: put back before each replay, and looked at for writes after it.

What a replay changes is judged leniently, see ``audit.rows``: a tensor is as it should be if in one
of its ways only rows changed that the batch names, or the dummy's. A tensor whose shape admits no
way, such as a counter, is put back and not judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.audit.row_axes import RowAxis, RowsByKind, reserved_rows, row_axes, rows_of_batch


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
        state: By name. Tensors that lie within another one are looked at as parts of it.
        page_size: Slots of the first page, which is the dummy's.
        whole: The largest batch; its slots and requests tell what a tensor's dimensions count.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], page_size: int, whole: Any) -> None:
        self._page_size = page_size
        named = rows_of_batch(whole, page_size)
        self._last_request = max(named["requests"])
        self._watched = [
            _Watched(name, tensor, row_axes(tensor, page_size, named))
            for name, tensor in _apart(state)
        ]
        self._pools: list[tuple[_Watched, RowAxis]] = []
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
        each_named = rows_of_batch(batch, self._page_size), reserved_rows(self._page_size)
        for each in self._watched:
            pool = next((way for way in each.ways if each.was_written(way, *each_named)), None)
            if pool is not None:
                self._pools.append((each, pool))
                each.prefer(pool)
            elif each.is_table(self._last_request):
                self._tables.append(each)

    def poison(self, value: float) -> None:
        """Fill the dummy slots of KV pools; whole numbers there are left alone."""
        for each, way in self._pools:
            if each.tensor.is_floating_point():
                dummy = each.tensor.narrow(way.dim, 0, way.reserved_count(self._page_size))
                # fill_ refuses what a dtype lacks, such as an infinity of eight bits.
                dummy.copy_(torch.tensor(value))

    def mislead(self, batch: Any) -> bool:
        """Let the dummy request's row of request tables name slots of a request not in the batch.

        Returns whether there is such a table and such a request.
        """
        requests = rows_of_batch(batch, self._page_size)["requests"]
        others = [row for row in range(1, self._last_request + 1) if row not in requests]
        for each in self._tables if others else ():
            each.tensor[0] = each.tensor[others[-1]]
        return bool(self._tables and others)

    def stray_write(self, batch: Any) -> Write | None:
        """The first row that changed although the batch does not name it."""
        named = rows_of_batch(batch, self._page_size)
        judged = [each for each in self._watched if each.ways]
        # The likeliest way explains almost everything, so the device is waited for once.
        found = [each.strays(each.ways[0], named).any() for each in judged]
        doubtful = torch.stack(found).tolist() if found else []
        for each, is_doubtful in zip(judged, doubtful, strict=True):
            write = each.write(named) if is_doubtful else None
            if write is not None:
                return write
        return None


class _Watched:
    """One tensor, its copy, and what its rows may stand for."""

    def __init__(self, name: str, tensor: torch.Tensor, ways: tuple[RowAxis, ...]) -> None:
        self.name, self.tensor, self.saved, self.ways = name, tensor, tensor.clone(), ways

    def prefer(self, way: RowAxis) -> None:
        """Take a way first, since it was seen to be right."""
        self.ways = (way, *(other for other in self.ways if other != way))

    def strays(self, way: RowAxis, named: RowsByKind) -> torch.Tensor:
        """Rows that changed and are not named, bool [rows]."""
        return way.stray_rows(self.tensor, self.saved, named)

    def write(self, named: RowsByKind) -> Write | None:
        """The first stray row by the way that explains most of them, if none explains all."""
        strays = [(way, self.strays(way, named).nonzero().flatten().tolist()) for way in self.ways]
        way, rows = min(strays, key=lambda each: len(each[1]))
        return Write(self.name, rows[0], *self._values(way, rows[0])) if rows else None

    def was_written(self, way: RowAxis, named: RowsByKind, nobodys: RowsByKind) -> bool:
        """Whether slots that were named changed, or their pages, and nothing else."""
        if way.kind not in ("slots", "pages"):
            return False
        rows = {*way.changed_rows(self.tensor, self.saved).nonzero().flatten().tolist()}
        return rows <= {*named[way.kind]} and not rows <= {*nobodys[way.kind]}

    def is_table(self, last_request: int) -> bool:
        """Whether it may hold a row of slots per request, and was not written."""
        tensor = self.tensor
        is_whole = tensor.dtype in (torch.int32, torch.int64) and tensor.ndim == 2
        return is_whole and len(tensor) > last_request and torch.equal(tensor, self.saved)

    def _values(self, way: RowAxis, row: int) -> tuple[str, str]:
        """What the first changed number of a row was, and is."""
        both = [way.rows(tensor)[:, row].flatten() for tensor in (self.saved, self.tensor)]
        bits = [numbers.view(torch.uint8).view(len(numbers), -1) for numbers in both]
        at = int((bits[0] != bits[1]).any(1).nonzero()[0])
        before, after = (numbers[at].item() for numbers in both)
        return f"{before:.6g}", f"{after:.6g}"


def _apart(state: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """State that is neither empty nor a part of other state: its rows begin somewhere else."""
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(state.items(), key=lambda each: _size_and_layout(each[1])):
        if tensor.numel() and not any(_is_within(tensor, whole) for whole in kept.values()):
            kept[name] = tensor
    return [(name, tensor) for name, tensor in state.items() if name in kept]


def _size_and_layout(tensor: torch.Tensor) -> tuple[int, bool]:
    """Sorts what holds others before them."""
    return -tensor.numel() * tensor.element_size(), not tensor.is_contiguous()


def _is_within(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.data_ptr() + (last + 1) * tensor.element_size()
    size = whole.numel() * whole.element_size()
    begins_within = whole.data_ptr() <= tensor.data_ptr()
    return whole.is_contiguous() and begins_within and end <= whole.data_ptr() + size
