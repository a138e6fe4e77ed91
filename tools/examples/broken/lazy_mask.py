"""A mask that is built on first use and cached.

graphkit audit tools.examples.broken.lazy_mask:target

Error: the mask depends on the tokens of the batch, but the cache key is their number. Warm-up
builds the mask from pad rows; capture finds it cached and records no operation that builds it.
Effect: every batch masks the tokens of the pad rows instead of its own.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import VOCAB, Model, target_of


class Broken(Model):
    """Masks the logit of each row's own token."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, torch.Tensor] = {}

    def forward(self, inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        """Return logits and hidden states of the draft tokens."""
        size = inputs.num_tokens
        if size not in self.masks:
            tokens = torch.arange(VOCAB, device=inputs.input_ids.device)
            self.masks[size] = inputs.input_ids[:, None] == tokens
        output = super().forward(inputs)
        output.next_token_logits = output.next_token_logits.masked_fill(self.masks[size], -1e9)
        return output


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "lazy mask", device)
