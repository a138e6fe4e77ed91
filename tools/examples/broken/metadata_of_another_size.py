"""Metadata that is made once, for the first batch size, and read at every size.

graphkit audit tools.examples.broken.metadata_of_another_size:target

Error: the mask says which rows belong to one request. It is made for the first batch, kept in flat
memory as attention kernels take it, and read at each size as if it had been made for that.
Effect: rows see rows of other requests, pad rows included, at every size but the first.
"""

from __future__ import annotations

import torch

import graphkit as gk
from tools.examples.broken.sound import Model, target_of


class Broken(Model):
    """Adds the sum of the tokens of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None

    def history_term(self, inputs: gk.TargetVerifyInputs) -> torch.Tensor:
        """Return what earlier steps and the tokens of each row's request contribute, [T, H]."""
        tokens = inputs.num_tokens
        if self.mask is None or len(self.mask) < tokens**2:
            request = torch.arange(tokens, device=self.cache.device) // inputs.tokens_per_request
            self.mask = (request[:, None] == request).float().flatten()
        seen = self.mask[: tokens**2].view(tokens, tokens)
        return super().history_term(inputs) + seen @ self.embed(inputs.input_ids)


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return target_of(Broken(), "metadata of another size", device)
