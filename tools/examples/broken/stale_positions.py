"""A forward that reads a copy of the positions.

graphkit audit tools.examples.broken.stale_positions:target

What is wrong: the scheduler calls ``prepare`` before each forward, the graph only knows the copy's
address, and a replay refreshes the inputs but not the copy.
What a user sees: right answers as long as somebody calls ``prepare``; after that, the positions of
another batch, and an illegal address once they lead beyond a table.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import CONTEXT, REQUESTS, WIDTH, Model, target_of


class Broken(Model):
    """Keeps the positions of the step in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.zeros(REQUESTS * WIDTH, dtype=torch.int64))

    def prepare(self, batch: gk.TargetVerifyInputs) -> None:
        """To be called before each forward."""
        positions = torch.as_tensor(batch.positions)
        self.positions[: len(positions)].copy_(positions)

    def place(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """What the position of each row adds, [T, 1]."""
        return self.positions[: inputs.num_tokens, None] / CONTEXT


def target(device: str = "auto") -> gk.CaptureTarget:
    """The factory that the command calls."""
    torch.manual_seed(0)
    return target_of(Broken(), "stale positions", device)
