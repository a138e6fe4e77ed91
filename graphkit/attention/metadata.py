"""Metadata of a batch for attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Lengths, page table and mask of one batch, all on its device.

    Tensors computed inside a captured graph are graph memory, valid until the next replay in that
    pool.

    Attributes:
        cache_seqlens: Keys of each request, this step's rows included; int32 [B].
        cu_seqlens_q: Running sum of query rows, from 0; int32 [B + 1].
        cu_seqlens_k: Running sum of ``cache_seqlens``, from 0; int32 [B + 1].
        page_table: Page of every page_size keys, 0 behind the last; int32 [B, pages].
        window_page_table: That of layers with a window, whose pool may be another; else the same.
        mask: True where a row sees one of its request's last keys; bool, [B, W, W] in a verify and
            [B, W, C] with C > W in a draft tree. ``None`` for a chain.
        max_seqlen_q: Query rows per request (W). In DRAFT_EXTEND an upper bound, since only the
            device knows the rows; those behind ``cu_seqlens_q[B]`` belong to no request. 1 if
            there are no requests.
        max_seqlen_k: Upper bound of ``cache_seqlens``, fixed at capture.
    """

    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor
    window_page_table: torch.Tensor
    mask: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
