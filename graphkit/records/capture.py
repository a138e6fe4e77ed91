"""What a capture made, per mode and size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.environment import Environment
from graphkit.records.graph import GraphRecord
from graphkit.records.json_text import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStats:
    """What a runner did so far.

    Attributes:
        replays: Replays, idle batches not counted.
        padded_rows: Rows computed for nobody, in tokens.
        fallbacks: Eager runs by reason.
        replays_by_size: Replays by captured batch size.
    """

    replays: int
    padded_rows: int
    fallbacks: Mapping[str, int]
    replays_by_size: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRecord:
    """One captured size.

    Attributes:
        batch_size: Requests.
        num_tokens: Rows.
        num_nodes: Graph nodes; operations on the recorder.
        capture_ms: Host time of warm-ups, capture, instantiation and upload.
        pool_bytes: Bytes by which the pool grew.
        replay_us: Median time of a replay until its results are there; ``None`` if not measured.
        eager_us: The same of the forward on the same live batch without a graph.
        largest_difference: Largest absolute difference of any output on live rows from eager, over
            all live batches that were compared; ``None`` if none was.
        batches_compared: How many those were.
    """

    batch_size: int
    num_tokens: int
    num_nodes: int
    capture_ms: float
    pool_bytes: int
    replay_us: float | None = None
    eager_us: float | None = None
    largest_difference: float | None = None
    batches_compared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRecord:
    """One field of a runner's inputs.

    Attributes:
        field: Its name.
        dtype: Such as ``int64``.
        shape: At the largest size.
        axis: ``request``, ``token`` or ``none``: what its rows stand for.
        pad: What fills the rows that no live request has.
        address: Where it lies.
        size: Its bytes.
        is_bound: Whether another graph writes it in place, so that nothing is copied.
        meaning: One line.
    """

    field: str
    dtype: str
    shape: tuple[int, ...]
    axis: str
    pad: float
    address: int
    size: int
    is_bound: bool
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRecord:
    """All sizes of one runner.

    Attributes:
        mode: The forward mode's name.
        tokens_per_request: Rows per request.
        host_planned: Whether the attention backend plans on the host before each replay, outside
            the graph.
        input_bytes: Bytes of the input arena.
        sizes: Ascending; none if the mode stays eager.
        eager_reason: Why, as a sentence; empty if it does not.
        buffers: The inputs' fields, in the order of their declaration.
        stats: What was replayed and what fell back until the record was made.
    """

    mode: str
    tokens_per_request: int
    host_planned: bool
    input_bytes: int
    sizes: tuple[SizeRecord, ...]
    eager_reason: str = ""
    buffers: tuple[BufferRecord, ...] = ()
    stats: ReplayStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A live row whose replay is not what it should be.

    Attributes:
        field: The output field.
        row: Its row.
        request: The request that the row belongs to.
        expected: The value without a graph.
        got: The value that the replay gave.
        kind: What that says of the bug.
        mode: The forward mode's name.
        batch_size: Live requests.
        padded_batch_size: The captured size.
    """

    field: str
    row: int
    request: int
    expected: float
    got: float
    kind: str = ""
    mode: str = ""
    batch_size: int = 0
    padded_batch_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRecord(Record):
    """What a capture made.

    Attributes:
        target: Name of what was captured.
        backend: ``cuda`` or ``recorder``.
        environment: Where.
        modes: One per runner.
        mismatches: Replays that were wrong; empty also if none was compared.
        graphs: What is inside the graphs; empty unless asked for.
    """

    KIND: ClassVar[str] = "capture"
    target: str
    backend: str
    environment: Environment
    modes: tuple[ModeRecord, ...]
    mismatches: tuple[Mismatch, ...] = ()
    graphs: tuple[GraphRecord, ...] = ()

    @property
    def sizes(self) -> tuple[SizeRecord, ...]:
        """The sizes of all modes, in their order."""
        return tuple(size for mode in self.modes for size in mode.sizes)
