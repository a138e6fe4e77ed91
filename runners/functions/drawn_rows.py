"""Rows with values that an example does not have, of the same kind as those of the example."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum

import torch

from graphkit.runners.functions.arguments import Arguments


class Integers(IntEnum):
    """Where drawn integers and booleans come from.

    Only ``EXAMPLE`` keeps the numbers of a row together; the others may index out of range.
    """

    EXAMPLE = 0
    COLUMN = 1
    ARGUMENT = 2


class Floats(Enum):
    """Which part of their range in the example drawn floating-point numbers are in."""

    MIDDLE = -1 / 64, 1 / 64
    LOW = -1, -0.75
    HIGH = 0.75, 1
    ENDS = None
    """Both ends, so that the largest magnitude differs from that of the middle."""


class DrawnRows:
    """Draws rows of arguments.

    Args:
        arguments: The arguments.
        seed: Seed of the values.
        uses_example: Whether floating-point numbers are those of the example, too.
    """

    def __init__(self, arguments: Arguments, seed: int, uses_example: bool) -> None:
        self._arguments, self._uses_example = arguments, uses_example
        self._generator = torch.Generator().manual_seed(seed)

    def rows(
        self,
        indices: Sequence[int],
        floats: Floats,
        integers: Integers = Integers.EXAMPLE,
        *,
        negates: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return rows by argument.

        Args:
            indices: Rows of the example whose integers and booleans the rows have.
            floats: Where floating-point numbers are drawn from.
            integers: Draws integers and booleans from elsewhere.
            negates: Whether booleans of the example are negated.
        """
        rows = {}
        for key, example in self._arguments.example.items():
            if example.is_floating_point() and not self._uses_example:
                rows[key] = self._floats(example, len(indices), floats)
            elif example.is_floating_point() or integers is Integers.EXAMPLE:
                picked = example[list(indices)]
                rows[key] = ~picked if negates and example.dtype == torch.bool else picked
            else:
                rows[key] = self._integers(example, len(indices), integers)
        return rows

    def _floats(self, example: torch.Tensor, count: int, part: Floats) -> torch.Tensor:
        finite = example[example.isfinite()].double()
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
        if low == high:  # such as zeros or ones, which show nothing
            high = low + max(1.0, abs(low))
        drawn = self._drawn(count, example)
        if part.value is None:
            drawn = (2 * drawn - 1).sign() * (1 + self._drawn(count, example)) / 2
        else:
            begin, end = part.value
            drawn = begin + (end - begin) * drawn
        values = low / 2 + high / 2 + (high / 2 - low / 2) * drawn
        return values.to(example.device, example.dtype)

    def _integers(self, example: torch.Tensor, count: int, source: Integers) -> torch.Tensor:
        numbers = example.long().cpu()
        low, high = numbers.amin(0), numbers.amax(0)
        if source is Integers.ARGUMENT or example.dtype == torch.bool:
            least, most = numbers.min(), numbers.max()
            if least == most and int(least) in (0, 1):  # they show nothing, and are often flags
                least, most = torch.tensor(0), torch.tensor(1)
            low, high = least.expand_as(low), most.expand_as(high)
        span = (high - low + 1).double()
        drawn = (self._drawn(count, example) * span).long().minimum(high - low)
        return (low + drawn).to(example.device, example.dtype)

    def _drawn(self, count: int, example: torch.Tensor) -> torch.Tensor:
        """Return uniform numbers of [0, 1), a row per row."""
        shape = count, *example.shape[1:]
        return torch.rand(shape, generator=self._generator, dtype=torch.double)
