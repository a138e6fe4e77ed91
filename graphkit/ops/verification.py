"""Greedy verification of a draft tree.

Dimensions: B requests, W nodes per request, A columns of accept_index.
"""

# ruff: noqa: N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.registration import register_op
from graphkit.ops.tree_walk import TreeWalk, pick, write_paths


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
    token_BA = target_predict.gather(1, walk.path_BA.clamp(min=0))
    write_paths(predicts, accept_index, accept_token_num, retrieve_index, walk, token_BA)
