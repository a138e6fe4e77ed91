"""The whole speculative step as one graph, and many steps in one launch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.buffers import Axis, Rows, StepInputs, declare
from graphkit.config import BufferSizes, require_int
from graphkit.errors import ConfigError, InputError, ReplayError
from graphkit.graphs import (
    Attribution,
    Backend,
    CapturedGraph,
    LoopGraph,
    backend_for,
    scope,
)
from graphkit.ops.device_loop import advance_loop, begin_loop
from graphkit.ops.loop_layout import Control
from graphkit.records import CaptureRecord, SizeRecord
from graphkit.runners import Output, StepRunner, declare_output
from graphkit.runners.capture import SizeCapture
from graphkit.runners.replayer import Replayer
from graphkit.runners.step import Step, tensors_of
from graphkit.spec import SpecConfig
from graphkit.step.context import EngineContext, EngineModel
from graphkit.step.device_step import DeviceStep
from graphkit.step.drafter import Drafter
from graphkit.step.output_ring import OutputRing
from graphkit.step.prefill import Prefill
from graphkit.step.request_state import RequestState
from graphkit.step.sampling_params import SamplingParams
from graphkit.step.step_stream import LoopReader, StepStream


@dataclass(kw_only=True, eq=False)
class SpecStepInputs(StepInputs):
    """Batch of a whole step. All else is on the device, by request row.

    Shapes:
        req_pool_indices: [B] int64.
    """

    req_pool_indices: Rows = declare(
        Axis.REQUEST, torch.int64, "row of the request; rows that have ended run as pads"
    )


@dataclass(kw_only=True, eq=False)
class SpecStepOutput(Output):
    """Report of a whole step, see ``graphkit.ops.loop_layout.Report``.

    Shapes:
        report: [B, 4 + longest path] int32; ``None`` for an idle batch.
    """

    report: torch.Tensor | None = declare_output(Axis.REQUEST, torch.int32, row=None, optional=True)


@dataclass(kw_only=True, eq=False)
class _LaunchInputs(StepInputs):
    """Batch of a launch: the rows, the requests at whose end it ends, and its steps."""

    req_pool_indices: Rows = declare(Axis.REQUEST, torch.int64, "row of the request")
    is_watched: Rows = declare(
        Axis.REQUEST, torch.bool, "whether the loop ends when the request ends"
    )
    max_steps: Rows = declare(Axis.NONE, torch.int32, "most steps of the loop")


@dataclass(kw_only=True, eq=False)
class _LaunchOutput(Output):
    """Rows of the first step, [B] int64."""

    req_pool_indices: torch.Tensor = declare_output(Axis.REQUEST, torch.int64)


class _LoopBody(Step[SpecStepOutput]):
    """A step whose rows the loop writes, so that its graphs have no refresh."""

    def captured(self, size: int) -> tuple[Callable[[], dict[str, torch.Tensor]], ...]:
        """Return the padded stages alone."""
        return tuple(partial(tensors_of, stage) for stage in self.padded(size))


class SpecStepRunner(StepRunner[SpecStepInputs, SpecStepOutput]):
    """Captures draft, verify, accept and catch-up as one graph, and loops over it on the device.

    ``replay`` runs one step. ``launch`` runs many: the device removes requests as they end, runs
    the smallest captured size that holds the others, and writes each step's tokens to memory that
    the host reads while the loop runs. Both are one ``cudaGraphLaunch`` (generation v3).

    The caller owns rows and KV slots: a request needs a row of ``ReqToTokenPool`` that names slots
    for its prompt, its new tokens and ``slots_ahead`` more. Life of a request: ``admit`` ->
    steps -> its end is reported, or ``release``.

    Args:
        target: The model whose output the requests receive.
        drafter: Proposes draft tokens; ``None`` decodes one token per step.
        spec: Drafting and verification settings.
        sizes: Limits on batch and context.
        batch_sizes: Batch sizes to capture; ``None`` takes the default list.
        device: As for ``Runner``.
        backend: As for ``Runner``.
        is_greedy: Capture steps without sampling: requests with a temperature are refused.
        chunked_prefill_size: Most prompt tokens per forward.
        ring_entries: Steps that wait for the host at most.

    Attributes:
        device_step: The step that is captured, with the state of the requests.
        loop_refusal: Why ``launch`` is not available, as a sentence; empty if it is.

    Raises:
        ConfigError: Settings or pools contradict each other, or the drafter needs the host.
    """

    def __init__(
        self,
        target: EngineModel,
        drafter: Drafter | None = None,
        *,
        spec: SpecConfig,
        sizes: BufferSizes,
        batch_sizes: Iterable[int] | None = None,
        device: torch.device | str = "auto",
        backend: Backend | None = None,
        is_greedy: bool = False,
        chunked_prefill_size: int = 512,
        ring_entries: int = 256,
    ) -> None:
        require_int("SpecStepRunner", "ring_entries", ring_entries)
        backend = backend_for(device, backend)
        context = EngineContext.create(
            target, spec, sizes, generation="v3", backend=backend, batch_sizes=batch_sizes,
            chunked_prefill_size=chunked_prefill_size,
        )  # fmt: skip
        self.device_step = step = DeviceStep(target, drafter, context)
        if reason := step.host_reason:
            raise ConfigError(f"the step needs the host: {reason}.", field="drafter")
        self._is_greedy, self._prefill = is_greedy, Prefill(step, chunked_prefill_size)
        super().__init__(
            self._whole_step,
            inputs=SpecStepInputs,
            output=SpecStepOutput,
            spec=spec,
            sizes=sizes,
            backend=backend,
            batch_sizes=batch_sizes,
            tokens_per_request=1,
        )
        self.loop_refusal = backend.loop_refusal
        self._rows = self.buffers.live_rows("req_pool_indices", self.table.largest)
        self._watched = torch.zeros(self.table.largest, dtype=torch.bool, device=self.device)
        self._control = torch.zeros(len(Control), dtype=torch.int32, device=self.device)
        self._sizes = torch.tensor(self.table.sizes, dtype=torch.int32, device=self.device)
        self._ring = OutputRing(ring_entries, self.table.largest, step.max_path, self.device)
        self._prologue = StepRunner(
            self._begin,
            inputs=_LaunchInputs,
            output=_LaunchOutput,
            sizes=replace(sizes, max_batch_size=self.table.largest),
            backend=backend,
            batch_sizes=[self.table.largest],
        )
        self._bodies: dict[int, CapturedGraph] = {}
        self._reader: LoopReader | None = None
        self._loop: LoopGraph | None = None
        self._launcher: Replayer[_LaunchOutput] | None = None
        self._launches: list[tuple[int, int]] = []
        self._launched = 0

    @property
    def state(self) -> RequestState:
        """State of the requests, by request row."""
        return self.device_step.state

    @property
    def slots_ahead(self) -> int:  # type: ignore[override]  # of this step, not of any STEP
        """KV slots that a step writes behind the committed tokens of a request."""
        return self.device_step.slots_ahead

    # Requests.

    def admit(
        self,
        req_pool_index: int,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
    ) -> torch.Tensor:
        """Prefill a prompt; the next step continues the request. Enqueues only, eagerly.

        Args:
            req_pool_index: Row of the request; its KV slots are in ``req_to_token``.
            prompt_ids: Token ids of the prompt, at least one.
            sampling: ``None`` takes the defaults of ``SamplingParams``.
            max_new_tokens: Most tokens to generate; by default that of ``sampling``.

        Returns:
            The report of the first new token, [1, 5] int32, on the device.

        Raises:
            InputError: The request has too many stop tokens, or a temperature although the runner
                is greedy.
        """
        sampling = sampling or SamplingParams()
        if self._is_greedy and sampling.temperature:
            raise InputError(
                f"the request has temperature {sampling.temperature}, but the runner was created "
                "with is_greedy=True. Use temperature 0, or a runner that samples.",
                field="temperature",
            )
        self._join()
        limit = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        return self._prefill.run(req_pool_index, prompt_ids, sampling, limit)

    def release(self, req_pool_indices: Sequence[int]) -> None:
        """Make rows pads from the next step on. Enqueues only."""
        self._join()
        rows = torch.as_tensor(req_pool_indices, dtype=torch.int64)
        self.state.release(rows.to(self.device))

    # Life.

    def capture(
        self,
        progress: Callable[[SizeRecord], None] | None = None,
        *,
        attribution: Attribution | None = None,
    ) -> CaptureRecord:
        """Capture the step at every size, for ``replay`` and for ``launch``.

        Args:
            progress: Called after each size of ``replay``.
            attribution: As for ``Runner.capture``.

        Raises:
            CaptureError: A size cannot be captured. The attempt is undone.
            ReplayError: The runner is not ``planned``.
        """
        if self.status == "planned":
            with torch.no_grad():
                self._prefill.warm_up()
            if not self.loop_refusal:
                self._capture_loop()
        try:
            return super().capture(progress, attribution=attribution)
        except BaseException:
            self._close_loop()
            raise

    def launch(
        self,
        req_pool_indices: Sequence[int],
        *,
        max_steps: int,
        until: Collection[int] = (),
    ) -> StepStream:
        """Run up to ``max_steps`` steps in one launch. Does not wait.

        The loop ends when ``max_steps`` are done, a request of ``until`` ends, all requests have
        ended, the stream is stopped, or the ring is full of steps that nobody has read.

        Args:
            req_pool_indices: Rows of the requests.
            max_steps: Most steps.
            until: Rows of requests at whose end the loop ends.

        Returns:
            The steps, to be read while the loop runs.

        Raises:
            InputError: The rows are no distinct rows of requests, or ``until`` has another row.
            SizeError: The batch is larger than the largest size.
            ReplayError: The runner is not ``captured``, loops are not available, or earlier
                launches may still fill the ring.
        """
        self._require_captured("launch")
        if self._loop is None or self._reader is None or self._launcher is None:
            raise ReplayError(f"launch is not available: {self.loop_refusal}. Use replay(batch).")
        require_int("launch", "max_steps", max_steps)
        rows = self._checked_rows(req_pool_indices, until)
        self._reserve(max_steps)
        watched = np.isin(rows, np.fromiter(until, np.int64, len(until)))
        batch = _LaunchInputs(
            req_pool_indices=rows,
            is_watched=watched,
            max_steps=np.array([max_steps], dtype=np.int32),
        )
        self._launcher.replay(batch, None)
        self._launched += 1
        self._launches.append((self._launched, max_steps))
        return StepStream(self._launched, self._reader)

    def close(self) -> None:
        """Stop all launches, wait for them, and close all graphs. Streams remain readable."""
        self._close_loop()
        super().close()
        for runner in self.device_step.runners:
            runner.close()

    # The step.

    def _whole_step(self, inputs: SpecStepInputs) -> SpecStepOutput:
        report = self.device_step.run(inputs.req_pool_indices, is_greedy=self._is_greedy)
        return SpecStepOutput(report=report)

    def _loop_body(self, inputs: SpecStepInputs) -> SpecStepOutput:
        output = self._whole_step(inputs)
        with scope("advance"):
            advance_loop(
                output.report, self._rows, self._watched, self._control, self._sizes,
                self._ring.words, self._ring.entries,
            )  # fmt: skip
        return output

    def _begin(self, inputs: _LaunchInputs) -> _LaunchOutput:
        begin_loop(
            inputs.req_pool_indices, inputs.is_watched, inputs.max_steps, self._rows,
            self._watched, self._control, self._sizes,
        )  # fmt: skip
        return _LaunchOutput(req_pool_indices=inputs.req_pool_indices)

    def _capture_loop(self) -> None:
        """Capture prologue and bodies, and compose the loop."""
        body = _LoopBody(
            self._loop_body, self.mode, self.mode, self.spec, SpecStepOutput, self.buffers, None
        )
        self._rows.zero_()
        self._bodies, _ = SizeCapture(body, self.table, self.backend, {}).capture()
        try:
            self._prologue.capture()
            (prologue,) = self._prologue.graphs.values()
            self._loop = self.backend.loop(
                prologue,
                [self._bodies[size] for size in self.table],
                self._control[Control.AGAIN :][:1],
                self._control[Control.BODY :][:1],
            )
        except BaseException:
            self._close_loop()
            raise
        # The captures ran everything on pads.
        self._control.zero_()
        self._ring.clear()
        self._launcher = self._prologue.replayer_of({self.table.largest: self._loop})
        self._reader = LoopReader(self._ring, self._loop, self.backend.check_device)

    def _close_loop(self) -> None:
        if self._loop is not None:
            self._ring.stop(self._launched)
            self._loop.close()
            self._loop = None
        for graph in self._bodies.values():
            graph.close()
        self._bodies = {}
        if self._prologue.status == "captured":
            self._prologue.close()

    def _checked_rows(
        self, req_pool_indices: Sequence[int], until: Collection[int]
    ) -> NDArray[np.int64]:
        try:
            rows = np.asarray(req_pool_indices, dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"req_pool_indices is {req_pool_indices!r}, expected a sequence of ints.",
                field="req_pool_indices",
            ) from error
        last, distinct = len(self.state.remaining) - 1, set(rows.flatten().tolist())
        if rows.ndim != 1 or not distinct or len(distinct) < len(rows):
            raise InputError(
                f"req_pool_indices is {req_pool_indices!r}, expected distinct rows, at least one.",
                field="req_pool_indices",
            )
        if min(distinct) < 1 or max(distinct) > last:
            raise InputError(
                f"req_pool_indices has rows {min(distinct)} to {max(distinct)}, expected 1 to "
                f"{last}: row 0 belongs to pads.",
                field="req_pool_indices",
            )
        if not distinct.issuperset(until):
            raise InputError(
                f"until is {sorted(until)}, expected rows of the batch: {sorted(distinct)}.",
                field="until",
            )
        return rows

    def _reserve(self, max_steps: int) -> None:
        """Refuse a launch whose steps may find the ring full of those of earlier launches."""
        assert self._reader is not None, "launch is available"
        self._reader.collect()
        self._launches = [each for each in self._launches if each[0] > self._reader.last_ended]
        steps = sum(steps for _, steps in self._launches)
        if self._launches and steps + max_steps > self._ring.entries:
            raise ReplayError(
                f"earlier launches of {steps} steps are running and the ring holds "
                f"{self._ring.entries}: a launch of {max_steps} more could find it full. Read the "
                "earlier streams to their end first, or increase ring_entries."
            )

    def _join(self) -> None:
        if self._loop is not None:
            self._loop.join()
