"""Sums of the residual stream that wait for the norm that reads them.

``rms_norm(a + b)`` is one kernel as ``add_rms_norm``, also where ``b`` is a product in parts. A sum
is therefore not computed where a model writes it, but by the norm behind it, or by the first
operation that reads it otherwise. Mamba keeps the stream in float32 beside layers of two bytes, and
rounds it before the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import reduce
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from graphkit.distributed import Collectives
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
_MIXED = {torch.float32, torch.bfloat16}, {torch.float32, torch.float16}
"""Dtypes of a stream and of the layers that it passes."""


class DeferredResidualAdd(torch.Tensor):
    """The sum of two tensors of one shape, or of the parts of one, computed when it is first read.

    Private names of torch, checked on 2.13: ``torch.Tensor._make_wrapper_subclass``, the documented
    way to a tensor without memory.
    """

    _parts: torch.Tensor
    _residual: torch.Tensor | None
    _versions: tuple[int, int]
    _total: torch.Tensor | None
    _collectives: Collectives | None
    _product: DeferredResidualAdd | None
    _is_normalised: bool
    _part_dtype: torch.dtype
    _rounded_from: DeferredResidualAdd | None

    @staticmethod
    def __new__(cls, parts: torch.Tensor, dtype: torch.dtype) -> Self:
        """Create a sum of parts, [S, ...], that is not computed yet, in a dtype."""
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls, parts.shape[1:], dtype=dtype, device=parts.device
        )
        self._parts, self._residual, self._total = parts, None, None
        self._collectives, self._product, self._is_normalised = None, None, False
        self._versions = _version(parts), 0
        self._part_dtype, self._rounded_from = dtype, None
        return self

    @classmethod
    def of(cls, one: torch.Tensor, other: torch.Tensor) -> Self:
        """Return the sum of two tensors, of which one may be an unread product.

        Of two dtypes, float32 is that of the stream.
        """
        is_product = isinstance(one, DeferredResidualAdd) and one.is_unread_product
        if is_product if one.dtype == other.dtype else other.dtype == torch.float32:
            one, other = other, one
        residual = one.total() if isinstance(one, DeferredResidualAdd) else one
        product, collectives = None, None
        if isinstance(other, DeferredResidualAdd) and other.is_unread_product:
            product, parts, collectives = other, other._checked_parts(), other._collectives
        else:
            parts = (other.total() if isinstance(other, DeferredResidualAdd) else other)[None]
        self = cls(parts, residual.dtype)
        self._residual, self._versions = residual, (_version(parts), _version(residual))
        self._collectives, self._product = collectives, product
        self._part_dtype = other.dtype
        return self

    def to_dtype(self, dtype: torch.dtype) -> DeferredResidualAdd | None:
        """Return this sum in a dtype, not computed yet; ``None`` if it has to be computed."""
        if dtype == self.dtype:
            return self
        can_wait = self._total is None and self._residual is not None
        if not can_wait or self._collectives is not None or dtype != self._part_dtype:
            return None
        rounded = type(self)(self._parts, dtype)
        rounded._rounded_from = self
        return rounded

    def over_ranks(self, collectives: Collectives) -> Self:
        """Let the parts of all ranks add up, and return this sum."""
        self._collectives = collectives
        return self

    @property
    def is_unread_product(self) -> bool:
        """Whether this is a sum of parts alone, which nothing has read."""
        return self._residual is None and self._total is None and self._rounded_from is None

    @property
    def is_read_by_norm(self) -> bool:
        """Whether this is a product that nothing but a norm has read, as part of a sum."""
        return self.is_unread_product and self._is_normalised

    def total(self) -> torch.Tensor:
        """Return the sum.

        Raises:
            TargetError: A term was written after the addition.
        """
        if self._rounded_from is not None:
            return self._rounded_from.total().to(self.dtype)
        if self._total is None:
            rows = self._rank_rows()
            if self._collectives is not None:
                rows = self._collectives.all_reduce(rows)
            self._total = rows
            if self._residual is not None:  # an addition with options is not deferred
                self._total = torch.add(self._residual, rows, alpha=1)
        return self._total

    def normalised(self, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``rms_norm`` of the sum, and keep the sum."""
        wide = self._rounded_from
        if wide is not None and wide._total is None and weight.dtype == self.dtype:
            return wide._normalised(weight, eps, rounds=True)
        is_mixed = self._part_dtype != self.dtype
        if self._total is not None or self._residual is None or is_mixed:
            return normalised(self.total(), weight, eps)
        return self._normalised(weight, eps)

    def _normalised(
        self, weight: torch.Tensor, eps: float, *, rounds: bool = False
    ) -> torch.Tensor:
        """Return ``add_rms_norm`` of the terms, and keep the sum."""
        assert self._residual is not None, "only sums are deferred"
        parts, width = self._checked_parts(), self.shape[-1]
        residual = self._residual.reshape(-1, width)
        parts = parts.reshape(len(parts), -1, width)
        if self._collectives is None:
            rows, total = add_rms_norm(parts, residual, weight, eps, rounds)
        else:
            takes_parts = len(parts) > 1 and self._collectives.takes_parts(
                len(residual), width, residual.dtype
            )
            own = parts if takes_parts else self._rank_rows().view(-1, width)
            rows, total = self._collectives.add_rms_norm(own, residual, weight, eps)
        self._total = total.view(self.shape)
        if self._product is not None:
            self._product._is_normalised = True
        return rows.view(self.shape)

    def _rank_rows(self) -> torch.Tensor:
        """Return the sum of this rank's parts.

        A collective may overwrite them: ``defer_products`` takes products that are read once.
        """
        return reduce(torch.add, self._checked_parts().unbind()).to(self._part_dtype).contiguous()

    def _checked_parts(self) -> torch.Tensor:
        residual = self._residual
        if self._versions != (_version(self._parts), 0 if residual is None else _version(residual)):
            raise TargetError(
                "the model writes a tensor after adding it to the residual stream, where the sum "
                "is not computed yet. Load it with fuse=False."
            )
        return self._parts

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
        if func is torch.Tensor.to and isinstance(args[0], DeferredResidualAdd):
            options = [*args[1:], *(kwargs or {}).values()]
            is_dtype = len(options) == 1 and isinstance(options[0], torch.dtype)
            converted = args[0].to_dtype(options[0]) if is_dtype else None
            if converted is not None:
                return converted
        args, kwargs = tree_map_only(
            DeferredResidualAdd, DeferredResidualAdd.total, (args, dict(kwargs or {}))
        )
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
        args, kwargs = tree_map_only(
            DeferredResidualAdd, DeferredResidualAdd.total, (args, dict(kwargs or {}))
        )
        return func(*args, **kwargs)


class DeferredSums(TorchFunctionMode):
    """Lets additions in a block give a ``DeferredResidualAdd``.

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
            return DeferredResidualAdd.of(*args)
        return func(*args, **(kwargs or {}))

    def _may_wait(self, one: Any, other: Any) -> bool:
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.shape == other.shape
            and (one.dtype == other.dtype or {one.dtype, other.dtype} in _MIXED)
            and one.dim() == 3
            and one.shape[-1] in self._widths
            and one.is_floating_point()
        )


def normalised(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``rms_norm`` of rows [..., H], or of a pending sum."""
    if isinstance(rows, DeferredResidualAdd):
        return rows.normalised(weight, eps)
    return rms_norm(rows.reshape(-1, rows.shape[-1]), weight, eps).view(rows.shape)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
