"""Attention metadata of one batch, computed on the device.

Dimensions: B requests, W query rows of each, P columns of the page table, S page size.

Further suffixes: B1 requests + 1.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from functools import partial
from typing import Annotated

import torch

from graphkit.errors import AttentionError
from graphkit.ops.registration import register_op

Metadata = tuple[
    Annotated[torch.Tensor, "[B] int32"],
    Annotated[torch.Tensor, "[B + 1] int32"],
    Annotated[torch.Tensor, "[B + 1] int32"],
    Annotated[torch.Tensor, "[B, P] int32"],
]
"""The results of ``paged_metadata``."""


@register_op(sizes_from=("seq_lens_B",), error=AttentionError)
def paged_metadata(
    req_pool_indices_B: Annotated[torch.Tensor, "[B] int64"],
    seq_lens_B: Annotated[torch.Tensor, "[B <= 1024] int32"],
    req_to_token: Annotated[torch.Tensor, "[rows >= 1, context >= 1] int32"],
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
        req_pool_indices_B: Row of ``req_to_token`` per request; one outside it is clamped.
        seq_lens_B: Tokens of each request without the ``appended`` rows. One program of the CUDA
            kernel sums up all requests, 1024 at most.
        req_to_token: Slot of each token of each request, the table of a ``ReqToTokenPool``.
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
