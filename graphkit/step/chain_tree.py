"""Draft trees whose shape does not depend on values, so that their links are constants."""

from __future__ import annotations

import torch

from graphkit.step.step_tensors import DraftTree
from graphkit.step.transfers import to_device


class ChainTree:
    """A tree of fixed shape: K chains that start at the root, with lengths as equal as W allows.

    Waits for the device when it is created, and never again.

    Args:
        topk: Number of chains (K).
        width: Number of nodes, the root included (W).
        max_batch_size: Most requests of a batch (M).
        device: The device of the tensors.
        drafted: Nodes that drafts can occupy, the root included; the others hold token 0 and are
            linked to none, so that they are never accepted. ``None`` selects all.

    Attributes:
        max_depth: Depth of the longest chain.
    """

    def __init__(
        self,
        topk: int,
        width: int,
        max_batch_size: int,
        device: torch.device,
        *,
        drafted: int | None = None,
    ) -> None:
        linked = width if drafted is None else drafted
        chain = [(node - 1) % topk for node in range(1, width)]
        depth = [(node - 1) // topk + 1 for node in range(1, width)]
        child = [node + topk if node + topk < linked else -1 for node in range(1, width)]
        sibling = [node + 1 if node < min(topk, linked - 1) else -1 for node in range(1, width)]
        self.max_depth = max(depth[: linked - 1], default=0)
        chain_of, depth_of = to_device([0, *chain], device), to_device([0, *depth], device)
        mask = (chain_of[:, None] == chain_of) & (depth_of[:, None] >= depth_of)
        mask[:, 0] = True
        next_token = to_device([1 if linked > 1 else -1, *child], device)
        next_sibling = to_device([-1, *sibling], device)
        self._masks = mask.repeat(max_batch_size, 1, 1)
        self._next_tokens = next_token.repeat(max_batch_size, 1)
        self._next_siblings = next_sibling.repeat(max_batch_size, 1)
        rows = torch.arange(max_batch_size * width, device=device)
        self._rows = rows.view(max_batch_size, width)
        self._undrafted = torch.zeros(max_batch_size, width - linked, dtype=torch.int64).to(device)

    def of(self, draft_tokens: torch.Tensor) -> DraftTree:
        """Return the trees of some tokens. Enqueues nothing if drafts can occupy all nodes.

        Args:
            draft_tokens: Token of each node that drafts can occupy, [B, W] int64 if these are all;
                that of the root is not read.
        """
        requests = len(draft_tokens)
        if self._undrafted.shape[1]:
            draft_tokens = torch.cat([draft_tokens, self._undrafted[:requests]], 1)
        return DraftTree(
            draft_tokens=draft_tokens.flatten(),
            tree_mask=self._masks[:requests],
            retrieve_index=self._rows[:requests],
            retrieve_next_token=self._next_tokens[:requests],
            retrieve_next_sibling=self._next_siblings[:requests],
        )
