"""The whole speculative step as one graph, and many steps in one launch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn, Self

import torch
from torch import nn

from graphkit.config import BufferSizes, require_int
from graphkit.distributed import RankGroup
from graphkit.engine.kv.pool import PoolUse, check_unused
from graphkit.engine.step.context import EngineContext, StepOptions
from graphkit.engine.step.device_loops import DeviceLoops, LoopStep
from graphkit.engine.step.drafter import Drafter
from graphkit.engine.step.engine_model import EngineModel
from graphkit.engine.step.request_state import RequestState
from graphkit.engine.step.sampling_params import SamplingParams
from graphkit.engine.step.spec_step import SpecStep, SpecStepInputs, SpecStepOutput, StepVariant
from graphkit.engine.step.step_requests import StepRequests
from graphkit.engine.step.step_stream import StepStream
from graphkit.errors import ConfigError, ReplayError
from graphkit.graphs import Attribution, Backend, backend_for, scope
from graphkit.ops.inference import allocates
from graphkit.records import CaptureRecord, LoopRecord, ModeRecord, ReplayStats, SizeRecord
from graphkit.runners import StepRunner
from graphkit.runners.memory_estimate import trial_sizes
from graphkit.spec import SpecConfig

logger = logging.getLogger(__name__)


class SpecStepRunner(StepRunner[SpecStepInputs, SpecStepOutput]):
    """Captures draft, verify, accept and catch-up as one graph, and loops over it on the device.

    ``replay`` runs one step. ``launch`` runs many: the device removes requests as they end, runs
    the smallest captured size that holds the others, and writes each step's tokens to memory that
    the host reads while the loop runs. Both are one ``cudaGraphLaunch`` (generation v3).

    The caller owns rows and KV slots. The row of a request in ``ReqToTokenPool`` contains slots for
    its text, for the tokens of the next steps, and ``slots_ahead`` more; no other running request
    may have them. Further slots may be added between launches; columns behind them contain 0.
    Life of a request: ``admit`` -> steps -> its end is reported, or ``release``. Several runners
    may use one pool, with different rows and slots at any time. Slots shared by requests of two
    runners are not detected. An open ``SpeculativeEngine`` is the only user of its pools.

    Args:
        target: The model whose output the requests receive.
        drafter: Proposes draft tokens; ``None`` decodes one token per step.
        spec: Drafting and verification settings.
        sizes: Limits on batch and context.
        batch_sizes: Batch sizes to capture; ``None`` selects the default
            list.
        device: As for ``Runner``.
        backend: As for ``Runner``.
        is_greedy: Capture steps without sampling: requests with a temperature are refused.
        chunked_prefill_size: See ``SpeculativeEngine``, like the next.
        prefill_sizes: Numbers of prompt tokens to capture.
        ring_entries: Most steps that wait for the host to read them.
        group: As for ``Runner``. All ranks admit, launch and release the same requests in the same
            order. ``launch`` needs ranks with the same batch and, on CUDA, one-shot collectives;
            see ``RankGroup``. The loops of all ranks end after the same step.
        check: As for ``Runner``. ``admit`` always checks the slots of a row, and ``launch`` and
            ``replay`` those of a row that did not have all of them at ``admit``. In the checking
            mode, each step also checks the slots that it writes.

    Attributes:
        spec_step: The step that is captured, with the state of the requests.
        no_loop_reason: Reason why ``launch`` is not available, or an empty string.

    Raises:
        ConfigError: Settings or pools contradict each other, an open engine uses the pools, or the
            drafter needs the host.
    """

    group: RankGroup | None
    _use: PoolUse | None

    @allocates
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
        chunked_prefill_size: int | None = None,
        prefill_sizes: Sequence[int] | None = None,
        ring_entries: int = 256,
        group: RankGroup | None = None,
        check: bool | None = None,
    ) -> None:
        options = StepOptions(
            backend=backend_for(device, backend),
            batch_sizes=batch_sizes,
            chunked_prefill_size=chunked_prefill_size,
            prefill_sizes=prefill_sizes,
            check=check,
            is_greedy=is_greedy,
            ring_entries=ring_entries,
            group=group,
        )
        context = EngineContext.create(target, spec, sizes, options, owner="SpecStepRunner")
        check_unused("SpecStepRunner", target.pools, allocates=False)
        step = SpecStep(target, drafter, context)
        self._set_up(step, options)
        self._use = PoolUse("SpecStepRunner", step.pools, allocates=False)

    @classmethod
    def from_step(cls, step: SpecStep, options: StepOptions | None = None) -> Self:
        """Create a runner of an existing step, whose pools the caller has reserved.

        Args:
            step: The step.
            options: Their ``is_greedy``, ``ring_entries`` and ``group`` are read; ``None`` selects
                the step's ``context.options``.

        Raises:
            ConfigError: The drafter needs the host.
        """
        runner = cls.__new__(cls)
        runner._set_up(step, step.context.options if options is None else options)
        return runner

    @allocates
    def _set_up(self, step: SpecStep, options: StepOptions) -> None:
        if reason := step.eager_reason:
            raise ConfigError(f"the step cannot run without the host: {reason}.", field="drafter")
        context, self.spec_step = step.context, step
        self._is_greedy, self._use = options.is_greedy, None
        super().__init__(
            self._whole_step,
            inputs=SpecStepInputs,
            output=SpecStepOutput,
            spec=context.spec.longest,
            sizes=context.sizes,
            tokens_per_request=1,
            group=options.group,
            **context.runner_options,
        )
        self._requests = StepRequests(step, is_greedy=options.is_greedy, join_loops=self.join_loops)
        for runner in step.runners:  # their eager runs are parts of this step
            runner.dispatch.counts_fallbacks = False
        self._loops = DeviceLoops(self, step, options.ring_entries)
        self.no_loop_reason = self._loops.no_loop_reason

    @property
    def state(self) -> RequestState:
        """State of the requests, by request row."""
        return self.spec_step.state

    @property
    def slots_ahead(self) -> int:
        """KV slots that a step writes behind the committed tokens of a request."""
        return self.spec_step.slots_ahead

    @property
    def max_path(self) -> int:
        """Most tokens that a step accepts for a request, the bonus token included."""
        return self.spec_step.max_path

    def admit(
        self,
        req_pool_index: int,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        num_output_tokens: int = 0,
    ) -> torch.Tensor:
        """Prefill a prompt; the next step continues the request. Enqueues only, eagerly.

        Args:
            req_pool_index: Row of the request. ``req_to_token`` has the KV slots of the prompt and
                ``slots_ahead`` more, which the first step needs. A launch of N steps needs slots
                for ``(N - 1) * max_path`` further tokens, but for none behind ``max_new_tokens``.
                The row may have them now, or get them before the launch.
            prompt_ids: Token ids of the prompt, at least one.
            sampling: ``None`` selects the defaults of ``SamplingParams``. A request without a seed
                gets a different one for each call of ``admit``. A repeated run gets the same seeds,
                which are those of an engine with ``seed=0``.
            max_new_tokens: Most tokens to generate; by default that of ``sampling``.
            num_output_tokens: How many of the last ``prompt_ids`` the request has generated, if it
                was admitted before. Penalties and ``min_tokens`` count them as output.

        Slots are checked on the device. For a wrong slot, this call raises on the CPU, and a later
        call of ``admit``, ``replay`` or ``launch`` raises on CUDA. A row that has slots for its
        longest text is not checked again; any other one is checked before each launch and replay.

        Returns:
            The report of the first new token, [1, 7] int32, on the device. The last column has the
            bits of its log-probability, float32, or -1 without ``logprobs``.

        Raises:
            ConfigError: ``max_new_tokens`` is not an int of at least 1, or ``num_output_tokens`` is
                not an int of at least 0.
            InputError: The row is outside the table or reserved, the prompt is not a sequence of
                token ids, ``sampling`` is not a ``SamplingParams`` or has a stop token outside the
                vocabulary, prompt and new tokens do not fit in a row of ``req_to_token``, the
                request has a temperature although the runner is greedy, or a slot of the row is
                empty, outside the KV pool or in use by another request.
            ReplayError: The runner is closed.
        """
        self._require_open("admit")
        requests = self._requests
        requests.report()
        prefill = requests.checked(
            req_pool_index, prompt_ids, sampling, max_new_tokens, num_output_tokens
        )
        return self._on_ranks(requests.prefill, prefill)

    def release(self, req_pool_indices: Sequence[int]) -> None:
        """Make rows pads of all later launches and replays. Enqueues only.

        A loop that is running continues the requests until it ends; see ``StepStream.stop``.

        Raises:
            InputError: A row occurs twice, is outside the table or is reserved.
            ReplayError: The runner is closed.
        """
        self._require_open("release")
        rows = self.state.valid_rows(req_pool_indices, may_be_empty=True)
        self._requests.release(rows)

    def join_loops(self) -> None:
        """Make later work of the current stream run after the loops. Does not wait on CUDA."""
        self._loops.join()

    def stop_loops(self) -> None:
        """Stop all launches and wait until they have ended. Streams remain readable.

        After an exception in ``launch``, such as a ``KeyboardInterrupt``, the device may have run
        steps that no stream contains. Stop the loops, ``release`` the requests, and ``admit`` them
        again with the text received so far. The recorder runs loops on the host, so that an
        exception while a stream is read has the same effect there.
        """
        self._loops.stop()

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
            AttentionError: The target's attention backend computes a tree or a packed prefill
                differently from a chain; without ``capture``, the first ``admit`` raises it.
            CaptureError: A size cannot be captured. The attempt is undone.
            ReplayError: The runner is not ``planned``.
        """
        if self.status != "planned":
            return super().capture()  # raises
        self._requests.admission.capture(self.capturing_backend())
        if self.no_loop_reason:
            logger.warning("%s runs no device loops: %s.", self.mode.name, self.no_loop_reason)
        else:
            self._loops.capture(self._loop_steps())
        try:
            record = super().capture(progress, attribution=attribution)
        except BaseException:
            if self.status == "planned":
                self._loops.close()
            raise
        self._captured_mode = mode = replace(record.modes[0], loops=self._loops.records())
        return replace(record, modes=(mode,))

    @contextmanager
    def trial_capture(self) -> Iterator[ModeRecord]:
        """See ``Runner.trial_capture``; captures loops, too."""
        with ExitStack() as trial:
            loops: tuple[LoopRecord, ...] = ()
            if self.status == "planned":
                self._requests.admission.warm_up(self.capturing_backend())
            if self.status == "planned" and not self.no_loop_reason:
                self._loops.capture(self._loop_steps(), trial_sizes(self.table))
                trial.callback(self._loops.close)
                loops = self._loops.records()
            mode = trial.enter_context(super().trial_capture())
            yield replace(mode, loops=loops or mode.loops)

    def memory_names(
        self, weights: nn.Module | Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, dict[str, torch.Tensor]]:
        """See ``Runner.memory_names``; the state is that of the requests and of all models."""
        names = super().memory_names(weights)
        return {
            **names,
            "state": {**names["state"], **self.spec_step.tensors()},
            "mailbox": {**names["mailbox"], **self._requests.slots.tensors()},
        }

    def memory_parts(self) -> dict[str, list[torch.Tensor]]:
        """See ``Runner.memory_parts``; of all models of the step, and of the loops."""
        parts = super().memory_parts()
        for of_part in (self.spec_step.memory_parts(), self._loops.memory_parts()):
            for name, tensors in of_part.items():
                parts[name] += tensors
        parts["static_buffers"] += self._requests.slots.tensors().values()
        return parts

    def replay(
        self,
        batch: SpecStepInputs,
        *,
        padded_batch_size: int | None = None,
        clone: bool = False,
    ) -> SpecStepOutput:
        """Replay one step; see ``Runner.replay``."""
        return self._on_ranks(self._checked_replay, batch, padded_batch_size, clone)

    @property
    def can_launch(self) -> bool:
        """Whether ``launch`` is available: the runner is captured, and the device can loop."""
        return self.status == "captured" and not self.no_loop_reason

    def launch(
        self,
        req_pool_indices: Sequence[int],
        *,
        max_steps: int,
        until: Collection[int] = (),
    ) -> StepStream:
        """Run up to ``max_steps`` steps in one launch, behind earlier launches and replays.

        Does not wait unless four launches have not begun. Then it waits for the first of them.

        The loop ends when ``max_steps`` are done, a request of ``until`` ends, all requests have
        ended, the stream is stopped, or the ring is full of unread steps.

        Args:
            req_pool_indices: Rows of the requests.
            max_steps: Most steps.
            until: Rows of requests at whose end the loop ends.

        Returns:
            The steps, to be read while the loop runs.

        Raises:
            InputError: A row occurs twice, is outside the table or is reserved, or ``until`` has
                another row. A row lacks slots for the steps, on CUDA of an earlier launch. An
                earlier ``admit`` found a wrong slot. In the checking mode, an earlier step found a
                wrong slot or computed a wrong value.
            SizeError: The batch is larger than the largest size.
            ReplayError: The runner is not ``captured``, loops are not available, the streams of
                the last 64 launches were dropped, or of the last 1,024 not read, or earlier
                launches may still fill the ring.
        """
        if not self.can_launch:
            self._refuse_launch()
        return self._on_ranks(self._checked_launch, req_pool_indices, max_steps, until)

    @property
    def stats(self) -> ReplayStats:
        """Steps that were replayed or read from launches, and fallbacks."""
        return self._loops.add_steps(super().stats)

    @property
    def seconds(self) -> tuple[float, float]:
        """Times of plain decoding and of the steps of launches, see ``EngineStats``."""
        return self._loops.seconds

    def close(self) -> None:
        """Stop all launches, wait for them, and close all graphs. Streams remain readable."""
        with ExitStack() as last_first:  # closes all, even if a rank has failed
            for runner in self.spec_step.runners:
                last_first.callback(runner.close)
            last_first.callback(self._requests.admission.close)
            if self._use is not None:
                last_first.callback(self._use.end)
            last_first.callback(super().close)
            if self.group is None:
                self._loops.close()
            elif not self.group.is_lost:
                self.group.run(self._loops.close)
            else:
                self.group.end_collectives()
                with suppress(RuntimeError):  # of loops that were running
                    self._loops.close()

    def _shared_settings(self) -> dict[str, str]:
        inner = [f"{runner.mode.name} {runner.sizes}" for runner in self.spec_step.runners]
        return {
            **super()._shared_settings(),
            "spec": repr(self.spec_step.context.spec),
            "drafter": type(self.spec_step.drafter).__name__,
            "is_greedy": str(self._is_greedy),
            "the runners of the step": ", ".join(inner),
        }

    def _require_open(self, what: str) -> None:
        if self.status == "closed":
            raise ReplayError(f"{what} needs an open runner, but this one is closed.")

    def _checked_replay(
        self, batch: SpecStepInputs, padded_batch_size: int | None, clone: bool
    ) -> SpecStepOutput:
        self._requests.report()
        self._requests.check_all_growing()
        return super().replay(batch, padded_batch_size=padded_batch_size, clone=clone)

    def _fall_back(self, batch: SpecStepInputs, without: Collection[str]) -> SpecStepOutput:
        self._requests.check_all_growing()
        return super()._fall_back(batch, without)

    def _whole_step(self, inputs: SpecStepInputs) -> SpecStepOutput:
        return self._run(inputs, is_greedy=self._is_greedy)

    def _run(
        self, inputs: SpecStepInputs, *, is_greedy: bool, variant: StepVariant | None = None
    ) -> SpecStepOutput:
        if self.spec_step.context.is_checking:
            with scope("check slots"):
                self._requests.slots.enqueue_step(inputs.req_pool_indices)
        rows, num_drafts = inputs.req_pool_indices, None
        if variant is not None and (lengths := self._loops.state.lengths) is not None:
            num_drafts = lengths.num_drafts[: len(rows)]
        report = self.spec_step.run(
            rows, is_greedy=is_greedy, variant=variant, num_drafts=num_drafts
        )
        return SpecStepOutput(report=report)

    def _loop_steps(self) -> dict[bool, list[LoopStep]]:
        """Return the step of each variant, by whether it is greedy."""
        variants, kinds = self.spec_step.variants, (True,) if self._is_greedy else (True, False)
        return {
            kind: [partial(self._run, is_greedy=kind, variant=variant) for variant in variants]
            for kind in kinds
        }

    def _checked_launch(
        self, req_pool_indices: Sequence[int], max_steps: int, until: Collection[int]
    ) -> StepStream:
        self._requests.report()
        require_int("launch", "max_steps", max_steps)
        rows = self.state.valid_rows(req_pool_indices, until)
        self._requests.check_growing(rows, max_steps)
        return self._loops.launch(
            rows, frozenset(until), max_steps, is_greedy=self.state.is_greedy(rows)
        )

    def _refuse_launch(self) -> NoReturn:
        self._require_captured("launch")
        raise ReplayError(f"launch is not available: {self.no_loop_reason}. Use replay(batch).")
