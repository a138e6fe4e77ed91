"""A KV pool and the table of the slots of each request, as paged attention reads them.

Suffixes: T rows, N query heads, M key-value heads, D head size of keys, E head size of values.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphkit.config import require_type
from graphkit.engine.kv import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from graphkit.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from graphkit.engine.kv.pool import TokenToKVPool
    from graphkit.ops.heads import ProjectedHeads

Pool = MHATokenToKVPool | MLATokenToKVPool


@dataclass(frozen=True)
class PagedCache:
    """A request pool and a KV pool of one device.

    Attributes:
        requests: Table of the KV slots of each request.
        pool: Keys and values, or latents, by slot.
    """

    requests: ReqToTokenPool
    pool: Pool

    def check(self, owner: str, readable: tuple[type[TokenToKVPool], ...], prefix: str) -> None:
        """Check the pools that were passed to a backend.

        Args:
            owner: Name of the backend's class.
            readable: Types of KV pools that it can read.
            prefix: What its arguments are named with: ``window_``, or empty.

        Raises:
            ConfigError: A pool has a type that the backend cannot read, or their devices differ.
        """
        field, table = f"{prefix}kv_pool", f"{prefix}req_to_token_pool"
        require_type(owner, table, self.requests, ReqToTokenPool, "a ReqToTokenPool")
        if not isinstance(self.pool, readable):
            names = " or ".join(pool.__name__ for pool in readable)
            actual = type(self.pool).__name__
            raise ConfigError(
                f"{owner}.{field} must be of type {names}, got {actual}.", field=field
            )
        if self.requests.device != self.pool.device:
            raise ConfigError(
                f"{table} is on {self.requests.device} and {field} on {self.pool.device}: make "
                "both on one device.",
                field=field,
            )

    def shares_pages(self, other: PagedCache) -> bool:
        """Return whether each token has the same page number in both KV pools."""
        return self.requests is other.requests and self.pool.page_size == other.pool.page_size

    @property
    def stores_by_ops(self) -> bool:
        """Whether the pool stores by the ops of its class.

        A subclass that overrides the store may launch no kernel.
        """
        pool = type(self.pool)
        if issubclass(pool, MLATokenToKVPool):
            return pool.set_mla_kv_buffer is MLATokenToKVPool.set_mla_kv_buffer
        return pool.set_kv_buffer is MHATokenToKVPool.set_kv_buffer

    def store(
        self, layer: int, loc_T: torch.Tensor, key_TMD: torch.Tensor, value_TME: torch.Tensor
    ) -> None:
        """Write a key and a value per token into the slots ``loc_T``, [T] int64, of a layer.

        A pool of latents stores the latent as the key and the rotated part as the value.
        """
        if isinstance(self.pool, MLATokenToKVPool):
            self.pool.set_mla_kv_buffer(layer, loc_T, key_TMD, value_TME)
        else:
            self.pool.set_kv_buffer(layer, loc_T, key_TMD, value_TME)

    def store_rotated(self, layer: int, loc_T: torch.Tensor, heads: ProjectedHeads) -> torch.Tensor:
        """Rotate heads, write their keys and values as ``store`` does, and return queries.

        A subclass of a pool that overrides ``set_kv_buffer`` gets rotated keys and values.

        Shapes:
            loc_T: [T] int64. Returns [T, N, D].

        Raises:
            AttentionError: See ``set_kv_buffer``.
        """
        if isinstance(self.pool, MHATokenToKVPool) and self.stores_by_ops:
            return self.pool.set_rotated_kv_buffer(layer, loc_T, heads)
        query, key, value = heads.rotated()
        self.store(layer, loc_T, key, value)
        return query
