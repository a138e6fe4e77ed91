"""Rows, keys and slots of each request, for attention in plain torch with static shapes.

Suffixes: B requests, B1 requests + 1, W most query rows of a request, T rows, L positions.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

import torch


def pad_rows(
    rows_T: torch.Tensor, cu_seqlens_q_B1: torch.Tensor, max_seqlen_q: int
) -> torch.Tensor:
    """Return [T, ...] rows as [B, W, ...]; a request of fewer rows is filled with any others."""
    row_W = torch.arange(max_seqlen_q, device=cu_seqlens_q_B1.device)
    return rows_T[(cu_seqlens_q_B1[:-1, None] + row_W).clamp(0, rows_T.shape[0] - 1)]


def pack_rows(
    padded: torch.Tensor,
    cu_seqlens_q_B1: torch.Tensor,
    num_tokens: int,
    is_row_BW: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [B, W, ...] rows as [T, ...], with zeros in rows that no request has.

    Rows that are False in ``is_row_BW`` are zero, too, whatever they hold.
    """
    starts_B1 = cu_seqlens_q_B1[:, None]
    target_BW = starts_B1[:-1] + torch.arange(padded.shape[1], device=padded.device)
    is_kept_BW = target_BW < starts_B1[1:].clamp(max=num_tokens)
    if is_row_BW is not None:
        is_kept_BW = is_kept_BW & is_row_BW
    target_BW = torch.where(is_kept_BW, target_BW, num_tokens)  # one row behind the end takes all
    packed = padded.new_zeros(num_tokens + 1, *padded.shape[2:])
    return packed.index_copy_(0, target_BW.flatten(), padded.flatten(0, 1))[:num_tokens]


def visible_keys(
    cache_seqlens_B: torch.Tensor,
    cu_seqlens_q_B1: torch.Tensor,
    mask: torch.Tensor | None,
    max_keys: int,
    max_seqlen_q: int,
    window: int = 0,
) -> torch.Tensor:
    """Return which of the L = ``max_keys`` positions each query sees, bool [B, W, L].

    ``paged_attention`` defines mask and window. Entries behind the rows of a request have no
    meaning.
    """
    key_L = torch.arange(max_keys, device=cache_seqlens_B.device)
    if mask is None:
        rows_B = cu_seqlens_q_B1[1:] - cu_seqlens_q_B1[:-1]
        query_W = torch.arange(max_seqlen_q, device=cache_seqlens_B.device)
        last_BW = (cache_seqlens_B - rows_B)[:, None] + query_W
        visible_BWL = key_L <= last_BW[:, :, None]
    else:
        columns = mask.shape[2]
        column_BL = key_L - (cache_seqlens_B[:, None] - columns)
        index_BWL = column_BL.clamp(0, columns - 1)[:, None].expand(-1, max_seqlen_q, -1)
        visible_BWL = mask.gather(2, index_BWL) | (column_BL < 0)[:, None]
    is_key_BL = key_L < cache_seqlens_B[:, None]
    visible_BWL = visible_BWL & is_key_BL[:, None]
    if window:
        from_end_BWL = visible_BWL.flip(2).cumsum(2, dtype=torch.int32).flip(2)
        visible_BWL = visible_BWL & (from_end_BWL <= window)
    return visible_BWL


def key_slots(page_table: torch.Tensor, page_size: int, wanted_BL: torch.Tensor) -> torch.Tensor:
    """Return the slot of each position, int64 [B, L]; the dummy slot 0 where it is not wanted."""
    slots_BL = page_table.long()
    if page_size > 1:
        offset = torch.arange(page_size, device=page_table.device)
        slots_BL = (slots_BL[:, :, None] * page_size + offset).flatten(1)
    return torch.where(wanted_BL, slots_BL, 0)


def seen_rows(cache: torch.Tensor, slots_BL: torch.Tensor, seen_BL: torch.Tensor) -> torch.Tensor:
    """Return the cache's rows of the slots, [B, L, ...]; zeros at positions that no query sees.

    A mask of the scores alone would let NaN through, since 0 * NaN is NaN.
    """
    rows = cache.index_select(0, slots_BL.flatten())
    # On a CPU, masked_fill takes eight times as long, and an index of two dimensions four times.
    bits = seen_BL.flatten().to(torch.uint8) * 255
    rows.view(torch.uint8).bitwise_and_(bits.view(-1, *[1] * (rows.dim() - 1)))
    return rows.view(*seen_BL.shape, *rows.shape[1:])


def has_dense_rows(tensor: torch.Tensor) -> bool:
    """Return whether the elements of each slot, or token, are contiguous."""
    heads, head_dim = tensor.shape[1:]
    return tensor.stride(2) == 1 and (heads == 1 or tensor.stride(1) == head_dim)


def is_part_of(value_cache: torch.Tensor, key_cache: torch.Tensor) -> bool:
    """Return whether each value is the first part of its key, as in a pool of latents."""
    return (
        value_cache.data_ptr() == key_cache.data_ptr()
        and value_cache.stride() == key_cache.stride()
    )
