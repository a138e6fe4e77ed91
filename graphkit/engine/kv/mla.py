"""The KV cache of multi-head latent attention.

Suffixes: T tokens, R kv_lora_rank, E qk_rope_head_dim.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass

import torch

from graphkit.engine.kv.pool import TokenToKVPool
from graphkit.ops.kv_cache import store_kv


@dataclass(eq=False)
class MLATokenToKVPool(TokenToKVPool):
    """One buffer per layer, which holds keys and values; see ``TokenToKVPool``.

    A row is the compressed latent, R elements, then the part of the key that encodes the position,
    E elements. All heads share the row: the key is the whole row, the value its latent
    (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Args:
        size, page_size, layer_num, device: See ``TokenToKVPool``.
        dtype: float16, bfloat16 or float32.
        kv_lora_rank: Elements of the latent (R).
        qk_rope_head_dim: Elements of the rotated part (E).

    Raises:
        ConfigError: An argument is out of range; ``field`` names it.
    """

    size: int
    page_size: int
    dtype: torch.dtype
    kv_lora_rank: int
    qk_rope_head_dim: int
    layer_num: int
    device: InitVar[torch.device | str]

    def _allocate(self) -> None:
        self._kv = self._add_buffers("kv", 1, self.kv_lora_rank + self.qk_rope_head_dim)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """Return the rows of one layer, [slots, 1, R + E].

        Raises:
            AttentionError: There is no such layer.
        """
        return self._kv[self._checked(layer)]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        """Return the latents of one layer, [slots, 1, R], a view of its rows.

        Raises:
            AttentionError: There is no such layer.
        """
        return self.get_key_buffer(layer)[..., : self.kv_lora_rank]

    def set_mla_kv_buffer(
        self, layer: int, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Write one row per token into slots ``loc`` by one ``graphkit::store_kv``.

        Enqueues on the current stream. Never synchronises; may be captured.

        Shapes:
            loc: [T] int64. cache_k_nope: [T, 1, R], the latent. cache_k_rope: [T, 1, E].

        Raises:
            AttentionError: There is no such layer, or a tensor has the wrong shape, dtype or
                device.
        """
        rows = self.get_key_buffer(layer)
        latent, rotated = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        store_kv(latent, rotated, loc, cache_k_nope, cache_k_rope)
