"""KV pools of the draft heads of one engine or target."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphkit.engine.attention import PagedAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.models.heads.config import LlamaConfig
from graphkit.models.pools import all_slots


@dataclass(frozen=True, slots=True)
class PoolFactory:
    """Creates attention backends that share a request pool, each over a KV pool of its own.

    Attributes:
        requests: The request pool that all models share.
        kind: The backend class.
        page_size: Slots per page.
        dtype: Data type of keys and values.
        slots: KV slots of each pool; ``None`` selects those of every request at its longest.
    """

    requests: ReqToTokenPool
    kind: type[PagedAttention]
    page_size: int
    dtype: torch.dtype
    slots: int | None = None

    def attention(self, config: LlamaConfig) -> PagedAttention:
        """Create a backend over a new pool, for a model's layers."""
        slots = self.slots
        if slots is None:
            slots = all_slots(self.requests, self.page_size)
        pool = MHATokenToKVPool(
            slots, self.page_size, self.dtype, config.num_key_value_heads,
            config.head_dim, config.num_hidden_layers, self.requests.device,
        )  # fmt: skip
        return self.kind(self.requests, pool)
