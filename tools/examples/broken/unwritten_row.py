"""A workspace with a row that no operation writes.

graphkit audit tools.examples.broken.unwritten_row:target

Error: each row adds the embedding of the token before it. The first row of a request has none: it
multiplies by zero a row of the workspace, which ``empty`` allocated and nothing writes.
Effect: correct results while that memory holds numbers; NaN as soon as it holds NaN, for example
after a sleep and a wake-up, or after another graph has used the memory.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import HIDDEN, WIDTH, Model, target_of


class Broken(Model):
    """Adds the embedding of the previous token."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("has_previous", (torch.arange(WIDTH) > 0).float()[:, None])

    def position_term(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """Return what the position and the previous token contribute to each row, [T, H]."""
        tokens = self.embed(inputs.input_ids).view(inputs.batch_size, WIDTH, HIDDEN)
        workspace = tokens.new_empty(inputs.batch_size, WIDTH + 1, HIDDEN)
        workspace[:, 1:] = tokens
        previous = workspace[:, :-1] * self.has_previous
        return super().position_term(inputs) + previous.flatten(0, 1)


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "unwritten row", device)
