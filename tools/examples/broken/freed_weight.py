"""A prepared weight that is replaced for every number of rows.

graphkit audit tools.examples.broken.freed_weight:target

Error: the head's weight is copied for each number of rows, and the copy for one size replaces that
for the size before, whose address the graph of that size contains.
Effect: none until the freed memory is allocated again; then wrong results at some batch sizes, or
an illegal address. On a CPU the recorder keeps the memory alive, so that replays remain correct.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import Model, target_of


class Broken(Model):
    """Keeps a copy of the head's weight for the last number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: tuple[int, torch.Tensor] | None = None

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, [T, V]."""
        rows = len(hidden)
        if self.prepared is None or self.prepared[0] != rows:
            self.prepared = rows, self.head.weight.t().contiguous()
        return (hidden @ self.prepared[1] + self.head.bias) / self.temperature


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "freed weight", device)
