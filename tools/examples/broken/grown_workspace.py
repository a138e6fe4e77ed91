"""A workspace that grows with the batch.

graphkit audit tools.examples.broken.grown_workspace:target

What is wrong: a batch of more rows replaces it by a larger one. Every graph that was captured
before keeps the address of the old one, which is freed.
What a user sees: all is well until the first long prompt runs without a graph; after that replays
write into memory that belongs to somebody else.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import HIDDEN, Model, target_of


class Broken(Model):
    """Adds up into memory that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.workspace = torch.empty(0, HIDDEN)

    def past(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """What its request said before adds to each row, [T, H]."""
        past, rows = super().past(inputs), inputs.num_tokens
        if len(self.workspace) < rows:
            self.workspace = torch.empty_like(past)
        return self.workspace[:rows].copy_(past)


def target(device: str = "auto") -> gk.CaptureTarget:
    """The factory that the command calls."""
    torch.manual_seed(0)
    return target_of(Broken(), "grown workspace", device)
