"""Tensors that alias graph memory without owning it.

The outputs of a captured size are valid until the next replay of any graph of the pool. Because
nothing owns their memory, the allocator reuses it for the next, smaller size, which keeps the pool
near the size of the largest graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from graphkit.graphs.pool_memory import device_bytes


def non_owning_aliases(tree: Any) -> Any:
    """Replace every CUDA tensor of a pytree by an alias that does not own its memory."""
    return tree_map(_alias, tree)


def _alias(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_cuda or not leaf.numel():
        return leaf
    storage = leaf.untyped_storage()
    memory = device_bytes(storage.data_ptr(), storage.nbytes(), leaf.device)
    return memory.view(leaf.dtype).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
