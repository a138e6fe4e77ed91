"""What an attention kernel must know of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Lengths, page table and mask of one batch, all on its device.

    Made inside a captured graph the tensors alias graph memory: they are valid until the next
    replay in that pool.

    Attributes:
        cache_seqlens: Keys of each request, this step's rows included; int32 [B].
        cu_seqlens_q: Running sum of query rows, from 0; int32 [B + 1].
        cu_seqlens_k: Running sum of ``cache_seqlens``, from 0; int32 [B + 1].
        page_table: Page of each run of page_size keys, 0 where there is none; int32 [B, pages].
        mask: Which of a request's last keys each of its rows sees; bool, [B, W, W] in a verify and
            [B, W, more] in a draft tree. ``None`` is a chain.
        max_seqlen_q: Query rows per request (W), exact, except in DRAFT_EXTEND: there an upper
            bound, since the rows are known to the device alone, and rows behind ``cu_seqlens_q[B]``
            belong to nobody. 1 if there are no requests.
        max_seqlen_k: Upper bound of ``cache_seqlens``, fixed at capture.
    """

    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor
    mask: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
