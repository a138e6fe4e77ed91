"""State by KV slot that the target does not declare.

graphkit audit tools.examples.broken.undeclared_state:target

Error: the step writes ``pool`` and reads it in later steps, and ``mutable_state`` lacks it.
Effect: capture leaves the rows of its pads in the pool, and no tool can restore it between two runs
that it compares.
"""

from __future__ import annotations

import torch

import graphkit as gk
from graphkit.graphs import resolve_device
from tools.examples.broken.sound import HIDDEN, Model, target_of


class Broken(Model):
    """Adds a decaying sum of the rows of earlier steps, by KV slot."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = torch.zeros(len(self.cache), HIDDEN)

    def history_term(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """Return what earlier steps of each row's request contribute, [T, H]."""
        history = super().history_term(inputs)
        of_row = self.pool[inputs.out_cache_loc]
        self.pool[inputs.out_cache_loc] = of_row * 0.5 + history
        return history + of_row


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    model = Broken()
    model.pool = model.pool.to(resolve_device(device))
    return target_of(model, "undeclared state", device)
