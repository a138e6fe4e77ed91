"""All-reduce of small tensors through memory that the GPUs of a host share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from graphkit.ops.kernels.push_all_reduce import BLOCK, WORD, launch_push_all_reduce

_CAPACITY = 1 << 16
"""Most words of a tensor."""


class PushAllReduce:
    """Sums tensors of up to 256 KiB over ranks, in one kernel without a barrier.

    Calls may be captured and may be part of a device loop. All ranks make the same calls in order,
    on one stream at a time. Creation is collective and must precede captures.

    Args:
        process_group: The ranks.
        device: This rank's GPU.

    Raises:
        RuntimeError: The GPUs cannot write to the memory of each other.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._rank, ranks = process_group.rank(), process_group.size()
        self._parts = symmetric_memory.empty(
            2 * ranks * _CAPACITY, dtype=torch.int64, device=device
        ).zero_()
        memory = symmetric_memory.rendezvous(self._parts, process_group)
        offset = self._parts.data_ptr() - memory.buffer_ptrs[self._rank]
        addresses = [each + offset for each in memory.buffer_ptrs]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(_CAPACITY // BLOCK, dtype=torch.int32, device=device)
        memory.barrier()  # no rank writes before all have cleared their parts

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Return whether a tensor is small enough, and float32 or bfloat16 of whole words."""
        size = x.numel() * x.itemsize
        is_sized = size <= _CAPACITY * WORD and size % WORD == 0
        return is_sized and x.dtype in (torch.float32, torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, with the same bits on each; ``x`` is contiguous."""
        return launch_push_all_reduce(x, self._calls, self._addresses, self._rank, _CAPACITY)
