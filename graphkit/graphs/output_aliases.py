"""Tensors that alias graph memory without owning it.

The outputs of a captured size are valid until the next replay of any graph of the pool. Because
nothing owns their memory, the allocator reuses it for the next, smaller size, which keeps the pool
near the size of the largest graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


class _DeviceMemory:
    """Device memory as ``torch.as_tensor`` reads it (``__cuda_array_interface__``, version 3)."""

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


def non_owning_aliases(tree: Any) -> Any:
    """Replace every CUDA tensor of a pytree by an alias that does not own its memory."""
    return tree_map(_alias, tree)


def _alias(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_cuda or not leaf.numel():
        return leaf
    memory = _DeviceMemory(leaf, leaf.untyped_storage().nbytes())
    alias = torch.as_tensor(memory, device=leaf.device).view(leaf.dtype)
    return alias.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
