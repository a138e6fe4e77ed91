"""Several KV pools as one, for models whose layers have keys and values of different shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.config import require_type
from graphkit.engine.kv.pool import TokenToKVPool
from graphkit.errors import ConfigError


class LayerGroupKVPool:
    """A ``KVPool`` of groups of layers; a token has the same slot in all of them.

    Args:
        groups: One pool per group, of the same size, page size and device.

    Attributes:
        groups: As passed.
        size: Tokens that each of the pools holds.
        page_size: Slots per page.

    Raises:
        ConfigError: There is no group, one is no ``TokenToKVPool``, or two of them differ.
    """

    def __init__(self, groups: Sequence[TokenToKVPool]) -> None:
        name, expected = type(self).__name__, "a KV pool"
        require_type(name, "groups", groups, Sequence, "a sequence of KV pools")
        for number, pool in enumerate(groups):
            require_type(name, f"groups[{number}]", pool, TokenToKVPool, expected)
        shapes = {(pool.size, pool.page_size, pool.device) for pool in groups}
        if len(shapes) != 1:
            raise ConfigError(
                f"the pools have (size, page_size, device) {sorted(map(str, shapes))}, expected "
                "one. Create all pools with the same values.",
                field="groups",
            )
        self.groups = tuple(groups)
        self.size, self.page_size, self.device = shapes.pop()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every buffer by group, kind and layer, such as ``0.key.3``."""
        return {
            f"{group}.{name}": tensor
            for group, pool in enumerate(self.groups)
            for name, tensor in pool.tensors().items()
        }

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots in every buffer of every layer; see ``TokenToKVPool.move_kv_cache``."""
        for pool in self.groups:
            pool.move_kv_cache(tgt_loc, src_loc)
