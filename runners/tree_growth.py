"""A draft tree that grows step by step; see ``graphkit.ops.tree_growth``.

Suffixes: B requests, K branches.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

import torch

from graphkit.ops.tree_growth import choose_nodes, grow_tree, plant_tree


class TreeGrowth:
    """The candidates of every request, step by step. Static shapes; may be captured.

    Args:
        topk_p_BK: Probabilities of the candidates of step 0.
        topk_index_BK: Their token ids.
        num_steps: Draft steps (S); the tree is complete after S - 1 calls of ``grow``.

    Shapes:
        topk_p_BK: [B, K] float32. topk_index_BK: [B, K] int64.

    Attributes:
        tokens: [B, K] int64, tokens of the current branches.
        parents: [B, K] int64, branch of the previous step that each current branch continues; set
            by ``grow``.
        rows: [B * K] int64, row of each current branch in the hidden states of the previous step;
            at step 0 in the hidden states of the requests.
        mask: [B, K, K * S] bool, the draft slots that each current branch sees.
    """

    def __init__(
        self, topk_p_BK: torch.Tensor, topk_index_BK: torch.Tensor, num_steps: int
    ) -> None:
        self._scores, self._tokens, self._parent_list, self.rows, self.mask = plant_tree(
            topk_p_BK, topk_index_BK, num_steps
        )
        self._branch_scores, self.tokens = topk_p_BK, topk_index_BK
        self._step = 0

    def grow(self, topk_p: torch.Tensor, topk_index: torch.Tensor) -> None:
        """Add the candidates after each current branch, and continue with the K best of them.

        Shapes:
            topk_p: [B * K, K] float32. topk_index: [B * K, K] int64.
        """
        self._step += 1
        self._branch_scores, self.tokens, self.parents, self.rows, self.mask = grow_tree(
            self._scores, self._tokens, self._parent_list, self._branch_scores, topk_p,
            topk_index, self.mask, self._step,
        )  # fmt: skip

    def best(self, num_draft_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the ``num_draft_tokens - 1`` best candidates of all steps, which join the root.

        Returns:
            parent_list: [B, K * (S - 1) + 1] int64, the candidate that each branch continues; -1
                is the root.
            top_scores_index: [B, W - 1] int64, ascending numbers of the selected candidates.
            draft_tokens: [B, W - 1] int64, their token ids.
        """
        chosen, tokens = choose_nodes(self._scores, self._tokens, num_draft_tokens)
        return self._parent_list, chosen, tokens
