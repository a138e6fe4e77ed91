"""A live batch size at a captured size, with everything that a replay of it needs at hand."""

from __future__ import annotations

from typing import Any

from graphkit.buffers import SLOTS, FieldWriter, InputBuffers
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
        graph: Any,
        output: Output,
    ) -> None:
        self.requests = requests
        self.tokens = requests * buffers.capacity.tokens_per_request
        self.padded_batch_size = padded_batch_size
        self.launch = graph.replay
        self.output = output.live(self.requests, self.tokens)
        self.replays = 0
        self._buffers = buffers
        self._writers: list[tuple[FieldWriter, ...] | None] = [None] * SLOTS

    def writers(self, slot: int) -> tuple[FieldWriter, ...]:
        """The writers of every field that a batch brings, for one slot."""
        made = self._writers[slot]
        if made is None:
            made = self._writers[slot] = self._buffers.writers(slot, self.requests)
        return made

    def write(self, slot: int, batch: Any) -> list[Any]:
        """Write a batch's rows into a slot; returns what must live until the device read them.

        Raises:
            InputError: A field cannot be taken. The slot may be written again.
        """
        in_flight = []
        for writer in self._writers[slot] or self.writers(slot):
            kept = writer.write(getattr(batch, writer.name))
            if kept is not None:
                in_flight.append(kept)
        return in_flight
