"""A live batch size at a captured size, with everything that a replay of it needs at hand."""

from __future__ import annotations

from graphkit.buffers import SLOTS, BatchWriter, InputBuffers
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
    """

    __slots__ = (
        "_buffers", "_writers", "launch", "output", "padded_batch_size", "replays", "requests",
        "tokens",
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
        self.tokens = requests * buffers.capacity.tokens_per_request
        self.padded_batch_size = padded_batch_size
        self.launch = graph.replay
        self.output = output.live(self.requests, self.tokens)
        self.replays = 0
        self._buffers = buffers
        self._writers: list[BatchWriter | None] = [None] * SLOTS

    def writer(self, slot: int) -> BatchWriter:
        """What writes a batch of this size into a slot."""
        made = self._writers[slot]
        if made is None:
            made = self._writers[slot] = self._buffers.writer(slot, self.requests)
        return made
