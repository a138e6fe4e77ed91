"""The cache of an indexer, which selects the keys that a row attends to.

Suffixes: T tokens, I index_head_dim.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

from dataclasses import InitVar, dataclass

import torch

from graphkit.engine.kv.pool import TokenToKVPool


@dataclass(eq=False)
class IndexKeyPool(TokenToKVPool):
    """One buffer of index keys per layer, in their own data type; see ``TokenToKVPool``.

    Args:
        size, page_size, layer_num, device: See ``TokenToKVPool``.
        dtype: float16, bfloat16 or float32.
        index_head_dim: Elements of an index key (I).

    Raises:
        ConfigError: An argument is out of range; ``field`` names it.
    """

    size: int
    page_size: int
    dtype: torch.dtype
    index_head_dim: int
    layer_num: int
    device: InitVar[torch.device | str]

    def _allocate(self) -> None:
        self._index_k = self._add_buffers("index_k", self.index_head_dim)

    def get_index_k_buffer(self, layer: int) -> torch.Tensor:
        """Return the index keys of one layer, [slots, I].

        Raises:
            AttentionError: There is no such layer.
        """
        return self._index_k[self._checked(layer)]

    def set_index_k_buffer(self, layer: int, loc_T: torch.Tensor, index_k_TI: torch.Tensor) -> None:
        """Write one index key per token into slot ``loc_T``.

        One launch on the current stream. Never synchronises; may be captured.

        Shapes:
            loc_T: [T] int64. index_k_TI: [T, I] of the data type of the pool.

        Raises:
            AttentionError: There is no such layer.
        """
        self.get_index_k_buffer(layer).index_copy_(0, loc_T, index_k_TI)
