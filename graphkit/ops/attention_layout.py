"""Rows and keys of each request as dense tensors, for attention in plain torch.

Suffixes: B requests, B1 requests + 1, W most query rows of a request, T rows, L positions.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

import torch


class DenseLayout:
    """Where the rows and keys of each request lie in tensors of [B, W, ...] and [B, L, ...].

    All shapes are static. There are few operations, since each is a node of a recorded graph.
    ``paged_attention`` documents the arguments other than ``num_tokens``, and what a row sees.

    Args:
        num_tokens: Rows of the batch (T).

    Attributes:
        visible_BWL: Which of the L = pages * page_size positions each row sees, bool. Entries
            behind the rows of a request have no meaning.
        seen_BL: Which positions at least one row of the request sees, bool.
    """

    def __init__(
        self,
        num_tokens: int,
        page_table: torch.Tensor,
        cache_seqlens_B: torch.Tensor,
        cu_seqlens_q_B1: torch.Tensor,
        mask: torch.Tensor | None,
        page_size: int,
        max_seqlen_q: int,
        window: int = 0,
        chunked: bool = False,
    ) -> None:
        self._num_tokens, self._page_table, self._page_size = num_tokens, page_table, page_size
        lengths_B1, ends_B1 = cache_seqlens_B[:, None], cu_seqlens_q_B1[1:, None]
        key_L = torch.arange(page_table.shape[1] * page_size, device=page_table.device)
        row_W = torch.arange(max_seqlen_q, device=page_table.device)
        self._row_BW = cu_seqlens_q_B1[:-1, None] + row_W
        if mask is None:
            last_BW = self._row_BW + (lengths_B1 - ends_B1)
            sees_any_BW = last_BW >= 0
            self.visible_BWL = key_L <= last_BW[:, :, None]
            self.seen_BL = key_L < lengths_B1  # the last row sees all keys
            if window:
                keys_BW = _keys_in_window(last_BW, window, chunked)
                self.visible_BWL = self.visible_BWL & (key_L > (last_BW - keys_BW)[:, :, None])
                # Entries behind the rows of a request reach behind its last key.
                self.seen_BL = self.seen_BL & self.visible_BWL.any(1)
        else:
            self.visible_BWL = _visible_in_tree(mask, key_L, lengths_B1, window, chunked)
            self.seen_BL = self.visible_BWL.any(1)
            sees_any_BW = self.visible_BWL.any(2)
        self._is_row_BW = (self._row_BW < ends_B1) & sees_any_BW

    def keys(self, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of each cache as [B, L, ...], with zeros at positions not seen.

        A mask of the scores alone would let NaN through, since 0 * NaN is NaN.
        """
        pages = self._page_table.long()
        if self._page_size > 1:
            offset = torch.arange(self._page_size, device=pages.device)
            pages = (pages[:, :, None] * self._page_size + offset).flatten(1)
        slots = (pages * self.seen_BL).flatten()  # the reserved slot 0 where nothing is seen
        # Bytes of 255 where a row stays: masked_fill takes several times as long on a CPU.
        bits = self.seen_BL.flatten().view(torch.int8).neg().view(torch.uint8)
        dense = []
        for cache in caches:
            rows = cache.index_select(0, slots)
            rows.view(torch.uint8).bitwise_and_(bits.view(-1, *[1] * (rows.dim() - 1)))
            dense.append(rows.view(*self.seen_BL.shape, *rows.shape[1:]))
        return tuple(dense)

    def pad(self, rows_T: torch.Tensor) -> torch.Tensor:
        """Return [T, ...] rows as [B, W, ...]. Entries behind a request's rows are arbitrary."""
        return rows_T[self._row_BW.clamp(0, self._num_tokens - 1)]

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Return [B, W, ...] rows as [T, ...], zero where a row sees no key or has no request."""
        # One row behind the end takes the entries behind the rows of each request.
        target = self._row_BW.masked_fill(~self._is_row_BW, self._num_tokens)
        packed = padded.new_zeros(self._num_tokens + 1, *padded.shape[2:])
        packed.index_copy_(0, target.flatten(), padded.flatten(0, 1))
        return packed[: self._num_tokens]


def _keys_in_window(position: torch.Tensor, window: int, chunked: bool) -> torch.Tensor | int:
    """Return how many of its last keys a row at a position sees."""
    return position % window + 1 if chunked else window


def _visible_in_tree(
    mask: torch.Tensor, key_L: torch.Tensor, lengths_B1: torch.Tensor, window: int, chunked: bool
) -> torch.Tensor:
    """Return which positions each row sees, bool [B, W, L]; ``mask`` is for the last keys alone."""
    columns = mask.shape[2]
    column_BL = key_L - (lengths_B1 - columns)
    index_BWL = column_BL.clamp(0, columns - 1)[:, None].expand(-1, mask.shape[1], -1)
    visible_BWL = mask.gather(2, index_BWL) | (column_BL < 0)[:, None]
    visible_BWL = visible_BWL & (key_L < lengths_B1)[:, None]
    if window:  # in a tree, the last keys that a row sees are those of its own path
        from_end_BWL = visible_BWL.flip(2).cumsum(2, dtype=torch.int32).flip(2)
        keys_BW1 = _keys_in_window(from_end_BWL[..., :1] - 1, window, chunked)
        visible_BWL = visible_BWL & (from_end_BWL <= keys_BW1)
    return visible_BWL


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
