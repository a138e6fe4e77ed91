"""Mixtures of experts in forms that capture: shapes depend on the number of rows alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

IMPLEMENTATION = "graphkit"
"""Name of these experts in the registry of transformers."""
_GATHERED_BYTES = 64 << 20
"""Most bytes of weights that are gathered at once; the weights of one row may have more."""


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the experts of each row; an implementation for the registry of transformers.

    Rows that select more experts than there are run one grouped product in bfloat16, which reads
    each weight once. The grouped product of other types waits for the router on the host. Other
    rows gather the weights of their experts, a few rows at a time: the weights of all rows of a
    prompt would take a multiple of the model's memory.

    Args:
        module: The experts, whose class ``use_experts_implementation`` decorates.
        hidden_states: [T, H].
        top_k_index: Experts of each row, [T, K] int64.
        top_k_weights: Their weights, [T, K].

    Returns:
        The weighted sum of the experts of each row, [T, H].
    """
    first = module.gate_up_proj if module.has_gate else module.up_proj
    is_bfloat16 = hidden_states.dtype == first.dtype == torch.bfloat16
    if is_bfloat16 and top_k_index.numel() > module.num_experts:
        grouped: torch.Tensor = grouped_mm_experts_forward(
            module, hidden_states, top_k_index, top_k_weights
        )
        return grouped
    largest = max(weight[0].nbytes for weight in (first, module.down_proj))
    rows = max(1, _GATHERED_BYTES // (largest * top_k_index.shape[-1]))
    parts = zip(
        hidden_states.split(rows), top_k_index.split(rows), top_k_weights.split(rows), strict=True
    )
    results = [batched_mm_experts_forward(module, *part) for part in parts]
    return results[0] if len(results) == 1 else torch.cat(results)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts)
