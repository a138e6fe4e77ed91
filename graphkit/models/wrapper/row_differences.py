"""Differences between logits of a model and of its wrapper, reduced to a few numbers per row.

Logits of all rows of a prompt may need more memory than the weights. So a comparison computes those
of few rows at a time, and keeps of each row what it needs to judge and to describe it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from graphkit.config import BufferSizes
from graphkit.runners.comparison.differences import Rounding

MOST_ROWS = 512
"""Most rows whose logits are computed at once."""
_SHARE_OF_HEAD = 32
"""The logits that are computed at once have at most this part of the numbers of the head."""
_ALWAYS = 2**20
"""So many logits are computed at once whatever the size of the head."""
_LEAST_ROWS = 8
_REDUCED_AT_ONCE = 2**16
"""Logits whose differences are computed at once, in float64."""


def rows_at_once(sizes: BufferSizes) -> int:
    """Return of how many rows the logits are computed at once."""
    rows = max(sizes.hidden_size // _SHARE_OF_HEAD, _ALWAYS // sizes.vocab_size, _LEAST_ROWS)
    return min(rows, MOST_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class RowDifferences:
    """What is known of each row after its logits are compared.

    Attributes:
        largest: Largest absolute difference, [T] float64; infinite where only one side is NaN.
        scale: Largest finite absolute logit of the model, [T].
        expected_token: Index of the model's largest logit, [T].
        token: Index of the wrapper's largest logit, [T].
    """

    largest: torch.Tensor
    scale: torch.Tensor
    expected_token: torch.Tensor
    token: torch.Tensor

    @classmethod
    def of(cls, expected: torch.Tensor, got: torch.Tensor) -> RowDifferences:
        """Compare logits of the model and the wrapper, [T, V], in the dtype of the wrapper."""
        rows = max(1, _REDUCED_AT_ONCE // expected.shape[1])
        parts = zip(expected.split(rows), got.split(rows), strict=True)
        return cls.joined([cls._of_few(one.to(other.dtype), other) for one, other in parts])

    @classmethod
    def joined(cls, parts: Sequence[RowDifferences]) -> RowDifferences:
        """Return the rows of all parts."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def rows(self, order: torch.Tensor) -> RowDifferences:
        """Return some rows."""
        names = [field.name for field in fields(self)]
        return RowDifferences(**{name: getattr(self, name)[order] for name in names})

    @classmethod
    def _of_few(cls, expected: torch.Tensor, got: torch.Tensor) -> RowDifferences:
        difference = got.double().sub_(expected).abs_()
        if not difference.isfinite().all():
            same = (expected == got) | (expected.isnan() & got.isnan())
            difference.nan_to_num_(nan=torch.inf, posinf=torch.inf).masked_fill_(same, 0.0)
        return cls(
            largest=difference.amax(1),
            scale=expected.abs().nan_to_num_(nan=0.0, posinf=0.0).amax(1),
            expected_token=expected.argmax(1),
            token=got.argmax(1),
        )

    def ulp(self, rounding: Rounding) -> float:
        """Return one ulp of all rows, see ``Rounding``."""
        return rounding.ulp(self.scale)

    def ulps(self, rounding: Rounding) -> float:
        """Return the largest difference in ulp."""
        return float(self.largest.max()) / self.ulp(rounding)

    def first_beyond(self, ulps: float, rounding: Rounding) -> int | None:
        """Return the first row that differs by more than so many ulp."""
        wrong = (self.largest > ulps * self.ulp(rounding)).nonzero()
        return int(wrong[0]) if wrong.numel() else None
