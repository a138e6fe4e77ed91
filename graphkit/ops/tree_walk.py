"""The walk down a draft tree that every verification shares.

Suffixes: B requests, W nodes per request, A columns of accept_index.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from collections.abc import Iterator

import torch


class TreeWalk:
    """A walk from the root of each tree of a batch, all trees in step.

    Iteration yields the child that each walk tries next, int64 [B], 0 where there is none. The
    caller decides which are accepted and calls ``settle``. The walk takes W - 1 turns for any
    links: a tree needs no more, since no child is tried twice, and links with a cycle end.

    Attributes:
        path_BA: Accepted nodes from the root on, -1 behind the last.
        num_drafts_B: Number of accepted nodes without the root.
        node_B: The last accepted node.
        has_child_B: True where there is a child to try and a column for it.
    """

    def __init__(
        self, retrieve_next_token: torch.Tensor, retrieve_next_sibling: torch.Tensor, columns: int
    ) -> None:
        self._links = retrieve_next_token, retrieve_next_sibling
        self._child_B = retrieve_next_token[:, 0]
        self._column_A = torch.arange(columns, device=retrieve_next_token.device)
        self.num_drafts_B = torch.zeros_like(self._child_B)
        self.node_B = torch.zeros_like(self._child_B)
        self.path_BA = torch.where(self._column_A == 0, 0, -1).repeat(len(self.node_B), 1)

    def __iter__(self) -> Iterator[torch.Tensor]:
        width, columns = self._links[0].shape[1], self._column_A.shape[0]
        for _ in range(width - 1):
            is_node_B = (self._child_B >= 0) & (self._child_B < width)
            self.has_child_B = is_node_B & (self.num_drafts_B < columns - 1)
            yield torch.where(self.has_child_B, self._child_B, 0)

    def settle(self, child_B: torch.Tensor, fits_B: torch.Tensor) -> torch.Tensor:
        """Accept the child where there is one and it fits; else continue with its sibling.

        Shapes:
            child_B: [B] int64, as the iteration yielded it. fits_B: [B] bool.
            Returns [B] bool, True where the child was accepted.
        """
        accepted_B = fits_B & self.has_child_B
        self.num_drafts_B = self.num_drafts_B + accepted_B
        self.node_B = torch.where(accepted_B, child_B, self.node_B)
        is_new_column_BA = accepted_B[:, None] & self.is_last()
        self.path_BA = torch.where(is_new_column_BA, child_B[:, None], self.path_BA)
        first_B, sibling_B = (pick(link_BW, child_B) for link_BW in self._links)
        child_B = torch.where(accepted_B, first_B, sibling_B)
        self._child_B = torch.where(self.has_child_B, child_B, -1)
        return accepted_B

    def tokens_after(self, candidates: torch.Tensor, bonus_B: torch.Tensor) -> torch.Tensor:
        """Return the token after each accepted node: that of the next node, or the bonus token.

        A path along a cycle visits nodes again. All visits have the token after the last one.

        Shapes:
            candidates: [B, W] int64. bonus_B: [B] int64. Returns [B, A] int64.
        """
        next_BA = pick_columns(candidates, self.path_BA).roll(-1, 1)
        token_BA = torch.where(self.is_last(), bonus_B[:, None], next_BA)
        is_same_node_BAA = self.path_BA[:, :, None] == self.path_BA[:, None]
        return token_BA.gather(1, torch.where(is_same_node_BAA, self._column_A, 0).amax(2))

    def is_last(self) -> torch.Tensor:
        """Return which column holds the last accepted node, bool [B, A]."""
        return self._column_A == self.num_drafts_B[:, None]


def pick(rows_BX: torch.Tensor, column_B: torch.Tensor) -> torch.Tensor:
    """Return one entry of each row, [B]."""
    return rows_BX.gather(1, column_B[:, None])[:, 0]


def pick_columns(rows_BW: torch.Tensor, column_BA: torch.Tensor) -> torch.Tensor:
    """Return some entries of each row, [B, A]; the first one for a negative column."""
    return rows_BW.gather(1, column_BA.clamp(min=0))


def write_paths(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    retrieve_index: torch.Tensor,
    walk: TreeWalk,
    token_BA: torch.Tensor,
) -> None:
    """Write each path and the token after each of its nodes; skip ids outside ``predicts``.

    Args:
        predicts: Tokens by flat id, int32 [B * W].
        accept_index: Receives the flat ids of the paths, int32 [B, A].
        accept_token_num: Receives the numbers of accepted drafts, int32 [B].
        retrieve_index: Flat id of each node, int64 [B, W].
        walk: The walk, at its end.
        token_BA: The token after each accepted node, the same for all visits of a node.
    """
    on_path_BA = walk.path_BA >= 0
    flat_BA = pick_columns(retrieve_index, walk.path_BA)
    accept_index.copy_(torch.where(on_path_BA, flat_BA, -1))
    accept_token_num.copy_(walk.num_drafts_B)

    rows = predicts.shape[0]
    is_row_BA = on_path_BA & (flat_BA >= 0) & (flat_BA < rows)
    row_BA = torch.where(is_row_BA, flat_BA, rows)
    longer = torch.cat([predicts, predicts.new_zeros(1)])  # one more row for skipped ids
    longer[row_BA.flatten()] = token_BA.flatten().to(predicts.dtype)
    predicts.copy_(longer[:-1])
