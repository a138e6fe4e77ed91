"""A model in training mode: its dropout is active.

graphkit audit tools.examples.broken.active_dropout:target

Error: nothing called ``eval``, so that the forward sets a tenth of its numbers to zero at random.
Effect: the same batch gives other logits in each replay, and fewer drafts are accepted.
"""

from __future__ import annotations

import torch
from torch import nn

import graphkit as gk
from tools.examples.broken.sound import HIDDEN, Model, target_of


class Broken(Model):
    """Drops a part of the normalised hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Dropout(0.1))


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "active dropout", device)
