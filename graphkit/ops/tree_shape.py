"""How large a draft tree is, and the memory for one."""

from __future__ import annotations

import torch

Six = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def num_candidates(num_steps: int, topk: int) -> int:
    """Tokens that S steps of K branches propose: K of step 0, K * K of each further one."""
    return topk + (num_steps - 1) * topk * topk if num_steps else 0


def empty_tree(bonus_tokens: torch.Tensor, width: int) -> Six:
    """The six results of ``build_tree``, not filled in."""
    requests = bonus_tokens.shape[0]
    links = [bonus_tokens.new_empty(requests, width) for _ in range(3)]
    flat = [bonus_tokens.new_empty(requests * width) for _ in range(2)]
    mask = bonus_tokens.new_empty(requests, width, width, dtype=torch.bool)
    return mask, flat[0], links[0], links[1], links[2], flat[1]
