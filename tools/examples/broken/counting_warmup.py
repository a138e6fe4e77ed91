"""A forward that counts its calls on the host.

graphkit audit tools.examples.broken.counting_warmup:target

Error: warm-ups and captures call the forward, and replays do not.
Effect: everything that depends on the count, such as a schedule or a seed, starts at a wrong value
and then stays constant.
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
        """Return logits and hidden states of the draft tokens."""
        self.steps += 1
        return super().forward(inputs)


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "counting warmup", device)
