"""Attention of a few new rows per request over a paged KV cache.

Suffixes: B requests, B1 requests + 1, W most query rows of a request, T rows of all requests,
N query heads, M key-value heads, G query heads per key-value head, D head size, P pages per
request, L = P * page size keys.
"""

# ruff: noqa: N803, N806 - tensor suffixes are the house's notation
from __future__ import annotations

import torch

from graphkit.errors import AttentionError
from graphkit.ops.attention_layout import key_slots, pack_rows, pad_rows, visible_keys

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@torch.library.custom_op("graphkit::paged_attention", mutates_args=(), device_types="cpu")
def paged_attention(
    query_TND: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens_B: torch.Tensor,
    cu_seqlens_q_B1: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    page_size: int,
    max_seqlen_q: int,
) -> torch.Tensor:
    """Let each query see the keys of its request that it may.

    Request b owns the rows from ``cu_seqlens_q_B1[b]`` up to the next entry. Without a mask they
    are its last tokens: query i of n sees the first (keys - n + i + 1) keys, none if that is
    negative, as with pad rows. A mask's C columns stand for the last C keys of its request: query i
    sees such a key where ``mask[b, i, column]`` holds, and every key before them. C = W is the tree
    of a verify, whose rows are those keys; C > W is that of a draft step, whose rows see their
    ancestors of earlier steps. Columns before the first key stand for nothing. With a mask every
    request has W rows.

    What a key or a value holds that no query of its request may see, NaN included, never reaches
    the output. A query that sees no key gets zeros, and so does a row that belongs to nobody. Sums
    run in float32.

    One or two launches on the current stream; never synchronises, may be captured. A length beyond
    the page table counts as the page table's end.

    Args:
        query_TND: Query rows, those of one request side by side.
        key_cache: Keys of one layer by slot.
        value_cache: Values of one layer by slot.
        page_table: Page p of request b holds its keys p * page_size onwards.
        cache_seqlens_B: Keys of each request.
        cu_seqlens_q_B1: Running sum of each request's query rows, from 0.
        mask: Which of the last keys each query sees; a chain if left out.
        scale: Factor on the scores.
        page_size: Slots per page.
        max_seqlen_q: Upper bound of a request's query rows (W). Where a request has more, some rows
            are left undefined.

    Shapes:
        query_TND: [T, N, D], N a multiple of M, D <= 256; the result is like it.
        key_cache, value_cache: [slots, M, D]. All three: float16, bfloat16 or float32.
        page_table: [B, P] int32. cache_seqlens_B: [B] int32. cu_seqlens_q_B1: [B + 1] int32.
        mask: [B, W, C] bool, C >= W.

    Raises:
        AttentionError: A shape, dtype, device or number does not fit.
    """
    _check(query_TND, key_cache, value_cache, page_table, cache_seqlens_B, cu_seqlens_q_B1, mask,
           page_size, max_seqlen_q)  # fmt: skip
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
    # Softmax of nothing at all is NaN.
    out_BWND = out_BWND.masked_fill(~visible_BWL.any(2)[:, :, None, None], 0)
    return pack_rows(out_BWND, cu_seqlens_q_B1, tokens).to(query_TND.dtype)


@paged_attention.register_fake
def _(query_TND: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return query_TND.new_empty(query_TND.shape)


@paged_attention.register_kernel("cuda")
def _(
    query_TND: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens_B: torch.Tensor,
    cu_seqlens_q_B1: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    page_size: int,
    max_seqlen_q: int,
) -> torch.Tensor:
    from graphkit.ops.kernels.paged_attention import launch_paged_attention

    _check(query_TND, key_cache, value_cache, page_table, cache_seqlens_B, cu_seqlens_q_B1, mask,
           page_size, max_seqlen_q)  # fmt: skip
    with torch.cuda.device(query_TND.device):
        return launch_paged_attention(
            query_TND, key_cache, value_cache, page_table, cache_seqlens_B, cu_seqlens_q_B1, mask,
            scale, page_size, max_seqlen_q,
        )  # fmt: skip


def _check(
    query_TND: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens_B: torch.Tensor,
    cu_seqlens_q_B1: torch.Tensor,
    mask: torch.Tensor | None,
    page_size: int,
    max_seqlen_q: int,
) -> None:
    if page_size < 1 or max_seqlen_q < 1:
        _refuse("page_size, max_seqlen_q", (page_size, max_seqlen_q), "at least 1 each")
    _check_rows(query_TND, key_cache, value_cache)
    indices = _check_indices(page_table, cache_seqlens_B, cu_seqlens_q_B1)
    if mask is not None:
        indices = (*indices, mask)
        rows = [cache_seqlens_B.shape[0], max_seqlen_q]
        fits = list(mask.shape[:2]) == rows and mask.dim() == 3 and mask.shape[2] >= max_seqlen_q
        if not fits or mask.dtype != torch.bool:
            wanted = f"{[*rows, max_seqlen_q]} torch.bool or more columns, or None for a chain"
            _refuse("mask", _say(mask), wanted)
    devices = {str(tensor.device) for tensor in (query_TND, key_cache, value_cache, *indices)}
    if len(devices) > 1:
        _refuse("tensors on", sorted(devices), "all on one device")


def _check_rows(
    query_TND: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> None:
    if key_cache.dim() != 3 or value_cache.shape != key_cache.shape:
        caches = list(key_cache.shape), list(value_cache.shape)
        _refuse("caches", caches, "two of one shape [slots, heads, head size]")
    if key_cache.stride(2) != 1 or value_cache.stride(2) != 1:
        _refuse("caches with spaced elements", "", "caches contiguous in the head size")
    heads, head_dim = key_cache.shape[1:]
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        _refuse("head size", head_dim, f"1 to {MAX_HEAD_DIM}")
    shape = list(query_TND.shape)
    if len(shape) != 3 or shape[2] != head_dim or not heads or shape[1] % heads:
        _refuse("query_TND", shape, f"[T, a multiple of {heads} heads, {head_dim}]")
    for tensor in (query_TND, key_cache, value_cache):
        if tensor.dtype not in DTYPES:
            _refuse("a tensor", _say(tensor), "float16, bfloat16 or float32")


def _check_indices(
    page_table: torch.Tensor, cache_seqlens_B: torch.Tensor, cu_seqlens_q_B1: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    if page_table.dim() != 2 or page_table.dtype != torch.int32:
        _refuse("page_table", _say(page_table), "[B, pages] torch.int32")
    requests = page_table.shape[0]
    for name, tensor, length in (
        ("cache_seqlens_B", cache_seqlens_B, requests),
        ("cu_seqlens_q_B1", cu_seqlens_q_B1, requests + 1),
    ):
        if list(tensor.shape) != [length] or tensor.dtype != torch.int32:
            _refuse(name, _say(tensor), f"[{length}] torch.int32")
    return page_table, cache_seqlens_B, cu_seqlens_q_B1


def _say(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _refuse(what: str, came: object, allowed: str) -> None:
    raise AttentionError(f"paged_attention got {what} {came}: pass {allowed}.")
