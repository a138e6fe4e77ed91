"""Draft models run on known text as in decoding: S draft steps from every position at once.

EAGLE heads read their own hidden states this way, as in the training of EAGLE-3 (arXiv 2503.01840).
Root r of a window is a position at which a draft starts. Draft step k = 1 .. S takes the token at
r + k and predicts the next one, which the target predicts from its feature at r + k. Blocks of
DFLASH have all their draft steps in one forward.

Shape letters: B windows, L tokens of each, R = L - S roots, T = B x R rows, H hidden, V vocabulary,
N query heads, M key and value heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.mtp import MtpHead
from graphkit.models.running import AttentionCall, attending

STEPS = 3
BLOCK_DECAY = 4.0
"""Drafts of a block after which the loss counts 1 / e."""


class Draft(NamedTuple):
    """One draft step from every root.

    Attributes:
        logits: [B, R, V].
        hidden: Hidden states that must resemble the target's features, [B, R, H], if any.
        tokens: Target token of each column of a reduced vocabulary, [V], if it is one.
        stride: Distance of the roots.
        reads_text: Whether the step reads the true tokens of the steps before it.
        weight: Factor of the loss.
    """

    logits: Tensor
    hidden: Tensor | None = None
    tokens: Tensor | None = None
    stride: int = 1
    reads_text: bool = True
    weight: float = 1.0

    def at_roots(self, rows: Tensor, step: int) -> Tensor:
        """Return the row ``step`` behind each root: rows [B, L, ...] to [B, R, ...]."""
        return rows[:, step :: self.stride][:, : self.logits.shape[1]]


class UnrolledAttention:
    """An ``attend`` for the S calls of one layer that drafts from every root.

    In step k, a root attends to the rows that its KV cache would contain in decoding: the rows of
    step 1 up to its own, and its own rows of steps 2 to k.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        """Attend in the next step; there is one layer."""
        query, key, value = rows_of(call)
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
        return out.transpose(1, 2).flatten(0, 1)[None]

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
        with attending(attend, positions + step):
            states: Tensor = head(tokens, hidden, positions + step)
        return states

    for _, hidden in chain(run, ids, features):
        yield Draft(*(per_window(rows, len(ids)) for rows in (head.logits(hidden), hidden)))


