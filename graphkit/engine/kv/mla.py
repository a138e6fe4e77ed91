"""The KV cache of multi-head latent attention, and that of an indexer, which selects its keys.

Suffixes: T tokens, R kv_lora_rank, E qk_rope_head_dim, I index_head_dim.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions

from __future__ import annotations

from dataclasses import InitVar, dataclass

import torch

from graphkit.engine.kv.pool import TokenToKVPool
from graphkit.errors import AttentionError
from graphkit.ops.argument_rules import describe
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


@dataclass(eq=False)
class IndexKeyPool(TokenToKVPool):
    """One buffer of index keys per layer; see ``TokenToKVPool``.

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
        super()._allocate()
        self._index_k = self._add_buffers("index_k", self.index_head_dim)

    def get_index_k_buffer(self, layer: int) -> torch.Tensor:
        """Return the index keys of one layer, [slots, I].

        Raises:
            AttentionError: There is no such layer.
        """
        return self._index_k[self._checked(layer)]

    def set_index_k_buffer(self, layer: int, loc_T: torch.Tensor, index_k_TI: torch.Tensor) -> None:
        """Write one index key per token into slot ``loc_T`` by one ``graphkit::store_kv``.

        Enqueues on the current stream. Never synchronises; may be captured.

        Shapes:
            loc_T: [T] int64. index_k_TI: [T, I], any floating-point dtype.

        Raises:
            AttentionError: There is no such layer, or a tensor has the wrong shape, dtype or
                device.
        """
        rows = self.get_index_k_buffer(layer)
        if index_k_TI.shape[1:] != rows.shape[1:] or not index_k_TI.is_floating_point():
            raise AttentionError(
                f"set_index_k_buffer: index_k_TI is {describe(index_k_TI)}, expected "
                f"[T, I] = [T, {self.index_head_dim}] of a floating-point dtype."
            )
        # The op writes two parts of a row: here the halves of a key.
        (first, second), (new_first, new_second) = (
            tensor[:, None].tensor_split(2, -1) for tensor in (rows, index_k_TI)
        )
        store_kv(first, second, loc_T, new_first, new_second)


@dataclass(eq=False)
class DSATokenToKVPool(IndexKeyPool, MLATokenToKVPool):
    """An ``MLATokenToKVPool`` that also stores each token's index key.

    The indexer of a layer scores all keys of a request and selects some (DeepSeek-V3.2).
    ``PagedAttention.attend_positions`` attends to those.

    Args:
        size, page_size, dtype, layer_num, device: See ``TokenToKVPool``.
        kv_lora_rank: Elements of the latent.
        qk_rope_head_dim: Elements of the rotated part.
        index_head_dim: Elements of an index key (I).

    Raises:
        ConfigError: An argument is out of range; ``field`` names it.
    """
