"""The KV cache of multi-head and grouped-query attention.

Suffixes: T tokens, M key-value heads, D head size.
"""

# ruff: noqa: N803 - tensor suffixes are the house's notation
from __future__ import annotations

import torch

from graphkit.config import require_int
from graphkit.errors import AttentionError, ConfigError
from graphkit.ops.store_kv import store_kv

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class MHATokenToKVPool:
    """One key and one value buffer per layer, addressed by token slot.

    Slots ``page_size .. page_size + size - 1`` are for tokens. The whole first page is the dummy
    that pad rows write to and read from; nothing may be expected of what it holds. The buffers keep
    their addresses for the life of the pool, so captured graphs may hold them.

    Args:
        size: Tokens that the pool holds.
        page_size: Slots per page.
        dtype: float16, bfloat16 or float32.
        head_num: Key-value heads (M).
        head_dim: Elements per head (D).
        layer_num: Layers.
        device: Where the buffers live.

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
        counts = {"size": size, "page_size": page_size, "layer_num": layer_num}
        for field, value in (counts | {"head_num": head_num, "head_dim": head_dim}).items():
            require_int("MHATokenToKVPool", field, value)
        if dtype not in _DTYPES:
            raise ConfigError(
                f"MHATokenToKVPool.dtype must be float16, bfloat16 or float32, got {dtype!r}.",
                field="dtype",
            )
        self.size, self.page_size, self.dtype = size, page_size, dtype
        self.head_num, self.head_dim, self.layer_num = head_num, head_dim, layer_num
        self.device = torch.device(device)
        self._keys = [self._zeros() for _ in range(layer_num)]
        self._values = [self._zeros() for _ in range(layer_num)]

    def _zeros(self) -> torch.Tensor:
        shape = (self.size + self.page_size, self.head_num, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """The keys of one layer, [size + page_size, M, D].

        Raises:
            AttentionError: There is no such layer.
        """
        return self._keys[self._checked(layer)]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        """The values of one layer, [size + page_size, M, D].

        Raises:
            AttentionError: There is no such layer.
        """
        return self._values[self._checked(layer)]

    def set_kv_buffer(
        self, layer: int, loc_T: torch.Tensor, key_TMD: torch.Tensor, value_TMD: torch.Tensor
    ) -> None:
        """Write one row per token into the slots ``loc_T``, by one ``graphkit::store_kv``.

        Enqueues on the current stream; never synchronises, may be captured.

        Shapes:
            loc_T: [T] int64. key_TMD, value_TMD: [T, M, D].

        Raises:
            AttentionError: There is no such layer, or a tensor does not fit.
        """
        layer = self._checked(layer)
        store_kv(self._keys[layer], self._values[layer], loc_T, key_TMD, value_TMD)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every buffer by name (``key.0``, ``value.0``, ...), for checksums and saved state."""
        keys = {f"key.{layer}": keys for layer, keys in enumerate(self._keys)}
        return keys | {f"value.{layer}": values for layer, values in enumerate(self._values)}

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < self.layer_num:
            raise AttentionError(
                f"KV pool has no layer {layer}: it has {self.layer_num}, counted from 0. "
                "Make the pool with the model's layer_num."
            )
        return layer
