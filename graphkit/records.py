"""What graphkit measured and counted, as plain data with JSON both ways. Needs no torch.

Everything that people see is made from these, so it works without a GPU. A record carries its
schema version; a reader refuses a newer one instead of guessing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graphkit.record_json import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where a record was made. Empty text stands for what does not exist there."""

    device: str
    torch: str
    triton: str
    cuda: str
    driver: str
    graphkit: str


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
class ModeRecord:
    """All sizes of one runner.

    Attributes:
        mode: The forward mode's name.
        tokens_per_request: Rows per request.
        host_planned: Whether the attention backend plans on the host before each replay, outside
            the graph.
        input_bytes: Bytes of the input arena.
        sizes: Ascending; none if the mode stays eager.
        stays_eager: Why, as a sentence; empty if it does not.
    """

    mode: str
    tokens_per_request: int
    host_planned: bool
    input_bytes: int
    sizes: tuple[SizeRecord, ...]
    stays_eager: str = ""


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
    """

    KIND: ClassVar[str] = "capture"
    target: str
    backend: str
    environment: Environment
    modes: tuple[ModeRecord, ...]
    mismatches: tuple[Mismatch, ...] = ()

    @property
    def sizes(self) -> tuple[SizeRecord, ...]:
        """The sizes of all modes, in their order."""
        return tuple(size for mode in self.modes for size in mode.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of a benchmark.

    Attributes:
        name: What was measured.
        value: The figure.
        unit: Its unit, such as ``us``; ``x`` for a ratio.
        bar: The largest value that we allow ourselves; ``None`` for what is only shown.
    """

    name: str
    value: float
    unit: str
    bar: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport(Record):
    """What a benchmark measured, in one run on one machine.

    Attributes:
        name: The benchmark.
        environment: Where.
        settings: What was run: sizes and counts.
        measures: The figures, rivals beside ours.
    """

    KIND: ClassVar[str] = "bench"
    name: str
    environment: Environment
    settings: Mapping[str, int | str]
    measures: tuple[Measure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What became of one prompt.

    Attributes:
        prompt, text: What was given, and what the model made of it; U+FFFD for what is no UTF-8.
        finish_reason: Why it ended.
        tokens: Tokens made, one that ended the text included.
        accept_length: Mean tokens per verify step, bonus included; 0 if there was none.
    """

    prompt: str
    text: str
    finish_reason: str
    tokens: int
    accept_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRecord(Record):
    """What ``graphkit generate`` made, with which settings, and how fast.

    Attributes:
        text: That of the first completion.
        completions: One per prompt, in their order.
        environment, backend: Where; ``cuda`` or ``recorder``.
        algorithm, topk, num_steps, num_draft_tokens, generation: How drafts were made and verified.
        temperature, seed: How tokens were chosen.
        new_tokens: Tokens of all completions.
        seconds: Wall time from the first prompt read to the last token; no loading, no capture.
        tokens_per_second: Their ratio.
        accept_length: Mean tokens per request and verify step, bonus included.
        capture_seconds: Time that all captures took; ``None`` if nothing was captured.
        replays: Graph replays by forward mode.
        fallbacks: Eager runs by forward mode and reason; modes without any are left out.
    """

    KIND: ClassVar[str] = "generate"
    text: str
    completions: tuple[Completion, ...]
    environment: Environment
    backend: str
    algorithm: str
    topk: int
    num_steps: int
    num_draft_tokens: int
    generation: str
    temperature: float
    seed: int
    new_tokens: int
    seconds: float
    tokens_per_second: float
    accept_length: float
    capture_seconds: float | None
    replays: Mapping[str, int]
    fallbacks: Mapping[str, Mapping[str, int]]


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
