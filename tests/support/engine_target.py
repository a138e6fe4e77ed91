"""Targets with an engine of a small step: a table of next tokens, and drafts of earlier text."""

from __future__ import annotations

from itertools import pairwise

import torch

import graphkit as gk

VOCAB, WIDTH, CONTEXT, ROWS = 16, 4, 96, 3
SPEC = gk.SpecConfig("NGRAM", WIDTH - 1, 1, WIDTH)
SIZES = gk.BufferSizes(ROWS, CONTEXT, 1, VOCAB, torch.float32)


class TableForward:
    """A target: a token has one likely successor. Writes a number per token into the KV pool."""

    def __init__(self, pool, device):
        tokens = torch.arange(VOCAB)
        logits = torch.nn.functional.one_hot((5 * tokens + 3) % VOCAB, VOCAB)
        self._logits, self._pool = 4.0 * logits.to(device), pool

    def __call__(self, inputs):
        self._pool.set_kv_buffer(0, inputs.out_cache_loc, *self.key_and_value(inputs))
        return gk.ForwardOutput(next_token_logits=self._logits[inputs.input_ids])

    def key_and_value(self, inputs):
        """Return what is stored, [T, 1, 1] each."""
        return (inputs.input_ids.float().view(-1, 1, 1),) * 2


def engine_target(
    device="cpu",
    *,
    forward=TableForward,
    drafter=gk.NgramDrafter,
    slots=ROWS * CONTEXT,
    sizes=SIZES,
    generation=None,
    spec=SPEC,
    **facts,
):
    """Return a target whose only mode is the STEP of an engine of these parts."""

    def engine(**options):
        requests = gk.ReqToTokenPool(ROWS, CONTEXT, torch.device(device))
        pool = gk.MHATokenToKVPool(slots, 1, torch.float32, 1, 1, 1, torch.device(device))
        attention = gk.SdpaAttention(requests, pool)
        model = gk.EngineModel(forward(pool, device), attention)
        options |= {"spec": spec, "sizes": sizes, "generation": generation}
        return gk.SpeculativeEngine(model, drafter(), **options)

    settings = {"engine": engine, "forwards": {}, "batch_sizes": [1, ROWS], "spec": SPEC}
    settings |= {"name": "table", "sizes": SIZES, "sample_batch": lambda *_: None}
    return gk.CaptureTarget(**(settings | facts))


class Counting(gk.NgramDrafter):
    """Every third draft is right: it depends on a number of the host, which a graph keeps."""

    calls = 0

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        self.calls += 1
        tree = super().draft(req_pool_indices, seq_lens, bonus_tokens)
        tokens = tree.draft_tokens.view(-1, WIDTH)
        for before, after in pairwise(tokens.unbind(1)):
            after.copy_((5 * before + 3 + self.calls % 3) % VOCAB)
        return tree


right = engine_target()
counting = engine_target(drafter=Counting)
host_in_loop = engine_target(generation="v1")
