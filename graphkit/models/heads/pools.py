"""KV pools of the draft heads of one engine or target."""

from __future__ import annotations

import torch

from graphkit.engine.attention import PagedAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.models.heads.config import LayerConfig
from graphkit.models.pools import all_slots, attention_class


def head_attention(
    config: LayerConfig,
    requests: ReqToTokenPool,
    page_size: int,
    dtype: torch.dtype,
    slots: int | None = None,
    kind: type[PagedAttention] | None = None,
) -> PagedAttention:
    """Return attention over a new KV pool of the layers of a head.

    Args:
        config: The layers.
        requests: Slots of each request.
        page_size: Slots per page.
        dtype: Data type of keys and values.
        slots: KV slots; ``None`` selects those of every request at its longest.
        kind: Attention backend; ``None`` selects Triton on CUDA and torch elsewhere.
    """
    if slots is None:
        slots = all_slots(requests, page_size)
    pool = MHATokenToKVPool(
        slots, page_size, dtype, config.num_key_value_heads, config.head_dim,
        config.num_hidden_layers, requests.device,
    )  # fmt: skip
    return attention_class(kind, requests.device)(requests, pool)
