"""Attention of a few new rows per request over a paged KV cache.

Suffixes: B requests, W query rows per request, T = B * W, N query heads, M key-value heads,
D head size, P pages per request, L = P * page size keys.
"""

# ruff: noqa: N803, N806 - tensor suffixes are the house's notation
from __future__ import annotations

import torch

from graphkit.errors import AttentionError

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@torch.library.custom_op("graphkit::paged_attention", mutates_args=(), device_types="cpu")
def paged_attention(
    query_TND: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens_B: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    page_size: int,
    tokens_per_request: int,
) -> torch.Tensor:
    """Let each query see its request's committed keys and the rows of this step that it may.

    The last W keys of a request are this step's own rows. Query i sees every key before them, and
    own row j where ``mask[b, i, j]`` holds, or where j <= i if there is no mask. What a key or a
    value holds that no query of its request may see, NaN included, never reaches the output; a
    query that sees no key gets zeros. Sums run in float32.

    One or two launches on the current stream; never synchronises, may be captured. A length beyond
    the page table counts as the page table's end.

    Args:
        query_TND: Query rows, those of one request side by side.
        key_cache: Keys of one layer by slot.
        value_cache: Values of one layer by slot.
        page_table: Page p of request b holds its keys p * page_size onwards.
        cache_seqlens_B: Keys of each request, own rows included.
        mask: Which own rows each query sees; a chain if left out.
        scale: Factor on the scores.
        page_size: Slots per page.
        tokens_per_request: Query rows per request (W).

    Shapes:
        query_TND: [T, N, D], N a multiple of M, D <= 256; the result is like it.
        key_cache, value_cache: [slots, M, D]. All three: float16, bfloat16 or float32.
        page_table: [B, P] int32. cache_seqlens_B: [B] int32. mask: [B, W, W] bool.

    Raises:
        AttentionError: A shape, dtype, device or number does not fit.
    """
    _check(query_TND, key_cache, value_cache, page_table, cache_seqlens_B, mask,
           page_size, tokens_per_request)  # fmt: skip
    visible_BWL = visible_keys(cache_seqlens_B, mask, page_table.shape[1] * page_size,
                               tokens_per_request)  # fmt: skip
    seen_BL = visible_BWL.any(1)
    slots_BL = key_slots(page_table, page_size, seen_BL)
    hidden_BL11 = ~seen_BL[:, :, None, None]
    key_BLMD = key_cache[slots_BL].float().masked_fill(hidden_BL11, 0)
    value_BLMD = value_cache[slots_BL].float().masked_fill(hidden_BL11, 0)

    _, heads, head_dim = query_TND.shape
    kv_heads = key_cache.shape[1]
    grouped = (-1, tokens_per_request, kv_heads, heads // kv_heads, head_dim)
    query_BWMGD = query_TND.float().reshape(grouped)
    scores = torch.einsum("bwmgd,blmd->bmgwl", query_BWMGD, key_BLMD) * scale
    hidden_B11WL = ~visible_BWL[:, None, None]
    weights = scores.masked_fill(hidden_B11WL, -torch.inf).softmax(-1)
    weights = weights.masked_fill(hidden_B11WL, 0)  # softmax of nothing at all is NaN
    out_BWMGD = torch.einsum("bmgwl,blmd->bwmgd", weights, value_BLMD)
    return out_BWMGD.reshape(query_TND.shape).to(query_TND.dtype)


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
    mask: torch.Tensor | None,
    scale: float,
    page_size: int,
    tokens_per_request: int,
) -> torch.Tensor:
    from graphkit.ops.kernels.paged_attention import launch_paged_attention

    _check(query_TND, key_cache, value_cache, page_table, cache_seqlens_B, mask,
           page_size, tokens_per_request)  # fmt: skip
    with torch.cuda.device(query_TND.device):
        return launch_paged_attention(
            query_TND, key_cache, value_cache, page_table, cache_seqlens_B, mask, scale,
            page_size, tokens_per_request,
        )  # fmt: skip


def visible_keys(
    cache_seqlens_B: torch.Tensor, mask: torch.Tensor | None, max_keys: int, width: int
) -> torch.Tensor:
    """Which of the L = ``max_keys`` positions each query sees, bool [B, W, L]; static shapes."""
    device = cache_seqlens_B.device
    key_L = torch.arange(max_keys, device=device)
    own_BL = key_L - (cache_seqlens_B[:, None] - width)
    if mask is None:
        query_W1 = torch.arange(width, device=device)[:, None]
        return (own_BL[:, None] <= query_W1) & (key_L < cache_seqlens_B[:, None])[:, None]
    is_own_BL = (own_BL >= 0) & (own_BL < width)
    column_BWL = own_BL.clamp(0, width - 1)[:, None].expand(-1, width, -1)
    tree_BWL = mask.gather(2, column_BWL) & is_own_BL[:, None]
    return tree_BWL | (own_BL < 0)[:, None]


def key_slots(page_table: torch.Tensor, page_size: int, wanted_BL: torch.Tensor) -> torch.Tensor:
    """The slot of each position, int64 [B, L]; the dummy slot 0 where it is not wanted."""
    offset = torch.arange(page_size, device=page_table.device)
    slots_BL = (page_table.long()[:, :, None] * page_size + offset).flatten(1)
    return torch.where(wanted_BL, slots_BL, 0)


def _check(
    query_TND: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens_B: torch.Tensor,
    mask: torch.Tensor | None,
    page_size: int,
    tokens_per_request: int,
) -> None:
    if page_size < 1 or tokens_per_request < 1:
        _refuse("page_size, tokens_per_request", (page_size, tokens_per_request), "at least 1 each")
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
    requests, odd = divmod(shape[0], tokens_per_request)
    if odd:
        _refuse("query_TND", f"{shape[0]} rows", f"a multiple of {tokens_per_request} rows")
    if page_table.dim() != 2 or page_table.shape[0] != requests or page_table.dtype != torch.int32:
        _refuse("page_table", _say(page_table), f"[{requests}, pages] torch.int32")
    if list(cache_seqlens_B.shape) != [requests] or cache_seqlens_B.dtype != torch.int32:
        _refuse("cache_seqlens_B", _say(cache_seqlens_B), f"[{requests}] torch.int32")
    square = [requests, tokens_per_request, tokens_per_request]
    if mask is not None and (list(mask.shape) != square or mask.dtype != torch.bool):
        _refuse("mask", _say(mask), f"{square} torch.bool, or None for a chain")
    for tensor in (query_TND, key_cache, value_cache):
        if tensor.dtype not in DTYPES:
            _refuse("a tensor", _say(tensor), "float16, bfloat16 or float32")
    indices = (page_table, cache_seqlens_B) if mask is None else (page_table, cache_seqlens_B, mask)
    devices = {str(tensor.device) for tensor in (query_TND, key_cache, value_cache, *indices)}
    if len(devices) > 1:
        _refuse("tensors on", sorted(devices), "all on one device")


def _say(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _refuse(what: str, came: object, allowed: str) -> None:
    raise AttentionError(f"paged_attention got {what} {came}: pass {allowed}.")
