"""Attention of a few new rows per request over a paged KV cache.

Suffixes: B requests, B1 requests + 1, W most query rows of a request, T rows of all requests,
N query heads, M key-value heads, G query heads per key-value head, D head size, P pages per
request, L = P * page size keys.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import AttentionError
from graphkit.ops.attention_layout import key_slots, pack_rows, pad_rows, visible_keys
from graphkit.ops.registration import register_op

MAX_HEAD_DIM = 256


def _check(given: Any) -> None:
    """Refuse head counts, head sizes, strides and masks that the kernel does not take."""
    heads, head_dim = given.key_cache.shape[1:]
    query_heads = given.query_TND.shape[1]
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        _refuse(f"the head size is {head_dim}", f"1 to {MAX_HEAD_DIM}")
    if not heads or query_heads % heads:
        _refuse(f"query_TND has {query_heads} heads", f"a multiple of the cache's {heads}")
    if given.key_cache.stride(2) != 1 or given.value_cache.stride(2) != 1:
        _refuse("the caches have gaps between elements", "memory contiguous in the head size")
    mask = given.mask
    if mask is not None and mask.shape[2] < given.max_seqlen_q:
        expected = f"at least max_seqlen_q = {given.max_seqlen_q}, or no mask for a chain"
        _refuse(f"mask has {mask.shape[2]} columns", expected)


def _refuse(found: str, expected: str) -> None:
    raise AttentionError(f"paged_attention: {found}, expected {expected}.")


@register_op(
    fake=lambda given: given.query_TND.new_empty(given.query_TND.shape),
    check=_check,
    sizes_from=("key_cache", "value_cache", "page_table"),
    error=AttentionError,
)
def paged_attention(
    query_TND: Annotated[torch.Tensor, "[T, N, D] float16 or bfloat16 or float32"],
    key_cache: Annotated[torch.Tensor, "[slots, M, D] float16 or bfloat16 or float32"],
    value_cache: Annotated[torch.Tensor, "[slots, M, D] float16 or bfloat16 or float32"],
    page_table: Annotated[torch.Tensor, "[B, P] int32"],
    cache_seqlens_B: Annotated[torch.Tensor, "[B] int32"],
    cu_seqlens_q_B1: Annotated[torch.Tensor, "[B + 1] int32"],
    mask: Annotated[torch.Tensor | None, "[B, W, C] bool"],
    scale: float,
    page_size: Annotated[int, "S >= 1"],
    max_seqlen_q: Annotated[int, "W >= 1"],
) -> torch.Tensor:
    """Attend from each query row to the visible keys of its request.

    Request b has the rows from ``cu_seqlens_q_B1[b]`` up to the next entry. Without a mask they
    are its last tokens: query i of n sees the first (keys - n + i + 1) keys, none if that is
    negative, as for pad rows. A mask's C columns stand for the last C keys of its request: query i
    sees such a key where ``mask[b, i, column]`` is True, and every key before them. C = W is the
    tree of a verify, whose rows are those keys. C > W is the tree of a draft step, whose rows see
    their ancestors of earlier steps. Columns before the first key are ignored. With a mask every
    request has W rows.

    Keys and values that no query of their request may see, NaN included, never reach the output.
    A query that sees no key gets zeros, and so does a row behind ``cu_seqlens_q_B1[B]``. Sums run
    in float32. A length beyond the page table is cut to its end.

    One or two launches on the current stream. Never synchronises; may be captured.

    Args:
        query_TND: Query rows, those of one request next to each other.
        key_cache: Keys of one layer by slot.
        value_cache: Values of one layer by slot.
        page_table: Page p of request b holds its keys from p * page_size on.
        cache_seqlens_B: Keys of each request.
        cu_seqlens_q_B1: Running sum of each request's query rows, from 0.
        mask: Which of the last keys each query sees; None for a chain.
        scale: Factor on the scores.
        page_size: Slots per page.
        max_seqlen_q: Upper bound of a request's query rows (W). If a request has more, some rows
            are undefined.

    Shapes:
        query_TND: [T, N, D], N a multiple of M, D <= 256; the result has its shape and dtype.
        key_cache, value_cache: [slots, M, D]. All three: float16, bfloat16 or float32.
        page_table: [B, P] int32. cache_seqlens_B: [B] int32. cu_seqlens_q_B1: [B + 1] int32.
        mask: [B, W, C] bool, C >= W.

    Raises:
        AttentionError: A tensor has the wrong shape, dtype, device or layout, or a number is
            below 1.
    """
    tokens, (requests, pages) = query_TND.shape[0], page_table.shape
    if not (tokens and requests and pages):
        return torch.zeros_like(query_TND, memory_format=torch.contiguous_format)
    visible_BWL = visible_keys(
        cache_seqlens_B, cu_seqlens_q_B1, mask, pages * page_size, max_seqlen_q
    )
    seen_BL = visible_BWL.any(1)
    slots_BL = key_slots(page_table, page_size, seen_BL)
    hidden_BL11 = ~seen_BL[:, :, None, None]
    key_BLMD = key_cache[slots_BL].float().masked_fill(hidden_BL11, 0)
    value_BLMD = value_cache[slots_BL].float().masked_fill(hidden_BL11, 0)

    query_BWND = pad_rows(query_TND.float(), cu_seqlens_q_B1, max_seqlen_q)
    query_BWMGD = query_BWND.unflatten(2, (key_cache.shape[1], -1))
    scores = torch.einsum("bwmgd,blmd->bmgwl", query_BWMGD, key_BLMD) * scale
    weights = scores.masked_fill(~visible_BWL[:, None, None], -torch.inf).softmax(-1)
    out_BWMGD = torch.einsum("bmgwl,blmd->bwmgd", weights, value_BLMD)
    out_BWND = out_BWMGD.flatten(2, 3)
    # Softmax of an empty row is NaN.
    out_BWND = out_BWND.masked_fill(~visible_BWL.any(2)[:, :, None, None], 0)
    return pack_rows(out_BWND, cu_seqlens_q_B1, tokens).to(query_TND.dtype)
