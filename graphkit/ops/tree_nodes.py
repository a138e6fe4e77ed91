"""Parents and depths of tree nodes, from the mask of what each node sees.

Suffixes: B requests, W nodes of each.
"""

from __future__ import annotations

import torch


def parents_and_depths(tree_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parent of each node, -1 for roots, and how many nodes it sees.

    Nodes may be in any order. The parent of a node is the deepest of its ancestors, each of which
    sees fewer nodes. If all nodes see all, as in the mask of a pad row, all are roots. Enqueues
    only; may be captured.

    Shapes:
        tree_mask: [B, W, W] bool; True where node i sees node j, which is i itself or an ancestor.
        Returns two of [B, W] int64.
    """
    depths = tree_mask.sum(2)
    is_ancestor = tree_mask & (depths[:, None] < depths[:, :, None])
    deepest = torch.where(is_ancestor, depths[:, None], -1).max(2)
    return torch.where(deepest.values < 0, -1, deepest.indices), depths
