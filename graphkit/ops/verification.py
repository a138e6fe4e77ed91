"""Which drafted nodes the target's own greedy choice confirms.

Suffixes: B requests, W nodes per request, A columns of accept_index.
"""

# ruff: noqa: N806 - tensor suffixes are the house's notation
from __future__ import annotations

import torch

from graphkit.ops.tree_arguments import demand_tensor
from graphkit.ops.tree_walk import TreeWalk, check_paths, pick, write_paths


@torch.library.custom_op(
    "graphkit::verify_tree_greedy",
    mutates_args=("predicts", "accept_index", "accept_token_num"),
    device_types="cpu",
)
def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree from its root along the children that hold the target's next token.

    From the last accepted node, its children are tried in their order; the first one whose token is
    ``target_predict`` of that node is accepted. The walk ends when none is, or when accept_index
    has no column left. Contract of the field's greedy tree verification.

    Written, and nothing else: each row of accept_index, the flat ids of the accepted nodes from the
    root on, then -1; accept_token_num, how many of them are drafts; predicts at those ids, the
    target's token after each, of which the last is the bonus token.

    A link outside the tree counts as none, and a walk looks at W - 1 children at most, so that a
    damaged tree ends it. An id outside predicts is not written to.

    One launch on the current stream, none for an idle batch; never synchronises, may be captured.

    Args:
        predicts: Tokens by flat id, filled in along the accepted paths.
        accept_index: The accepted paths.
        accept_token_num: Accepted drafts, the bonus token excluded.
        candidates: Token of each node.
        retrieve_index: Flat id of each node.
        retrieve_next_token: First child of each node, -1 if none.
        retrieve_next_sibling: Next child of the same parent, -1 if none.
        target_predict: The target's token after each node.

    Shapes:
        predicts: [B * W] int32. accept_index: [B, A] int32, A >= 1, usually num_steps + 1.
        accept_token_num: [B] int32. All three contiguous.
        candidates, retrieve_*: [B, W] int64. target_predict: [B, W] int64 or int32.

    Raises:
        InputError: A shape, dtype, device or layout does not fit.
    """
    _check(predicts, accept_index, accept_token_num, candidates, retrieve_index,
           retrieve_next_token, retrieve_next_sibling, target_predict)  # fmt: skip
    walk = TreeWalk(retrieve_next_token, retrieve_next_sibling, accept_index.shape[1])
    for child_B in walk:
        wanted_B = pick(target_predict, walk.node_B)
        walk.settle(child_B, pick(candidates, child_B) == wanted_B)
    token_BA = target_predict.gather(1, walk.path_BA.clamp(min=0))
    write_paths(predicts, accept_index, accept_token_num, retrieve_index, walk, token_BA)


@verify_tree_greedy.register_fake
def _(*_: object, **__: object) -> None:
    """Nothing is returned, so there is no shape to tell."""


@verify_tree_greedy.register_kernel("cuda")
def _(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    from graphkit.ops.kernels.verification import launch_verify_tree_greedy

    _check(predicts, accept_index, accept_token_num, candidates, retrieve_index,
           retrieve_next_token, retrieve_next_sibling, target_predict)  # fmt: skip
    with torch.cuda.device(predicts.device):
        launch_verify_tree_greedy(
            predicts, accept_index, accept_token_num, candidates, retrieve_index,
            retrieve_next_token, retrieve_next_sibling, target_predict,
        )  # fmt: skip


def _check(*tensors: torch.Tensor) -> None:
    *paths, target_predict = tensors
    check_paths("verify_tree_greedy", *paths)
    candidates = paths[3]
    demand_tensor(
        "verify_tree_greedy", "target_predict", target_predict, candidates.shape,
        (torch.int64, torch.int32), candidates.device,
    )  # fmt: skip
