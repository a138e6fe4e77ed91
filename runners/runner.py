"""The machinery that the runners of all modes share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import torch

from graphkit.attention import AttentionBackend
from graphkit.buffers import InputBuffers, Inputs, admit, capacity_of
from graphkit.config import BufferSizes
from graphkit.errors import ConfigError, GraphkitError, InputError, ReplayError, SizeError
from graphkit.graphs.environment import environment
from graphkit.graphs import Backend, CapturedGraph, SizeTable, backend_for
from graphkit.records import CaptureRecord, ModeRecord, ReplayStats, SizeRecord
from graphkit.runners.capturing import capture_all
from graphkit.runners.decision import Decision, Reason
from graphkit.runners.eager import unpadded
from graphkit.runners.fit import Fit
from graphkit.runners.outputs import Output
from graphkit.runners.staged import StagedBatch
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
        optional: Optional fields that every batch will bring.
        inputs_type: A subclass of the mode's inputs that declares further fields.
        bound: Storage of fields that another graph writes in place; batches leave them out.
        state: Tensors that a step changes; capturing leaves them as they were.

    Raises:
        ConfigError: A setting contradicts another one, or the device.
        DeviceError: There is no such device.
    """

    mode: ClassVar[ForwardMode]
    buffers_type: ClassVar[type[InputBuffers]]
    output_type: ClassVar[type[Output]]

    def __init__(
        self,
        forward: Callable[[Any], OutputT],
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
        self.forward, self.spec, self.sizes, self.attention = forward, spec, sizes, attention
        self.table = SizeTable(sizes.max_batch_size, batch_sizes, multiple_of=multiple_of)
        self.backend = backend_for(device, backend)
        self.device = self.backend.device
        self.tokens_per_request = spec.tokens_per_request(self.mode)
        if attention is not None:
            self._adopt(attention)
        self.buffers = self.buffers_type(
            capacity_of(
                spec,
                sizes,
                requests=self.table.largest,
                tokens_per_request=self.tokens_per_request,
                seq_len_fill=1 if attention is None else attention.seq_len_fill_value,
            ),
            self.device,
            inputs_type=inputs_type,
            optional=self.default_optional() if optional is None else optional,
            bound=bound,
            is_alive=self.backend.is_alive,
        )
        self._mailbox = self.buffers.mailbox
        self.life: Literal["planned", "captured", "closed"] = "planned"
        self.shadow: Literal["padded"] | None = None
        """``"padded"`` makes replays run the identical padded path without the graph."""
        self._state = dict(state or {})
        self._before_replay = getattr(attention, "before_replay", None)
        self._graphs: dict[int, CapturedGraph] = {}
        self._fits: dict[tuple[int, int | None], Fit] = {}
        self._fallbacks: Counter[str] = Counter()

    def default_optional(self) -> tuple[str, ...]:
        """Optional fields that the settings imply."""
        return ()

    def _adopt(self, attention: AttentionBackend) -> None:
        if not attention.supports(self.mode):
            raise ConfigError(
                f"attention backend {type(attention).__name__} does not support {self.mode.name}. "
                "Pass one that does, or attention=None and attend in the forward.",
                field="attention",
            )
        sizes = replace(self.sizes, max_batch_size=self.table.largest)
        attention.init_state(sizes, self.table.largest * self.tokens_per_request)

    # -- life ------------------------------------------------------------------------------------

    def capture(self, progress: Callable[[SizeRecord], None] | None = None) -> CaptureRecord:
        """Capture every size, largest first.

        Args:
            progress: Called after each size.

        Raises:
            CaptureError: A size cannot be captured. Nothing of the attempt remains: the runner is
                still ``planned`` and may capture again.
            ReplayError: The runner is not ``planned``.
        """
        if self.life != "planned":
            raise ReplayError(f"runner is {self.life}: capture() needs 'planned'. Make a new one.")
        self._graphs, sizes = capture_all(
            self.table,
            self.backend,
            self.buffers,
            lambda size: self._step(size).tensors(),
            mode=self.mode.name,
            state=self._state,
            progress=progress or (lambda _size: None),
        )
        self.life = "captured"
        return CaptureRecord(
            target=getattr(self.forward, "__qualname__", type(self.forward).__name__),
            backend=self.backend.name,
            environment=environment(self.device),
            modes=(
                ModeRecord(
                    mode=self.mode.name,
                    tokens_per_request=self.tokens_per_request,
                    host_planned=self._before_replay is not None,
                    input_bytes=self.buffers.arena.nbytes,
                    sizes=sizes,
                ),
            ),
        )

    def close(self) -> None:
        """Give all graphs back. May be called again; outputs must not be used any more."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs, self._fits = {}, {}
        self.life = "closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- a batch's way ---------------------------------------------------------------------------

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
        fit = self._fits.get((batch.batch_size, padded_batch_size))
        if fit is None:
            if batch.batch_size == 0:
                return self._idle()
            fit = self._make_fit(batch.batch_size, padded_batch_size)
        for name in self.buffers.absent:
            if getattr(batch, name) is not None:
                raise InputError(_not_captured(name), field=name)
        slot = self._mailbox.claim()
        in_flight = fit.write(slot, batch)
        if self._before_replay is not None:
            self._before_replay(self.mode, batch, fit.padded_batch_size)
        output = self._launch(fit, slot, in_flight)
        return output.clone() if clone else output

    def stage(self, batch_size: int) -> StagedBatch[OutputT]:
        """The next mailbox slot, for the scheduler to write into directly.

        Raises:
            SizeError: The batch is larger than the largest size, or empty.
            ReplayError: The runner is not ``captured``, or its attention backend plans on the host
                and so needs a whole batch.
        """
        if self._before_replay is not None:
            raise ReplayError(
                f"{type(self.attention).__name__} plans each batch on the host. Use replay(batch)."
            )
        fit = self._fits.get((batch_size, None)) or self._make_fit(batch_size, None)
        slot = self._mailbox.claim()
        self.buffers.pad_slot(slot)
        return StagedBatch(self, fit, slot, self._mailbox.sequence)

    def run(self, batch: Any, *, clone: bool = False) -> OutputT:
        """Replay the batch, or run the forward without a graph and count the reason.

        Raises:
            InputError: A field is missing or wrong, so that there is no eager way either.
            ReplayError: The runner is closed.
        """
        miss = self._miss(batch)
        if miss is None:
            return self.replay(batch, clone=clone)
        if not miss.has_eager_way:
            raise ReplayError(self._explain(miss, batch))
        output = self.fall_back(batch)
        self._fallbacks[miss.value] += 1
        return output

    def fall_back(self, batch: Any) -> OutputT:
        """Run the forward on the live rows alone, without padding and without a graph.

        Allocates, and may synchronise as the forward does.

        Raises:
            InputError: A field is missing or wrong; its name is in the text.
        """
        if batch.batch_size == 0:
            return self._idle()
        return self._run(unpadded(batch, self.buffers.inputs, self.buffers.capacity, self.device))

    def can_replay(self, batch: Any) -> Decision:
        """Whether ``replay`` takes the batch, and if not, why. Launches nothing."""
        miss = self._miss(batch)
        if miss is not None:
            return Decision(False, self._explain(miss, batch), None, miss)
        if batch.batch_size == 0:
            return Decision(True, "", 0)
        try:
            for layout in self.buffers.layouts:
                if layout.name not in self.buffers.bound:
                    rows = self.buffers.capacity.rows(layout.field.axis, batch.batch_size)
                    admit(layout, getattr(batch, layout.name), rows, self.device)
        except GraphkitError as error:
            return Decision(False, str(error), None, Reason.BAD_FIELD)
        return Decision(True, "", self.table.fit(batch.batch_size))

    @property
    def stats(self) -> ReplayStats:
        """What was replayed and what fell back so far."""
        by_size: Counter[int] = Counter()
        padded = 0
        for fit in self._fits.values():
            by_size[fit.padded_batch_size] += fit.replays
            padded += fit.replays * (fit.padded_batch_size - fit.requests)
        return ReplayStats(
            replays=by_size.total(),
            padded_rows=padded * self.tokens_per_request,
            fallbacks=dict(self._fallbacks),
            replays_by_size=dict(sorted(by_size.items())),
        )

    # -- inside ----------------------------------------------------------------------------------

    def _launch(self, fit: Fit, slot: int, in_flight: list[Any]) -> OutputT:
        mailbox = self._mailbox
        mailbox.post(slot, fit.requests, fit.tokens)
        if self.shadow is None:
            fit.launch()
            output: Any = fit.output
        else:
            self.backend.order()
            output = self._step(fit.padded_batch_size).live(fit.requests, fit.tokens)
        mailbox.commit(slot, in_flight)
        fit.replays += 1
        return output  # type: ignore[no-any-return]

    def _replay_staged(
        self, fit: Fit, slot: int, sequence: int, in_flight: list[Any], clone: bool
    ) -> OutputT:
        if sequence != self._mailbox.sequence or self.life != "captured":
            raise ReplayError(
                "this staged batch is over: its slot was replayed or taken by another batch, or "
                "the runner was closed. Call stage() again."
            )
        output = self._launch(fit, slot, in_flight)
        return output.clone() if clone else output

    def _step(self, size: int) -> OutputT:
        """What a captured graph of this size does."""
        self.buffers.refresh(size)
        return self._run(self.buffers.view(size))

    def _run(self, inputs: Inputs) -> OutputT:
        with torch.no_grad():
            if self.attention is not None:
                inputs.attention = self.attention.metadata(self.mode, inputs)
            output = self.forward(inputs)
        return self.output_type.checked(output, inputs.batch_size, inputs.num_tokens)

    def _make_fit(self, requests: int, size: int | None) -> Fit:
        if self.life != "captured":
            raise ReplayError(
                f"runner is {self.life}: replay needs 'captured'. "
                + ("Call capture() first." if self.life == "planned" else "Make a new one.")
            )
        padded = self.table.fit(requests) if size is None else size
        if padded not in self._graphs or padded < requests:
            raise SizeError(
                f"{requests} requests cannot run at batch size {padded}: "
                f"captured are {list(self.table)}.",
                batch_size=requests,
                largest=self.table.largest,
            )
        graph = self._graphs[padded]
        fit = Fit(self.buffers, requests, padded, graph, self.output_type(**graph.output))
        self._fits[requests, size] = fit
        return fit

    def _idle(self) -> OutputT:
        """Outputs without rows; nothing is launched."""
        if self.life != "captured":
            return self.output_type.empty(self.sizes, self.device)  # type: ignore[return-value]
        largest = self.output_type(**self._graphs[self.table.largest].output)
        return largest.live(0, 0)  # type: ignore[return-value]

    def _miss(self, batch: Any) -> Reason | None:
        if self.life != "captured":
            return Reason.CLOSED if self.life == "closed" else Reason.NOT_CAPTURED
        requests = batch.batch_size
        if not self.table.fits(requests):
            return Reason.BATCH_TOO_LARGE
        if batch.num_tokens != requests * self.tokens_per_request:
            return Reason.WRONG_WIDTH
        for name in self.buffers.absent:
            if getattr(batch, name) is not None:
                return Reason.FIELD_NOT_CAPTURED
        return None

    def _explain(self, miss: Reason, batch: Any) -> str:
        requests, tokens = batch.batch_size, batch.num_tokens
        if miss is Reason.BATCH_TOO_LARGE:
            return f"batch of {requests} requests; the largest captured size is {self.table.largest}"
        if miss is Reason.WRONG_WIDTH:
            return (
                f"{tokens} tokens in {requests} requests; "
                f"captured are {self.tokens_per_request} tokens per request"
            )
        if miss is Reason.FIELD_NOT_CAPTURED:
            return _not_captured(
                next(n for n in self.buffers.absent if getattr(batch, n) is not None)
            )
        return f"runner is {self.life}, not 'captured'"


def _not_captured(name: str) -> str:
    return f"field {name!r} was not captured. Pass optional=[{name!r}] to the runner."
