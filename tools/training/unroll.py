"""Draft models run on known text as in decoding: S draft steps from every position at once.

EAGLE heads read their own hidden states this way, as in the training of EAGLE-3 (arXiv 2503.01840).
Root r of a window is a position at which a draft starts. Draft step k = 1 .. S takes the token at
r + k and predicts the next one, which the target predicts from its feature at r + k.

Shape letters: B windows, L tokens of each, R = L - S roots, T = B x R rows, H hidden, V vocabulary,
N query heads, M key and value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graphkit.reference import (
    Eagle3Head,
    EagleHead,
    LlamaModel,
    MTPHead,
    causal_attend,
    full_logits,
)

STEPS = 3


class Draft(NamedTuple):
    """One draft step from every root.

    Attributes:
        logits: [B, R, V].
        hidden: Hidden states that must resemble the target's features, [B, R, H], if any.
        tokens: Target token of each column of a reduced vocabulary, [V], if it is one.
    """

    logits: Tensor
    hidden: Tensor | None = None
    tokens: Tensor | None = None


class UnrolledAttention:
    """An ``attend`` for the S calls of one layer that drafts from every root.

    In step k, a root attends to the rows that its KV cache would contain in decoding: the rows of
    step 1 up to its own, and its own rows of steps 2 to k.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend in the next step: query [T, N, D], key and value [T, M, D] to [T, N, D]."""
        del layer  # there is only one
        groups = query.shape[1] // key.shape[1]
        self._keys.append(self._heads_first(key.repeat_interleave(groups, 1)))
        self._values.append(self._heads_first(value.repeat_interleave(groups, 1)))
        query = self._heads_first(query)
        out = scaled_dot_product_attention(
            query,
            torch.cat(self._keys, dim=2),
            torch.cat(self._values, dim=2),
            attn_mask=visible(query.shape[2], len(self._keys), query.device),
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _heads_first(self, rows: Tensor) -> Tensor:
        return per_window(rows, self._batch_size).transpose(1, 2)


def visible(roots: int, step: int, device: torch.device) -> Tensor:
    """Return the mask of the rows of steps 1 to ``step`` per root, bool [R, step * R]."""
    own = torch.eye(roots, dtype=torch.bool, device=device)
    return torch.cat((torch.ones_like(own).tril(), *[own] * (step - 1)), dim=1)


def eagle_drafts(head: EagleHead, ids: Tensor, features: Tensor) -> Iterator[Draft]:
    """Yield the S steps of an EAGLE head; each reads the hidden states of the one before.

    Shapes:
        ids: [B, L] int64.
        features: [B, L, H], the target's.
    """
    attend, positions = UnrolledAttention(len(ids)), positions_of(ids)

    def run(step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        return head(tokens, hidden, positions + step, attend)

    for _, hidden in chain(run, ids, features):
        yield Draft(*(per_window(rows, len(ids)) for rows in (head.logits(hidden), hidden)))


def eagle3_drafts(head: Eagle3Head, ids: Tensor, features: Tensor) -> Iterator[Draft]:
    """Yield the S steps of an EAGLE-3 head; arguments as for ``eagle_drafts``.

    The features are [B, L, 3 H], of three target layers. Nothing ties the hidden states to them.
    """
    attend, positions = UnrolledAttention(len(ids)), positions_of(ids)

    def run(step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        return head(tokens, hidden, positions + step, attend)

    token_map = head.token_map()
    for _, hidden in chain(run, ids, features):
        yield Draft(per_window(head.logits(hidden), len(ids)), tokens=token_map)


def mtp_drafts(head: MTPHead, ids: Tensor, features: Tensor) -> Iterator[Draft]:
    """Yield the S steps of MTP layers; arguments as for ``eagle_drafts``."""
    attend, positions = causal_attend(len(ids), ids.shape[1] - STEPS), positions_of(ids)

    def run(step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        return head(step, tokens, hidden, positions, attend)

    for step, hidden in chain(run, ids, features):
        yield Draft(per_window(head.logits(step, hidden), len(ids)))


def standalone_drafts(model: LlamaModel, ids: Tensor, features: Tensor) -> Iterator[Draft]:
    """Yield the S steps of a language model, which does not use ``features``."""
    del features
    logits = full_logits(model, ids[:, 1:])
    for step in range(STEPS):
        yield Draft(logits[:, step:][:, : ids.shape[1] - STEPS])


def chain(
    run: Callable[[int, Tensor, Tensor], Tensor], ids: Tensor, features: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Call ``run(step, tokens, hidden)`` S times; yield each step and its hidden states [T, H]."""
    roots = ids.shape[1] - STEPS
    hidden = features[:, :roots].flatten(0, 1)
    for step in range(STEPS):
        hidden = run(step, ids[:, step + 1 :][:, :roots].flatten(), hidden)
        yield step, hidden


def positions_of(ids: Tensor) -> Tensor:
    """Return the positions of the roots, [T]."""
    return torch.arange(ids.shape[1] - STEPS, device=ids.device).repeat(len(ids))


def per_window(rows: Tensor, batch_size: int) -> Tensor:
    """Split rows [T, ...] into [B, R, ...]."""
    return rows.unflatten(0, (batch_size, -1))
