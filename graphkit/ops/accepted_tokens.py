"""Acceptance of draft trees by the tokens or the distributions of the target.

The walks are those of ``verify_tree_greedy`` and ``tree_speculative_sampling_target_only``. These
ops also draw the samples, order the tokens along the path and count them, in one launch.

Suffixes: B requests, W nodes of each, P tokens of the longest path, V vocabulary, R request rows.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.philox import philox_uniform
from graphkit.ops.registration import register_op
from graphkit.ops.tree_sampling import tree_speculative_sampling_target_only
from graphkit.ops.verification import verify_tree_greedy

Accepted = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def empty_accepted(given: Any) -> Accepted:
    """Allocate the results of both ops."""
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

    One launch on the current stream, none for an idle batch. Never synchronises; may be captured.

    Args:
        candidates: Token of each node.
        retrieve_next_token: First child of each node, -1 if it has none.
        retrieve_next_sibling: Next child of the same parent, -1 if there is none.
        target_predict: The target's token after each node.
        longest_path: Most tokens of a path, the bonus token included (P), at most W.

    Returns:
        A tuple of four tensors:

        predict: The target's token after each accepted node. Those of a request's path are the
        first of its W entries, and 0 follows.
        accept_index: Row ``b * W + i`` of each accepted node, the root first, padded with -1.
        num_accepted_drafts: Accepted nodes without the root.
        num_accepted_tokens: Accepted tokens, the bonus token included.

    Shapes:
        candidates, retrieve_next_token, retrieve_next_sibling: [B, W] int64.
        target_predict: [B * W] int64.
        Returns [B * W] int64, [B, P] int32, [B] int32, [B] int32.

    Raises:
        InputError: A tensor has the wrong shape, dtype or device, or P is not 1 to W.
    """
    path = empty_path(candidates, longest_path)
    links = rows_of(candidates), retrieve_next_token, retrieve_next_sibling
    verify_tree_greedy(*path, candidates, *links, target_predict.view(candidates.shape))
    return ordered_paths(candidates.shape[1], *path)


@register_op(fake=empty_accepted, check=check_path)
def accept_samples(
    candidates: Annotated[torch.Tensor, "[B, W >= 1] int64"],
    retrieve_next_token: Annotated[torch.Tensor, "[B, W] int64"],
    retrieve_next_sibling: Annotated[torch.Tensor, "[B, W] int64"],
    target_probs: Annotated[torch.Tensor, "[B * W, V >= 1] float32"],
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    seeds: Annotated[torch.Tensor, "[R] int64"],
    positions: Annotated[torch.Tensor, "[R] int32"],
    longest_path: Annotated[int, "P >= 1"],
) -> Accepted:
    """Accept a path of each tree so that its tokens follow the target's distribution.

    The samples are those of ``philox_uniform``: draw i of a request for its node i, draw W for its
    bonus token. One launch on the current stream, none for an idle batch. Never synchronises; may
    be captured.

    Args:
        candidates: Token of each node.
        retrieve_next_token: First child of each node, -1 if it has none.
        retrieve_next_sibling: Next child of the same parent, -1 if there is none.
        target_probs: The target's distribution after each node.
        req_pool_indices: Request rows.
        seeds: Seeds by request row.
        positions: Positions of the roots by request row; a request draws once at each.
        longest_path: Most tokens of a path, the bonus token included (P), at most W.

    Returns:
        As ``accept_tokens``.

    Shapes:
        candidates, retrieve_next_token, retrieve_next_sibling: [B, W] int64.
        target_probs: [B * W, V] float32. req_pool_indices: [B] int64. seeds: [R] int64.
        positions: [R] int32. Returns [B * W] int64, [B, P] int32, [B] int32, [B] int32.

    Raises:
        InputError: A tensor has the wrong shape, dtype or device, or P is not 1 to W.
    """
    width = candidates.shape[1]
    path = empty_path(candidates, longest_path)
    links = rows_of(candidates), retrieve_next_token, retrieve_next_sibling
    samples = philox_uniform(seeds[req_pool_indices], positions[req_pool_indices], width + 1)
    probs = target_probs.view(*candidates.shape, target_probs.shape[1])
    tree_speculative_sampling_target_only(
        *path, candidates, *links, samples[:, :width], samples[:, width], probs
    )  # fmt: skip
    return ordered_paths(width, *path)


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
