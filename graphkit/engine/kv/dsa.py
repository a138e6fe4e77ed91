"""The KV cache of sparse attention over latents, with the cache of the indexer that selects keys.

Suffixes: T tokens, I index_head_dim.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

from dataclasses import dataclass

import torch

from graphkit.engine.kv.mla import MLATokenToKVPool
from graphkit.errors import AttentionError
from graphkit.ops.argument_rules import describe
from graphkit.ops.index_scores import SCALE_BYTES
from graphkit.ops.kv_cache import store_kv

_FP8 = torch.float8_e4m3fn
_LEAST = 1e-30
"""Smallest magnitude used for a scale, so that a scale is a normal number and not zero."""


@dataclass(eq=False)
class DSATokenToKVPool(MLATokenToKVPool):
    """An ``MLATokenToKVPool`` that also stores each token's index key in eight bits.

    A row of the indexer's cache is I bytes of float8_e4m3fn, then one float32 scale in the
    machine's byte order; key = float8 * scale. The indexer of DeepSeek-V3.2 uses one
    scale per token's key; the layout by token is specific to this package.

    Args:
        size, page_size, layer_num, device: See ``TokenToKVPool``.
        dtype: float16, bfloat16 or float32; of the latents alone.
        kv_lora_rank: Elements of the latent.
        qk_rope_head_dim: Elements of the rotated part.
        index_head_dim: Elements of an index key (I).

    Raises:
        ConfigError: An argument is out of range; ``field`` names it.
    """

    index_head_dim: int

    def _allocate(self) -> None:
        super()._allocate()
        row = self.index_head_dim + SCALE_BYTES
        self._index_k = self._add_buffers("index_k", row, dtype=torch.uint8)

    def get_index_k_buffer(self, layer: int) -> torch.Tensor:
        """Return the quantised index keys of one layer, uint8 [slots, I + 4].

        Raises:
            AttentionError: There is no such layer.
        """
        return self._index_k[self._checked(layer)]

    def set_index_k_buffer(self, layer: int, loc_T: torch.Tensor, index_k_TI: torch.Tensor) -> None:
        """Quantise one index key per token and write it into slot ``loc_T``.

        The scale is the key's largest magnitude divided by the largest float8. A few launches on
        the current stream. Never synchronises; may be captured.

        Shapes:
            loc_T: [T] int64. index_k_TI: [T, I], any floating dtype.

        Raises:
            AttentionError: There is no such layer, or a tensor has the wrong shape, dtype or
                device.
        """
        rows = self.get_index_k_buffer(layer)[:, None]
        if index_k_TI.dim() != 2 or not index_k_TI.is_floating_point():
            raise AttentionError(
                f"set_index_k_buffer: index_k_TI is {describe(index_k_TI)}, expected "
                f"[T, I] = [T, {self.index_head_dim}] of a floating-point dtype."
            )
        keys, scales = rows.split([self.index_head_dim, SCALE_BYTES], -1)
        store_kv(keys, scales, loc_T, *_quantised(index_k_TI[:, None].float()))


def _quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of each row's elements and of its scale."""
    most = torch.finfo(_FP8).max
    # Not a division: CUDA multiplies by the inverse, which rounds differently from the CPU.
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=_LEAST) * (1 / most)
    return (rows / scale).to(_FP8).view(torch.uint8), scale.view(torch.uint8)
