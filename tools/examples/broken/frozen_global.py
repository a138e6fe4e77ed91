"""A penalty in a global of the module.

graphkit audit tools.examples.broken.frozen_global:target

Error: a method that the forward calls reads a number from a global, which capture stores.
Effect: replays use the penalty of the capture, also after the host has changed the global.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import Model, target_of

penalty = 1.2
"""Changed by the host between two steps."""


class Broken(Model):
    """Scales its logits."""

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, [T, V]."""
        return super().scores(hidden) * penalty


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "frozen global", device)
