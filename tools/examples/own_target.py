"""A CaptureTarget around a model of your own.

graphkit capture tools.examples.own_target:target
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import graphkit as gk

HIDDEN, VOCAB, WIDTH, REQUESTS = 64, 256, 4, 8


class Model(nn.Module):
    """The smallest thing that has logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, inputs: gk.TargetVerifyInputs) -> gk.VerifyOutput:
        """Score every row by its token and position."""
        hidden = self.embed(inputs.input_ids) + inputs.positions[:, None] / 100
        return gk.VerifyOutput(next_token_logits=self.head(hidden), hidden_states=hidden)


def sample_batch(_mode: gk.ForwardMode, batch_size: int, seed: int) -> gk.TargetVerifyInputs:
    """A live batch, the same for the same arguments."""
    random = np.random.default_rng([seed, batch_size])
    lengths = random.integers(5, 50, batch_size)
    return gk.TargetVerifyInputs(
        req_pool_indices=np.arange(1, batch_size + 1),
        seq_lens=lengths,
        input_ids=random.integers(0, VOCAB, batch_size * WIDTH),
        positions=(lengths[:, None] + np.arange(WIDTH)).ravel(),
        out_cache_loc=np.arange(1, batch_size * WIDTH + 1),
    )


def target(device: str = "cpu") -> gk.CaptureTarget:
    """The factory that the command calls."""
    torch.manual_seed(0)
    model = Model().to(device)
    return gk.CaptureTarget(
        name="own model",
        spec=gk.SpecConfig("EAGLE", num_steps=WIDTH - 1, topk=1, num_draft_tokens=WIDTH),
        sizes=gk.BufferSizes(REQUESTS, 128, HIDDEN, VOCAB, torch.float32),
        forwards={gk.ForwardMode.TARGET_VERIFY: model},
        sample_batch=sample_batch,
        weights=model,
    )


def main() -> int:
    """Capture it, check it, and print the verdict."""
    record = gk.capture_target(target(), device="cpu")
    print(f"{record.target}: {len(record.mismatches)} mismatches")
    return 1 if record.mismatches else 0


if __name__ == "__main__":
    raise SystemExit(main())
