"""A forward that reads a copy of the positions.

graphkit audit tools.examples.broken.stale_positions:target

Error: the graph reads the copy, which only ``prepare`` updates. A replay refreshes the inputs, but
not the copy.
Effect: correct results only if the scheduler calls ``prepare`` before each replay; otherwise the
positions of an earlier batch.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import CONTEXT, REQUESTS, WIDTH, Model, target_of


class Broken(Model):
    """Copies the positions of each step to its own buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.zeros(REQUESTS * WIDTH, dtype=torch.int64))

    def prepare(self, batch: gk.TargetVerifyInputs) -> None:
        """Copy the positions of a batch; to be called before each forward."""
        positions = torch.as_tensor(batch.positions)
        self.positions[: len(positions)].copy_(positions)

    def position_term(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """Return what the position of each row contributes, [T, 1]."""
        return self.positions[: inputs.num_tokens, None] / CONTEXT


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "stale positions", device)
