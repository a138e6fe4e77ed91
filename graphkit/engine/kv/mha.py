"""The KV cache of multi-head and grouped-query attention.

Suffixes: T tokens, N query heads, M key-value heads, D head size.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import torch

from graphkit.engine.kv.pool import TokenToKVPool
from graphkit.errors import ConfigError, short_repr
from graphkit.ops.heads import ProjectedHeads
from graphkit.ops.inference import allocates
from graphkit.ops.kv_cache import FP8, store_kv


@dataclass(eq=False)
class MHATokenToKVPool(TokenToKVPool):
    """One key and one value buffer per layer, addressed by token slot; see ``TokenToKVPool``.

    A pool of float8_e4m3fn has half the bytes of bfloat16. It stores a key or value divided by its
    scale, rounded to three mantissa bits; magnitudes above 448 become 448. ``tensors`` has its
    buffers as bytes.

    Args:
        size, page_size, layer_num, device: See ``TokenToKVPool``.
        dtype: float16, bfloat16, float32 or float8_e4m3fn.
        head_num: Key-value heads (M).
        head_dim: Elements per head (D).
        key_scale: Scale of the keys in a pool of float8_e4m3fn: a number for all heads, or a tensor
            [M] or [layer_num, M] with a number per head. ``None`` selects 1.
        value_scale: Scale of the values, as ``key_scale``.

    Raises:
        ConfigError: An argument is out of range; ``field`` names it.
    """

    dtypes = (*TokenToKVPool.dtypes, FP8)

    size: int
    page_size: int
    dtype: torch.dtype
    head_num: int
    head_dim: int
    layer_num: int
    device: InitVar[torch.device | str]
    key_scale: InitVar[float | torch.Tensor | None] = field(default=None, kw_only=True)
    value_scale: InitVar[float | torch.Tensor | None] = field(default=None, kw_only=True)

    @allocates
    def __post_init__(
        self,
        device: torch.device | str,
        key_scale: float | torch.Tensor | None,
        value_scale: float | torch.Tensor | None,
    ) -> None:
        super().__post_init__(device)
        self._scales: list[torch.Tensor] = []
        for name, scale in {"key_scale": key_scale, "value_scale": value_scale}.items():
            if self.dtype == FP8:
                self._scales.append(self._scale_of_heads(name, scale))
            elif scale is not None:
                raise ConfigError(
                    f"{name} is for a pool of float8_e4m3fn, but dtype is {self.dtype}. Pass None.",
                    field=name,
                )

    def _allocate(self) -> None:
        is_fp8 = self.dtype == FP8
        stored = torch.uint8 if is_fp8 else self.dtype  # bytes can be compared, filled everywhere
        keys, values = (
            self._add_buffers(kind, self.head_num, self.head_dim, dtype=stored)
            for kind in ("key", "value")
        )
        self._keys = [buffer.view(self.dtype) for buffer in keys] if is_fp8 else keys
        self._values = [buffer.view(self.dtype) for buffer in values] if is_fp8 else values

    def _scale_of_heads(self, field: str, scale: float | torch.Tensor | None) -> torch.Tensor:
        """Return scales, [layer_num, M] float32."""
        shape = self.layer_num, self.head_num
        try:
            scales = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"MHATokenToKVPool.{field} must be a number, a tensor or None, got "
                f"{short_repr(scale)}.",
                field=field,
            ) from error
        if scales.shape not in ((), shape[1:], shape):
            raise ConfigError(
                f"{field} has shape {list(scales.shape)}, expected a number, [{self.head_num}] or "
                f"{list(shape)}.",
                field=field,
            )
        if not bool(((scales > 0) & scales.isfinite()).all()):
            raise ConfigError(f"{field} must be positive and finite.", field=field)
        return scales.to(self.device).expand(shape).contiguous()

    def get_scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scales of keys and values; see ``TokenToKVPool.get_scales``."""
        layer = self._checked(layer)
        if not self._scales:
            return None, None
        keys, values = self._scales
        return keys[layer], values[layer]

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
        scales = self.get_scales(layer)
        store_kv(self._keys[layer], self._values[layer], loc_T, key_TMD, value_TMD, *scales)

    def set_rotated_kv_buffer(
        self, layer: int, loc_T: torch.Tensor, heads: ProjectedHeads
    ) -> torch.Tensor:
        """Rotate heads, and write their keys and values; see ``set_kv_buffer``.

        Runs as one ``graphkit::store_rotated_heads``. Never synchronises; may be captured.

        Shapes:
            loc_T: [T] int64. Returns the rotated queries, [T, N, D].

        Raises:
            AttentionError: There is no such layer, or a tensor has the wrong shape, dtype or
                device.
        """
        layer = self._checked(layer)
        scales = self.get_scales(layer)
        return heads.store(self._keys[layer], self._values[layer], loc_T, *scales)
