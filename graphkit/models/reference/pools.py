"""KV pools and attention backends for the models of one engine or target."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import isabstract

import torch

from graphkit.engine.attention import PagedAttention, SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.errors import ConfigError, short_repr
from graphkit.models.reference.config import LlamaConfig


def attention_class(attention: object, device: torch.device) -> type[PagedAttention]:
    """Return the attention backend that a setting selects on a device; see ``reference_engine``.

    Raises:
        ConfigError: It is neither ``None`` nor a class of backends.
    """
    if attention is None:
        return TritonAttention if device.type == "cuda" else SdpaAttention
    if (
        isinstance(attention, type)
        and issubclass(attention, PagedAttention)
        and not isabstract(attention)
    ):
        return attention
    raise ConfigError(
        "attention must be a class derived from graphkit.PagedAttention, such as "
        f"graphkit.TritonAttention, or None, got {short_repr(attention)}.",
        field="attention",
    )


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


def all_slots(requests: ReqToTokenPool, page_size: int) -> int:
    """Return the KV slots of every request at its longest, in whole pages."""
    return requests.size * -(-requests.max_context_len // page_size) * page_size
