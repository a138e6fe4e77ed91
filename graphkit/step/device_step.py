"""A whole speculative step on the device: draft, verify, accept and catch up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.attention.cache import kv_pools
from graphkit.buffers import Axis, Rows, StepInputs, declare
from graphkit.graphs import Backend, CaptureFailure, scope
from graphkit.runners import Output, Runner, declare_output
from graphkit.runners.capture import capture_error
from graphkit.step.context import EngineContext, EngineModel
from graphkit.step.drafter import Drafter, NullDrafter, prepare_drafter
from graphkit.step.step_tensors import Verified
from graphkit.step.tree_checks import check_tree
from graphkit.step.verifier import FillBitmask, Verifier


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


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step returns.

    Attributes:
        verified: Accepted paths, for the drafter to catch up on.
        report: [B, 4 + longest path] int32, new tokens and ends of the requests, for the host; see
            ``graphkit.ops.loop_layout.Report``.
    """

    verified: Verified
    report: torch.Tensor


class DeviceStep:
    """Drafts, verifies and accepts. Every method only enqueues work; none waits for the device.

    Args:
        target: The model whose output the requests receive.
        drafter: Prepared here; ``None`` decodes one token per step.
        context: Settings and shared state.

    Attributes:
        state: State of the requests.
        runners: The runner of each mode, the target's first.
        pools: All pools with state of requests, by slot or by row.
        slots_ahead: KV slots that one step writes behind the committed tokens of a request.
        max_path: Most tokens that one step can accept, bonus included.

    Raises:
        ConfigError: The drafter does not implement ``Drafter``, or its settings are invalid.
    """

    def __init__(
        self, target: EngineModel, drafter: Drafter | None, context: EngineContext
    ) -> None:
        self.drafter = prepare_drafter(NullDrafter() if drafter is None else drafter, context)
        self.context = context
        self.max_path = min(self.drafter.max_path, context.verify_width)
        self.state = context.state
        self.verifier = verifier = Verifier(target, context, self.state, self.max_path)
        self.runners: tuple[Runner[Any, Any], ...] = (verifier.runner, *self.drafter.runners)
        drafts = (pool for r in self.drafter.runners for pool in kv_pools(r.attention))
        self.pools = (*target.pools, *drafts)
        self.slots_ahead = max(context.verify_width, self.drafter.slots_needed)
        checks = (runner.buffers.value_checks for runner in self.runners)
        self._value_checks = tuple(check for check in checks if check is not None)

    @property
    def host_reason(self) -> str:
        """Reason why a graph of the step is not possible, as a phrase, or an empty string."""
        if self.drafter.host_reason:
            return self.drafter.host_reason
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
        states, as views.
        """
        stashed = self.context.future_map.tensors()
        return {
            **self.state.tensors(),
            **{f"future map {name}": each for name, each in stashed.items()},
            **{name: each[:, 0] for name, each in self._recurrent_tensors().items()},
        }

    def _recurrent_tensors(self) -> dict[str, torch.Tensor]:
        """Return the committed state of each row, and the states after the nodes of its tree."""
        recurrent = self.verifier.recurrent_state
        named = {} if recurrent is None else recurrent.tensors()
        return {f"recurrent {name}": each for name, each in named.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor that a step changes or that its attention reads, each once, by name.

        ``future map`` tensors exist from the first prefill on.
        """
        named = {**self.request_tensors(), **self._recurrent_tensors()}
        for runner in self.runners:
            held = runner.memory_names()["state"]
            named |= {f"{runner.label} {name}": tensor for name, tensor in held.items()}
        by_memory = {(t.data_ptr(), t.shape): name for name, t in reversed(named.items())}
        return {name: named[name] for name in reversed(by_memory.values())}

    def draft_and_verify(
        self,
        req_pool_indices: torch.Tensor,
        *,
        is_greedy: bool,
        fill_bitmask: FillBitmask | None = None,
    ) -> StepResult:
        """Draft, verify, and commit the accepted tokens.

        Requests that have ended run as pads.

        Args:
            req_pool_indices: Request rows, [B] int64.
            is_greedy: Whether every temperature is 0.
            fill_bitmask: Returns the token bitmask of the trees; called between draft and verify.
                ``None`` allows every token.

        Raises:
            InputError: The drafter returned an invalid tree.
        """
        state = self.state
        rows, seq_lens, bonus = state.running(req_pool_indices)
        with scope("draft"):
            tree = self.drafter.draft(rows, seq_lens, bonus)
        check_tree(self.drafter, tree, seq_lens, self.context)
        verified = self.verifier.verify(
            rows, seq_lens, bonus, tree, is_greedy=is_greedy, fill_bitmask=fill_bitmask
        )
        with scope("accept"):
            counts = verified.counts.num_accepted_tokens
            report = state.advance(rows, verified.predict, counts, self.max_path)
        return StepResult(verified, report)

    def run(self, req_pool_indices: torch.Tensor, *, is_greedy: bool) -> torch.Tensor:
        """Run a whole step, the catch-up of the drafter included, and return its report.

        Arguments and errors are those of ``draft_and_verify``. Every token is allowed.
        """
        result = self.draft_and_verify(req_pool_indices, is_greedy=is_greedy)
        with scope("extend"):
            self.drafter.extend(result.verified)
        return result.report

    def warm_up(self, backend: Backend, functions: Iterable[Callable[[], None]]) -> None:
        """Run functions without a graph, one after the other, and wait for each.

        Args:
            backend: Backend of the graphs that are captured next.
            functions: What to run, so that its kernels are compiled.

        Raises:
            CaptureError: A function raised an exception.
        """
        try:
            with backend.session(), torch.no_grad():
                for function in functions:
                    backend.warm_up(function)
        except CaptureFailure as failure:
            raise capture_error(self.verifier.runner.mode, 1, failure) from failure.__cause__
