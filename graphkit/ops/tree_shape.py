"""Size of a draft tree, and memory for one."""

from __future__ import annotations

import torch

TreeTensors = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]
"""The results of ``build_tree``."""


def num_candidates(num_steps: int, topk: int) -> int:
    """Return the number of tokens that S steps of K branches propose: K, then K * K per step."""
    return topk + (num_steps - 1) * topk * topk if num_steps else 0


def empty_tree(bonus_tokens: torch.Tensor, width: int) -> TreeTensors:
    """Allocate the six results of ``build_tree`` for [B] bonus tokens and W = ``width`` nodes."""
    requests = bonus_tokens.shape[0]
    links = [bonus_tokens.new_empty(requests, width) for _ in range(3)]
    flat = [bonus_tokens.new_empty(requests * width) for _ in range(2)]
    mask = bonus_tokens.new_empty(requests, width, width, dtype=torch.bool)
    return mask, flat[0], links[0], links[1], links[2], flat[1]
