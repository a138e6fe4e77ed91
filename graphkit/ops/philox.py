"""Random numbers that depend on a request's seed, position and draw alone.

Dimensions: B requests, n draws per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

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
    those of its Random123 library.

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


def _empty_samples(given: Any) -> torch.Tensor:
    """Allocate the result of ``philox_uniform``."""
    seeds = given.seeds
    return torch.empty(len(seeds), given.draws, dtype=torch.float32, device=seeds.device)


@register_op(fake=_empty_samples)
def philox_uniform(
    seeds: Annotated[torch.Tensor, "[B] int64"],
    positions: Annotated[torch.Tensor, "[B] int32"],
    draws: Annotated[int, "n >= 1"],
) -> torch.Tensor:
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
