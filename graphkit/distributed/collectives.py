"""Collectives of the forwards of a split model.

NCCL's collectives, which ``torch.distributed`` calls, cannot be part of a device loop. The one-shot
collectives can; large ones are those of ``torch.ops.symm_mem``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from graphkit.errors import ConfigError, first_line
from graphkit.ops.decoder import add_rms_norm

_SHARED_BYTES = 16 << 20
"""Largest tensor of a one-shot collective. Every rank keeps so much memory for it."""
_WORD = 4
"""``torch.ops.symm_mem`` moves words of so many bytes."""
_all_gather = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)  # torch 2.13 renames it


class Collectives:
    """Collectives through ``torch.distributed``, such as NCCL.

    They run on the current stream and may be captured. All ranks call the same ones in order.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks; ``x``, which is contiguous, may be overwritten."""
        dist.all_reduce(x, group=self._group)
        return x

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``graphkit.ops.decoder.add_rms_norm`` of the sum over all ranks.

        Args:
            x: This rank's summand, contiguous; may be overwritten. In parts if ``takes_parts``.
            residual: Added to the sum.
            weight: Factor of each column.
            eps: Added to the mean square.

        Returns:
            The normalised sum of both, and the sum.

        Shapes:
            x: [T, H], or [S, T, H] in parts. residual, results: [T, H]. weight: [H].
        """
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def takes_parts(self, rows: int, width: int, dtype: torch.dtype) -> bool:  # noqa: ARG002
        """Return whether ``add_rms_norm`` takes summands of a shape in parts, in float32."""
        return False

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the columns of all ranks side by side: [T, P] of each rank as [T, R * P]."""
        ranks, (tokens, columns) = self._group.size(), x.shape
        gathered = x.new_empty(ranks * tokens, columns)
        _all_gather(gathered, x.contiguous(), group=self._group)
        return gathered.view(ranks, tokens, columns).transpose(0, 1).reshape(tokens, -1)


class OneShotCollectives(Collectives):
    """Collectives through memory that every GPU of a host can read, without NCCL.

    For a sum of up to 512 KiB each rank writes its tensor into the memory of all others, in one
    kernel without a barrier. ``add_rms_norm`` is part of that kernel. A gather of up to 2 MiB is
    one such kernel too. For larger tensors each rank copies its own into its part of the memory,
    waits on the device until all have, and reads the others' parts: one kernel for a sum
    (``torch.ops.symm_mem``), four nodes for a gather. No multicast is used. Tensors of more than
    16 MiB go in slices of rows; outside of graphs, such sums go through NCCL.

    Unlike NCCL's, these collectives may be part of a device loop. They cannot be aborted: if a rank
    ends, the others wait until their processes are killed. Sums of other types than float32 and
    bfloat16, and tensors whose rows are not whole words of 4 bytes, go through NCCL.

    Creation is collective and must precede captures. One stream at a time may use them.

    Args:
        process_group: The ranks, which use NCCL.

    Raises:
        ConfigError: The GPUs cannot read the memory of each other.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        from graphkit.distributed.push_collectives import (  # needs Triton
            PushCollectives,
            shared_memory,
        )

        super().__init__(process_group)
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            self._shared, self._memory = shared_memory(
                _SHARED_BYTES, torch.uint8, device, process_group
            )
            self._push = PushCollectives(process_group, device)
        except RuntimeError as error:
            raise ConfigError(
                f"the GPUs of the ranks have no symmetric memory: {first_line(error)}. Create the "
                "RankGroup without one_shot.",
                field="one_shot",
            ) from error

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Collectives.all_reduce``. The sum has the same bits on every rank."""
        if self._push.can_all_reduce(x):
            return self._push.all_reduce(x)
        is_large = x.nbytes > _SHARED_BYTES
        has_type = x.dtype in (torch.float32, torch.bfloat16) and _can_share(x)
        if not has_type or (is_large and not torch.cuda.is_current_stream_capturing()):
            return super().all_reduce(x)
        if is_large:
            return torch.cat([self.all_reduce(part) for part in _slices(x)])
        out: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            self._shared_like(x), x, "sum", self._group.group_name
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ``Collectives.add_rms_norm``. The results have the same bits on every rank."""
        expected = torch.float32 if x.dim() > residual.dim() else weight.dtype
        has_dtypes = residual.dtype == weight.dtype and x.dtype == expected
        rows, width = residual.shape
        if has_dtypes and self._push.can_add_rms_norm(rows, width, residual.dtype):
            return self._push.add_rms_norm(x, residual.contiguous(), weight, eps)
        return super().add_rms_norm(x, residual, weight, eps)

    def takes_parts(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """See ``Collectives.takes_parts``."""
        return self._push.can_add_rms_norm(rows, width, dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Collectives.all_gather``."""
        if self._push.can_all_gather(x):
            return self._push.all_gather(x.contiguous())
        if not _can_share(x):
            return super().all_gather(x)
        if x.nbytes > _SHARED_BYTES:
            return torch.cat([self.all_gather(part) for part in _slices(x)])
        self._shared_like(x).copy_(x)
        self._memory.barrier()
        parts = (
            self._memory.get_buffer(rank, x.shape, x.dtype) for rank in range(self._group.size())
        )
        out = torch.cat(tuple(parts), 1)
        self._memory.barrier()  # no rank writes its part again before all have read it
        return out

    def _shared_like(self, x: Tensor) -> Tensor:
        return self._shared.view(x.dtype)[: x.numel()].view(x.shape)


def _can_share(x: Tensor) -> bool:
    if x.nbytes <= _SHARED_BYTES:
        return x.nbytes % _WORD == 0
    row = x.nbytes // len(x)
    return row % _WORD == 0 and row <= _SHARED_BYTES


def _slices(x: Tensor) -> tuple[Tensor, ...]:
    """Return slices of rows that fit the shared memory."""
    return torch.split(x, _SHARED_BYTES * len(x) // x.nbytes)
