"""A temperature stored as a Python number.

graphkit audit tools.examples.broken.python_temperature:target

Error: capture stores the number as an argument of the division, and replays use that value.
Effect: every request is sampled at the temperature of the capture. Eager runs are correct.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import Model, target_of


class Broken(Model):
    """Stores the temperature on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.python_temperature = 1.0

    def set_temperature(self, value: float) -> None:
        """Change the number, which no graph reads."""
        self.python_temperature = value

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, [T, V]."""
        return self.head(hidden) / self.python_temperature


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "Python temperature", device)
