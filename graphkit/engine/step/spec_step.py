"""A whole speculative step on the device: draft, verify, accept and catch up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphkit.buffers import Axis, Rows, StepInputs, declare
from graphkit.buffers.attention import kv_pools
from graphkit.engine.step.acceptance import Verified
from graphkit.engine.step.context import EngineContext
from graphkit.engine.step.drafter import Drafter, NullDrafter, check_prepared, prepare_drafter
from graphkit.engine.step.engine_model import EngineModel
from graphkit.engine.step.plain_step import CatchUpDrafter, PendingCatchUp, PlainDrafter
from graphkit.engine.step.prompt_runner import PromptRunner
from graphkit.engine.step.tree_checks import check_tree
from graphkit.engine.step.verifier import FillBitmask, Verifier
from graphkit.graphs import scope
from graphkit.runners import Output, Runner, declare_output
from graphkit.runners.known_memory import attribute_tensors


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
        report: [B, 5 + 2 * longest path] int32; ``None`` for an idle batch.
    """

    report: torch.Tensor | None = declare_output(Axis.REQUEST, torch.int32, row=None, optional=True)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step returns.

    Attributes:
        verified: Accepted paths, for the drafter to catch up on.
        report: [B, 5 + 2 * longest path] int32, new tokens, ends of the requests and
            log-probabilities, for the host; see ``graphkit.ops.loop_layout``.
        variant: What ran. Its drafter catches up.
    """

    verified: Verified
    report: torch.Tensor
    variant: StepVariant


@dataclass(frozen=True, slots=True)
class StepVariant:
    """What a step of one draft length and number of rows runs.

    Attributes:
        drafter: Drafts, and catches up.
        verifier: Verifies trees of the length.
        max_path: Most tokens that the step can accept, bonus included.
        mean_drafts: Drafts per request that verify has rows for. If a request can have more, the
            rows are divided among the requests.
    """

    drafter: Drafter
    verifier: Verifier
    max_path: int
    mean_drafts: int

    @property
    def drafts(self) -> int:
        """Most drafts that the step verifies for a request."""
        return self.verifier.context.verify_width - 1

    @property
    def divides_rows(self) -> bool:
        """Whether requests have different numbers of rows."""
        return self.mean_drafts < self.drafts

    def num_rows(self, batch_size: int) -> int:
        """Return the rows of verify at a captured size."""
        return batch_size * (1 + self.mean_drafts)

    @property
    def defers_catch_up(self) -> bool:
        """Whether the step leaves its tokens to a later catch-up."""
        return type(self.drafter) is PlainDrafter


class SpecStep:
    """Drafts, verifies and accepts. Every method only enqueues work; none waits for the device.

    Args:
        target: The model whose output the requests receive.
        drafter: Prepared here; ``None`` decodes one token per step.
        context: Settings and shared state.

    Attributes:
        context: Settings and shared state.
        state: State of the requests.
        variants: What a step runs, by draft length and number of rows, fewest first. If one of
            several lengths is 0, a plain step that catches up follows them; see ``plain_step``.
        pending_catch_up: Tokens of plain steps that the drafter has yet to process, or ``None``.
        drafter, verifier: Those of the longest length, which also process prompts.
        runners: The runner of each mode and length, the target's of the longest length first.
        prompts: Runs prompts by graphs; ``None`` without them.
        pools: All pools with state of requests, by slot or by row.
        slots_ahead: KV slots that one step writes behind the committed tokens of a request.
        max_path: Most tokens that one step can accept, bonus included.

    Raises:
        ConfigError: The drafter does not implement ``Drafter``, or its settings are invalid.
    """

    def __init__(
        self, target: EngineModel, drafter: Drafter | None, context: EngineContext
    ) -> None:
        self.context, self.state = context, context.state
        contexts = [context.at_length(spec) for spec in context.spec.lengths]
        *shorter, longest = contexts
        self.drafter = prepare_drafter(NullDrafter() if drafter is None else drafter, longest)
        self.max_path = min(self.drafter.max_path, longest.verify_width)
        self.pending_catch_up: PendingCatchUp | None = None
        if context.spec.is_adaptive and not contexts[0].spec.num_steps:
            self.state.count_behind()
            self.pending_catch_up = PendingCatchUp(longest, self.max_path)
        drafters = [*map(self._at_length, shorter), self.drafter]
        variants = []
        for own, own_drafter in zip(contexts, drafters, strict=True):
            max_path = min(own_drafter.max_path, own.verify_width)
            verifier = Verifier(target, own, self.state, max_path)
            variants.append(StepVariant(own_drafter, verifier, max_path, own.verify_width - 1))
        if context.spec.is_adaptive and longest.spec.topk == 1:
            self.state.count_acceptance(self.max_path - 1)
            variants[-1:] = self._divided(
                variants[-1], [0, *(own.spec.num_steps for own in contexts)][-2]
            )
        if self.pending_catch_up is not None:
            catch_up = CatchUpDrafter(self.pending_catch_up, self.drafter)
            catch_up.prepare(contexts[0])
            variants.append(replace(variants[0], drafter=catch_up))
        self.variants = tuple(variants)
        self.verifier = self.longest.verifier
        runners = dict.fromkeys(
            runner
            for variant in reversed(self.by_length)
            for runner in (
                variant.verifier.runner, variant.verifier.packed_runner, *variant.drafter.runners
            )
        )  # fmt: skip
        self.runners: tuple[Runner[Any, Any], ...] = tuple(
            runner for runner in runners if runner is not None
        )
        self.prompts = PromptRunner.create(self.verifier, context)
        drafts = (pool for r in self.drafter.runners for pool in kv_pools(r.attention))
        self.pools = (*target.pools, *drafts)
        needed = (variant.drafter.slots_needed for variant in self.variants)
        self.slots_ahead = max(longest.verify_width, *needed)
        checks = (runner.buffers.value_checks for runner in self.runners)
        self._value_checks = tuple(check for check in checks if check is not None)

    def _divided(self, longest: StepVariant, shorter: int) -> list[StepVariant]:
        """Return the variants of the longest length, those with fewer rows first.

        They have rows for 1, 2, 4 and so on drafts per request, and for all drafts. With known
        acceptance, and times of dense, mixture-of-experts and hybrid targets, one of them is at
        least 0.97 times as fast as the best number of rows.

        Args:
            longest: The variant that verifies all drafts.
            shorter: Drafts of the length before it, which divided rows exceed.
        """
        verifier, most = longest.verifier, longest.max_path - 1
        means = [1 << bit for bit in range(most.bit_length())]
        divided = [replace(longest, mean_drafts=mean) for mean in means if shorter < mean < most]
        if not divided or not verifier.packs_rows:
            return [longest]
        sizes = verifier.runner.table.sizes
        verifier.pack(sorted({each.num_rows(size) for each in divided for size in sizes}))
        return [*divided, longest]

    def _at_length(self, context: EngineContext) -> Drafter:
        """Return the drafter of a draft length, prepared."""
        if context.spec.num_steps or self.pending_catch_up is None:
            return check_prepared(self.drafter.at_length(context))
        drafter = PlainDrafter(self.pending_catch_up)
        drafter.prepare(context)
        return drafter

    @property
    def by_length(self) -> tuple[StepVariant, ...]:
        """The variants that draft, or decode alone, without the one that catches up."""
        return self.variants if self.pending_catch_up is None else self.variants[:-1]

    @property
    def longest(self) -> StepVariant:
        """The variant of the longest draft length that verifies all drafts."""
        return self.by_length[-1]

    @property
    def eager_reason(self) -> str:
        """Reason why a graph of the step is not possible, as a phrase, or an empty string."""
        if self.drafter.eager_reason:
            return self.drafter.eager_reason
        if self.context.options.structured_output:
            return "the matchers of structured output run on the host between draft and verify"
        if self.context.future_map.debug:
            return "the future map's debug mode reads the device"
        for runner in self.runners:
            if runner.step.plans_on_host:
                return f"the attention backend of {runner.mode.name} plans each batch on the host"
            if runner.eager_reason:  # the mode falls back, which a graph of the step cannot
                return runner.eager_reason
        return ""

    def report_checks(self) -> None:
        """Raise for a wrong value that a captured step has found; see ``Runner(check=True)``.

        Reads host memory only.

        Raises:
            InputError: An earlier step computed a wrong value; ``field`` names it.
        """
        for checks in self._value_checks:
            checks.report()

    def request_tensors(self) -> dict[str, torch.Tensor]:
        """Return what the next step reads of each request, except its KV: [rows + 1, ...] by name.

        ``future map`` tensors exist from the first prefill on. ``recurrent`` ones are the committed
        states.
        """
        recurrent = self.verifier.recurrent_state
        committed = {} if recurrent is None else recurrent.committed()
        return {
            **self._stashed_tensors(),
            **{f"recurrent {name}": states for name, states in committed.items()},
        }

    def _stashed_tensors(self) -> dict[str, torch.Tensor]:
        """Return the state of requests outside of their layers."""
        stashed = self.context.future_map.tensors()
        return {
            **self.state.tensors(),
            **{f"future map {name}": tensor for name, tensor in stashed.items()},
        }

    def _recurrent_tensors(self) -> dict[str, torch.Tensor]:
        """Return the committed state of each row, and the states after the nodes of its tree."""
        recurrent = self.verifier.recurrent_state
        named = {} if recurrent is None else recurrent.tensors()
        return {f"recurrent {name}": states for name, states in named.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor that a step changes or that its attention reads, each once, by name.

        ``future map`` tensors exist from the first prefill on.
        """
        named = {**self._stashed_tensors(), **self._recurrent_tensors()}
        if (pending := self.pending_catch_up) is not None:
            named |= {f"pending {name}": tensor for name, tensor in pending.tensors().items()}
        for runner in self.runners:
            held = runner.memory_names()["state"]
            named |= {f"{runner.label} {name}": tensor for name, tensor in held.items()}
        by_memory = {(t.data_ptr(), t.shape): name for name, t in reversed(named.items())}
        return {name: named[name] for name in reversed(by_memory.values())}

    def memory_parts(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors of all models of the step; see ``Runner.memory_parts``."""
        parts: dict[str, list[torch.Tensor]] = defaultdict(list)
        for runner in self.runners:
            for name, tensors in runner.memory_parts().items():
                parts[name] += tensors
        parts["recurrent_state"] += self._recurrent_tensors().values()
        drafters = [variant.drafter for variant in self.variants]
        parts["static_buffers"] += [
            *self.tensors().values(),
            *(tensor for drafter in drafters for _, tensor in attribute_tensors(drafter, 1)),
        ]
        return parts

    def draft_and_verify(
        self,
        req_pool_indices: torch.Tensor,
        *,
        is_greedy: bool,
        fill_bitmask: FillBitmask | None = None,
        variant: StepVariant | None = None,
        num_drafts: torch.Tensor | None = None,
    ) -> StepResult:
        """Draft, verify, and commit the accepted tokens.

        Requests that have ended run as pads.

        Args:
            req_pool_indices: Request rows, [B] int64.
            is_greedy: Whether every temperature is 0.
            fill_bitmask: Returns the token bitmask of the trees; called between draft and verify.
                ``None`` allows every token.
            variant: One of ``variants``; ``None`` selects the longest draft length.
            num_drafts: Drafts of each request that a variant verifies that divides its rows, [B]
                int32, -1 for pads; ``None`` divides them evenly.

        Raises:
            InputError: The drafter returned an invalid tree.
        """
        state, variant = self.state, self.longest if variant is None else variant
        rows, seq_lens, bonus = state.running(req_pool_indices)
        # The longest length's drafter catches up for plain steps, so it must know, too.
        variant.drafter.is_greedy = self.drafter.is_greedy = is_greedy
        num_rows = 0
        if variant.divides_rows:
            requests, table = len(rows), variant.verifier.runner.table
            num_rows = variant.num_rows(table.fit(requests) if table.fits(requests) else requests)
            num_rows = min(num_rows, requests * (variant.drafts + 1))
            if num_drafts is None:
                num_drafts = torch.full_like(seq_lens, variant.mean_drafts)
        else:
            num_drafts = None
        with scope("draft"):
            tree = variant.drafter.draft(rows, seq_lens, bonus)
        check_tree(variant.drafter, tree, seq_lens, variant.verifier.context)
        verified = variant.verifier.verify(
            rows, seq_lens, bonus, tree, is_greedy=is_greedy, fill_bitmask=fill_bitmask,
            num_drafts=num_drafts, num_rows=num_rows,
        )  # fmt: skip
        with scope("accept"):
            counts = verified.counts.num_accepted_tokens
            report = state.advance(
                rows, verified.predict, counts, self.max_path, verified.logit_index,
                verified.logits, verified.log_sums, num_drafts, variant.drafts,
            )  # fmt: skip
        return StepResult(verified, report, variant)

    def catch_up(
        self, result: StepResult, num_accepted_tokens: Sequence[int] | None = None
    ) -> None:
        """Let the drafter of a step catch up.

        Args:
            result: Result of ``draft_and_verify``.
            num_accepted_tokens: Accepted rows of each request for v1, 0 if it has finished. Without
                them, v1 waits for the device.
        """
        drafter, verified = result.variant.drafter, result.verified
        if self.context.generation != "v1":
            drafter.extend(verified)
            return
        if num_accepted_tokens is None:
            num_accepted_tokens = verified.counts.num_accepted_tokens.tolist()
        drafter.extend_accepted(verified, num_accepted_tokens)

    def run(
        self,
        req_pool_indices: torch.Tensor,
        *,
        is_greedy: bool,
        variant: StepVariant | None = None,
        num_drafts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run a whole step, the catch-up of the drafter included, and return its report.

        Arguments and errors are those of ``draft_and_verify``. Every token is allowed. In v1, waits
        for the device.
        """
        result = self.draft_and_verify(
            req_pool_indices, is_greedy=is_greedy, variant=variant, num_drafts=num_drafts
        )
        with scope("extend"):
            self.catch_up(result)
        return result.report
