"""Result of a capture, per mode and size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

from graphkit.records.graph import GraphRecord, check_graphs
from graphkit.records.record import Count, Duration, Environment, Integer, Real, Record
from graphkit.records.wrapper import WrapperRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStats:
    """Counts of a runner's replays and fallbacks.

    Attributes:
        replays: Number of replays, without idle batches.
        padded_rows: Rows (tokens) of padding that were computed.
        fallbacks: Eager runs by reason.
        replays_by_size: Replays by captured batch size.
        live_sizes: Replays by number of live requests, without steps of device loops.
        agreements: Steps that several ranks agreed to run, if they agree.
        idle: Agreed steps in which this rank had no request and ran pads.
        drafted_lengths: Steps by drafts per request; empty with one draft length.
    """

    replays: Count
    padded_rows: Count
    fallbacks: Mapping[str, Count]
    replays_by_size: Mapping[Count, Count]
    live_sizes: Mapping[Count, Count] = field(default_factory=dict)
    agreements: Count = 0
    idle: Count = 0
    drafted_lengths: Mapping[Count, Count] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRecord:
    """One captured size.

    Attributes:
        batch_size: Number of requests.
        num_tokens: Number of rows.
        num_nodes: Number of graph nodes; of operations on the recorder.
        capture_ms: Host time of warm-ups, capture, instantiation and upload.
        pool_bytes: Bytes by which the pool grew.
        executable_bytes: Bytes that the driver allocated for the executable; 0 on the recorder.
        replay_us: Median time from a replay to its results; ``None`` if not measured.
        eager_us: Median time of the eager forward on the same live batch.
        largest_difference: Largest absolute difference of an output on live rows from eager, over
            all compared batches; ``None`` if none was compared.
        batches_compared: Number of live batches that were compared.
    """

    batch_size: Count
    num_tokens: Count
    num_nodes: Count
    capture_ms: Duration
    pool_bytes: Integer
    executable_bytes: Count = 0
    replay_us: Duration | None = None
    eager_us: Duration | None = None
    largest_difference: Real | None = None
    batches_compared: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRecord:
    """One field of a runner's inputs.

    Attributes:
        field: Name of the field.
        dtype: Data type, such as ``int64``.
        shape: Shape at the largest size.
        axis: Meaning of a row: ``request``, ``token`` or ``none``.
        pad: Value of the rows of padding.
        address: Device address.
        size: Size in bytes.
        is_bound: True if another graph writes it in place, so that nothing is copied.
        meaning: One line of description.
    """

    field: str
    dtype: str
    shape: tuple[Count, ...]
    axis: str
    pad: Real
    address: Count
    size: Count
    is_bound: bool
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBody:
    """The step of one size, and of one of several draft lengths, inside a device loop.

    Attributes:
        batch_size: Captured size.
        num_nodes: Number of graph nodes; of operations on the recorder.
        drafts: Most drafts per request; ``None`` with one draft length.
        rows: Rows of verify; ``None`` with one draft length.
        catches_up: Whether the draft model catches up on plain steps.
        replay_us: Time of a replay, by which draft lengths are chosen; ``None`` with one draft
            length. Counted work on the recorder.
        pool_bytes, executable_bytes: As for ``SizeRecord``.
    """

    batch_size: Count
    num_nodes: Count
    drafts: Count | None = None
    rows: Count | None = None
    catches_up: bool = False
    replay_us: Duration | None = None
    pool_bytes: Integer = 0
    executable_bytes: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRecord:
    """A device loop: a prologue, then ``WHILE again { SWITCH size { a step per size } }``.

    Attributes:
        kind: ``greedy`` for requests of temperature 0, ``sampled`` for all others.
        prologue_nodes: Number of nodes that run once per launch.
        bodies: In the order of the SWITCH; a single body has none.
        steps_compared: Steps of launches that were compared with replays of single steps.
        pool_bytes: Bytes by which the pool grew for the prologue; 0 for a loop that has the one of
            another loop.
        executable_bytes: Bytes that the driver allocated for the loop, its copies of the bodies
            included.
    """

    kind: str
    prologue_nodes: Count
    bodies: tuple[LoopBody, ...]
    steps_compared: Count = 0
    pool_bytes: Integer = 0
    executable_bytes: Count = 0

    @property
    def graph_bytes(self) -> int:
        """Bytes by which the pool grew for prologue and bodies."""
        return self.pool_bytes + sum(body.pool_bytes for body in self.bodies)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRecord:
    """All sizes of one runner.

    Attributes:
        mode: Name of the forward mode.
        tokens_per_request: Rows per request.
        host_planned: True if the attention backend plans on the host before each replay, outside
            the graph.
        input_bytes: Bytes of the input arena.
        sizes: Captured sizes, ascending; empty if the mode stays eager.
        eager_reason: Reason why the mode stays eager, or an empty string.
        buffers: Fields of the inputs, in the order of their declaration.
        stats: Counts of replays and fallbacks until the record was made.
        loops: Device loops over the step; empty without any.
    """

    mode: str
    tokens_per_request: Count
    host_planned: bool
    input_bytes: Count
    sizes: tuple[SizeRecord, ...]
    eager_reason: str = ""
    buffers: tuple[BufferRecord, ...] = ()
    stats: ReplayStats | None = None
    loops: tuple[LoopRecord, ...] = ()

    @property
    def graph_bytes(self) -> int:
        """Bytes by which the pool grew for all graphs, loops included."""
        return sum(graphs.pool_bytes for graphs in self.sizes) + sum(
            loop.graph_bytes for loop in self.loops
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A live row whose replay differs from the forward without a graph.

    Attributes:
        field: Name of the output field.
        row: Index of the row.
        request: Index of the request that the row belongs to.
        expected: Value without a graph.
        got: Value of the replay.
        ulps: Their distance in units in the last place of ``dtype``; ``None`` for integers.
        dtype: Dtype of these units, which the step computes in; empty for integers.
        kind: Class of the fault.
        mode: Name of the forward mode.
        batch_size: Number of live requests.
        padded_batch_size: Captured size.
        module, source: Module path and source line that caused it; empty if unknown.
    """

    field: str
    row: Count
    request: Count
    expected: Real
    got: Real
    ulps: Real | None = None
    dtype: str = ""
    kind: str = ""
    mode: str = ""
    batch_size: Count = 0
    padded_batch_size: Count = 0
    module: str = ""
    source: str = ""

    @property
    def distance(self) -> str:
        """The distance as text, such as ``3 ulp of bfloat16``; empty if there is none."""
        if self.ulps is None or not isfinite(self.ulps):
            return ""
        return f"{self.ulps:.3g} ulp of {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRecord(Record):
    """Result of a capture.

    Attributes:
        target: Name of the target.
        backend: ``cuda`` or ``recorder``.
        environment: Where it was captured.
        modes: One per runner.
        mismatches: Wrong rows; empty also if no replay was compared.
        graphs: Nodes of the graphs; empty if the capture was not inspected.
        wrapper: Comparison of the target with its model; ``None`` if it declares none.
    """

    KIND: ClassVar[str] = "capture"
    target: str
    backend: str
    environment: Environment
    modes: tuple[ModeRecord, ...]
    mismatches: tuple[Mismatch, ...] = ()
    graphs: tuple[GraphRecord, ...] = ()
    wrapper: WrapperRecord | None = None

    def check_contents(self) -> None:
        """Refuse graphs with invalid indices."""
        check_graphs(self.graphs)

    @property
    def title(self) -> str:
        """Name of the target."""
        return self.target

    @property
    def differs_from_model(self) -> bool:
        """Whether the logits of a row differ from the logits of the target's model."""
        return self.wrapper is not None and self.wrapper.difference is not None

    @property
    def sizes(self) -> tuple[SizeRecord, ...]:
        """The sizes of all modes, in their order."""
        return tuple(size for mode in self.modes for size in mode.sizes)
