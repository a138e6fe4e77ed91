"""Attention metadata of one batch, made on the device.

Suffixes: B requests, B1 requests + 1, P columns of the page table.
"""

# ruff: noqa: N803, N806 - tensor suffixes are the house's notation
# ruff: noqa: ARG001 - a fake kernel has its op's signature
from __future__ import annotations

import torch

from graphkit.errors import AttentionError

MAX_REQUESTS = 1024
"""Most requests that one program of the CUDA kernel sums up."""


@torch.library.custom_op("graphkit::paged_metadata", mutates_args=(), device_types="cpu")
def paged_metadata(
    req_pool_indices_B: torch.Tensor,
    seq_lens_B: torch.Tensor,
    req_to_token: torch.Tensor,
    page_size: int,
    max_pages: int,
    tokens_per_request: int,
    appended: int,
    extend_lens_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Derive lengths, their running sums and the page table from rows and lengths.

    One launch on the current stream; never synchronises, may be captured: the results then lie in
    the graph's pool at fixed addresses, and every entry is written by every replay.

    Args:
        req_pool_indices_B: Row of ``req_to_token`` per request; one outside it is clamped.
        seq_lens_B: Tokens of each request, ``appended`` rows not counted.
        req_to_token: Slot of each token of each request.
        page_size: Tokens per page.
        max_pages: Columns of the page table (P), a fixed upper bound.
        tokens_per_request: Query rows per request.
        appended: Rows of this step that ``seq_lens_B`` does not count.
        extend_lens_B: Query rows of each request, instead of tokens_per_request, where they vary.

    Returns:
        cache_seqlens_B = seq_lens_B + appended; cu_seqlens_q_B1 = running sum of extend_lens_B, or
        multiples of tokens_per_request; cu_seqlens_k_B1 = running sum of cache_seqlens_B, both from
        0 to the total; page_table[b, p] = req_to_token[row of b, p * page_size] // page_size for
        pages that request b has begun, else 0.

    Shapes:
        req_pool_indices_B: [B] int64, B <= MAX_REQUESTS. seq_lens_B, extend_lens_B: [B] int32.
        req_to_token: [rows, context] int32.
        Returns [B], [B + 1], [B + 1] and [B, P], all int32.

    Raises:
        AttentionError: A shape, dtype, device or number does not fit.
    """
    _check(req_pool_indices_B, seq_lens_B, req_to_token, extend_lens_B)
    _check_numbers(page_size, max_pages, tokens_per_request)
    rows, context = req_to_token.shape
    cache_seqlens_B = seq_lens_B + appended
    if extend_lens_B is None:
        extend_lens_B = torch.full_like(seq_lens_B, tokens_per_request)
    cu_seqlens_q_B1 = _running_sum(extend_lens_B)
    cu_seqlens_k_B1 = _running_sum(cache_seqlens_B)

    first_P = _arange(seq_lens_B, max_pages) * page_size
    begun_BP = (first_P < cache_seqlens_B[:, None]) & (first_P < context)
    rows_B = req_pool_indices_B.clamp(0, rows - 1)
    slots_BP = req_to_token[rows_B][:, first_P.clamp(max=context - 1)]
    page_table = torch.where(begun_BP, slots_BP // page_size, 0)
    return cache_seqlens_B, cu_seqlens_q_B1, cu_seqlens_k_B1, page_table


@paged_metadata.register_fake
def _(
    req_pool_indices_B: torch.Tensor,
    seq_lens_B: torch.Tensor,
    req_to_token: torch.Tensor,
    page_size: int,
    max_pages: int,
    tokens_per_request: int,
    appended: int,
    extend_lens_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    requests = seq_lens_B.shape[0]
    shapes = (requests,), (requests + 1,), (requests + 1,), (requests, max_pages)
    lengths, cu_q, cu_k, pages = (seq_lens_B.new_empty(shape) for shape in shapes)
    return lengths, cu_q, cu_k, pages


@paged_metadata.register_kernel("cuda")
def _(
    req_pool_indices_B: torch.Tensor,
    seq_lens_B: torch.Tensor,
    req_to_token: torch.Tensor,
    page_size: int,
    max_pages: int,
    tokens_per_request: int,
    appended: int,
    extend_lens_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from graphkit.ops.kernels.paged_metadata import launch_paged_metadata

    _check(req_pool_indices_B, seq_lens_B, req_to_token, extend_lens_B)
    _check_numbers(page_size, max_pages, tokens_per_request)
    with torch.cuda.device(seq_lens_B.device):
        return launch_paged_metadata(
            req_pool_indices_B, seq_lens_B, req_to_token, page_size, max_pages,
            tokens_per_request, appended, extend_lens_B,
        )  # fmt: skip


def _arange(like: torch.Tensor, end: int) -> torch.Tensor:
    return torch.arange(end, dtype=torch.int32, device=like.device)


def _running_sum(lengths_B: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0, dtype=torch.int32)])


def _check(
    req_pool_indices_B: torch.Tensor,
    seq_lens_B: torch.Tensor,
    req_to_token: torch.Tensor,
    extend_lens_B: torch.Tensor | None,
) -> None:
    requests = tuple(seq_lens_B.shape)
    extend = seq_lens_B if extend_lens_B is None else extend_lens_B
    for name, tensor, dtype, fits, shape in (
        ("seq_lens_B", seq_lens_B, torch.int32, len(requests) == 1, "[B]"),
        ("req_pool_indices_B", req_pool_indices_B, torch.int64,
         tuple(req_pool_indices_B.shape) == requests, "[B], like seq_lens_B"),
        ("extend_lens_B", extend, torch.int32,
         tuple(extend.shape) == requests, "[B], like seq_lens_B"),
        ("req_to_token", req_to_token, torch.int32,
         req_to_token.dim() == 2 and req_to_token.numel() > 0, "[rows, context]"),
    ):  # fmt: skip
        if not fits or tensor.dtype != dtype or tensor.device != seq_lens_B.device:
            raise AttentionError(
                f"paged_metadata got {name} of {list(tensor.shape)} {tensor.dtype} on "
                f"{tensor.device}: it must be {shape} {dtype} on {seq_lens_B.device}."
            )
    if requests[0] > MAX_REQUESTS:
        raise AttentionError(
            f"paged_metadata got {requests[0]} requests: it takes up to {MAX_REQUESTS}. "
            "Split the batch."
        )


def _check_numbers(page_size: int, max_pages: int, tokens_per_request: int) -> None:
    numbers = (page_size, max_pages, tokens_per_request)
    if min(numbers) < 1:
        raise AttentionError(
            f"paged_metadata got page_size, max_pages, tokens_per_request = {numbers}: "
            "each must be at least 1."
        )
