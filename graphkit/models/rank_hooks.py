"""Hooks of the modules that ranks split: sums and gathers over the ranks.

The modules compute as before, so that layers may be fused and quantised below the hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphkit.distributed import RankGroup
from graphkit.models.residual import DeferredResidualAdd


class _RankHook:
    """A hook with the collectives of a group, which copies of a model share."""

    def __init__(self, group: RankGroup) -> None:
        self._collectives, self._rank, self._size = group.collectives, group.rank, group.size

    def __deepcopy__(self, _memo: object) -> _RankHook:
        return self


class RankSum(_RankHook):
    """Forward hook that returns the sum of the results of all ranks.

    The sum of a product that a norm adds to the residual stream is left to that norm.
    """

    def __call__(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        if isinstance(output, DeferredResidualAdd) and output.is_unread_product:
            return output.over_ranks(self._collectives)
        return self._collectives.all_reduce(output.contiguous())


class GatheredColumns(_RankHook):
    """Forward hook that returns the columns of all ranks side by side.

    Args:
        group: The ranks.
        columns: Number of all columns (N).
    """

    def __init__(self, group: RankGroup, columns: int) -> None:
        super().__init__(group)
        self._columns = columns

    def __call__(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Return all columns, [..., N]."""
        rows = self._collectives.all_gather(output.reshape(-1, output.shape[-1]).contiguous())
        return rows[:, : self._columns].view(*output.shape[:-1], self._columns)


class RankInput(_RankHook):
    """Forward pre-hook that passes a rank's columns of the input, or its share of a sum."""

    def __init__(self, group: RankGroup, kind: str) -> None:
        super().__init__(group)
        self._is_part = kind == "part"

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, of which the first is changed."""
        rows, *others = args
        if not self._is_part:
            return (rows / self._size, *others)
        return (rows.chunk(self._size, -1)[self._rank], *others)


def gathers_columns(module: nn.Module) -> bool:
    """Return whether a module returns columns that other ranks compute."""
    return any(isinstance(hook, GatheredColumns) for hook in module._forward_hooks.values())
