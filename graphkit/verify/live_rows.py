"""Rows of two results of one operation that must agree, found by the shapes of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations

import torch

LiveRows = Callable[[torch.Tensor, torch.Tensor], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""Returns every reading of two results of one operation as rows that must agree. Two results agree
if they do in one reading; without a reading they differ."""


def same_rows(
    expected: torch.Tensor, got: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Read all rows of two runs of the same batch."""
    if expected.shape == got.shape:
        yield expected, got


def padded_rows(requests: int, size: int) -> LiveRows:
    """Read the live rows of a run without pads and of one with pads.

    Rows are found where the shapes differ: pads are at the end of a dimension, or at the end of
    each part of one that merges others with the requests.

    Args:
        requests: Live requests.
        size: Requests of the run with pads.
    """

    def read(
        expected: torch.Tensor, got: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if expected.dim() != got.dim():
            return
        differing = [d for d in range(got.dim()) if expected.shape[d] != got.shape[d]]
        yield _narrowed(expected, got.shape), _narrowed(got, expected.shape)
        for dim in differing if len(differing) == 1 else ():
            width, rest = divmod(expected.shape[dim], requests)
            if rest or got.shape[dim] != width * size:
                continue
            for parts in range(2, width + 1):
                if width % parts == 0:
                    split = [
                        tensor.unflatten(dim, (parts, -1)).narrow(
                            dim + 1, 0, requests * width // parts
                        )
                        for tensor in (expected, got)
                    ]
                    yield split[0], split[1]

    return read


def reordered_rows(requests: Sequence[int], tokens: Sequence[int]) -> LiveRows:
    """Read the rows of a run, and of a run of the same requests in another order.

    Args:
        requests: Index of each request of the second run in the first one.
        tokens: The same for token rows.
    """
    orders = [torch.tensor(requests), torch.tensor(tokens)]

    def read(
        expected: torch.Tensor, got: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if expected.shape != got.shape:
            return
        yield expected, got
        for order in orders:
            dims = [d for d in range(got.dim()) if got.shape[d] and got.shape[d] % len(order) == 0]
            for dim in dims:
                width = got.shape[dim] // len(order)
                for parts in (p for p in range(1, width + 1) if width % p == 0):
                    yield _taken(expected, dim, order, parts), got
            for one, other in combinations(dims, 2):
                yield _taken(_taken(expected, one, order, 1), other, order, 1), got

    return read


def _narrowed(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    for dim, length in enumerate(shape):
        tensor = tensor.narrow(dim, 0, min(length, tensor.shape[dim]))
    return tensor


def _taken(tensor: torch.Tensor, dim: int, order: torch.Tensor, parts: int) -> torch.Tensor:
    """Return a tensor with the requests of each part of a dimension in another order."""
    shape = *tensor.shape[:dim], parts, len(order), -1, *tensor.shape[dim + 1 :]
    return tensor.reshape(shape).index_select(dim + 1, order.to(tensor.device)).view_as(tensor)
