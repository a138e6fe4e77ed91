"""Scores by which the indexer of sparse attention selects keys.

Dimensions: B requests, W most query rows of a request, C columns of the mask, T rows of all
requests, X index heads, I elements of an index key, P pages per request, S page size.

Further suffixes: B1 requests + 1, L = P * page size keys.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import Annotated

import torch

from graphkit.errors import AttentionError
from graphkit.ops.attention_layout import DenseLayout
from graphkit.ops.registration import register_op

SCALE_BYTES = 4
"""Bytes of a key's scale, behind its elements."""


@register_op(sizes_from=("query_TXI", "page_table"), error=AttentionError)
def index_scores(
    query_TXI: Annotated[torch.Tensor, "[T, X, I] float16 or bfloat16 or float32"],
    weights_TX: Annotated[torch.Tensor, "[T, X] float16 or bfloat16 or float32"],
    index_cache: Annotated[torch.Tensor, "[slots, I + 4] uint8"],
    page_table: Annotated[torch.Tensor, "[B, P] int32"],
    cache_seqlens_B: Annotated[torch.Tensor, "[B] int32"],
    cu_seqlens_q_B1: Annotated[torch.Tensor, "[B + 1] int32"],
    mask: Annotated[torch.Tensor | None, "[B, W, C >= W] bool"],
    page_size: Annotated[int, "S >= 1"],
    max_seqlen_q: Annotated[int, "W >= 1"],
) -> Annotated[torch.Tensor, "[T, P * S] float32"]:
    """Score each row's visible keys by weighted products with the row's index queries.

    The score of a key is the sum over heads of ``weight * max(0, query . key)``, in float32; -inf
    for keys that a row does not see and for rows of no request (DeepSeek-V3.2, the lightning
    indexer). Scale factors of the model belong into the weights. ``paged_attention`` defines which
    keys a row sees.

    Two launches.

    Args:
        query_TXI: Index queries of each row.
        weights_TX: Weights of the heads.
        index_cache: Quantised index keys of one layer by slot, as ``DSATokenToKVPool`` stores them.
        page_table: As for ``paged_attention``, like the other arguments.
        cache_seqlens_B: Keys of each request.
        cu_seqlens_q_B1: Running sum of each request's query rows, from 0.
        mask: Which of the last keys each query sees; None for a chain.
        page_size: Slots per page.
        max_seqlen_q: Upper bound of a request's query rows (W).

    Returns:
        The scores, [T, P * page_size] float32.
    """
    (requests, pages), tokens = page_table.shape, query_TXI.shape[0]
    hidden_TL = query_TXI.new_full((tokens, pages * page_size), -torch.inf, dtype=torch.float32)
    if not (tokens and requests and pages):
        return hidden_TL
    layout = DenseLayout(
        tokens, page_table, cache_seqlens_B, cu_seqlens_q_B1, mask, page_size, max_seqlen_q
    )
    (rows_BLR,) = layout.keys(index_cache)
    key_BLI, query_BWXI = dequantised(rows_BLR), layout.pad(query_TXI.float())
    weights_BWX = layout.pad(weights_TX.float())
    products_BWXL = torch.einsum("bwxi,bli->bwxl", query_BWXI, key_BLI).relu()
    scores_BWL = torch.einsum("bwx,bwxl->bwl", weights_BWX, products_BWXL)
    return torch.where(layout.pack(layout.visible_BWL), layout.pack(scores_BWL), hidden_TL)


def dequantised(rows: torch.Tensor) -> torch.Tensor:
    """Return the index keys of quantised rows, float32 [..., I] of uint8 [..., I + 4]."""
    keys, scales = rows.tensor_split([rows.shape[-1] - SCALE_BYTES], -1)
    return keys.contiguous().view(torch.float8_e4m3fn).float() * scales.contiguous().view(
        torch.float32
    )
