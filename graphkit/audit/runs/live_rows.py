"""Which rows of two results of one operation must agree, found by the shapes of the results.

Shapes may leave several possibilities: 4 rows of 2 requests may be 2 tokens of each request, or 2
parts with a row per request. Every possibility is a pair of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations

import torch

LiveRows = Callable[[torch.Tensor, torch.Tensor], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""Returns pairs of tensors from two results of one operation, the expected one first. The results
agree if the tensors of one pair do; without a pair they differ."""


def same_rows(
    expected: torch.Tensor, got: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both results of two runs of the same batch if they have one shape."""
    if expected.shape == got.shape:
        yield expected, got


def padded_rows(requests: int, size: int) -> LiveRows:
    """Return a function that pairs the live rows of a run without pads and of one with pads.

    The dimension of the requests is where the shapes differ. Pads are at its end, or at the end of
    each of its parts if another dimension is merged into it, as in ``[heads * requests]``.

    Args:
        requests: Live requests.
        size: Requests of the run with pads.
    """

    def pair(
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

    return pair


def reordered_rows(requests: Sequence[int], tokens: Sequence[int]) -> LiveRows:
    """Return a function that pairs the rows of runs of the same requests in different orders.

    Any dimension whose length is a multiple of the requests or tokens may hold their rows.

    Args:
        requests: Index in the first run of each request of the second run.
        tokens: Index in the first run of each token row of the second run.
    """
    orders = [torch.tensor(requests), torch.tensor(tokens)]

    def pair(
        expected: torch.Tensor, got: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if expected.shape != got.shape:
            return
        yield expected, got  # a result that does not depend on the order
        for order in orders:
            dims = [d for d in range(got.dim()) if got.shape[d] and got.shape[d] % len(order) == 0]
            for dim in dims:
                width = got.shape[dim] // len(order)
                for parts in (p for p in range(1, width + 1) if width % p == 0):
                    yield _reordered(expected, dim, order, parts), got
            for first, second in combinations(dims, 2):  # such as a mask of rows by rows
                reordered = _reordered(expected, first, order, 1)
                yield _reordered(reordered, second, order, 1), got

    return pair


def _narrowed(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the front of a tensor that is no longer than ``shape`` in any dimension."""
    for dim, length in enumerate(shape):
        tensor = tensor.narrow(dim, 0, min(length, tensor.shape[dim]))
    return tensor


def _reordered(tensor: torch.Tensor, dim: int, order: torch.Tensor, parts: int) -> torch.Tensor:
    """Return a tensor with the requests of each part of a dimension in another order."""
    shape = *tensor.shape[:dim], parts, len(order), -1, *tensor.shape[dim + 1 :]
    return tensor.reshape(shape).index_select(dim + 1, order.to(tensor.device)).view_as(tensor)
