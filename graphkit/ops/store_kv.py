"""Write new keys and values into one layer of a KV cache.

Suffixes: T tokens, M key-value heads, D head size, which values may have another of.
"""

# ruff: noqa: N803 - tensor suffixes are the house's notation
from __future__ import annotations

import torch

from graphkit.errors import AttentionError
from graphkit.ops.attention_layout import has_dense_rows


@torch.library.custom_op(
    "graphkit::store_kv", mutates_args=("key_cache", "value_cache"), device_types="cpu"
)
def store_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    loc_T: torch.Tensor,
    key_TMD: torch.Tensor,
    value_TMD: torch.Tensor,
) -> None:
    """Write row t of ``key_TMD`` and ``value_TMD`` into slot ``loc_T[t]``, in the cache's dtype.

    The caches may be two parts of one buffer, where a slot holds a key and a value side by side.
    One launch on the current stream; never synchronises, may be captured. Only the dummy slot 0 may
    come more than once, and keeps any one of its rows. A slot outside the cache raises IndexError
    on the CPU; on CUDA, where nobody could wait for the answer, its row is dropped.

    Shapes:
        key_cache, value_cache: [slots, M, D], the same dtype, each slot's part contiguous.
        loc_T: [T] int64.
        key_TMD, value_TMD: [T, M, D] like their cache, of any floating dtype or the cache's.

    Raises:
        AttentionError: A shape, dtype or device does not fit.
    """
    _check(key_cache, value_cache, loc_T, key_TMD, value_TMD)
    key_cache.index_copy_(0, loc_T, key_TMD.to(key_cache.dtype))
    value_cache.index_copy_(0, loc_T, value_TMD.to(value_cache.dtype))


@store_kv.register_fake
def _(*_: object, **__: object) -> None:
    """Nothing is returned, so there is no shape to tell."""


@store_kv.register_kernel("cuda")
def _(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    loc_T: torch.Tensor,
    key_TMD: torch.Tensor,
    value_TMD: torch.Tensor,
) -> None:
    from graphkit.ops.kernels.store_kv import launch_store_kv

    _check(key_cache, value_cache, loc_T, key_TMD, value_TMD)
    with torch.cuda.device(key_cache.device):
        launch_store_kv(key_cache, value_cache, loc_T, key_TMD, value_TMD)


def _check(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    loc_T: torch.Tensor,
    key_TMD: torch.Tensor,
    value_TMD: torch.Tensor,
) -> None:
    caches = (key_cache, value_cache)
    if (
        any(cache.dim() != 3 or not has_dense_rows(cache) for cache in caches)
        or key_cache.shape[:2] != value_cache.shape[:2]
        or key_cache.dtype != value_cache.dtype
    ):
        raise AttentionError(
            f"store_kv got caches of {_say(key_cache)} and {_say(value_cache)}: both must be "
            "[slots, heads, head size], contiguous by slot and of one dtype. Pass one layer's "
            "buffers."
        )
    if loc_T.dim() != 1 or loc_T.dtype != torch.int64:
        raise AttentionError(
            f"store_kv got loc_T of {_say(loc_T)}: it must be [T] torch.int64, a slot per token."
        )
    given = (("key_TMD", key_TMD, key_cache), ("value_TMD", value_TMD, value_cache))
    for name, tensor, cache in given:
        rows = (loc_T.shape[0], *cache.shape[1:])
        fits = tensor.is_floating_point() and cache.is_floating_point()
        if tensor.shape != rows or not (fits or tensor.dtype == cache.dtype):
            raise AttentionError(
                f"store_kv got {name} of {_say(tensor)}: it must be {list(rows)}, the tokens "
                f"of loc_T by the cache's heads and head size, and floating if the cache is, else "
                f"{cache.dtype}."
            )
    devices = {str(tensor.device) for tensor in (key_cache, value_cache, loc_T, key_TMD, value_TMD)}
    if len(devices) > 1:
        raise AttentionError(
            f"store_kv got tensors on {sorted(devices)}: move all of them to one device."
        )


def _say(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"
