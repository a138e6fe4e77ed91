"""A batch norm that includes pad rows.

graphkit audit tools.examples.broken.leaking_pad_row:target

Error: mean and variance are computed over all rows of the batch, pad rows included.
Effect: results depend on the number of pad rows. A batch of exactly a captured size is correct.
"""

from __future__ import annotations

import torch
from torch import nn

import graphkit as gk
from tools.examples.broken.sound import HIDDEN, Model, target_of


class Broken(Model):
    """Normalises over the rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN, track_running_stats=False)


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "leaking pad row", device)
