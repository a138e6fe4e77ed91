"""Random numbers of requests, and tokens drawn with them from distributions.

Random numbers depend on a request's seed, position and draw alone.

Dimensions: B requests, W nodes of each, n draws per request, V vocabulary, R request rows.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch

from graphkit.ops.registration import register_op

WORD = 0xFFFF_FFFF
"""Mask of the low 32 bits."""
ROUNDS = 10
MULTIPLIERS = 0xD251_1F53, 0xCD9E_8D57
KEY_STEPS = 0x9E37_79B9, 0xBB67_AE85
"""Added to the key after each round."""


def philox4x32(counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the four words that Philox4x32-10 makes of a counter and a key.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11. The parameters are
    from its Random123 library.

    Args:
        counter: Four words.
        key: Two words.

    Shapes:
        All are int64 in 0 to 2**32 - 1, of shapes that broadcast to [...]. Returns [..., 4] int64
        in the same range.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product of two words may exceed int64. It wraps around, which keeps all 64 bits; the
        # shift repeats the sign, which the mask removes.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = (p1 >> 32 & WORD) ^ c1 ^ k0, (p0 >> 32 & WORD) ^ c3 ^ k1
        c1, c3 = p1 & WORD, p0 & WORD
        k0, k1 = k0 + KEY_STEPS[0] & WORD, k1 + KEY_STEPS[1] & WORD
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1)


@register_op()
def philox_uniform(
    seeds: Annotated[torch.Tensor, "[B] int64"],
    positions: Annotated[torch.Tensor, "[B] int32"],
    draws: Annotated[int, "n >= 1"],
) -> Annotated[torch.Tensor, "[B, n] float32"]:
    """Draw uniform samples in [0, 1) from each request's seed and position.

    A sample is a function of its seed, its position and its draw. It does not depend on the batch,
    its size, the other rows, n or earlier calls, so pad rows do no harm. Equal seeds and positions
    give equal samples.

    Draw i is word i % 4 of Philox4x32-10 (Salmon et al., SC'11) with the key (low half of the seed,
    high half) and the counter (position, i // 4, 0, 0). The 24 high bits of the word, times 2**-24,
    are the sample, so all devices agree bit for bit.

    Args:
        seeds: Seed of each request; all 64 bits count.
        positions: Position of each request, such as its committed tokens. A request that draws
            twice at one position receives the same samples.
        draws: Samples per request (n).

    Returns:
        Samples by request and draw, [B, n] float32, multiples of 2**-24.
    """
    block = torch.arange((draws + 3) // 4, device=seeds.device)  # of four draws
    zero = torch.zeros_like(block)
    counter = positions[:, None].long() & WORD, block, zero, zero
    key = seeds[:, None] & WORD, seeds[:, None] >> 32 & WORD
    words = philox4x32(counter, key).flatten(1)[:, :draws]
    return (words >> 8).float() * 2**-24


@register_op(sizes_from=("positions",))
def target_samples(
    target_probs: Annotated[torch.Tensor, "[B * W, V >= 1] float32"],
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    seeds: Annotated[torch.Tensor, "[R] int64"],
    positions: Annotated[torch.Tensor, "[B, W] int64"],
) -> Annotated[torch.Tensor, "[B * W] int64"]:
    """Draw the target's token after each node from the request's seed and the node's position.

    Let u be draw 0 of ``philox_uniform`` for the request's seed and the position of the node. The
    token is drawn by inverse transform: it is the first one whose running sum of probabilities
    exceeds u times their total. A token of probability 0 is never drawn. If rounding leaves no
    such token, it is the last one of a probability above 0. Where the total is 0 or not finite, it
    is the most probable one, NaN excluded.

    A text is a function of the seed and of the target's distributions: u belongs to a position, and
    the order in which a row is summed depends on V alone. Batch, W, tree and the other rows have no
    effect. Nodes of one depth share u. Draft tokens that equal these samples are the ones to accept
    (``accept_tokens``): the text is then the one that the target generates without a drafter.

    Args:
        target_probs: The target's distribution after each node, as ``target_probs`` returns it.
        req_pool_indices: Request rows.
        seeds: Seeds by request row.
        positions: Position of each node in the text of its request.

    Returns:
        The token after each node, [B * W] int64.
    """
    node_seeds = seeds[req_pool_indices].repeat_interleave(positions.shape[1])
    coins = philox_uniform(node_seeds, positions.flatten().int(), 1)[:, 0]
    return sample_rows(target_probs, target_probs, coins)


def sample_rows(
    weight_BV: torch.Tensor, fallback_BV: torch.Tensor, coin_B: torch.Tensor
) -> torch.Tensor:
    """Draw a token by inverse transform, int64 [B]; the fallback's largest without a finite sum."""
    running_BV = weight_BV.double().cumsum(1)
    total_B = running_BV[:, -1]
    is_past_BV = running_BV > (coin_B * total_B)[:, None]
    token_V = torch.arange(weight_BV.shape[1], device=weight_BV.device)
    has_mass_BV = weight_BV > 0
    first_B = torch.where(is_past_BV & has_mass_BV, token_V, len(token_V)).amin(1)
    last_B = torch.where(has_mass_BV, token_V, -1).amax(1)  # taken for a sample of 1
    largest_B = fallback_BV.masked_fill(fallback_BV.isnan(), -torch.inf).argmax(1)
    has_total_B = (total_B > 0) & (total_B < torch.inf)
    return torch.where(has_total_B, torch.minimum(first_B, last_B), largest_B)
