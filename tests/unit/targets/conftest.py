"""A model of one embedding and one linear layer as a CaptureTarget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphkit as gk

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
VOCAB, HIDDEN = 32, 8
WIDTH = {VERIFY: 4, DECODE: 1}


def sample_batch(mode, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = batch_size * WIDTH[mode]
    return gk.TargetVerifyInputs(
        req_pool_indices=torch.arange(1, batch_size + 1),
        seq_lens=torch.randint(1, 9, (batch_size,), generator=generator, dtype=torch.int32),
        input_ids=torch.randint(1, VOCAB, (tokens,), generator=generator),
        positions=torch.arange(tokens) % WIDTH[mode],
        out_cache_loc=torch.arange(1, tokens + 1),
    )


class Tiny(nn.Module):
    """Calls ``mix(hidden, inputs)`` between its two layers; that is where bugs are planted."""

    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.mix = mix

    def forward(self, inputs):
        hidden = self.mix(self.embedding(inputs.input_ids), inputs)
        return gk.VerifyOutput(next_token_logits=self.head(hidden), hidden_states=hidden)


@pytest.fixture
def make_target():
    """``make_target(mix, **changes)``; without ``mix`` the model is right."""

    def make(mix=lambda hidden, inputs: hidden + inputs.positions[:, None], **changes):
        facts = {
            "name": "tiny",
            "spec": gk.SpecConfig("EAGLE", 3, 1, 4),
            "sizes": gk.BufferSizes(4, 64, HIDDEN, VOCAB, torch.float32),
            "forwards": {VERIFY: Tiny(mix)},
            "sample_batch": sample_batch,
            "batch_sizes": [2],
        }
        return gk.CaptureTarget(**{**facts, **changes})

    return make
