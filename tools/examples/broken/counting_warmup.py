"""A forward that counts its calls.

graphkit audit tools.examples.broken.counting_warmup:target

What is wrong: warm-ups and captures are calls, too, and replays are none.
What a user sees: whatever follows the count (a schedule, a seed, the next log line) begins in the
middle, and then stands still.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import Model, target_of


class Broken(Model):
    """Counts its steps on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        """Score the drafted tokens."""
        self.steps += 1
        return super().forward(inputs)


def target(device: str = "auto") -> gk.CaptureTarget:
    """The factory that the command calls."""
    torch.manual_seed(0)
    return target_of(Broken(), "counting warmup", device)
