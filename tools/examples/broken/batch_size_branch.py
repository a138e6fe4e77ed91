"""A branch on the size of the batch.

graphkit audit tools.examples.broken.batch_size_branch:target

Error: batches of more than four requests leave out the history, to save time.
Effect: a request computes something else as soon as its batch is padded to a larger size.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import Model, target_of

SMALL = 4


class Broken(Model):
    """Reads the history in small batches only."""

    def history_term(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """Return what earlier steps of each row's request contribute, [T, H]."""
        history = super().history_term(inputs)
        if inputs.batch_size > SMALL:
            history = history.clamp(-0.01, 0.01)
        return history


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "batch size branch", device)
