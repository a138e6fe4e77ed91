"""Tokens of plain steps, kept for the draft model until it processes them.

Dimensions: B requests, W tokens of each, T tokens of all, R request rows, N stored tokens per row,
H hidden size.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.registration import register_op


def _check_states(args: Any) -> None:
    """Check that hidden states and their store are both there, and that requests have tokens."""
    if (args.hidden_states is None) != (args.stored_states is None):
        raise InputError(
            "store_tokens: pass both of hidden_states and stored_states, or none of them.",
            field="stored_states",
        )
    if len(args.predict) % max(len(args.req_pool_indices), 1):
        raise InputError(
            f"store_tokens: predict is {describe(args.predict)}, expected the same number of "
            f"tokens for each of {len(args.req_pool_indices)} requests.",
            field="predict",
        )


@register_op(mutates_args=("stored_tokens", "stored_states", "count"), check=_check_states)
def store_tokens(
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    predict: Annotated[torch.Tensor, "[T] int64"],
    stored_tokens: Annotated[torch.Tensor, "[R, N] int64, contiguous"],
    count: Annotated[torch.Tensor, "[R] int32, contiguous"],
    depth: Annotated[int, "1 <= depth <= N"],
    hidden_states: Annotated[torch.Tensor | None, "[T, H]"] = None,
    stored_states: Annotated[torch.Tensor | None, "[R, N, H], contiguous"] = None,
) -> None:
    """Store the first token of each request, and its hidden state, behind those of its row.

    Pads, row 0, store nothing. Token n of a row is at column ``n % depth``, so that a row has its
    last ``depth`` tokens.

    Args:
        req_pool_indices: Request rows, each at most once, except row 0.
        predict: The target's tokens, W per request. T is B * W.
        stored_tokens: Receives the tokens.
        count: Tokens of each row so far, which one is added to.
        depth: Most tokens that a row keeps.
        hidden_states: The target's, or ``None``.
        stored_states: Receives them, if there are any.
    """
    is_live = req_pool_indices > 0
    rows, requests = req_pool_indices[is_live], len(req_pool_indices)
    if not len(rows):
        return
    column = (count[rows] % depth).long()
    stored_tokens[rows, column] = predict.view(requests, -1)[is_live, 0]
    if hidden_states is not None and stored_states is not None:
        states = hidden_states.view(requests, -1, hidden_states.shape[1])
        stored_states[rows, column] = states[is_live, 0]
    count[rows] += 1