def eagle3_drafts(head: Eagle3Head, ids: Tensor, features: Tensor) -> Iterator[Draft]:
    """Yield the S steps of an EAGLE-3 head; arguments as for ``eagle_drafts``.

    The features are [B, L, 3 H], of three target layers. Nothing ties the hidden states to them.
    """
    attend, positions = UnrolledAttention(len(ids)), positions_of(ids)

    def run(step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        with attending(attend, positions + step):
            states: Tensor = head(tokens, hidden, positions + step)
        return states

    token_map = head.token_map
    for _, hidden in chain(run, ids, features):
        yield Draft(per_window(head.logits(hidden), len(ids)), tokens=token_map)


def mtp_drafts(head: MtpHead, ids: Tensor, features: Tensor) -> Iterator[Draft]:
    """Yield the S steps of MTP layers; arguments as for ``eagle_drafts``."""
    positions = positions_of(ids)

    def attend(call: AttentionCall) -> Tensor:
        parts = (
            rows[0].unflatten(1, (len(ids), -1)) for rows in (call.query, call.key, call.value)
        )
        windows = (part.transpose(0, 1) for part in parts)
        out = scaled_dot_product_attention(*windows, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[None]

    def run(step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        with attending(attend, positions):
            states: Tensor = head(step, tokens, hidden, positions)
        return states

    for _, hidden in chain(run, ids, features):
        yield Draft(per_window(head.logits(hidden), len(ids)))


def standalone_drafts(model: nn.Module, ids: Tensor, features: Tensor) -> Iterator[Draft]:
    """Yield the S steps of a language model, which does not use ``features``."""
    del features
    logits = model(ids[:, 1:], use_cache=False).logits
    for step in range(STEPS):
        yield Draft(logits[:, step:][:, : ids.shape[1] - STEPS])


class BlockAttention:
    """An ``attend`` for blocks behind several roots of each window.

    A block sees the context up to its root, and all of its own rows.

    Args:
        context: Keys and values of the context, [B x L, M, D] each, for each layer.
        batch_size: Windows (B).
        roots: Roots of each window, [R].
        block_size: Rows of a block.
    """

    def __init__(
        self,
        context: list[tuple[Tensor, Tensor]],
        batch_size: int,
        roots: Tensor,
        block_size: int,
    ) -> None:
        self._context, self._batch_size = context, batch_size
        length = len(context[0][0]) // batch_size
        sees_context = torch.arange(length, device=roots.device) <= roots[:, None]
        own = torch.eye(len(roots), dtype=torch.bool, device=roots.device)
        mask = torch.cat((sees_context, own.repeat_interleave(block_size, 1)), dim=1)
        self._mask = mask.repeat_interleave(block_size, 0)

    def __call__(self, call: AttentionCall) -> Tensor:
        """Attend in one layer."""
        query, key, value = rows_of(call)
        both = zip(self._context[call.module.layer_idx], (key, value), strict=True)
        keys, values = (
            torch.cat([per_window(rows, self._batch_size) for rows in pair], dim=1).transpose(1, 2)
            for pair in both
        )
        queries = per_window(query, self._batch_size).transpose(1, 2)
        out = scaled_dot_product_attention(
            queries, keys, values, attn_mask=self._mask, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)[None]


def dflash_drafts(head: DFlashHead, ids: Tensor, features: Tensor) -> Iterator[Draft]:
    """Yield the drafts of blocks, whose roots are one block apart.

    All drafts of a block are made in one forward, so that they read only the token behind the root.
    Later ones count less in the loss, because they are verified only if all before are accepted.

    Shapes:
        ids: [B, L] int64.
        features: [B, L, n H], of the target layers that are the context.
    """
    (windows, length), size, device = ids.shape, head.block_size, ids.device
    positions = torch.arange(length, device=device).repeat(windows)
    context = head.context_heads(head.encoder(features.flatten(0, 1)), positions)
    roots = torch.arange(0, length - size + 1, size, device=device)
    block = torch.full((windows, len(roots), size), head.mask_token_id, device=device)
    block[..., 0] = ids[:, 1::size][:, : len(roots)]
    rows = (roots[:, None] + 1 + torch.arange(size, device=device)).flatten().repeat(windows)
    with attending(BlockAttention(context, windows, roots, size), rows):
        hidden = head(block.flatten(), rows)
    logits = head.logits(hidden).unflatten(0, block.shape)
    for step in range(1, size):
        weight = math.exp((1 - step) / BLOCK_DECAY)
        yield Draft(logits[:, :, step], stride=size, reads_text=False, weight=weight)


def chain(
    run: Callable[[int, Tensor, Tensor], Tensor], ids: Tensor, features: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Call ``run(step, tokens, hidden)`` S times; yield each step and its hidden states [T, H]."""
    roots = ids.shape[1] - STEPS
    hidden = features[:, :roots].flatten(0, 1)
    for step in range(STEPS):
        hidden = run(step, ids[:, step + 1 :][:, :roots].flatten(), hidden)
        yield step, hidden


def rows_of(call: AttentionCall) -> list[Tensor]:
    """Return queries [T, N, D], keys and values [T, M, D] of a call of attention."""
    return [heads[0].transpose(0, 1) for heads in (call.query, call.key, call.value)]


def positions_of(ids: Tensor) -> Tensor:
    """Return the positions of the roots, [T]."""
    return torch.arange(ids.shape[1] - STEPS, device=ids.device).repeat(len(ids))


def per_window(rows: Tensor, batch_size: int) -> Tensor:
    """Split rows [T, ...] into [B, R, ...]."""
    return rows.unflatten(0, (batch_size, -1))
