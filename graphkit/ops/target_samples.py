"""The target's own sample after each node of a draft tree.

Dimensions: B requests, W nodes of each, V vocabulary, R request rows.
"""

from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.philox import philox_uniform
from graphkit.ops.registration import register_op
from graphkit.ops.tree_sampling import sample_rows


@register_op(
    fake=lambda given: given.positions.new_empty(given.positions.numel()),
    sizes_from=("positions",),
)
def target_samples(
    target_probs: Annotated[torch.Tensor, "[B * W, V >= 1] float32"],
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    seeds: Annotated[torch.Tensor, "[R] int64"],
    positions: Annotated[torch.Tensor, "[B, W] int64"],
) -> torch.Tensor:
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
