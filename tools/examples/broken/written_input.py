"""A forward that increments the positions in place.

graphkit audit tools.examples.broken.written_input:target

Error: the forward writes into its inputs, which belong to the runner.
Effect: whatever reads the field after the forward, such as a later stage of the step or another
graph, gets other values than the batch has.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import CONTEXT, Model, target_of


class Broken(Model):
    """Counts positions from 1."""

    def position_term(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """Return what the position of each row contributes, [T, 1]."""
        inputs.positions.add_(1)
        return inputs.positions[:, None] / CONTEXT


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "written input", device)
