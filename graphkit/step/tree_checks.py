"""Check of the links, the mask and the probabilities of draft trees.

The mask says what each node attends to, and the links which nodes may be accepted after which. If
they contradict each other, the target verifies other drafts than those that it accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graphkit.errors import InputError
from graphkit.step.step_tensors import DraftTree

_ROUNDING = 1e-3
"""Distance from 1 that rounding explains in a sum of probabilities."""
_REMEDY = "Describe one tree in the links and the mask, as graphkit.ops.build_tree does."


def check_links(method: str, tree: DraftTree, *, is_chain: bool) -> None:
    """Refuse links that form no tree, and a mask that contradicts them. Waits for the device.

    Nodes that the links do not reach are never accepted and not checked.

    Args:
        method: Name of the method that returned the tree, for messages.
        tree: Tensors of the right shapes.
        is_chain: Whether the verifier takes the tree for a chain and does not read its mask.

    Raises:
        InputError: A node is linked twice or out of range, an index is not that of its node, or a
            node sees other nodes than itself and its ancestors; ``field`` names the tensor.
    """
    batch_size, width = tree.retrieve_index.shape
    if tree.retrieve_index.flatten().tolist() != list(range(batch_size * width)):
        raise InputError(
            f"{method}: retrieve_index is not b * {width} + i for node i of request b. {_REMEDY}",
            field="retrieve_index",
        )
    chain = torch.ones(width, width, dtype=torch.bool).tril()
    masks = chain.expand(batch_size, -1, -1) if is_chain else tree.tree_mask.cpu()
    links = tree.retrieve_next_token.tolist(), tree.retrieve_next_sibling.tolist()
    for request, (child, sibling, mask) in enumerate(zip(*links, masks.tolist(), strict=True)):
        for node, path in _paths(method, request, child, sibling).items():
            seen = [other for other, is_visible in enumerate(mask[node]) if is_visible]
            if seen != path:
                what = "the chain has" if is_chain else f"tree_mask[{request}, {node}] shows"
                raise InputError(
                    f"{method}: the links of request {request} put node {node} at the end of the "
                    f"path {path}, but {what} {seen}. {_REMEDY}",
                    field="retrieve_next_token" if is_chain else "tree_mask",
                )


def check_probs(method: str, tree: DraftTree, draft_probs: torch.Tensor) -> None:
    """Refuse rows of nodes with children that are not distributions. Waits for the device.

    Args:
        method: Name of the method that returned the tree, for messages.
        tree: Its links.
        draft_probs: Its probabilities, [B * W, V] float32.

    Raises:
        InputError: A number is negative or NaN, or a row does not sum to 1; ``field`` is
            ``draft_probs``.
    """
    parents = (tree.retrieve_next_token.flatten() >= 0).nonzero()[:, 0]
    rows = draft_probs[parents].double()
    sums = rows.sum(1)
    is_wrong = ~((rows >= 0).all(1) & ((sums - 1).abs() < _ROUNDING))
    for row, total in zip(parents[is_wrong].tolist(), sums[is_wrong].tolist(), strict=True):
        raise InputError(
            f"{method}: draft_probs[{row}] has a sum of {total:.6g} or a number below 0, expected "
            "the probabilities that the children of the node were sampled from, such as a softmax.",
            field="draft_probs",
        )


def _paths(
    method: str, request: int, child: Sequence[int], sibling: Sequence[int]
) -> Mapping[int, list[int]]:
    """Return the ascending ancestors of each node that the links reach, the node included.

    Raises:
        InputError: A node is linked twice, or does not exist.
    """
    paths, to_visit = {0: [0]}, [0]
    while to_visit:
        parent = to_visit.pop()
        node, field = child[parent], "retrieve_next_token"
        while node != -1:
            if not 0 <= node < len(child) or node in paths:
                fact = "is linked twice" if node in paths else "does not exist"
                raise InputError(
                    f"{method}: {field} of request {request} contains node {node}, which {fact}. "
                    f"{_REMEDY}",
                    field=field,
                )
            paths[node] = sorted([*paths[parent], node])
            to_visit.append(node)
            node, field = sibling[node], "retrieve_next_sibling"
    return paths
