"""Acceptance of draft trees by the tokens of the target.

Dimensions: B requests, W nodes of each, A columns of accept_index, P tokens of the longest path.
"""

# ruff: noqa: N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.registration import register_op
from graphkit.ops.tree_walk import TreeWalk, pick, pick_columns, write_paths


@register_op(
    mutates_args=("predicts", "accept_index", "accept_token_num"), sizes_from=("candidates",)
)
def verify_tree_greedy(
    predicts: Annotated[torch.Tensor, "[B * W] int32, contiguous"],
    accept_index: Annotated[torch.Tensor, "[B, A >= 1] int32, contiguous"],
    accept_token_num: Annotated[torch.Tensor, "[B] int32, contiguous"],
    candidates: Annotated[torch.Tensor, "[B, W >= 1] int64"],
    retrieve_index: Annotated[torch.Tensor, "[B, W] int64"],
    retrieve_next_token: Annotated[torch.Tensor, "[B, W] int64"],
    retrieve_next_sibling: Annotated[torch.Tensor, "[B, W] int64"],
    target_predict: Annotated[torch.Tensor, "[B, W] int64 or int32"],
) -> None:
    """Accept the path of each tree that agrees with the target's greedy tokens.

    The walk starts at the root. The children of the last accepted node are tried in their order,
    and the first one whose token equals ``target_predict`` of that node is accepted. The walk ends
    when no child is accepted or when accept_index has no column left. Contract of SGLang's
    ``verify_tree_greedy`` (sgl-kernel, eagle_utils.cu).

    The op writes each row of accept_index, the flat ids of the accepted nodes from the root on,
    then -1; accept_token_num; and ``predicts`` at the accepted ids, the target's token after each
    node. The last of these tokens is the bonus token. Other entries keep their values.

    A link outside the tree counts as none, and a walk tries at most W - 1 children, so that it
    ends for any links. Ids outside ``predicts`` are skipped.

    Args:
        predicts: Tokens by flat id, written along the accepted paths.
        accept_index: Receives the accepted paths. A is usually num_steps + 1.
        accept_token_num: Receives the number of accepted drafts, the bonus token excluded.
        candidates: Token of each node.
        retrieve_index: Flat id of each node.
        retrieve_next_token: First child of each node, -1 if it has none.
        retrieve_next_sibling: Next child of the same parent, -1 if there is none.
        target_predict: The target's token after each node.
    """
    walk = TreeWalk(retrieve_next_token, retrieve_next_sibling, accept_index.shape[1])
    for child_B in walk:
        wanted_B = pick(target_predict, walk.node_B)
        walk.settle(child_B, pick(candidates, child_B) == wanted_B)
    token_BA = pick_columns(target_predict, walk.path_BA)
    write_paths(predicts, accept_index, accept_token_num, retrieve_index, walk, token_BA)


Accepted = tuple[
    Annotated[torch.Tensor, "[B * W] int64"],
    Annotated[torch.Tensor, "[B, P] int32"],
    Annotated[torch.Tensor, "[B] int32"],
    Annotated[torch.Tensor, "[B] int32"],
]
"""The results of ``accept_tokens`` and ``accept_by_rejection``."""


@register_op()
def accept_tokens(
    candidates: Annotated[torch.Tensor, "[B, W >= 1] int64"],
    retrieve_next_token: Annotated[torch.Tensor, "[B, W] int64"],
    retrieve_next_sibling: Annotated[torch.Tensor, "[B, W] int64"],
    target_predict: Annotated[torch.Tensor, "[B * W] int64"],
    longest_path: Annotated[int, "1 <= P <= W"],
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
        longest_path: Most tokens of a path, the bonus token included (P).

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
    links = flat_rows(candidates), retrieve_next_token, retrieve_next_sibling
    verify_tree_greedy(*path, candidates, *links, target_predict.view(candidates.shape))
    return ordered_paths(candidates.shape[1], *path)


def empty_path(
    candidates: torch.Tensor, longest_path: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate what the walks write: tokens by row, accept_index and the number of drafts."""
    requests = len(candidates)
    predicts = torch.zeros_like(candidates.flatten(), dtype=torch.int32)
    return predicts, predicts.new_empty(requests, longest_path), predicts.new_empty(requests)


def flat_rows(candidates: torch.Tensor) -> torch.Tensor:
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
