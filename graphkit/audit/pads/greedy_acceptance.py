"""How many drafts a target's own greedy choice confirms, from a verify batch and its logits."""

from __future__ import annotations

from typing import Any

import torch

from graphkit.ops import verify_tree_greedy
from graphkit.spec import SpecConfig


def accepted_drafts(spec: SpecConfig, batch: Any, logits: torch.Tensor) -> torch.Tensor | None:
    """Accepted drafts of each request.

    Args:
        spec: How the algorithm drafts.
        batch: A TARGET_VERIFY batch; may hold more requests than ``logits`` has rows of.
        logits: Of its first requests.

    Returns:
        int32 [B]; ``None`` where the batch does not say what hangs on what: rows without drafts, or
        a tree without its mask.

    Shapes:
        logits: [B * W, V].
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
    """The node that each node hangs on, int64 [B, W]; -1 of the root.

    A node comes after its ancestors, so its parent is the last one before it that it sees.
    """
    node = torch.arange(width)
    if mask is None:
        return (node - 1).expand(requests, width)
    seen = torch.as_tensor(mask)[:requests].cpu().tril(-1)
    return torch.where(seen, node, -1).amax(2)


def _links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of each node, int64 [B, W]; -1 where there is none."""
    width = parents.shape[1]
    node = torch.arange(width, device=parents.device)

    def first(are: torch.Tensor) -> torch.Tensor:
        found = torch.where(are, node, width).amin(2)
        return torch.where(found < width, found, -1)

    children = parents[:, None, :] == node[:, None]
    siblings = (parents[:, None, :] == parents[:, :, None]) & (node > node[:, None])
    return first(children), first(siblings)
