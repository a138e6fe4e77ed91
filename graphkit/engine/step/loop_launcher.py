"""Launches of loops: one mailbox entry with the rows of the batch, and one graph launch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from struct import Struct

import torch

from graphkit.buffers import Axis, FieldLayout, InputBuffers, Rows, StepInputs, declare
from graphkit.graphs import LoopGraph
from graphkit.runners import Output, declare_output

_CODES = {torch.int64: "q", torch.bool: "?"}
"""Format of each dtype in ``struct``."""


@dataclass(kw_only=True, eq=False)
class LaunchInputs(StepInputs):
    """Batch of a launch."""

    req_pool_indices: Rows = declare(Axis.REQUEST, torch.int64, "row of the request")
    is_watched: Rows = declare(
        Axis.REQUEST, torch.bool, "whether the loop ends when the request ends"
    )
    max_steps: Rows = declare(Axis.NONE, torch.int64, "most steps of the loop")
    launch: Rows = declare(Axis.NONE, torch.int64, "number of the launch")


@dataclass(kw_only=True, eq=False)
class LaunchOutput(Output):
    """Rows of the first step, [B] int64."""

    req_pool_indices: torch.Tensor = declare_output(Axis.REQUEST, torch.int64)


class LoopLauncher:
    """Writes the batches of launches into a mailbox, and launches loops.

    A launch usually follows a wait, in which other code has filled the CPU's caches, so the less
    code a launch runs, the faster it is. One call of ``struct`` therefore writes the whole batch,
    which the caller has validated, instead of a ``Replayer``.

    Args:
        buffers: Buffers of the prologue, for ``LaunchInputs``.
    """

    def __init__(self, buffers: InputBuffers) -> None:
        self._buffers, self._mailbox = buffers, buffers.mailbox
        self._payload = buffers.layouts[0].payload
        self._packers: dict[int, Struct] = {}

    def launch(
        self,
        graph: LoopGraph,
        rows: Sequence[int],
        watched: Collection[int],
        max_steps: int,
        number: int,
    ) -> None:
        """Launch a loop. After an exception, the next launch waits for the device.

        Args:
            graph: The loop.
            rows: Rows of the requests, valid and at most as many as the largest size.
            watched: Rows of ``rows`` at whose end the loop ends.
            max_steps: Most steps.
            number: Number of the launch.

        Raises:
            ReplayError: CUDA refused the launch, or the device has failed.
        """
        mailbox, requests = self._mailbox, len(rows)
        packer = self._packers.get(requests)
        if packer is None:
            packer = self._packers[requests] = _packer(self._buffers, requests)
        entry = mailbox.claim()
        packer.pack_into(
            mailbox.words(entry), self._payload,
            *rows, *map(watched.__contains__, rows), max_steps, number,
        )  # fmt: skip
        mailbox.post(entry, requests, requests)
        graph.replay()
        mailbox.commit()


def _packer(buffers: InputBuffers, requests: int) -> Struct:
    """Return the format of a batch from the first field's payload to the last one's."""
    layouts: Sequence[FieldLayout] = buffers.layouts
    parts, end = ["="], layouts[0].payload
    for layout in layouts:
        rows = buffers.capacity.rows(layout.field.axis, requests)
        parts.append(f"{layout.payload - end}x{rows}{_CODES[layout.dtype]}")
        end = layout.payload + rows * layout.row_bytes
    return Struct("".join(parts))
