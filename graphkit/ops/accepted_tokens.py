"""Acceptance of draft trees by the tokens of the target.

The walk is that of ``verify_tree_greedy``. The op also orders the tokens along the path and counts
them, in one launch.

Dimensions: B requests, W nodes of each, P tokens of the longest path.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.registration import register_op
from graphkit.ops.verification import verify_tree_greedy

Accepted = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def empty_accepted(given: Any) -> Accepted:
    """Allocate the results."""
    candidates, (requests, width) = given.candidates, given.candidates.shape
    accept_index, *counts = (
        candidates.new_empty(shape, dtype=torch.int32)
        for shape in ((requests, given.longest_path), (requests,), (requests,))
    )
    return candidates.new_empty(requests * width), accept_index, counts[0], counts[1]


def check_path(given: Any) -> None:
    """Refuse paths of more tokens than a tree has nodes."""
    width = given.candidates.shape[1]
    if given.longest_path > width:
        raise InputError(
            f"{type(given).__name__}: longest_path is {given.longest_path}, expected at most the "
            f"{width} nodes of a tree.",
            field="longest_path",
        )


@register_op(fake=empty_accepted, check=check_path)
def accept_tokens(
    candidates: Annotated[torch.Tensor, "[B, W >= 1] int64"],
    retrieve_next_token: Annotated[torch.Tensor, "[B, W] int64"],
    retrieve_next_sibling: Annotated[torch.Tensor, "[B, W] int64"],
    target_predict: Annotated[torch.Tensor, "[B * W] int64"],
    longest_path: Annotated[int, "P >= 1"],
) -> Accepted:
    """Accept the path of each tree that agrees with the target's tokens.

    These are its most probable tokens (``argmax_rows``) or its samples (``target_samples``). The
    children of a node are tried in their order, and the first one that holds the target's token is
    accepted. The path ends where no child does; the target's token there is the bonus token.

    Args:
        candidates: Token of each node.
        retrieve_next_token: First child of each node, -1 if it has none.
        retrieve_next_sibling: Next child of the same parent, -1 if there is none.
        target_predict: The target's token after each node.
        longest_path: Most tokens of a path, the bonus token included (P), at most W.

    Returns:
        A tuple of four tensors:

        predict: [B * W] int64, the target's token after each accepted node. Those of a request's
        path are the first of its W entries, and 0 follows.
        accept_index: [B, P] int32, row ``b * W + i`` of each accepted node, the root first, padded
        with -1.
        num_accepted_drafts: [B] int32, accepted nodes without the root.
        num_accepted_tokens: [B] int32, accepted tokens, the bonus token included.
    """
    path = empty_path(candidates, longest_path)
    links = rows_of(candidates), retrieve_next_token, retrieve_next_sibling
    verify_tree_greedy(*path, candidates, *links, target_predict.view(candidates.shape))
    return ordered_paths(candidates.shape[1], *path)


def empty_path(
    candidates: torch.Tensor, longest_path: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate what the walks write: tokens by row, accept_index and the number of drafts."""
    requests = len(candidates)
    predicts = torch.zeros_like(candidates.flatten(), dtype=torch.int32)
    return predicts, predicts.new_empty(requests, longest_path), predicts.new_empty(requests)


def rows_of(candidates: torch.Tensor) -> torch.Tensor:
    """Return the flat row of each node, [B, W] int64."""
    rows = torch.arange(candidates.numel(), device=candidates.device)
    return rows.view(candidates.shape)


def ordered_paths(
    width: int, predicts: torch.Tensor, accept_index: torch.Tensor, drafts: torch.Tensor
) -> Accepted:
    """Return the results, with the tokens of each path at the front of its request's."""
    tokens = predicts.new_zeros(len(drafts), width, dtype=torch.int64)
    on_path = predicts[accept_index.clamp(min=0)].long()
    tokens[:, : accept_index.shape[1]] = torch.where(accept_index >= 0, on_path, 0)
    return tokens.flatten(), accept_index, drafts, drafts + 1
