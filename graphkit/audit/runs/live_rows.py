"""Which rows of two results of one operation must agree, found by the shapes of the results.

Shapes may leave several possibilities: 4 rows of 2 requests may be 2 tokens of each request, or 2
parts with a row per request. Every possibility is a pair of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""Tensors from two results of one operation, the expected one first."""
LiveRows = Callable[[torch.Tensor, torch.Tensor], Iterable[Pair]]
"""Returns pairs from two results: they agree if the tensors of one pair do, else they differ."""


def same_rows(expected: torch.Tensor, got: torch.Tensor) -> Iterator[Pair]:
    """Yield both results of two runs of the same batch if they have one shape."""
    if expected.shape == got.shape:
        yield expected, got


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where two runs have the rows that must agree, in units such as requests or tokens.

    Attributes:
        expected, got: Index of each unit in the first and in the second run.
        num_expected, num_got: Number of units in either run.
        may_have_pads: Whether the step may add pads behind the rows, one row per unit, as products
            do. They are looked for in the first two dimensions.
    """

    expected: Sequence[int]
    got: Sequence[int]
    num_expected: int
    num_got: int
    may_have_pads: bool = False

    @classmethod
    def in_order(cls, order: Sequence[int]) -> RowPlaces:
        """Return the places of units that the second run has in another order."""
        return cls(order, range(len(order)), len(order), len(order))


def matched_rows(*places: RowPlaces) -> LiveRows:
    """Return a function that pairs the rows of two runs that have them at different places.

    Any dimension whose length is a multiple of the units may hold the rows, also if another
    dimension is merged into it, as in ``[heads * requests]``. Other dimensions may differ in
    length, as that of the longest request does; their fronts are compared.

    Args:
        places: The places of requests, and those of token rows where requests have different
            numbers of them.
    """

    def pair(expected: torch.Tensor, got: torch.Tensor) -> Iterator[Pair]:
        if expected.dim() != got.dim():
            return
        yield _narrowed(expected, got)  # a result that does not depend on the places
        for units in places:
            dims = [dim for dim in range(got.dim()) if _holds(units, expected, got, dim)]
            for dim in dims:
                width = got.shape[dim] // units.num_got
                for parts in (p for p in range(1, width + 1) if width % p == 0):
                    yield _narrowed(*_taken(units, expected, got, dim, parts))
            for dim in {0, 1} & {*range(got.dim())} if units.may_have_pads else ():
                fits = expected.shape[dim] >= units.num_expected, got.shape[dim] >= units.num_got
                if all(fits) and dim not in dims and expected.shape[:dim] == got.shape[:dim]:
                    front = expected.narrow(dim, 0, units.num_expected)
                    yield _taken(units, front, got.narrow(dim, 0, units.num_got), dim)
            for first, second in combinations(dims, 2):  # such as a mask of rows by rows
                taken = _taken(units, *_taken(units, expected, got, first), second)
                yield _narrowed(*taken)

    return pair


def _holds(units: RowPlaces, expected: torch.Tensor, got: torch.Tensor, dim: int) -> bool:
    """Return whether a dimension may hold the rows of all units, as many of each."""
    width, rest = divmod(expected.shape[dim], units.num_expected)
    return not rest and width > 0 and got.shape[dim] == width * units.num_got


def _taken(
    units: RowPlaces, expected: torch.Tensor, got: torch.Tensor, dim: int, parts: int = 1
) -> Pair:
    """Return the rows of the units in each part of a dimension of two tensors."""

    def rows(tensor: torch.Tensor, count: int, places: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(places, device=tensor.device)
        split: torch.Tensor = tensor.unflatten(dim, (parts, count, -1))
        return split.index_select(dim + 1, index).flatten(dim, dim + 2)

    one = rows(expected, units.num_expected, units.expected)
    return one, rows(got, units.num_got, units.got)


def _narrowed(expected: torch.Tensor, got: torch.Tensor) -> Pair:
    """Return the fronts that two tensors share in every dimension."""
    for dim, (one, other) in enumerate(zip(expected.shape, got.shape, strict=True)):
        length = min(one, other)
        expected, got = expected.narrow(dim, 0, length), got.narrow(dim, 0, length)
    return expected, got
