"""The write of new keys and values into one layer of a KV cache.

Dimensions: T tokens, M key-value heads, D head size of keys, E head size of values.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import AttentionError
from graphkit.ops.argument_rules import describe
from graphkit.ops.attention_layout import has_dense_rows
from graphkit.ops.registration import register_op


def _check(given: Any) -> None:
    """Refuse caches of different dtypes or spaced rows, and rows that cannot be converted."""
    caches = (given.key_cache, given.value_cache)
    if not all(map(has_dense_rows, caches)) or caches[0].dtype != caches[1].dtype:
        raise AttentionError(
            f"store_kv: the caches are {describe(caches[0])} and {describe(caches[1])}, expected "
            "one dtype and contiguous memory within each slot. Pass one layer's buffers."
        )
    for name, rows in (("key_TMD", given.key_TMD), ("value_TMD", given.value_TMD)):
        is_floating = rows.is_floating_point() and caches[0].is_floating_point()
        if not is_floating and rows.dtype != caches[0].dtype:
            raise AttentionError(
                f"store_kv: {name} is {describe(rows)}, but the cache holds {caches[0].dtype}. "
                "Pass that dtype, or floating-point rows for a floating-point cache."
            )


@register_op(
    mutates_args=("key_cache", "value_cache"),
    check=_check,
    sizes_from=("key_cache", "value_cache", "loc_T"),
    error=AttentionError,
)
def store_kv(
    key_cache: Annotated[torch.Tensor, "[slots, M, D]"],
    value_cache: Annotated[torch.Tensor, "[slots, M, E]"],
    loc_T: Annotated[torch.Tensor, "[T] int64"],
    key_TMD: Annotated[torch.Tensor, "[T, M, D]"],
    value_TMD: Annotated[torch.Tensor, "[T, M, E]"],
) -> None:
    """Write row t of ``key_TMD`` and ``value_TMD`` into slot ``loc_T[t]``, in the cache's dtype.

    The caches may be two parts of one buffer whose rows hold a key and a value side by side. Only
    the dummy slot 0 may occur more than once; it keeps any one of its rows. A slot outside the
    cache raises IndexError on the CPU. On CUDA its row is dropped, since the op does not wait for
    the device.

    Args:
        key_cache: Keys of one layer, each slot contiguous.
        value_cache: Values of the layer in the dtype of key_cache, each slot contiguous.
        loc_T: Slot of each token.
        key_TMD: Keys to write: of any floating-point dtype for a floating-point cache, else of the
            cache's dtype.
        value_TMD: Values to write, as key_TMD.
    """
    key_cache.index_copy_(0, loc_T, key_TMD.to(key_cache.dtype))
    value_cache.index_copy_(0, loc_T, value_TMD.to(value_cache.dtype))
