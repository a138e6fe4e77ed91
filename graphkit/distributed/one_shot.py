"""All-reduce through memory that every GPU of a host can read."""

from __future__ import annotations

import torch
import torch.distributed as dist

from graphkit.distributed.rank_group import RankGroup
from graphkit.errors import ConfigError

BUFFER_BYTES = 512 * 1024
"""Largest tensor. Every rank reads the whole tensor of every other one, so that NCCL, which divides
large tensors among the ranks, is faster above."""


class OneShotAllReduce:
    """Sums small tensors over the GPUs of one host in one kernel, without NCCL.

    Each rank copies its tensor into its part of a symmetric memory, waits until all have, and adds
    up what it reads from theirs (``torch.ops.symm_mem.one_shot_all_reduce_copy``). No multicast is
    used. Larger tensors go through NCCL.

    The kernel waits on the device for the other ranks and cannot be aborted, unlike NCCL's: if a
    rank ends, the others hang until their processes are killed.

    Creation is collective and must precede the capture. One stream at a time may use it.

    Args:
        group: The ranks; their process group uses NCCL.
        dtype: float32 or bfloat16.

    Raises:
        ConfigError: The ranks have no NCCL, the kernel lacks the dtype, or the GPUs cannot read the
            memory of each other.
    """

    def __init__(self, group: RankGroup, dtype: torch.dtype) -> None:
        if not group.uses_nccl:
            raise ConfigError(
                "a one-shot all-reduce needs ranks with CUDA devices and NCCL.", field="group"
            )
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"a one-shot all-reduce adds up float32 and bfloat16, got {dtype}.", field="dtype"
            )
        import torch.distributed._symmetric_memory as symmetric_memory

        try:
            buffer = symmetric_memory.empty(
                BUFFER_BYTES // dtype.itemsize,
                dtype=dtype,
                device=torch.device("cuda", torch.cuda.current_device()),
            )
            symmetric_memory.rendezvous(buffer, group.process_group)
        except RuntimeError as error:
            raise ConfigError(
                "the GPUs of the ranks have no symmetric memory: "
                f"{next(iter(str(error).splitlines()), '')} Use NCCL.",
                field="group",
            ) from error
        self._buffer, self._group = buffer, group.process_group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; ``x``, which is contiguous, may be overwritten."""
        if x.numel() > self._buffer.numel():
            dist.all_reduce(x, group=self._group)
            return x
        out: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            self._buffer[: x.numel()].view(x.shape), x, "sum", self._group.group_name
        )
        return out
