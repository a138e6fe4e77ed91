"""A layer over attention that graphkit cannot know, right and wrong ones."""

from __future__ import annotations

from dataclasses import replace

import torch

import graphkit as gk
from graphkit.engine.attention import SdpaAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool

VOCAB, HIDDEN, CONTEXT, ROWS = 32, 8, 48, 3
SIZES = gk.BufferSizes(ROWS, CONTEXT, HIDDEN, VOCAB, torch.float32)
CHAIN, TREE = gk.SpecConfig("NGRAM", 2, 1, 3), gk.SpecConfig("NGRAM", 2, 3, 6)
NONE = gk.SpecConfig("NONE", 0, 1, 1)


class Right(SdpaAttention):
    """Attention that graphkit cannot know."""


class IgnoresMode(SdpaAttention):
    """Claims every mode, and computes all as a verify, which counts the rows itself."""

    def metadata(self, mode, inputs):
        return super().metadata(gk.ForwardMode.TARGET_VERIFY, inputs)


class IgnoresMask(SdpaAttention):
    def metadata(self, mode, inputs):
        return replace(super().metadata(mode, inputs), mask=None)


class MisplacesHistory(SdpaAttention):
    """Counts the rows of a packed prefill twice."""

    def metadata(self, mode, inputs):
        metadata = super().metadata(mode, inputs)
        if mode is gk.ForwardMode.DRAFT_EXTEND:
            lengths = metadata.cache_seqlens + inputs.num_accepted_tokens
            metadata = replace(metadata, cache_seqlens=lengths)
        return metadata


class Layer:
    """One layer of attention between two tables."""

    def __init__(self, attention):
        generator = torch.Generator().manual_seed(2)
        self.embedding, self.head = (
            torch.randn(shape, generator=generator) for shape in ((VOCAB, HIDDEN), (HIDDEN, VOCAB))
        )
        self.place = torch.randn(CONTEXT, HIDDEN, generator=generator)
        self.attention = attention

    def __call__(self, inputs):
        rows = self.embedding[inputs.input_ids] + self.place[inputs.positions]
        heads = rows[:, None]
        attended = self.attention.attend(
            0, heads, heads, heads, inputs.out_cache_loc, inputs.attention
        )
        return gk.ForwardOutput(next_token_logits=(rows + attended[:, 0]) @ self.head)


def model_of(kind, slots=ROWS * CONTEXT):
    requests = ReqToTokenPool(ROWS, CONTEXT, "cpu")
    pool = MHATokenToKVPool(slots, 1, torch.float32, 1, HIDDEN, 1, "cpu")
    attention = kind(requests, pool)
    return gk.EngineModel(Layer(attention), attention)
