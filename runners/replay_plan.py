"""Everything that a replay of one live batch size needs, prepared once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from graphkit.buffers import ENTRIES, Axis, InputBuffers
from graphkit.graphs import CapturedGraph
from graphkit.runners.outputs import Output


class ReplayPlan:
    """A live batch size at a captured size. A replay looks nothing up and allocates nothing.

    Attributes:
        requests: Number of live requests.
        tokens: Number of live rows; the largest number if the batch is ragged.
        has_rows: 1, or 0 for an idle batch, whose fields without axis are pads, too.
        padded_batch_size: Captured size.
        launch: Replays the captured graph.
        output: Returns a new output of the graph's live rows. Its caller may change it.
        replays: Number of replays.
        missing_rows: Sum over all replays of the rows that they had fewer than ``tokens``.
        staged: Attributes of staged batches of this size, by entry; ``None`` until one was staged.
        writer: ``writer(entry)`` returns the writer of such a batch into a mailbox entry.
    """

    __slots__ = (
        "has_rows",
        "launch",
        "missing_rows",
        "output",
        "padded_batch_size",
        "replays",
        "requests",
        "staged",
        "tokens",
        "writer",
    )  # fmt: skip

    def __init__(
        self,
        buffers: InputBuffers,
        requests: int,
        padded_batch_size: int,
        graph: CapturedGraph,
        output: Output,
    ) -> None:
        self.requests, self.has_rows = requests, min(requests, 1)
        self.tokens = buffers.capacity.rows(Axis.TOKEN, requests)
        self.padded_batch_size = padded_batch_size
        self.launch = graph.replay
        rows = output.live(self.requests, self.tokens).tensors()
        self.output: Callable[[], Output] = partial(type(output), **rows)
        self.replays, self.missing_rows = 0, 0
        self.staged: list[dict[str, Any] | None] = [None] * ENTRIES
        self.writer = tuple(buffers.writer(entry, requests) for entry in range(ENTRIES)).__getitem__
