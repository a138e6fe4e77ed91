"""The KV cache of multi-head and grouped-query attention.

Suffixes: T tokens, M key-value heads, D head size.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

import torch

from graphkit.kv.pool import TokenToKVPool
from graphkit.ops.kv_cache import store_kv


class MHATokenToKVPool(TokenToKVPool):
    """One key and one value buffer per layer, addressed by token slot; see ``TokenToKVPool``.

    Args:
        size: Tokens that the pool holds.
        page_size: Slots per page.
        dtype: float16, bfloat16 or float32.
        head_num: Key-value heads (M).
        head_dim: Elements per head (D).
        layer_num: Layers.
        device: Device of the buffers.

    Raises:
        ConfigError: An argument is out of range; ``field`` names it.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: torch.device | str,
    ) -> None:
        super().__init__(
            size, page_size, dtype, layer_num, device, head_num=head_num, head_dim=head_dim
        )
        self.head_num, self.head_dim = head_num, head_dim
        self._keys = self._add_buffers("key", head_num, head_dim)
        self._values = self._add_buffers("value", head_num, head_dim)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """Return the keys of one layer, [slots, M, D].

        Raises:
            AttentionError: There is no such layer.
        """
        return self._keys[self._checked(layer)]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        """Return the values of one layer, [slots, M, D].

        Raises:
            AttentionError: There is no such layer.
        """
        return self._values[self._checked(layer)]

    def set_kv_buffer(
        self, layer: int, loc_T: torch.Tensor, key_TMD: torch.Tensor, value_TMD: torch.Tensor
    ) -> None:
        """Write one row per token into slots ``loc_T`` by one ``graphkit::store_kv``.

        Enqueues on the current stream. Never synchronises; may be captured.

        Shapes:
            loc_T: [T] int64. key_TMD, value_TMD: [T, M, D].

        Raises:
            AttentionError: There is no such layer, or a tensor has the wrong shape, dtype or
                device.
        """
        layer = self._checked(layer)
        store_kv(self._keys[layer], self._values[layer], loc_T, key_TMD, value_TMD)
