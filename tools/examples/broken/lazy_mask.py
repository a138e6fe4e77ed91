"""A mask that is built when it is first needed, and kept.

graphkit audit tools.examples.broken.lazy_mask:target

What is wrong: it depends on the tokens of the batch, but is kept by their number alone. Warm-up
builds it from pads; the capture finds it there and records nothing that would build it.
What a user sees: the tokens of the pads are forbidden in every batch, those of the batch never.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import VOCAB, Model, target_of


class Broken(Model):
    """Forbids to repeat a token."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, torch.Tensor] = {}

    def forward(self, inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        """Score the drafted tokens."""
        size = inputs.num_tokens
        if size not in self.masks:
            tokens = torch.arange(VOCAB, device=inputs.input_ids.device)
            self.masks[size] = inputs.input_ids[:, None] == tokens
        output = super().forward(inputs)
        output.next_token_logits = output.next_token_logits.masked_fill(self.masks[size], -1e9)
        return output


def target(device: str = "auto") -> gk.CaptureTarget:
    """The factory that the command calls."""
    torch.manual_seed(0)
    return target_of(Broken(), "lazy mask", device)
