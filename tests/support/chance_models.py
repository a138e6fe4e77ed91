"""A target of some layers, and a draft model whose drafts are right with a chosen chance."""

from __future__ import annotations

import torch

from graphkit.engine import Drafter
from graphkit.ops import philox_uniform
from graphkit.step.step_tensors import ChainTree

VOCAB, WIDE = 64, 32
TARGET_LAYERS, DRAFT_LAYERS = 200, 8
"""Matrix products of the target's forward, and of a draft or a catch-up."""


class LayeredLogits:
    """Logits of a target: a token has one successor, after layers that only cost work."""

    def __init__(self):
        self.successor = (5 * torch.arange(VOCAB) + 3) % VOCAB
        self._logits = 9.0 * torch.nn.functional.one_hot(self.successor, VOCAB)
        self._embedding, self._weight = torch.zeros(VOCAB, WIDE), torch.zeros(WIDE, WIDE)

    def __call__(self, inputs):
        hidden = self._embedding[inputs.input_ids]
        for _ in range(TARGET_LAYERS):
            hidden = hidden @ self._weight
        return self._logits[inputs.input_ids] + hidden[:, :1]


class ChanceDrafter(Drafter):
    """Drafts chains whose tokens are right with a chance, independently of each other.

    Whether a draft is right depends on its request, position and depth alone. Catching up is a
    layer over the rows of the step.
    """

    def __init__(self, chance):
        self._chance = chance

    @property
    def max_path(self):
        return self._width

    def prepare(self, context):
        self._width, self._context = context.verify_width, context
        self._tree = ChainTree(1, self._width, context.sizes.max_batch_size, context.device)
        self._successor = LayeredLogits().successor
        self._embedding, self._weight = torch.zeros(VOCAB, WIDE), torch.zeros(WIDE, WIDE)

    def at_length(self, context):
        other = ChanceDrafter(self._chance)
        other.prepare(context)
        return other

    def _layers(self, tokens):
        hidden = self._embedding[tokens]
        for _ in range(DRAFT_LAYERS):
            hidden = hidden @ self._weight
        return hidden

    def prefill(self, chunk):
        pass

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        tokens = [bonus_tokens]
        draws = philox_uniform(req_pool_indices, seq_lens, self._width)
        for depth in range(1, self._width):
            right = self._successor[tokens[-1]] + self._layers(tokens[-1])[:, 0].long()
            tokens.append(torch.where(draws[:, depth] < self._chance, right, (right + 1) % VOCAB))
        return self._tree.of(torch.stack(tokens, 1))

    def extend(self, verified):
        self._layers(verified.predict)

    def extend_accepted(self, verified, num_accepted_tokens):
        self.extend(verified)
