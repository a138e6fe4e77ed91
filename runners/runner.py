"""What the runners of all modes share: life, and the verbs that callers use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar

import torch
from torch import nn

from graphkit.errors import ConfigError, ReplayError, SizeError
from graphkit.graphs import Attribution, caller_line, environment, inspect_graph
from graphkit.records import CaptureRecord, GraphRecord, ReplayStats, SizeRecord
from graphkit.runners.capturing import Capturing
from graphkit.runners.dispatch import Decision
from graphkit.runners.outputs import Output
from graphkit.runners.planned import Planned
from graphkit.runners.replayer import Replayer
from graphkit.runners.staged import StagedBatch

OutputT = TypeVar("OutputT", bound=Output)


class Runner(Planned[OutputT]):
    """Captures a forward once per batch size and replays it for live batches.

    A replay writes one mailbox entry and launches one graph; the graph's first node refreshes the
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
        optional_fields: Optional fields that every batch brings; ``None`` takes what ``spec``
            implies.
        inputs_type: A subclass of the mode's inputs that declares further fields.
        bound_fields: Storage of fields that another graph writes in place; batches leave them out.
        mutable_state: Tensors that a step changes; capturing leaves them as they were.

    Raises:
        ConfigError: A setting contradicts another one, or the device.
        DeviceError: There is no such device.
    """

    status: Literal["planned", "captured", "closed"] = "planned"
    _replayer: Replayer[OutputT] | None = None
    _captured_at = ""

    def capture(
        self,
        progress: Callable[[SizeRecord], None] | None = None,
        *,
        attribution: Attribution | None = None,
    ) -> CaptureRecord:
        """Capture every size, largest first.

        A runner whose attention backend does not support graphs of its mode, where that is no
        error, makes none: the record then has no sizes, and every batch falls back.

        Args:
            progress: Called after each size.
            attribution: Notes which module, operation and line makes each node, for ``inspect``.
                Captures take longer with it; replays do not.

        Raises:
            CaptureError: A size cannot be captured. Nothing of the attempt remains: the runner is
                still ``planned`` and may capture again.
            ReplayError: The runner is not ``planned``.
        """
        if self.status != "planned":
            raise ReplayError(f"runner is {self.status}: capture() needs planned. Make a new one.")
        self._captured_at = caller_line()
        capturing = Capturing(self.parts, self.mutable_state, attribution)
        if self.eager_reason:
            record = capturing.no_size(self.eager_reason)
        else:
            graphs, record = capturing.every_size(progress or (lambda _size: None))
            self._replayer = Replayer(self.parts, graphs)
            self.status = "captured"
        return CaptureRecord(
            target=self.parts.step.name,
            backend=self.backend.name,
            environment=environment(self.device),
            modes=(record,),
        )

    def close(self) -> None:
        """Give all graphs back. May be called again; outputs must not be used any more."""
        if self._replayer is not None:
            self._replayer.close()
        self.status = "closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def replay(
        self, batch: Any, *, padded_batch_size: int | None = None, clone: bool = False
    ) -> OutputT:
        """Replay the graph of the smallest size that holds the batch.

        Enqueues on the current stream; neither synchronises nor allocates device memory. Waits
        only while as many replays as the mailbox has entries are in flight.

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
        output = self.replayer("replay").replay(batch, padded_batch_size)
        return output.clone() if clone else output

    def stage(self, batch_size: int, num_tokens: int | None = None) -> StagedBatch[OutputT]:
        """The next mailbox entry, for the scheduler to write into directly.

        Args:
            batch_size: Live requests.
            num_tokens: Live rows, where they vary; every row of every request if left out.

        Raises:
            InputError: ``num_tokens`` is not what the mode has.
            SizeError: The batch is larger than the largest size, or empty.
            ReplayError: The runner is not ``captured``, or its attention backend plans on the host.
        """
        return self.replayer("stage").stage(batch_size, num_tokens)

    def inspect(
        self,
        batch_size: int,
        *,
        weights: nn.Module | Mapping[str, torch.Tensor] | None = None,
        replay: Callable[[], object] | None = None,
    ) -> GraphRecord:
        """Look into the graph of a captured size; see ``graphkit.inspect_graph``.

        Pointers are named by input field, by ``mutable_state``, by the attributes of the attention
        backend, and by ``weights``.

        Args:
            batch_size: A captured size.
            weights: The model, or its weights by name.
            replay: Replays a batch at that size; given, some replays are measured.

        Raises:
            InspectError: See ``inspect_graph``.
            ReplayError: The runner is not ``captured``.
            SizeError: No graph of that size was captured.
        """
        graphs = self.replayer("inspect").graphs
        if batch_size not in graphs:
            raise SizeError(
                f"no graph of batch size {batch_size}: captured are {list(self.table)}.",
                batch_size=batch_size,
                largest=self.table.largest,
            )
        record = inspect_graph(
            graphs[batch_size],
            names=self.memory_names(weights),
            name=f"{self.mode.name} {batch_size}",
            captured_at=self._captured_at,
            replay=replay,
        )
        return replace(record, mode=self.mode.name, batch_size=batch_size)

    def run(self, batch: Any, *, clone: bool = False) -> OutputT:
        """Replay the batch, or fall back and count the reason.

        Raises:
            InputError: A field is missing or wrong, so that there is no eager way either.
            ReplayError: The runner is closed.
        """
        miss = self.parts.dispatch.miss(batch, self.status)
        if miss is None:
            return self.replay(batch, clone=clone)
        if not miss.has_eager_way:
            raise ReplayError(self.parts.dispatch.explain(miss, batch, self.status))
        output = self.fall_back(batch)
        if batch.batch_size:  # an idle batch asks for nothing, so it misses nothing
            self.parts.dispatch.fallbacks[miss.value] += 1
        return output

    def fall_back(self, batch: Any, *, without: Collection[str] = ()) -> OutputT:
        """Run the forward on the live rows alone, without padding and without a graph.

        Allocates, and may synchronise as the forward does.

        Args:
            batch: As for ``replay``.
            without: Optional fields that this batch leaves out on purpose, such as the mask of a
                tree where a prompt is read.

        Raises:
            InputError: A field is missing or wrong; its name is in the text.
            OutputError: The forward returned something else than its mode's output.
        """
        if batch.batch_size:
            return self.parts.step.unpadded(batch, without)
        self.parts.dispatch.check_idle(batch)
        if self.status == "captured":
            return self.replayer("fall_back").idle()
        empty: OutputT = self.output_type.empty(self.spec, self.sizes, self.device)
        return empty

    def can_replay(self, batch: Any) -> Decision:
        """Whether ``replay`` takes the batch, and if not, why. Launches nothing."""
        return self.parts.dispatch.decide(batch, self.status)

    @property
    def shadow(self) -> Literal["padded"] | None:
        """``"padded"`` makes replays run the identical padded path without the graph."""
        return self.replayer("shadow").shadow

    @shadow.setter
    def shadow(self, way: Literal["padded"] | None) -> None:
        if way not in ("padded", None):
            raise ConfigError(f"shadow is 'padded' or None, got {way!r}.", field="shadow")
        self.replayer("shadow").shadow = way

    @property
    def stats(self) -> ReplayStats:
        """What was replayed and what fell back so far; also after ``close``."""
        by_size, padded = self._replayer.count() if self._replayer else (Counter[int](), 0)
        return ReplayStats(
            replays=by_size.total(),
            padded_rows=padded,
            fallbacks=dict(self.parts.dispatch.fallbacks),
            replays_by_size=dict(sorted(by_size.items())),
        )

    def replayer(self, what: str) -> Replayer[OutputT]:
        """What replays the captured graphs; ``what`` needs it, for the text of an error.

        Raises:
            ReplayError: The runner is not ``captured``.
        """
        if self.eager_reason and self.status != "closed":
            raise ReplayError(f"{self.eager_reason}: {what} needs a graph. Use run(batch).")
        if self.status != "captured":
            remedy = "Call capture() first." if self.status == "planned" else "Make a new one."
            raise ReplayError(f"runner is {self.status}: {what} needs captured. {remedy}")
        assert self._replayer is not None, "a captured runner has a replayer"
        return self._replayer
