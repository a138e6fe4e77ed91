"""A forward that asks the device for a number.

graphkit audit tools.examples.broken.host_sync:target

What is wrong: ``item`` waits for the device, which a capture cannot do, and Python would decide
once and for all.
What a user sees: the capture is refused, and says at which line.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import CONTEXT, Model, target_of


class Broken(Model):
    """Scales long batches."""

    def past(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """What its request said before adds to each row, [T, H]."""
        longest = inputs.seq_lens.max().item()
        return super().past(inputs) * (2 if longest > CONTEXT // 2 else 1)


def target(device: str = "auto") -> gk.CaptureTarget:
    """The factory that the command calls."""
    torch.manual_seed(0)
    return target_of(Broken(), "host sync", device)
