"""State of the requests of a step: read at its start, advanced at its end.

Dimensions: B requests, W tokens of each, T tokens of all, P tokens of the longest path, R request
rows, X stop tokens, V vocabulary, N rows of logits, C parts of a row, A columns of accept_index.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.loop_layout import NO_LOGPROB, Report, RequestEnd
from graphkit.ops.processors import Kind
from graphkit.ops.registration import register_op


@register_op()
def begin_step(
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    remaining: Annotated[torch.Tensor, "[R] int32"],
    seq_lens: Annotated[torch.Tensor, "[R] int32"],
    bonus_tokens: Annotated[torch.Tensor, "[R] int64"],
) -> tuple[
    Annotated[torch.Tensor, "[B] int64"],
    Annotated[torch.Tensor, "[B] int32"],
    Annotated[torch.Tensor, "[B] int64"],
]:
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


def empty_report(args: Any) -> torch.Tensor:
    """Allocate the result of ``finish_step``."""
    requests = args.req_pool_indices.shape[0]
    return _empty_report(requests, args.longest_path, args.log_sums, args.seq_lens)


def _empty_report(
    requests: int, longest_path: int, log_sums: torch.Tensor | None, seq_lens: torch.Tensor
) -> torch.Tensor:
    words = longest_path * (1 if log_sums is None else 2)
    return seq_lens.new_empty((requests, Report.TOKENS + words))


@register_op(
    mutates_args=("seq_lens", "bonus_tokens", "remaining", "token_counts"),
    check=_check_width,
    fake=empty_report,
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
    kinds: Annotated[torch.Tensor | None, "[R] int32"] = None,
    token_counts: Annotated[torch.Tensor | None, "[R, V] int32, contiguous"] = None,
    accept_index: Annotated[torch.Tensor | None, "[B, A >= 1] int32"] = None,
    logits: Annotated[torch.Tensor | None, "[N, V] floating-point"] = None,
    log_sums: Annotated[torch.Tensor | None, "[N, C >= 1] float32"] = None,
    num_drafts: Annotated[torch.Tensor | None, "[B] int32"] = None,
    most_drafts: int = 0,
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
        kinds: Processors by request row, see ``ops.processors.Kind``; ``None`` for none, and so
            for the arguments behind it.
        token_counts: See ``ops.processors``; the accepted tokens of requests with penalties are
            counted.
        accept_index: Row of ``logits`` before each token of a path. Given with the next two.
        logits: The target's, before processors.
        log_sums: Their sums, see ``ops.processors``.
        num_drafts: Drafts that the step verified for each request; ``None`` for ``most_drafts``.
        most_drafts: Those of every request, -1 for a prefill. Not read with ``num_drafts``.

    Returns:
        The report, [B, 5 + P] int32, see ``graphkit.ops.loop_layout``; [B, 5 + 2P] with
        ``log_sums``. Tokens behind the new ones are -1.
    """
    requests = len(req_pool_indices)
    if not requests:
        return _empty_report(requests, longest_path, log_sums, seq_lens)
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
    drafts = torch.full_like(rows, most_drafts) if num_drafts is None else num_drafts.long()
    facts: dict[int, torch.Tensor] = {
        Report.ROW: torch.where(is_live, rows, 0),
        Report.ACCEPTED: torch.where(is_live, accepted, 0),
        Report.NEW: new,
        Report.END: torch.where(is_live & (left_over == 0), ended, RequestEnd.RUNNING),
        Report.DRAFTS: torch.where(is_live, drafts, 0),
    }
    head = torch.stack([facts[place] for place in range(Report.TOKENS)], 1)
    # Pads share row 0: they write what is there.
    last = tokens.gather(1, (accepted - 1).clamp(0, longest_path - 1)[:, None])[:, 0]
    seq_lens[rows] = torch.where(is_live, lengths + accepted, lengths).int()
    bonus_tokens[rows] = torch.where(is_live, last, bonus_tokens[rows])
    remaining[rows] = torch.where(is_live, left_over, left).int()
    is_new = column < new[:, None]
    report = torch.cat((head, torch.where(is_new, tokens, -1)), 1).int()
    if kinds is None:
        return report
    if token_counts is not None:
        is_counted = is_live & ((kinds[rows] & Kind.PENALTIES) != 0)
        place = ((column < accepted[:, None]) & is_counted[:, None]).nonzero(as_tuple=True)
        index = rows[place[0]], tokens[place]
        token_counts.index_put_(index, token_counts.new_tensor(2), accumulate=True)
    if accept_index is None or logits is None or log_sums is None:
        return report
    bits = torch.full_like(report[:, Report.TOKENS :], NO_LOGPROB)
    is_wanted = (is_new & ((kinds[rows] & Kind.LOGPROBS) != 0)[:, None]).nonzero(as_tuple=True)
    node = accept_index[is_wanted].long()
    # In float64: torch's logarithm of few float32 numbers differs from that of many.
    sums = log_sums[node].double().logsumexp(1).float()
    logprobs = logits[node, tokens[is_wanted]].float() - sums
    bits[is_wanted] = logprobs.view(torch.int32)
    return torch.cat((report, bits), 1)
