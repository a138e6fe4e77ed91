"""A prepared weight of which only the last one is kept.

graphkit audit tools.examples.broken.freed_weight:target

What is wrong: the head is laid out anew for each number of rows, and the copy for one size replaces
that for the size before, to which the graph of that size still points.
What a user sees: nothing, until something else is allocated there; then garbage from some batch
sizes, or an illegal address. On a CPU the recorder keeps the memory alive: there the audit says
that nobody declared it.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import Model, target_of


class Broken(Model):
    """Keeps its head laid out for the rows of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: tuple[int, torch.Tensor] | None = None

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, [T, V]."""
        rows = len(hidden)
        if self.prepared is None or self.prepared[0] != rows:
            self.prepared = rows, self.head.weight.t().contiguous()
        return (hidden @ self.prepared[1] + self.head.bias) / self.temperature


def target(device: str = "auto") -> gk.CaptureTarget:
    """The factory that the command calls."""
    torch.manual_seed(0)
    return target_of(Broken(), "freed weight", device)
