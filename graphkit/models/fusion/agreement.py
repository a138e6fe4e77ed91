"""Whether a replacement computes what its module computes, decided on random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

_LIMITS = {torch.float32: 32.0, torch.float64: 32.0}
_LIMIT_OF_HALF = 1.0
"""Largest root mean square error of a row over that of the row, as a multiple of the dtype's eps.

In two bytes, rounding at three places gives about 0.5: products add in float32. In float32 the
order of the sum matters, with an error that grows with the square root of its length.
"""
_MAGNITUDES = (-3.0, 1.5)
"""Decimal exponents of the smallest and the largest random row.

Small rows show the epsilon of a norm, large ones a clamp.
"""

_DECIDE: ContextVar[Callable[[bool], bool]] = ContextVar("graphkit_decide", default=bool)


@contextmanager
def deciding_by(decide: Callable[[bool], bool]) -> Iterator[None]:
    """Let ``agree`` return ``decide`` of its result, such as whether it is true on all ranks.

    Ranks of a split model compare different numbers. If one of them replaced a module alone, their
    collectives would no longer match.
    """
    token = _DECIDE.set(decide)
    try:
        yield
    finally:
        _DECIDE.reset(token)


def random_rows(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return normal numbers of the shape, dtype and device of a tensor [..., H].

    Rows have different magnitudes.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = like.shape[:-1]
    sizes = torch.logspace(*_MAGNITUDES, rows.numel()).view(*rows, 1)
    return (torch.randn(like.shape, generator=generator) * sizes).to(like.device, like.dtype)


def agree(expected: Any, got: Any) -> bool:
    """Return whether two nested results have the same form, and equal tensors but for rounding."""
    (one, form), (other, other_form) = tree_flatten(expected), tree_flatten(got)
    return _DECIDE.get()(form == other_form and all(map(_equal, one, other)))


def _equal(expected: Any, got: Any) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return bool(expected is got or expected == got)
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, got)
    size = expected.shape[-1] if expected.dim() else 1
    one, other = expected.double().reshape(-1, size), got.double().reshape(-1, size)
    same = (one == other) | (one.isnan() & other.isnan())
    error = torch.where(same, 0.0, one - other).square().mean(-1).sqrt()
    limit = _LIMITS.get(expected.dtype, _LIMIT_OF_HALF) * torch.finfo(expected.dtype).eps
    finite = torch.where(one.isfinite(), one, 0.0)
    return bool((error <= limit * finite.square().mean(-1).sqrt()).all())
