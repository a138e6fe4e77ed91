"""A target of an embedding and a linear layer in every mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.buffers import AcceptedCounts

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
DRAFT, EXTEND = gk.ForwardMode.DRAFT, gk.ForwardMode.DRAFT_EXTEND
EXTEND_V2, LAYERS = gk.ForwardMode.DRAFT_EXTEND_V2, gk.ForwardMode.MULTI_LAYER_EAGLE
VOCAB, HIDDEN, STEPS = 32, 8, 3
TREE_WIDTH = 8


def spec_of(topk):
    return gk.SpecConfig("EAGLE", STEPS, topk, STEPS + 1 if topk == 1 else TREE_WIDTH)


def sampler(spec, dtype=torch.float32):
    """Return ``sample_batch`` of a target with that spec."""

    def sample_batch(mode, batch_size, seed):
        generator = torch.Generator().manual_seed(seed)

        def draw(least, end, *shape):
            return torch.randint(least, end, shape, generator=generator)

        seq_lens = draw(1, 9, batch_size).int()
        common = {"req_pool_indices": torch.arange(1, batch_size + 1), "seq_lens": seq_lens}
        if mode is DRAFT:
            slots = batch_size * spec.topk * spec.num_steps
            return gk.DraftInputs(
                **common,
                topk_p=torch.rand(batch_size, spec.topk, generator=generator),
                topk_index=draw(1, VOCAB, batch_size, spec.topk),
                hidden_states=torch.randn(batch_size, HIDDEN, generator=generator).to(dtype),
                positions=seq_lens.long().repeat_interleave(spec.topk),
                out_cache_loc=torch.arange(1, slots + 1),
            )
        accepted = draw(1, STEPS + 2, batch_size).int()
        width = spec.tokens_per_request(mode)
        tokens = int(accepted.sum()) if mode is EXTEND else batch_size * width
        rows = {
            "input_ids": draw(1, VOCAB, tokens),
            "positions": torch.arange(tokens) % width,
            "out_cache_loc": torch.arange(1, tokens + 1),
        }
        if mode in (VERIFY, DECODE):
            tree = mode is VERIFY and spec.topk > 1
            mask = torch.ones(batch_size, width, width).tril().bool() if tree else None
            return gk.TargetVerifyInputs(**common, **rows, custom_mask=mask)
        caught_up = {
            **common, **rows, **AcceptedCounts.from_tokens(accepted).fields(),
            "extend_seq_lens": accepted if mode is EXTEND else torch.full_like(accepted, width),
            "hidden_states": torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
        }  # fmt: skip
        if mode is LAYERS:
            select_index = torch.arange(batch_size) * width + accepted - 1
            return gk.MultiLayerDraftExtendInputs(**caught_up, select_index=select_index)
        return gk.DraftExtendInputs(**caught_up)

    return sample_batch


class Tiny(nn.Module):
    """Two layers with ``mix(hidden, inputs)`` between them, where tests plant bugs."""

    def __init__(self, mix, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
        self.head = nn.Linear(HIDDEN, VOCAB, dtype=dtype)
        self.mix = mix

    def forward(self, inputs):
        hidden = self.embedding(inputs.input_ids)
        if getattr(inputs, "hidden_states", None) is not None:
            hidden = hidden + inputs.hidden_states / 2
        hidden = self.mix(hidden, inputs)
        return gk.ForwardOutput(next_token_logits=self.head(hidden), hidden_states=hidden)


def _right(hidden, inputs):
    return hidden + inputs.positions[:, None].to(hidden) / 4


@pytest.fixture
def make_target():
    """Return ``make_target(mix, modes=, topk=, dtype=, **changes)``, right without ``mix``."""

    def make(mix=_right, *, modes=(VERIFY,), topk=1, dtype=torch.float32, **changes):
        forward = Tiny(mix, dtype)
        facts = {
            "name": "tiny",
            "spec": spec_of(topk),
            "sizes": gk.BufferSizes(4, 64, HIDDEN, VOCAB, dtype),
            "forwards": {mode: [forward] * STEPS if mode is LAYERS else forward for mode in modes},
            "sample_batch": sampler(spec_of(topk), dtype),
            "batch_sizes": [2],
        }
        return gk.CaptureTarget(**{**facts, **changes})

    return make
