"""A live batch size at a captured size, with everything that a replay of it needs at hand."""

from __future__ import annotations

from graphkit.buffers import SLOTS, Axis, InputBuffers
from graphkit.graphs import CapturedGraph
from graphkit.runners.outputs import Output


class Fit:
    """Made once per live batch size, so that a replay looks nothing up and builds nothing.

    Attributes:
        requests: Live requests.
        tokens: Live rows.
        padded_batch_size: The captured size.
        launch: Replays the captured graph.
        output: The live rows of the graph's output.
        replays: How often it was replayed.
        writer: ``writer(slot)`` writes a batch of this size into a slot.
    """

    __slots__ = ("launch", "output", "padded_batch_size", "replays", "requests", "tokens", "writer")

    def __init__(
        self,
        buffers: InputBuffers,
        requests: int,
        padded_batch_size: int,
        graph: CapturedGraph,
        output: Output,
        tokens: int | None = None,
    ) -> None:
        self.requests = requests
        self.tokens = buffers.capacity.rows(Axis.TOKEN, requests, tokens)
        self.padded_batch_size = padded_batch_size
        self.launch = graph.replay
        self.output = output.live(self.requests, self.tokens)
        self.replays = 0
        writers = tuple(buffers.writer(slot, requests, tokens) for slot in range(SLOTS))
        self.writer = writers.__getitem__
