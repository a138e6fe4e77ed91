"""Growth of a draft tree step by step, and selection of the nodes to verify.

The candidates of a request are numbered: K of step 0, then K * K of each further step, one row of
K per branch. A branch of step s is one of the K best candidates of that step, and its parent is
the branch that it continues. The layout is that of EAGLE-2 (arXiv 2406.16858), as
``graphkit.ops.build_tree`` reads it.

Among candidates of equal score the smaller number ranks first. A child's score is its parent's
times a probability, so no parent ranks behind its child, and the selected nodes form one tree.

Suffixes: B requests, K branches, N candidates so far.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

import torch


def top_candidates(
    logits: torch.Tensor, topk: int, temperature: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities and ids of the ``topk`` most probable tokens of each row.

    Shapes:
        logits: [rows, V]. temperature: [rows] float32; 1 by default.
        Returns [rows, topk] float32 and [rows, topk] int64, in descending order. From topk 2 on,
        equal probabilities are in the order of ``Tensor.topk``.
    """
    scores = logits.float() if temperature is None else logits.float() / temperature[:, None]
    if topk == 1:
        best, index = scores.max(-1, keepdim=True)
        return (best - scores.logsumexp(-1, keepdim=True)).exp(), index
    values, index = scores.softmax(-1).topk(topk)
    return values, index


class TreeGrowth:
    """The candidates of every request, step by step. Static shapes; may be captured.

    Args:
        topk_p_BK: Probabilities of the candidates of step 0.
        topk_index_BK: Their token ids.

    Shapes:
        topk_p_BK: [B, K] float32. topk_index_BK: [B, K] int64.

    Attributes:
        tokens: [B, K], tokens of the current branches.
        parents: [B, K], branch of the previous step that each current branch continues.
    """

    def __init__(self, topk_p_BK: torch.Tensor, topk_index_BK: torch.Tensor) -> None:
        self._topk = topk_p_BK.shape[1]
        self._scores, self._tokens = [topk_p_BK], [topk_index_BK]
        self._score_BK, self.tokens = topk_p_BK, topk_index_BK
        first = torch.arange(-1, self._topk, device=topk_index_BK.device)
        self._parents = [first.expand(topk_p_BK.shape[0], -1)]
        self.parents = self._parents[0][:, 1:]

    def grow(self, topk_p: torch.Tensor, topk_index: torch.Tensor) -> None:
        """Add the candidates after each current branch, and continue with the K best of them.

        Shapes:
            topk_p: [B * K, K] float32. topk_index: [B * K, K] int64.
        """
        topk, step = self._topk, len(self._scores)
        scores = (self._score_BK.flatten()[:, None] * topk_p).view(-1, topk * topk)
        tokens = topk_index.reshape(-1, topk * topk)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]
        self._scores.append(scores)
        self._tokens.append(tokens)
        self._parents.append(order + topk * topk * (step - 1) + topk)
        self._score_BK, self.tokens = scores.gather(1, order), tokens.gather(1, order)
        self.parents = order // topk

    def best(self, num_draft_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the ``num_draft_tokens - 1`` best candidates of all steps, which join the root.

        Returns:
            parent_list: [B, K * (S - 1) + 1] int64, the candidate that each branch continues; -1
                is the root.
            top_scores_index: [B, W - 1] int64, ascending numbers of the selected candidates.
            draft_tokens: [B, W - 1] int64, their token ids.
        """
        scores, tokens = torch.cat(self._scores, 1), torch.cat(self._tokens, 1)
        ranked = scores.sort(dim=1, descending=True, stable=True).indices
        top_scores_index = ranked[:, : num_draft_tokens - 1].sort(1).values
        parent_list = torch.cat(self._parents, 1)[:, : self._topk * (len(self._scores) - 1) + 1]
        return parent_list, top_scores_index, tokens.gather(1, top_scores_index)
