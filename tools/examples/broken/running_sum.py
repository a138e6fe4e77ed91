"""A running sum over the rows of the batch.

graphkit audit tools.examples.broken.running_sum:target

Error: the sum of the rows before a draft token runs over all requests instead of its own.
Effect: a request's result depends on the requests before it in the batch. Pads come after live
rows, so that they change nothing.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import Model, target_of


class Broken(Model):
    """Adds the sum of the tokens so far."""

    def history_term(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """Return what earlier steps and the tokens up to each row contribute, [T, H]."""
        tokens = self.embed(inputs.input_ids)
        return super().history_term(inputs) + tokens.cumsum(0)


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "running sum", device)
