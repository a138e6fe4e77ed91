"""Count the drafts that a target's greedy choice accepts, from a verify batch and its logits."""

from __future__ import annotations

from typing import Any

import torch

from graphkit.ops import verify_tree_greedy
from graphkit.ops.tree import parents_and_depths
from graphkit.spec import SpecConfig


def accepted_drafts(spec: SpecConfig, batch: Any, logits: torch.Tensor) -> torch.Tensor | None:
    """Return the number of accepted drafts of each request, int32 [B].

    Args:
        spec: Draft settings of the batch.
        batch: A TARGET_VERIFY batch of at least B requests.
        logits: [B * W, V], of the first B requests.

    Returns:
        ``None`` if the batch does not define a tree: it has no drafts, or it is a tree without
        ``custom_mask``.
    """
    width = batch.num_tokens // batch.batch_size
    requests = len(logits) // width
    if width < 2 or (spec.topk > 1 and batch.custom_mask is None):
        return None
    tokens = torch.as_tensor(batch.input_ids, dtype=torch.int64).to(logits.device)
    parents = _parents(batch.custom_mask, requests, width).to(logits.device)
    flat = torch.arange(requests * width, device=logits.device)
    predicts = torch.zeros_like(flat, dtype=torch.int32)
    accept_index = predicts.new_empty(requests, width)
    drafts = predicts.new_empty(requests)
    verify_tree_greedy(
        predicts, accept_index, drafts,
        tokens[: requests * width].view(requests, width),
        flat.view(requests, width),
        *_links(parents),
        logits.argmax(-1).view(requests, width),
    )  # fmt: skip
    return drafts


def _parents(mask: Any, requests: int, width: int) -> torch.Tensor:
    """Return the parent of each node, int64 [B, W]; -1 for the root."""
    if mask is None:
        return (torch.arange(width) - 1).expand(requests, width)
    return parents_and_depths(torch.as_tensor(mask)[:requests].cpu())[0]


def _links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return first child and next sibling of each node, int64 [B, W]; -1 where there is none."""
    width = parents.shape[1]
    node = torch.arange(width, device=parents.device)

    def first(related: torch.Tensor) -> torch.Tensor:
        index = torch.where(related, node, width).amin(2)
        return torch.where(index < width, index, -1)

    children = parents[:, None, :] == node[:, None]
    siblings = (parents[:, None, :] == parents[:, :, None]) & (node > node[:, None])
    return first(children), first(siblings)
