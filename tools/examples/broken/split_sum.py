"""A head that splits its sums where a batch has few rows, as libraries of matrix products do.

graphkit audit tools.examples.broken.split_sum:target --only rows

Error: the products of few rows add in another order than those of many.
Effect: every row is right within rounding, but a request alone has other bits than among others.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import WIDTH, Model, target_of


class Broken(Model):
    """Adds the two halves of each sum at the end if the batch is one request."""

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, [T, V]."""
        rows, weight = hidden.double(), self.head.weight.double()
        if len(rows) > WIDTH:
            logits = (rows @ weight.t()).float()
        else:
            halves = zip(rows.chunk(2, 1), weight.chunk(2, 1), strict=True)
            logits = sum((part @ own.t()).float() for part, own in halves)
        return (logits + self.head.bias) / self.temperature


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "split sum", device)
