"""Requests that callers pass to an engine or a step: their checks, prompts and KV slots."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

from graphkit.config import require_int
from graphkit.engine.step.admission import Admission
from graphkit.engine.step.request_state import Prefill
from graphkit.engine.step.sampling_params import SamplingParams
from graphkit.engine.step.slot_checks import SlotChecks
from graphkit.engine.step.spec_step import SpecStep
from graphkit.errors import InputError, short_repr
from graphkit.graphs.devices import to_device


class RequestChecks:
    """Checks prompts and parameters, and gives each request a seed.

    Args:
        vocab_size: Tokens of the target's vocabulary.
        context_limit: Most tokens of a prompt and its output together.
        seed: Gives a different seed to each request that has none.
        bos_token_id: Replaces an empty prompt; with ``None``, an empty prompt is an error.
    """

    def __init__(
        self,
        vocab_size: int,
        context_limit: int,
        *,
        seed: int = 0,
        bos_token_id: int | None = None,
    ) -> None:
        self.vocab_size, self.context_limit = vocab_size, context_limit
        self._seed, self._bos, self._checked = seed, bos_token_id, 0

    def check(
        self, prompt_ids: Sequence[int], sampling: SamplingParams | None
    ) -> tuple[tuple[int, ...], SamplingParams]:
        """Return token ids and parameters of a new request, which have a seed.

        Args:
            prompt_ids: Token ids to continue.
            sampling: ``None`` selects the defaults.

        Raises:
            InputError: The prompt is empty without a BOS token, is not a sequence of token ids, or
                leaves no room for a new token. ``sampling`` is not a ``SamplingParams``, or has a
                stop token outside the vocabulary.
        """
        params, ids = self._valid_sampling(sampling), self._valid_prompt(prompt_ids)
        self._checked += 1
        return ids, params.with_seed(self._seed, self._checked)

    def _valid_sampling(self, sampling: object) -> SamplingParams:
        if sampling is None:
            return SamplingParams()
        if not isinstance(sampling, SamplingParams):
            raise InputError(
                f"sampling must be a graphkit.SamplingParams or None, got {short_repr(sampling)}.",
                field="sampling",
            )
        biases = sampling.logit_bias or {}
        for field, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", biases)):
            largest = max(ids, default=0)
            if largest >= self.vocab_size:
                raise InputError(
                    f"SamplingParams.{field} has {largest}, but the vocabulary has "
                    f"{self.vocab_size} tokens. Use ids from 0 to {self.vocab_size - 1}.",
                    field=field,
                )
        excluded = {token for token, bias in biases.items() if bias == -math.inf}
        if sampling.min_tokens:
            excluded.update(sampling.stop_token_ids)
        if len(excluded) == self.vocab_size:
            raise InputError(
                "SamplingParams.logit_bias, with the stop tokens of min_tokens, excludes all "
                f"{self.vocab_size} tokens of the vocabulary. Leave one.",
                field="logit_bias",
            )
        return sampling

    def _valid_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        try:
            ids = tuple(map(operator.index, prompt_ids))
        except TypeError as error:
            raise _prompt_error(
                f"is not a sequence of token ids: {error}", "Pass a sequence of ints."
            ) from error
        if not ids and self._bos is not None:
            ids = (self._bos,)
        if not ids:
            raise _prompt_error(
                "is empty", "Pass at least one token, or give an engine a bos_token_id."
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            outside = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise _prompt_error(
                f"contains token {outside}, but the vocabulary has {self.vocab_size} tokens",
                f"Use ids from 0 to {self.vocab_size - 1}.",
            )
        if len(ids) >= self.context_limit:
            raise _prompt_error(
                f"has {len(ids)} tokens, but prompt and output together are limited to "
                f"{self.context_limit}",
                "Shorten the prompt, or increase max_context_len.",
            )
        return ids


def _prompt_error(fact: str, remedy: str) -> InputError:
    return InputError(f"the prompt {fact}. {remedy}", field="prompt_ids")


class StepRequests:
    """Checks requests and their slots, and prefills their prompts.

    Args:
        step: The step that runs them.
        is_greedy: Whether requests with a temperature are refused.
        join_loops: Makes later work run after the loops of the step.

    Attributes:
        admission: Prefills the prompts.
        slots: Checks of the slots.
    """

    def __init__(self, step: SpecStep, *, is_greedy: bool, join_loops: Callable[[], None]) -> None:
        context, self._step = step.context, step
        self._is_greedy, self._join_loops = is_greedy, join_loops
        self._is_cpu = context.device.type == "cpu"
        context_limit = context.req_to_token.shape[1] - step.slots_ahead
        self._checks = RequestChecks(context.sizes.vocab_size, context_limit)
        self.admission = Admission(step, context_limit)
        self.slots = SlotChecks(
            step.state, context.req_to_token, step.slots_ahead, context.sizes.page_size,
            context.kv_slots + context.sizes.page_size, step.max_path,
        )  # fmt: skip

    def checked(
        self,
        req_pool_index: int,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None,
        max_new_tokens: int | None,
        num_output_tokens: int,
    ) -> Prefill:
        """Return what is to be prefilled of a request; see ``SpecStepRunner.admit``."""
        self._step.state.valid_rows([req_pool_index])
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
        return Prefill(req_pool_index, params, limit, prompt, num_outputs=num_output_tokens)

    def prefill(self, prefill: Prefill) -> torch.Tensor:
        """Check the slots of a request and prefill its prompt; return its first report."""
        self._join_loops()
        least = len(prefill.token_ids) + self._step.slots_ahead
        self.slots.enqueue_row(prefill.row, least + prefill.max_new_tokens, least)
        if self._is_cpu:
            self.slots.report()
        report = None
        while report is None:
            report = self.admission.prefill(self.admission.chunks([prefill]))
        return report

    def release(self, rows: Sequence[int]) -> None:
        """Make rows pads, and forget their slots. Enqueues only."""
        self._join_loops()
        state = self._step.state
        state.release(to_device(rows, self._step.context.device))
        self.slots.release(rows)

    def check_growing(self, rows: Iterable[int], max_steps: int) -> None:
        """Check the slots that steps need of rows that did not have all slots at ``admit``."""
        growing = self.slots.growing(rows)
        if growing:
            self._join_loops()
            self.slots.enqueue_launch(growing, max_steps)
            if self._is_cpu:
                self.slots.report()

    def check_all_growing(self) -> None:
        """Check the slots that one step needs of all rows, as ``check_growing`` does."""
        self.check_growing(range(1, self._step.state.last_row + 1), 1)

    def report(self) -> None:
        """Raise for what checks of slots and values have found."""
        try:
            self.slots.report()
        except InputError:
            with suppress(InputError):  # a wrong slot may break more rules
                self._step.report_checks()
            raise
        self._step.report_checks()
