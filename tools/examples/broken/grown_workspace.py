"""A workspace that grows with the batch.

graphkit audit tools.examples.broken.grown_workspace:target

Error: a batch with more rows replaces the workspace by a larger one. Graphs captured before it
contain the address of the old one, which is freed.
Effect: none until a long prompt runs eagerly; after that, replays write to memory that may belong
to another tensor.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import HIDDEN, Model, target_of


class Broken(Model):
    """Stores intermediate results in memory that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.workspace = torch.empty(0, HIDDEN)

    def history_term(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """Return what earlier steps of each row's request contribute, [T, H]."""
        history, rows = super().history_term(inputs), inputs.num_tokens
        if len(self.workspace) < rows:
            self.workspace = torch.empty_like(history)
        return self.workspace[:rows].copy_(history)


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "grown workspace", device)
