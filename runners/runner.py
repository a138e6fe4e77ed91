"""What the runners of all modes share: settings, life, and the verbs that callers use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import torch

from graphkit.attention import AttentionBackend
from graphkit.buffers import InputBuffers, Inputs, capacity_of
from graphkit.config import BufferSizes
from graphkit.errors import ConfigError, ReplayError
from graphkit.graphs import Backend, SizeTable, backend_for, environment
from graphkit.records import CaptureRecord, ReplayStats, SizeRecord
from graphkit.runners.capturing import Capturing
from graphkit.runners.dispatch import Decision, Dispatch
from graphkit.runners.outputs import Output
from graphkit.runners.parts import Parts
from graphkit.runners.replayer import Replayer
from graphkit.runners.staged import StagedBatch
from graphkit.runners.step import Step
from graphkit.spec import ForwardMode, SpecConfig

OutputT = TypeVar("OutputT", bound=Output)


class Runner(Generic[OutputT]):
    """Captures a forward once per batch size and replays it for live batches.

    A replay writes one mailbox slot and launches one graph; the graph's first node refreshes the
    inputs and pads them.

    Life: ``planned`` -> ``capture()`` -> ``captured`` -> ``close()`` -> ``closed``. A context
    manager, which closes. For one thread at a time; replays may come from several streams, each
    then waits for the one before.

    Args:
        forward: The model's step: takes the mode's inputs, padded to a captured size, and returns
            the mode's output for every row. Runs at capture, and for batches that fall back.
        spec: How the algorithm drafts and verifies.
        sizes: How large the buffers must be.
        batch_sizes: Sizes to capture; ``None`` takes the field's list up to the largest.
        device: ``auto``, ``cpu`` or ``cuda``.
        backend: A backend to share or to keep apart; ``None`` takes the device's.
        attention: Makes ``inputs.attention``; ``None`` if the forward brings its own.
        multiple_of: Captured sizes are multiples of it.
        optional: Optional fields that every batch will bring; ``None`` takes what ``spec`` implies.
        inputs_type: A subclass of the mode's inputs that declares further fields.
        bound: Storage of fields that another graph writes in place; batches leave them out.
        state: Tensors that a step changes; capturing leaves them as they were.

    Raises:
        ConfigError: A setting contradicts another one, or the device.
        DeviceError: There is no such device.
    """

    mode: ClassVar[ForwardMode]
    attention_mode: ClassVar[ForwardMode | None] = None
    """What the attention backend knows ``mode`` as, if not by that name."""
    buffers_type: ClassVar[type[InputBuffers]]
    output_type: ClassVar[type[Any]]
    step_type: ClassVar[type[Step[Any]]] = Step
    varies: ClassVar[bool] = False
    """Whether a request may have fewer rows than ``tokens_per_request``."""
    may_stay_eager: ClassVar[bool] = False
    """Whether an attention backend without support makes batches fall back instead of an error."""

    def __init__(
        self,
        forward: Any,
        *,
        spec: SpecConfig,
        sizes: BufferSizes,
        batch_sizes: Iterable[int] | None = None,
        device: torch.device | str = "auto",
        backend: Backend | None = None,
        attention: AttentionBackend | None = None,
        multiple_of: int = 1,
        optional: Collection[str] | None = None,
        inputs_type: type[Inputs] | None = None,
        bound: Mapping[str, torch.Tensor] | None = None,
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.spec, self.sizes, self.attention = spec, sizes, attention
        self.table = SizeTable(sizes.max_batch_size, batch_sizes, multiple_of=multiple_of)
        self.backend = backend_for(device, backend)
        self.device = self.backend.device
        self.tokens_per_request = self.width()
        self._stays_eager = "" if attention is None else self._adopt(attention)
        self.buffers = self.buffers_type(
            capacity_of(
                spec,
                sizes,
                requests=self.table.largest,
                tokens_per_request=self.tokens_per_request,
                seq_len_fill=1 if attention is None else attention.seq_len_fill_value,
                varies=self.varies,
            ),
            self.device,
            inputs_type=inputs_type,
            optional=self.implied_fields() if optional is None else optional,
            without=self.fields_without_use(),
            bound=bound,
            is_alive=self.backend.is_alive,
        )
        self.life: Literal["planned", "captured", "closed"] = "planned"
        self._state = dict(state or {})
        self._parts: Parts[OutputT] = Parts(
            mode=self.mode,
            output_type=self.output_type,
            table=self.table,
            backend=self.backend,
            buffers=self.buffers,
            step=self._make_step(forward),
            dispatch=Dispatch(self.table, self.buffers, self._stays_eager),
            plan_on_host=self._host_plan(),
        )
        self._replayer: Replayer[OutputT] | None = None
        self._fallbacks: Counter[str] = Counter()

    def implied_fields(self) -> tuple[str, ...]:
        """Optional fields that the settings imply."""
        return ()

    def fields_without_use(self) -> tuple[str, ...]:
        """Fields that the settings make meaningless; nothing is allocated for them."""
        return ()

    def _make_step(self, forward: Any) -> Step[OutputT]:
        return self.step_type(
            forward, self._attention_mode, self.spec, self.output_type, self.buffers, self.attention
        )

    def width(self) -> int:
        """Rows per request (the field's num_tokens_per_bs)."""
        return self.spec.tokens_per_request(self.mode)

    @property
    def _attention_mode(self) -> ForwardMode:
        return self.attention_mode or self.mode

    def _adopt(self, attention: AttentionBackend) -> str:
        """Prepare the backend; returns why it cannot serve graphs, if that is no error."""
        sizes = replace(self.sizes, max_batch_size=self.table.largest)
        if attention.supports(self._attention_mode):
            attention.init_state(sizes, self.table.largest * self.tokens_per_request)
            return ""
        fact = (
            f"attention backend {type(attention).__name__} does not support "
            f"{self._attention_mode.name}"
        )
        if self.may_stay_eager:
            return f"{fact} graphs"
        raise ConfigError(
            f"{fact}. Pass one that does, or attention=None and attend in the forward.",
            field="attention",
        )

    def capture(self, progress: Callable[[SizeRecord], None] | None = None) -> CaptureRecord:
        """Capture every size, largest first.

        A runner whose attention backend does not support graphs of its mode, where that is no
        error, makes none: the record then has no sizes, and every batch falls back.

        Args:
            progress: Called after each size.

        Raises:
            CaptureError: A size cannot be captured. Nothing of the attempt remains: the runner is
                still ``planned`` and may capture again.
            ReplayError: The runner is not ``planned``.
        """
        if self.life != "planned":
            raise ReplayError(f"runner is {self.life}: capture() needs planned. Make a new one.")
        capturing = Capturing(self._parts, self._state)
        if self._stays_eager:
            record = capturing.no_size()
        else:
            graphs, record = capturing.every_size(progress or (lambda _size: None))
            self._replayer = Replayer(self._parts, graphs)
            self.life = "captured"
        return CaptureRecord(
            target=self._parts.step.name,
            backend=self.backend.name,
            environment=environment(self.device),
            modes=(record,),
        )

    def close(self) -> None:
        """Give all graphs back. May be called again; outputs must not be used any more."""
        if self._replayer is not None:
            self._replayer.close()
        self.life = "closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def replay(
        self, batch: Any, *, padded_batch_size: int | None = None, clone: bool = False
    ) -> OutputT:
        """Replay the graph of the smallest size that holds the batch.

        Enqueues on the current stream; neither synchronises nor allocates device memory. Waits
        only while as many replays as the mailbox has slots are in flight.

        Args:
            batch: The mode's inputs with live rows: device tensors, CPU tensors or numpy arrays.
                Device tensors are read in stream order and may be dropped at once.
            padded_batch_size: A captured size to run at instead of the smallest.
            clone: Whether to copy the output out of graph memory.

        Returns:
            The live rows; aliases graph memory, valid until the next replay of that pool.

        Raises:
            InputError: A field is missing or wrong; its name is in the text.
            SizeError: The batch is larger than the largest size.
            ReplayError: The runner is not ``captured``.
        """
        output = self._captured("replay").replay(batch, padded_batch_size)
        return output.clone() if clone else output

    def stage(self, batch_size: int, num_tokens: int | None = None) -> StagedBatch[OutputT]:
        """The next mailbox slot, for the scheduler to write into directly.

        Args:
            batch_size: Live requests.
            num_tokens: Live rows, where they vary; every row of every request if left out.

        Raises:
            InputError: ``num_tokens`` is not what the mode has.
            SizeError: The batch is larger than the largest size, or empty.
            ReplayError: The runner is not ``captured``, or its attention backend plans on the host.
        """
        return self._captured("stage").stage(batch_size, num_tokens)

    def run(self, batch: Any, *, clone: bool = False) -> OutputT:
        """Replay the batch, or fall back and count the reason.

        Raises:
            InputError: A field is missing or wrong, so that there is no eager way either.
            ReplayError: The runner is closed.
        """
        miss = self._parts.dispatch.miss(batch, self.life)
        if miss is None:
            return self.replay(batch, clone=clone)
        if not miss.has_eager_way:
            raise ReplayError(self._parts.dispatch.explain(miss, batch, self.life))
        output = self.fall_back(batch)
        if batch.batch_size:  # an idle batch asks for nothing, so it misses nothing
            self._fallbacks[miss.value] += 1
        return output

    def fall_back(self, batch: Any) -> OutputT:
        """Run the forward on the live rows alone, without padding and without a graph.

        Allocates, and may synchronise as the forward does.

        Raises:
            InputError: A field is missing or wrong; its name is in the text.
            OutputError: The forward returned something else than its mode's output.
        """
        if batch.batch_size:
            return self._parts.step.unpadded(batch)
        if self.life == "captured":
            return self._captured("fall_back").idle()
        empty: OutputT = self.output_type.empty(self.sizes, self.device)
        return empty

    def can_replay(self, batch: Any) -> Decision:
        """Whether ``replay`` takes the batch, and if not, why. Launches nothing."""
        return self._parts.dispatch.decide(batch, self.life)

    @property
    def shadow(self) -> Literal["padded"] | None:
        """``"padded"`` makes replays run the identical padded path without the graph."""
        return self._captured("shadow").shadow

    @shadow.setter
    def shadow(self, way: Literal["padded"] | None) -> None:
        if way not in ("padded", None):
            raise ConfigError(f"shadow is 'padded' or None, got {way!r}.", field="shadow")
        self._captured("shadow").shadow = way

    @property
    def stats(self) -> ReplayStats:
        """What was replayed and what fell back so far; also after ``close``."""
        by_size, padded = self._replayer.count() if self._replayer else (Counter[int](), 0)
        return ReplayStats(
            replays=by_size.total(),
            padded_rows=padded,
            fallbacks=dict(self._fallbacks),
            replays_by_size=dict(sorted(by_size.items())),
        )

    def _captured(self, what: str) -> Replayer[OutputT]:
        if self._stays_eager and self.life != "closed":
            raise ReplayError(f"{self._stays_eager}: {what} needs a graph. Use run(batch).")
        if self.life != "captured":
            remedy = "Call capture() first." if self.life == "planned" else "Make a new one."
            raise ReplayError(f"runner is {self.life}: {what} needs captured. {remedy}")
        assert self._replayer is not None, "a captured runner has a replayer"
        return self._replayer

    def _host_plan(self) -> Callable[[Any, int], None] | None:
        hook = getattr(self.attention, "before_replay", None)
        if hook is None:
            return None
        mode = self._attention_mode
        return lambda batch, padded_batch_size: hook(mode, batch, padded_batch_size)
