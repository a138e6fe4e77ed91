"""A scale that is computed over all rows of the batch.

graphkit audit tools.examples.broken.batch_maximum:target

Error: the scale is the largest number of the batch, pad rows included, instead of that of each row.
Effect: results depend on which other requests, and how many pads, a batch has.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import Model, target_of


class Broken(Model):
    """Scales rows as quantisation per tensor does."""

    def history_term(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """Return what the token of each row contributes, scaled to [-1, 1], [T, H]."""
        tokens = self.embed(inputs.input_ids)
        largest = tokens.abs().amax()
        return super().history_term(inputs) + tokens / largest


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "batch maximum", device)
