"""A forward that reads a number from the device.

graphkit audit tools.examples.broken.host_sync:target

Error: ``item`` waits for the device, which capture does not allow. Python would also take the
branch once, at capture.
Effect: capture fails with an error that names the line.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import CONTEXT, Model, target_of


class Broken(Model):
    """Scales batches with long requests."""

    def history_term(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """Return what earlier steps of each row's request contribute, [T, H]."""
        longest = inputs.seq_lens.max().item()
        return super().history_term(inputs) * (2 if longest > CONTEXT // 2 else 1)


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "host sync", device)
