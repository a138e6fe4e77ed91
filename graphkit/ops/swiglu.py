"""The gate of a SwiGLU feed-forward network.

Dimensions: T rows, C columns.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch.nn.functional import silu

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.registration import register_op


def _check_width(given: Any) -> None:
    """Refuse rows that have no two halves."""
    if given.gate_up.shape[1] % 2:
        raise InputError(
            f"silu_and_mul: gate_up is {describe(given.gate_up)}, expected an even number of "
            "columns: those of the gate, then those of the up projection.",
            field="gate_up",
        )


@register_op(
    fake=lambda given: given.gate_up.new_empty(len(given.gate_up), given.gate_up.shape[1] // 2),
    check=_check_width,
    differentiable=True,
)
def silu_and_mul(gate_up: Annotated[torch.Tensor, "[T, C >= 2] floating-point"]) -> torch.Tensor:
    """Return ``silu(gate) * up`` of rows that hold both (SwiGLU, arXiv 2002.05202).

    silu is rounded to the dtype before the product.

    Args:
        gate_up: Columns of the gate, then as many of the up projection.

    Returns:
        The gated rows, [T, C / 2] of their dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
