"""Attention metadata of one batch, computed on the device.

Dimensions: B requests, W query rows of each, P columns of the page table, S page size.

Further suffixes: B1 requests + 1.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch

from graphkit.errors import AttentionError
from graphkit.ops.registration import register_op

MAX_REQUESTS = 1024
"""Most requests that one program of the CUDA kernel sums up."""

Metadata = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The results of ``paged_metadata``."""


def empty_metadata(args: Any) -> Metadata:
    """Allocate the results of ``paged_metadata`` for its arguments."""
    requests, like = args.seq_lens_B.shape[0], args.seq_lens_B
    return (
        like.new_empty(requests),
        like.new_empty(requests + 1),
        like.new_empty(requests + 1),
        like.new_empty(requests, args.max_pages),
    )


def _check(args: Any) -> None:
    """Refuse an empty table and more requests than the kernel takes."""
    if args.req_to_token.numel() == 0:
        raise AttentionError(
            f"paged_metadata: req_to_token is {list(args.req_to_token.shape)}, expected at least "
            "one row and one token. Pass the table of a ReqToTokenPool."
        )
    requests = args.seq_lens_B.shape[0]
    if requests > MAX_REQUESTS:
        raise AttentionError(
            f"paged_metadata: the batch has {requests} requests, expected at most {MAX_REQUESTS}. "
            "Split the batch."
        )


@register_op(fake=empty_metadata, check=_check, sizes_from=("seq_lens_B",), error=AttentionError)
def paged_metadata(
    req_pool_indices_B: Annotated[torch.Tensor, "[B] int64"],
    seq_lens_B: Annotated[torch.Tensor, "[B] int32"],
    req_to_token: Annotated[torch.Tensor, "[rows, context] int32"],
    page_size: Annotated[int, "S >= 1"],
    max_pages: Annotated[int, "P >= 1"],
    tokens_per_request: Annotated[int, "W >= 1"],
    appended: int,
    extend_lens_B: Annotated[torch.Tensor | None, "[B] int32"] = None,
) -> Metadata:
    """Compute lengths, their running sums and the page table from rows and lengths.

    In a capture the results are in the graph's pool at fixed addresses, and every replay writes
    every entry.

    Args:
        req_pool_indices_B: Row of ``req_to_token`` per request; one outside it is clamped. B is at
            most ``MAX_REQUESTS``.
        seq_lens_B: Tokens of each request without the ``appended`` rows.
        req_to_token: Slot of each token of each request. Not empty.
        page_size: Tokens per page.
        max_pages: Columns of the page table (P), a fixed upper bound.
        tokens_per_request: Query rows per request.
        appended: Rows of this step that ``seq_lens_B`` does not count.
        extend_lens_B: Query rows of each request, in place of tokens_per_request.

    Returns:
        A tuple of four tensors:

        cache_seqlens_B: [B] int32, seq_lens_B + appended.
        cu_seqlens_q_B1: [B + 1] int32, running sum from 0 of extend_lens_B, or multiples of
        tokens_per_request.
        cu_seqlens_k_B1: [B + 1] int32, running sum from 0 of cache_seqlens_B.
        page_table: [B, P] int32. Entry [b, p] is req_to_token[row of b, p * page_size] // page_size
        for pages that request b has begun, else 0.
    """
    rows, context = req_to_token.shape
    multiples = partial(torch.arange, 0, dtype=torch.int32, device=seq_lens_B.device)
    cache_seqlens_B = seq_lens_B + appended
    if extend_lens_B is None:
        ends = (len(seq_lens_B) + 1) * tokens_per_request
        cu_seqlens_q_B1 = multiples(ends, tokens_per_request)
    else:
        cu_seqlens_q_B1 = _running_sum(extend_lens_B)
    cu_seqlens_k_B1 = _running_sum(cache_seqlens_B)

    first_P = multiples(max_pages * page_size, page_size)
    begun_BP = first_P < cache_seqlens_B.clamp(max=context)[:, None]
    rows_B1 = req_pool_indices_B.clamp(0, rows - 1)[:, None]
    slots_BP = req_to_token[rows_B1, first_P.clamp(max=context - 1)]
    page_table = slots_BP // page_size * begun_BP
    return cache_seqlens_B, cu_seqlens_q_B1, cu_seqlens_k_B1, page_table


def _running_sum(lengths_B: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0, dtype=torch.int32)])
