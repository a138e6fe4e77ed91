"""The distribution that a request's tokens are drawn from.

Suffixes: B requests, W rows of each, V vocabulary, R request rows.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.registration import register_op


def _check_floats(given: Any) -> None:
    if not given.logits.is_floating_point():
        raise InputError(
            f"target_probs: logits is {describe(given.logits)}, expected floats.", field="logits"
        )


@register_op(
    fake=lambda given: given.logits.new_empty(given.logits.shape, dtype=torch.float32),
    check=_check_floats,
    sizes_from=("req_pool_indices",),
)
def target_probs(
    logits: Annotated[torch.Tensor, "[B * W, V >= 1]"],
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    temperatures: Annotated[torch.Tensor, "[R] float32"],
    width: Annotated[int, "W >= 1"],
) -> torch.Tensor:
    """Return the softmax of each row's logits over its request's temperature.

    Temperature 0 puts all probability on the most probable token. One launch on the current stream,
    none for an idle batch. Never synchronises; may be captured.

    Args:
        logits: The target's, W rows per request.
        req_pool_indices: Request rows.
        temperatures: Temperatures by request row, 0 or more.
        width: Rows per request (W).

    Shapes:
        logits: [B * W, V] of any float dtype. req_pool_indices: [B] int64.
        temperatures: [R] float32. Returns [B * W, V] float32.

    Raises:
        InputError: A tensor has the wrong shape, dtype or device, or W is below 1.
    """
    temperature = temperatures[req_pool_indices].repeat_interleave(width)[:, None]
    is_greedy = temperature == 0
    # Relative to the largest logit, overflow at low temperatures yields -inf: probability 0.
    behind = logits.float() - logits.amax(-1, keepdim=True).float()
    scaled = behind / torch.where(is_greedy, 1.0, temperature)
    greedy = torch.zeros_like(scaled).scatter(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(is_greedy, greedy, scaled.softmax(-1))
