"""A batch norm that was left in training mode.

graphkit audit tools.examples.broken.training_batch_norm:target

Error: ``eval()`` was not called, so mean and variance are those of the batch, pad rows included,
and each step changes the running statistics.
Effect: results depend on the other rows of the batch. A batch of exactly a captured size agrees
with the model without a graph.
"""

from __future__ import annotations

import torch
from torch import nn

import graphkit as gk
from tools.examples.broken.sound import HIDDEN, Model, target_of


class Broken(Model):
    """Normalises over the rows of the batch, and updates running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken().train(), "training batch norm", device)
