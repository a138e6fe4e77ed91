"""Collectives of small tensors through memory that the GPUs of a host share.

``torch.ops.symm_mem`` has a sum with two barriers on the device and no gather; each of these is one
kernel without a barrier, and the sum includes residual addition and norm.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphkit.ops.kernels.push_collectives import (
    SPAN,
    WORD,
    PushMemory,
    launch_push_add_rms_norm,
    launch_push_all_gather,
    launch_push_all_reduce,
)

_CAPACITY = 1 << 19
"""Words of a part of the memory, the most of a gather: 2 MiB of data, stored in 4 MiB."""
_MOST_BYTES = 1 << 19
"""Most bytes of a sum. ``torch.ops.symm_mem``, for larger ones, moves half the bytes."""


def shared_memory(
    size: int, dtype: torch.dtype, device: torch.device, process_group: dist.ProcessGroup
) -> tuple[Tensor, Any]:
    """Return memory that the GPUs of all ranks can read and write, and its handle. Collective.

    Uses ``torch.distributed._symmetric_memory``, a private module of torch, checked on 2.11.

    Raises:
        RuntimeError: The GPUs cannot read the memory of each other.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(size, dtype=dtype, device=device)
    return memory, symmetric_memory.rendezvous(memory, process_group)


class PushCollectives:
    """Collectives of small tensors over ranks, each one kernel without a barrier.

    Calls may be captured and may be part of a device loop. All ranks make the same calls in order,
    on one stream at a time. Creation is collective and must precede captures. It allocates 8 MiB
    times the number of ranks on each GPU.

    Raises:
        RuntimeError: The GPUs cannot write to the memory of each other.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        rank, ranks = process_group.rank(), process_group.size()
        self._words, handle = shared_memory(  # kept: the kernels have its address alone
            2 * ranks * _CAPACITY, torch.int64, device, process_group
        )
        self._words.zero_()
        # The tensor may begin behind the start of the buffer, by as much on every rank.
        offset = self._words.data_ptr() - handle.buffer_ptrs[rank]
        addresses = [address + offset for address in handle.buffer_ptrs]
        self._memory = PushMemory(
            calls=torch.zeros(_CAPACITY // SPAN, dtype=torch.int32, device=device),
            parts=torch.tensor(addresses, dtype=torch.int64, device=device),
            rank=rank,
            capacity=_CAPACITY,
        )
        handle.barrier()  # no rank writes before all have cleared their parts

    def can_all_reduce(self, x: Tensor) -> bool:
        """Return whether ``all_reduce`` takes ``x``: small, of float32 or pairs of bfloat16."""
        size = x.numel() * x.itemsize
        is_small = size <= _MOST_BYTES and size % WORD == 0
        return is_small and x.dtype in (torch.float32, torch.bfloat16)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, with the same bits on each; ``x`` is contiguous."""
        return launch_push_all_reduce(x, self._memory)

    def can_add_rms_norm(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Return whether ``add_rms_norm`` takes rows of a width: whole words that fit a part."""
        size = width * dtype.itemsize
        is_small = rows * size <= _MOST_BYTES and dtype in (torch.float32, torch.bfloat16)
        return is_small and size % WORD == 0 and self._memory.holds(rows, size // WORD)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ``Collectives.add_rms_norm``; all tensors are contiguous."""
        return launch_push_add_rms_norm(x, residual, weight, eps, self._memory)

    def can_all_gather(self, x: Tensor) -> bool:
        """Return whether ``all_gather`` takes ``x``: at most 2 MiB in rows of whole words."""
        is_small = x.numel() * x.itemsize <= _CAPACITY * WORD
        return is_small and x.shape[1] * x.itemsize % WORD == 0

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Collectives.all_gather``; ``x`` is contiguous."""
        return launch_push_all_gather(x, self._memory)
