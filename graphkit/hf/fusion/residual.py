"""Sums of the residual stream that wait for the norm that reads them.

``rms_norm(a + b)`` is one kernel as ``add_rms_norm``. A sum is therefore not computed where a model
writes it, but by the norm behind it, or by the first operation that reads it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from graphkit.errors import TargetError
from graphkit.ops.decoder import add_rms_norm, rms_norm

_SUMS = (torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.add)
_METADATA = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda")
) | {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
}  # fmt: skip
"""Functions that read no number of a tensor."""


class PendingSum(torch.Tensor):
    """The sum of two tensors of one shape, computed when it is first read.

    Private names of torch, checked on 2.13: ``torch.Tensor._make_wrapper_subclass``, the documented
    way to a tensor without memory.
    """

    _terms: tuple[torch.Tensor, torch.Tensor]
    _versions: tuple[int, int]
    _total: torch.Tensor | None

    @staticmethod
    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> Self:
        """Create a sum that is not computed yet."""
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls, one.shape, dtype=one.dtype, device=one.device
        )
        self._terms, self._versions = (one, other), (_version(one), _version(other))
        self._total = None
        return self

    def total(self) -> torch.Tensor:
        """Return the sum.

        Raises:
            TargetError: A term was written after the addition.
        """
        if self._total is None:
            one, other = self._checked_terms()
            self._total = one + other
        return self._total

    def normalised(self, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``rms_norm`` of the sum, and keep the sum."""
        if self._total is not None:
            return normalised(self._total, weight, eps)
        one, other = (term.reshape(-1, term.shape[-1]) for term in self._checked_terms())
        rows, total = add_rms_norm(one, other, weight, eps)
        self._total = total.view(self.shape)
        return rows.view(self.shape)

    def _checked_terms(self) -> tuple[torch.Tensor, torch.Tensor]:
        if tuple(map(_version, self._terms)) != self._versions:
            raise TargetError(
                "the model writes a tensor after adding it to the residual stream, where the sum "
                "is not computed yet. Load it with fuse=False."
            )
        return self._terms

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute the sums among the arguments, except for functions that read metadata."""
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        args, kwargs = tree_map_only(PendingSum, PendingSum.total, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute the sums among the arguments of an operation that torch calls by itself."""
        args, kwargs = tree_map_only(PendingSum, PendingSum.total, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


class DeferredSums(TorchFunctionMode):
    """Lets additions in a block give a ``PendingSum``.

    Args:
        widths: Row sizes of the norms that compute such sums; rows of other sizes are added at
            once.
    """

    def __init__(self, widths: Collection[int]) -> None:
        super().__init__()
        self._widths = widths

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function, or defer it."""
        if func in _SUMS and not kwargs and self._may_wait(*args):
            one, other = tree_map_only(PendingSum, PendingSum.total, args)
            return PendingSum(one, other)
        return func(*args, **(kwargs or {}))

    def _may_wait(self, one: Any, other: Any) -> bool:
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.shape == other.shape
            and one.dtype == other.dtype
            and one.dim() == 3
            and one.shape[-1] in self._widths
            and one.is_floating_point()
        )


def normalised(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``rms_norm`` of rows [..., H], or of a pending sum."""
    if isinstance(rows, PendingSum):
        return rows.normalised(weight, eps)
    return rms_norm(rows.reshape(-1, rows.shape[-1]), weight, eps).view(rows.shape)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
