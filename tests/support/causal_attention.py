"""Attention of draft heads over whole texts, without a cache.

Tensor suffixes: T tokens, N query heads, M key and value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graphkit.models.running import AttentionCall, attending

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attends in a layer: its number, queries [T, N, D], keys and values [T, M, D], to [T, N, D]."""


def run_head(head: Any, *rows_and_attend: Any, **options: Any) -> Any:
    """Call a draft head with rows, the last of which are positions, within an ``Attend``."""
    *rows, attend = rows_and_attend

    def attend_to(call: AttentionCall) -> Tensor:
        parts = (part[0].transpose(0, 1) for part in (call.query, call.key, call.value))
        attended: Tensor = attend(call.module.layer_idx, *parts)
        return attended[None]

    with attending(attend_to, rows[-1]):
        return head(*rows, **options)


def causal_attend(batch_size: int, length: int, window: int | None = None) -> Attend:
    """Return an ``attend`` without a cache, for B sequences of length L packed as T = B * L rows.

    Row b * L + i attends to rows b * L to b * L + i, or to the last ``window`` of them. For
    training and full-sequence runs.
    """

    def heads_first(x: Tensor) -> Tensor:
        return x.reshape(batch_size, length, *x.shape[1:]).transpose(1, 2)

    def attend(layer: int, query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor) -> Tensor:
        del layer  # all layers use the same mask
        query, key, value = (heads_first(x) for x in (query_TND, key_TMD, value_TMD))
        mask = None
        if window is not None:
            ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
            mask = ones.tril().triu(1 - window)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    return attend
