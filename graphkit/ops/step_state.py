"""State of the requests of a step: read at its start, advanced at its end.

Dimensions: B requests, W tokens of each, T tokens of all, P tokens of the longest path, R request
rows, X stop tokens.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.loop_layout import Report, RequestEnd
from graphkit.ops.registration import register_op

Running = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def empty_running(args: Any) -> Running:
    """Allocate the results of ``begin_step``."""
    rows = args.req_pool_indices
    return (
        torch.empty_like(rows),
        rows.new_empty(rows.shape, dtype=torch.int32),
        rows.new_empty(rows.shape),
    )


@register_op(fake=empty_running)
def begin_step(
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    remaining: Annotated[torch.Tensor, "[R] int32"],
    seq_lens: Annotated[torch.Tensor, "[R] int32"],
    bonus_tokens: Annotated[torch.Tensor, "[R] int64"],
) -> Running:
    """Read the state of each request, and of row 0 in the place of those that have ended.

    Args:
        req_pool_indices: Request rows.
        remaining: Tokens that may still be new, by request row; 0 once the request has ended.
        seq_lens: Committed tokens by request row.
        bonus_tokens: Newest token by request row.

    Returns:
        The rows, with 0 for ended requests, [B] int64; their committed tokens, [B] int32; their
        newest tokens, [B] int64.
    """
    rows = torch.where(remaining[req_pool_indices] > 0, req_pool_indices, 0)
    return rows, seq_lens[rows], bonus_tokens[rows]


def _check_width(args: Any) -> None:
    """Check that each request has the same number of tokens, at least one."""
    requests = len(args.req_pool_indices)
    width, rest = divmod(len(args.predict), max(requests, 1))
    if rest or (requests and not width):
        raise InputError(
            f"finish_step: predict is {describe(args.predict)}, expected [B * W] for {requests} "
            "requests of W >= 1 tokens.",
            field="predict",
        )


@register_op(
    mutates_args=("seq_lens", "bonus_tokens", "remaining"),
    check=_check_width,
    fake=lambda args: args.seq_lens.new_empty(
        (args.req_pool_indices.shape[0], Report.TOKENS + args.longest_path)
    ),
)
def finish_step(
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    predict: Annotated[torch.Tensor, "[T] int32 or int64"],
    num_accepted_tokens: Annotated[torch.Tensor, "[B] int32"],
    stop_ids: Annotated[torch.Tensor, "[R, X] int64"],
    seq_lens: Annotated[torch.Tensor, "[R] int32, contiguous"],
    bonus_tokens: Annotated[torch.Tensor, "[R] int64, contiguous"],
    remaining: Annotated[torch.Tensor, "[R] int32, contiguous"],
    longest_path: Annotated[int, "P >= 1"],
) -> torch.Tensor:
    """Advance the requests by their accepted tokens and report what is new.

    A request ends at its first stop token, which is its last new token, or when ``remaining``
    tokens are new. ``remaining`` of an ended request becomes 0. Rows of pads, row 0, are not
    advanced.

    Args:
        req_pool_indices: Request rows, 0 for pads.
        predict: The target's tokens, W per request, the path's first. T is B * W.
        num_accepted_tokens: Tokens on each path, bonus token included.
        stop_ids: Stop tokens by request row, padded with -1.
        seq_lens: Committed tokens by request row; accepted tokens are added.
        bonus_tokens: Last token of each path, by request row.
        remaining: Tokens that may still be new, by request row; new tokens are subtracted.
        longest_path: Most tokens of a path (P). Columns behind the W tokens of a request are -1.

    Returns:
        The report, [B, 4 + P] int32, see ``graphkit.ops.loop_layout``. Tokens behind the new ones
        are -1.
    """
    requests = len(req_pool_indices)
    if not requests:
        return seq_lens.new_empty((requests, Report.TOKENS + longest_path))
    rows, accepted = req_pool_indices, num_accepted_tokens.long()
    tokens = predict.view(requests, -1)[:, :longest_path].long()
    tokens = torch.nn.functional.pad(tokens, (0, longest_path - tokens.shape[1]), value=-1)
    column = torch.arange(longest_path, device=rows.device)
    lengths, left = seq_lens[rows], remaining[rows].long()
    most = torch.minimum(accepted, left)
    is_stop = (tokens[:, :, None] == stop_ids[rows][:, None]).any(2) & (column < most[:, None])
    first_stop = torch.where(is_stop, column, longest_path).amin(1)
    stops, is_live = first_stop < longest_path, (rows > 0) & (left > 0)
    new = torch.where(is_live, torch.minimum(most, first_stop + 1), 0)
    left_over = torch.where(stops, 0, left - new)
    ended = torch.where(stops, RequestEnd.STOP, RequestEnd.LENGTH)
    facts: dict[int, torch.Tensor] = {
        Report.ROW: torch.where(is_live, rows, 0),
        Report.ACCEPTED: torch.where(is_live, accepted, 0),
        Report.NEW: new,
        Report.END: torch.where(is_live & (left_over == 0), ended, RequestEnd.RUNNING),
    }
    head = torch.stack([facts[place] for place in range(Report.TOKENS)], 1)
    # Pads share row 0: they write what is there.
    last = tokens.gather(1, (accepted - 1).clamp(0, longest_path - 1)[:, None])[:, 0]
    seq_lens[rows] = torch.where(is_live, lengths + accepted, lengths).int()
    bonus_tokens[rows] = torch.where(is_live, last, bonus_tokens[rows])
    remaining[rows] = torch.where(is_live, left_over, left).int()
    return torch.cat((head, torch.where(column < new[:, None], tokens, -1)), 1).int()
