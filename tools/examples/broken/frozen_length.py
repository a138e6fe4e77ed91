"""A sum over a list whose length is the host's.

graphkit audit tools.examples.broken.frozen_length:target

Error: the forward divides by the length of a Python list, which capture stores as a number.
Effect: replays divide by the number of adapters at capture, also after the host has added one.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import Model, target_of


class Broken(Model):
    """Divides by the number of active adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = ["chat", "code", "tools"]

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, [T, V]."""
        return super().scores(hidden) / len(self.adapters)


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "frozen length", device)
