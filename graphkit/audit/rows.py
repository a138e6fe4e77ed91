"""What the rows of a state tensor may stand for.

Nobody declares it, and layouts differ: a row is a slot, a page of slots, a request or a place in
the batch, and keys and values, or layers, may come before. So every way is tried that a tensor's
shape admits, and one that explains what was written is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch

Kind = Literal["slots", "pages", "requests", "places"]
Named = Mapping[Kind, Sequence[int]]
"""Rows by what they may stand for."""
_MOST_BEFORE = 2
"""Dimensions that may come before the one that counts: keys and values, and layers."""


@dataclass(frozen=True, slots=True)
class Way:
    """What one dimension of a tensor may count.

    Attributes:
        kind: What its rows stand for.
        dim: The dimension.
        dims: Over how many it is spread: pages, and slots inside them.
    """

    kind: Kind
    dim: int
    dims: int = 1

    def dummies(self, page_size: int) -> int:
        """How many of the first along its dimension are nobody's."""
        if self.kind == "places":
            return 0
        return page_size if (self.kind, self.dims) == ("slots", 1) else 1

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as [before, rows, numbers of a row], contiguous."""
        shape, end = tensor.shape or (1,), self.dim + self.dims
        count = prod(shape[self.dim : end])
        return tensor.reshape(prod(shape[: self.dim]), count, -1).contiguous()

    def changed(self, now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Which rows differ, bool [rows]. To the bit: NaN equals itself."""
        return (_words(self.rows(now)) != _words(self.rows(before))).any(2).any(0)

    def strays(self, now: torch.Tensor, before: torch.Tensor, named: Named) -> torch.Tensor:
        """Which rows differ although nobody named them, bool [rows]."""
        changed = self.changed(now, before)
        # One row more stands for names beyond the last; no mask is indexed, so nothing waits.
        rows = torch.cat([changed, changed.new_zeros(1)])
        names = torch.tensor(named[self.kind], dtype=torch.int64).to(rows.device)
        rows[names.clamp(max=len(changed))] = False
        return rows[:-1]


def dummies(page_size: int) -> Named:
    """The rows of nobody: the first page of slots, and the first row of the request pool."""
    return {"slots": range(page_size), "pages": [0], "requests": [0], "places": []}


def named_by(batch: Any, page_size: int) -> Named:
    """The rows that a replay of a batch may change: its own, and nobody's."""
    slots, requests = _numbers(batch.out_cache_loc), _numbers(batch.req_pool_indices)
    return {
        "slots": [*range(page_size), *slots],
        "pages": [0, *(slot // page_size for slot in slots)],
        "requests": [0, *requests],
        "places": range(batch.batch_size),
    }


def _numbers(value: Any) -> list[int]:
    """Of a tensor or an array; none of a bound field, which batches leave out."""
    return [] if value is None else value.tolist()


def ways_of(tensor: torch.Tensor, page_size: int, named: Named) -> tuple[Way, ...]:
    """The ways that a tensor's shape admits, likely ones first.

    Args:
        tensor: Of declared state.
        page_size: Slots of a page.
        named: Rows that are known to be there; a dimension that counts is longer.
    """
    most = {kind: max(rows, default=0) for kind, rows in named.items()}
    kinds = list(most)
    ways = _ways(tensor.shape, page_size, most)
    # What counts slots is longer than what comes before it.
    return tuple(sorted(ways, key=lambda way: (kinds.index(way.kind), -tensor.shape[way.dim])))


def without_dummies(tensor: torch.Tensor, page_size: int, named: Named) -> torch.Tensor:
    """What is behind the dummy's rows, by the likeliest way, as a view."""
    for way in ways_of(tensor, page_size, named)[:1]:
        first = way.dummies(page_size)
        return tensor.narrow(way.dim, first, tensor.shape[way.dim] - first)
    return tensor


def _ways(shape: Sequence[int], page_size: int, most: Mapping[Kind, int]) -> Iterator[Way]:
    # The last dimension is what a row holds, if there is another one.
    for dim, rows in enumerate(shape[: max(len(shape) - 1, 1)][: _MOST_BEFORE + 1]):
        if rows > most["slots"]:
            yield Way("slots", dim)
        if page_size > 1 and rows > most["pages"]:
            is_split = shape[dim + 1 : dim + 2] == (page_size,)
            yield Way("slots", dim, 2) if is_split else Way("pages", dim)
        if rows > most["requests"]:
            yield Way("requests", dim)
        if dim == 0 and rows > most["places"]:
            yield Way("places", dim)


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Rows as whole numbers, of eight bytes if possible: it makes comparing cheap."""
    data = rows.view(torch.uint8)
    is_even = data.shape[2] % 8 == 0 and data.storage_offset() % 8 == 0
    return data.view(torch.int64) if is_even else data
