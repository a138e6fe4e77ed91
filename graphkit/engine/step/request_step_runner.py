"""The whole step of requests that a caller admits: their prompts, their slots, single steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn

from graphkit.config import require_int
from graphkit.distributed import RankGroup
from graphkit.engine.step.admission import Admission
from graphkit.engine.step.context import StepOptions
from graphkit.engine.step.request_checks import RequestChecks
from graphkit.engine.step.request_state import Prefill, RequestState
from graphkit.engine.step.sampling_params import SamplingParams
from graphkit.engine.step.slot_checks import SlotChecks
from graphkit.engine.step.spec_step import SpecStep, SpecStepInputs, SpecStepOutput, StepVariant
from graphkit.errors import ConfigError, InputError, ReplayError
from graphkit.graphs import scope
from graphkit.graphs.devices import to_device
from graphkit.runners import StepRunner

ResultT = TypeVar("ResultT")


class _RequestStepRunner(StepRunner[SpecStepInputs, SpecStepOutput]):
    """Admits requests, and runs whole steps for them. Base of ``SpecStepRunner``, which loops.

    Args:
        step: The step, whose pools the caller has reserved.
        options: Their ``is_greedy`` and ``group`` are read.

    Raises:
        ConfigError: The drafter needs the host.
    """

    group: RankGroup | None

    def __init__(self, step: SpecStep, options: StepOptions) -> None:
        if reason := step.eager_reason:
            raise ConfigError(f"the step cannot run without the host: {reason}.", field="drafter")
        context, self.spec_step = step.context, step
        self._is_greedy = options.is_greedy
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
        context_limit = context.req_to_token.shape[1] - self.slots_ahead
        self._checks = RequestChecks(context.sizes.vocab_size, context_limit)
        self._admission = Admission(step, context_limit)
        for runner in step.runners:  # their eager runs are parts of this step
            runner.dispatch.counts_fallbacks = False
        self._slot_checks = SlotChecks(
            step.state, context.req_to_token, step.slots_ahead, context.sizes.page_size,
            context.kv_slots + context.sizes.page_size, step.max_path,
        )  # fmt: skip

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
            The report of the first new token, [1, 6] int32, on the device. The last column has the
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
        self._report_checks()
        self.state.valid_rows([req_pool_index])
        prompt, params = self._checks.check(prompt_ids, sampling)
        limit = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        require_int("admit", "max_new_tokens", limit)
        require_int("admit", "num_output_tokens", num_output_tokens, least=0)
        if num_output_tokens >= len(prompt):
            raise InputError(
                f"num_output_tokens is {num_output_tokens}, but prompt_ids has {len(prompt)} "
                "tokens, of which the first one is the prompt's. Pass the prompt, then its output.",
                field="num_output_tokens",
            )
        if len(prompt) + limit > self._checks.context_limit:
            raise InputError(
                f"the prompt has {len(prompt)} tokens and max_new_tokens is {limit}, but a row of "
                f"req_to_token has {self._checks.context_limit} slots besides slots_ahead. "
                "Reduce max_new_tokens, or enlarge the ReqToTokenPool.",
                field="max_new_tokens",
            )
        if self._is_greedy and params.temperature:
            raise InputError(
                f"the request has temperature {params.temperature}, but the runner was created "
                "with is_greedy=True. Use temperature 0, or a runner that samples.",
                field="temperature",
            )
        prefill = Prefill(req_pool_index, params, limit, prompt, num_outputs=num_output_tokens)
        return self._on_ranks(self._prefill, prefill)

    def release(self, req_pool_indices: Sequence[int]) -> None:
        """Make rows pads of all later launches and replays. Enqueues only.

        A loop that is running continues the requests until it ends; see ``StepStream.stop``.

        Raises:
            InputError: A row occurs twice, is outside the table or is reserved.
            ReplayError: The runner is closed.
        """
        self._require_open("release")
        rows = self.state.valid_rows(req_pool_indices, may_be_empty=True)
        self.join_loops()
        self.state.release(to_device(rows, self.device))
        self._slot_checks.release(rows)

    def join_loops(self) -> None:
        """Make later work of the current stream run after the loops. Does not wait on CUDA."""

    def replay(
        self,
        batch: SpecStepInputs,
        *,
        padded_batch_size: int | None = None,
        clone: bool = False,
    ) -> SpecStepOutput:
        """Replay one step; see ``Runner.replay``."""
        return self._on_ranks(self._checked_replay, batch, padded_batch_size, clone)

    def memory_names(
        self, weights: nn.Module | Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, dict[str, torch.Tensor]]:
        """See ``Runner.memory_names``; the state is that of the requests and of all models."""
        names = super().memory_names(weights)
        return {
            **names,
            "state": {**names["state"], **self.spec_step.tensors()},
            "mailbox": {**names["mailbox"], **self._slot_checks.tensors()},
        }

    def memory_parts(self) -> dict[str, list[torch.Tensor]]:
        """See ``Runner.memory_parts``; of all models of the step."""
        parts = super().memory_parts()
        for name, tensors in self.spec_step.memory_parts().items():
            parts[name] += tensors
        parts["static_buffers"] += self._slot_checks.tensors().values()
        return parts

    def _on_ranks(self, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        return call(*arguments) if self.group is None else self.group.run(call, *arguments)

    def _prefill(self, prefill: Prefill) -> torch.Tensor:
        self.join_loops()
        least = len(prefill.token_ids) + self.slots_ahead
        self._slot_checks.enqueue_row(prefill.row, least + prefill.max_new_tokens, least)
        if self.device.type == "cpu":
            self._slot_checks.report()
        report = None
        while report is None:
            report = self._admission.prefill(self._admission.chunks([prefill]))
        return report

    def _checked_replay(
        self, batch: SpecStepInputs, padded_batch_size: int | None, clone: bool
    ) -> SpecStepOutput:
        self._report_checks()
        self._check_growing(range(1, self.state.last_row + 1), 1)
        return super().replay(batch, padded_batch_size=padded_batch_size, clone=clone)

    def _fall_back(self, batch: SpecStepInputs, without: Collection[str]) -> SpecStepOutput:
        self._check_growing(range(1, self.state.last_row + 1), 1)
        return super()._fall_back(batch, without)

    def _check_growing(self, rows: Iterable[int], max_steps: int) -> None:
        """Check the slots that steps need of rows that did not have all slots at ``admit``."""
        growing = self._slot_checks.growing(rows)
        if growing:
            self.join_loops()
            self._slot_checks.enqueue_launch(growing, max_steps)
            if self.device.type == "cpu":
                self._slot_checks.report()

    def _whole_step(self, inputs: SpecStepInputs) -> SpecStepOutput:
        return self._run(inputs, is_greedy=self._is_greedy)

    def _require_open(self, what: str) -> None:
        if self.status == "closed":
            raise ReplayError(f"{what} needs an open runner, but this one is closed.")

    def _report_checks(self) -> None:
        try:
            self._slot_checks.report()
        except InputError:
            with suppress(InputError):  # a wrong slot may break more rules
                self.spec_step.report_checks()
            raise
        self.spec_step.report_checks()

    def _run(
        self, inputs: SpecStepInputs, *, is_greedy: bool, variant: StepVariant | None = None
    ) -> SpecStepOutput:
        if self.spec_step.context.is_checking:
            with scope("check slots"):
                self._slot_checks.enqueue_step(inputs.req_pool_indices)
        report = self.spec_step.run(inputs.req_pool_indices, is_greedy=is_greedy, variant=variant)
        return SpecStepOutput(report=report)
