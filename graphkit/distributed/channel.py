"""Messages between the ranks of a group, through a CPU process group.

``torch.distributed.broadcast_object_list`` blocks until its time limit. A rank that waits here
notices a failure of another rank, and ``^C``, within a quarter of a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from graphkit.distributed.rank_group import RankGroup

_FOREVER_S = timedelta(days=365).total_seconds()
"""Rank 0 may be idle for long. A rank that fails or ends breaks the connections."""


class Channel:
    """Sends bytes from rank 0 to all, and numbers from all to all. Creation is collective."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._ranks = group.new_cpu_group(_FOREVER_S)
        self._size = torch.zeros(1, dtype=torch.int64)

    def broadcast(self, data: bytes = b"") -> bytes:
        """Return the bytes of rank 0 on every rank. Bytes of other ranks are ignored.

        Waits without a time limit, because rank 0 may have nothing to send. An empty message takes
        one collective of 8 bytes.

        Raises:
            RankError: A rank has failed.
        """
        return self._group.guard(self._broadcast, data)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks, in the order of ranks. All pass equally many.

        Raises:
            RankError: A rank has failed, or did not arrive within the time limit.
        """
        return self._group.guard(self._gather, numbers)

    def _broadcast(self, data: bytes) -> bytes:
        self._group.begin_wait()
        self._size[0] = len(data)
        self._send(self._size)
        if not self._size:
            return b""
        content = torch.zeros(int(self._size), dtype=torch.uint8)
        if self._group.rank == 0:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._send(content)
        return content.numpy().tobytes()

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        self._group.begin_wait()
        mine = torch.tensor(numbers, dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self._group.size)]
        self._group.wait(dist.all_gather(gathered, mine, group=self._ranks, async_op=True))
        return [numbers.tolist() for numbers in gathered]

    def _send(self, tensor: torch.Tensor) -> None:
        work = dist.broadcast(tensor, group=self._ranks, group_src=0, async_op=True)
        self._group.wait(work, math.inf)
