"""A temperature that is a Python number.

graphkit audit tools.examples.broken.baked_temperature:target

What is wrong: the number is an argument of the division when it is captured, and stays that.
What a user sees: every request is sampled at the temperature of the first one, whatever it asks
for; without graphs all is well.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import Model, target_of


class Broken(Model):
    """Keeps the temperature on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.heat = 1.0

    def set_temperature(self, value: float) -> None:
        """Change it where no graph looks."""
        self.heat = value

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, [T, V]."""
        return self.head(hidden) / self.heat


def target(device: str = "auto") -> gk.CaptureTarget:
    """The factory that the command calls."""
    torch.manual_seed(0)
    return target_of(Broken(), "baked temperature", device)
