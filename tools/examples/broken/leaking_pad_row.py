"""A batch norm that counts pad rows.

graphkit audit tools.examples.broken.leaking_pad_row:target

What is wrong: mean and variance are taken over all rows of the batch, those of nobody included.
What a user sees: answers that depend on how many requests happen to run; with a batch of exactly a
captured size all is well.
"""

from __future__ import annotations

import torch
from torch import nn

import graphkit as gk
from tools.examples.broken.sound import HIDDEN, Model, target_of


class Broken(Model):
    """Normalises over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN, track_running_stats=False)


def target(device: str = "auto") -> gk.CaptureTarget:
    """The factory that the command calls."""
    torch.manual_seed(0)
    return target_of(Broken(), "leaking pad row", device)
