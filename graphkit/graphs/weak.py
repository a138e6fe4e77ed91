"""Tensors over graph memory that do not keep it from being reused.

The outputs of a captured size stay readable until the next replay of the pool, but the allocator
may give their memory to the next, smaller size; that keeps the pool near the size of the largest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


class _Memory:
    """Device memory for ``torch.as_tensor``, by CUDA's array interface."""

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


def weak_references(tree: Any) -> Any:
    """The same structure with every CUDA tensor replaced by an alias that owns nothing."""
    return tree_map(_weak, tree)


def _weak(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_cuda or not leaf.numel():
        return leaf
    memory = _Memory(leaf, leaf.untyped_storage().nbytes())
    alias = torch.as_tensor(memory, device=leaf.device).view(leaf.dtype)
    return alias.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
