"""A live batch size at a captured size, with everything that a replay of it needs at hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from graphkit.buffers import ENTRIES, Axis, InputBuffers
from graphkit.graphs import CapturedGraph
from graphkit.runners.outputs import Output


class Fit:
    """Made once per live batch size, so that a replay looks nothing up and builds nothing.

    Attributes:
        requests: Live requests.
        tokens: Live rows; where rows vary, at most so many.
        padded_batch_size: The captured size.
        launch: Replays the captured graph.
        output: Makes an output of the graph's live rows, which its caller may change.
        replays: How often it was replayed.
        spared: Rows that those replays had fewer than ``tokens``, added up.
        writer: ``writer(entry)`` writes a batch of this size into an entry.
    """

    __slots__ = (
        "launch", "output", "padded_batch_size", "replays", "requests", "spared", "tokens",
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
        self.requests = requests
        self.tokens = buffers.capacity.rows(Axis.TOKEN, requests)
        self.padded_batch_size = padded_batch_size
        self.launch = graph.replay
        rows = output.live(self.requests, self.tokens).tensors()
        self.output: Callable[[], Output] = partial(type(output), **rows)
        self.replays, self.spared = 0, 0
        self.writer = tuple(buffers.writer(entry, requests) for entry in range(ENTRIES)).__getitem__
