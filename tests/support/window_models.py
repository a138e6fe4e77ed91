"""A target with a full layer between two layers with a window, which may have their own pool."""

from __future__ import annotations

import torch

from graphkit.config import BufferSizes
from graphkit.engine import EngineModel
from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.runners import ForwardOutput
from graphkit.spec import SpecConfig

VOCAB, HIDDEN, REQUESTS, CONTEXT, STEPS, WINDOW = 64, 32, 3, 64, 3, 8
HEADS, HEAD_DIM = 2, 16
WINDOWS = (WINDOW, 0, WINDOW)
"""Window of each layer; 0 is none."""


class WindowModel:
    """Random weights; a rotation stands in for positions."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(4)

        def weight(*shape, scale=1.0):
            return (scale * torch.randn(shape, generator=generator)).to(device)

        self.device = device
        self.embedding = weight(VOCAB, HIDDEN)
        self.positions = weight(CONTEXT, HIDDEN)
        self.projections = weight(len(WINDOWS), HIDDEN, 3 * HEADS * HEAD_DIM, scale=0.3)
        self.head = weight(HIDDEN, VOCAB)

    def logits(self, ids, positions, attend):
        """``attend(layer, query, key, value)`` over rows [T, N, D]."""
        hidden = self.embedding[ids] + self.positions[positions]
        for layer, projection in enumerate(self.projections):
            query, key, value = (hidden @ projection).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
            hidden = hidden + attend(layer, query, key, value).flatten(1)
        return hidden @ self.head

    def plain(self, prompt, count):
        """Greedy decoding without a cache."""
        ids = list(prompt)
        for _ in range(count):
            rows = torch.arange(len(ids), device=self.device)
            behind = rows[:, None] - rows

            def attend(layer, query, key, value, behind=behind):
                seen = (behind >= 0) & (behind < (WINDOWS[layer] or CONTEXT))
                scores = torch.einsum("tnd,snd->nts", query, key) * HEAD_DIM**-0.5
                weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
                return torch.einsum("nts,snd->tnd", weights, value)

            logits = self.logits(torch.tensor(ids, device=self.device), rows, attend)
            ids.append(int(logits[-1].argmax()))
        return ids[len(prompt) :]


def window_attention(
    device,
    *,
    page_size=1,
    has_window_pool=True,
    table=None,
    window_slots=None,
    window_page=None,
    requests=None,
    slots=None,
):
    """A backend, its layers with a window in a pool of their own."""
    requests = requests or ReqToTokenPool(REQUESTS, CONTEXT, device)
    slots = slots or REQUESTS * CONTEXT
    kind = TritonAttention if device == "cuda" else SdpaAttention

    def pool(layers, slots=slots, page=page_size):
        return MHATokenToKVPool(slots, page, torch.float32, HEADS, HEAD_DIM, layers, device)

    if not has_window_pool:
        return kind(requests, pool(len(WINDOWS)))
    return kind(
        requests,
        pool(1),
        window_req_to_token_pool=requests if table is None else table,
        window_kv_pool=pool(2, window_slots or slots, window_page or page_size),
    )


def window_target(model, attention):
    """An ``EngineModel``; layers are numbered from 0 in each pool."""
    places = {layer: layer for layer in range(len(WINDOWS))}
    if attention.window_kv_pool is not None:
        places = {0: 0, 1: 0, 2: 1}

    def forward(inputs):
        def attend(layer, query, key, value):
            return attention.attend(
                places[layer], query, key, value, inputs.out_cache_loc, inputs.attention,
                window=WINDOWS[layer],
            )  # fmt: skip

        return ForwardOutput(
            next_token_logits=model.logits(inputs.input_ids, inputs.positions, attend)
        )

    return EngineModel(forward, attention)


def settings(topk, page_size=1):
    """``spec=`` and ``sizes=``."""
    width = STEPS + 1 if topk == 1 else 1 + 2 * STEPS
    return {
        "spec": SpecConfig("NGRAM", STEPS, topk, width, page_size=page_size),
        "sizes": BufferSizes(REQUESTS, CONTEXT, HIDDEN, VOCAB, torch.float32, page_size=page_size),
    }
