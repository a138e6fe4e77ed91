"""A flag that chooses how logits are limited.

graphkit audit tools.examples.broken.frozen_branch:target

Error: Python takes one of two branches, and capture records the operations of that one.
Effect: replays run the branch of the capture, also after the host has changed the flag.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import Model, target_of


class Broken(Model):
    """Limits its logits smoothly or by clamping."""

    def __init__(self) -> None:
        super().__init__()
        self.is_smooth = True

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, [T, V]."""
        logits = super().scores(hidden)
        return torch.tanh(logits) if self.is_smooth else logits.clamp(-1, 1)


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "frozen branch", device)
