"""Captured prefills: one graph per number of prompt tokens, whatever requests they belong to."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
from torch.nn.functional import pad

from graphkit.buffers import Axis, TargetVerifyInputs
from graphkit.engine.step.context import EngineContext
from graphkit.engine.step.packed_rows import PackedInputs
from graphkit.engine.step.prefill_batch import PrefillBatch
from graphkit.engine.step.verifier import Verifier
from graphkit.errors import CaptureError
from graphkit.records import ModeRecord
from graphkit.runners import ForwardOutput, Output, Runner, StepRunner, declare_output
from graphkit.runners.capture import mode_record

MOST_REQUESTS = 8
"""Most requests of a captured prefill. Attention has a program for each tile of all tokens of each
of them, and most of these programs end at once."""
SIZES = (64, 128, 192, 256, 384, 512, 1024, 2048)
"""Numbers of tokens that are captured on CUDA. Few tokens take the device less time than the host
needs to launch their kernels."""

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class PromptOutput(Output):
    """Output of the target for packed chunks.

    Shapes:
        next_token_logits: [1, R, V], of the last token of each of R requests.
        hidden_states: [T, D], if the target returns them.
    """

    next_token_logits: torch.Tensor = declare_output(Axis.NONE, row=None)
    hidden_states: torch.Tensor | None = declare_output(Axis.REQUEST, row=None, optional=True)


class PromptRunner(StepRunner[PackedInputs, PromptOutput]):
    """Replays the target's forward over packed chunks of prompts.

    Its sizes count tokens. Without a graph, a prefill of few tokens takes as long as the host needs
    to launch its kernels.

    Args:
        target: Runner of the target, whose forward and attention run.
        context: Settings of the engine.
        token_counts: Numbers of tokens to capture.
    """

    def __init__(
        self,
        target: Runner[TargetVerifyInputs, ForwardOutput],
        context: EngineContext,
        token_counts: Sequence[int],
    ) -> None:
        self._target_step = target.step
        can_skip = getattr(target.attention, "skips_absent_rows", False)
        self._most_requests = min(context.sizes.max_batch_size, MOST_REQUESTS) if can_skip else 1
        self._longest = context.sizes.max_context_len
        super().__init__(
            self._prefill,
            inputs=PackedInputs,
            output=PromptOutput,
            sizes=replace(context.sizes, max_batch_size=max(token_counts)),
            tokens_per_request=1,
            **{**context.runner_options, "batch_sizes": token_counts},
        )

    @classmethod
    def create(cls, verifier: Verifier, context: EngineContext) -> PromptRunner | None:
        """Return a runner for the prompts of an engine; ``None`` if these run without graphs.

        A graph needs attention that knows packed rows and does not plan on the host, and recurrent
        layers that run all rows at once. The checking mode and engines of several ranks run prompts
        without one.
        """
        target, states = verifier.runner, verifier.recurrent_state
        if states is not None and not states.runs_at_once:
            return None  # the host knows how long the prompts are that it computes in parts
        options, most = context.options, context.most_prefill_tokens
        counts = options.prefill_sizes
        if counts is None:
            counts = SIZES if context.device.type == "cuda" else ()
        reach = min(most, context.sizes.max_batch_size * context.sizes.max_context_len)
        counts = [count for count in counts if count <= reach]
        step = target.step
        can_run = step.packs_rows and not step.plans_on_host and not target.eager_reason
        if not counts or not can_run or context.is_checking or options.group is not None:
            return None
        return cls(target, context, counts)

    @property
    def label(self) -> str:
        """What the runner runs."""
        return "PREFILL"

    def capture_if_possible(self) -> None:
        """Capture all sizes. A forward that cannot be captured runs eagerly, with a warning."""
        if self.status != "planned":
            return
        try:
            self.capture()
        except CaptureError as error:
            logger.warning("Prompts run without graphs: %s", error)

    @contextmanager
    def trial_capture(self) -> Iterator[ModeRecord]:
        """See ``Runner.trial_capture``; no size of a forward that cannot be captured."""
        with ExitStack() as trial:
            try:
                mode = trial.enter_context(super().trial_capture())
            except CaptureError as error:
                mode = mode_record(self.step, (), str(error))
            yield mode

    def tokens_within(self, microseconds: float) -> int:
        """Return the most tokens whose graph runs in a time, or 0 without such a graph.

        Waits for the device. Prompts of the row of pads run: attention and scans of recurrent
        layers take as long as for prompts that begin.
        """
        if self.status != "captured":
            return 0
        with self.without_stats():
            times = {}
            for size in self.graphs:
                inputs = self.prompts_of_pads(size)
                if len(inputs.positions) == size:
                    replay = SimpleNamespace(replay=partial(self.replay, inputs))
                    times[size] = self.backend.measure(replay)
        return max((size for size, time in times.items() if time <= microseconds), default=0)

    def prompts_of_pads(self, size: int) -> PackedInputs:
        """Return prompts of row 0 with so many tokens, or as many as the requests may have."""
        longest = self._longest
        lengths = [min(longest, size - begin) for begin in range(0, size, longest)]
        lengths = lengths[: self._most_requests]
        positions = torch.cat([torch.arange(length) for length in lengths])
        zeros = torch.zeros_like(positions)
        counts = torch.zeros(len(zeros), dtype=torch.int32)
        row_counts = counts.clone()
        row_counts[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32)
        return PackedInputs(
            input_ids=zeros, positions=positions, out_cache_loc=zeros, req_pool_indices=zeros,
            seq_lens=counts, row_counts=row_counts,
        )  # fmt: skip

    def holds(self, batch: PrefillBatch) -> bool:
        """Return whether a graph can run a batch."""
        return (
            self.status == "captured"
            and len(batch.lengths) <= self._most_requests
            and len(batch.positions) <= self.table.largest
        )

    def prefill(self, batch: PrefillBatch) -> ForwardOutput:
        """Replay chunks that ``holds`` accepts; enqueues only. ``Verifier.prefill`` calls it.

        Returns:
            Logits of the last token of each chunk, [B, V], and hidden states of all tokens, [T, D].
        """
        tokens, requests = len(batch.positions), len(batch.lengths)
        behind = (0, tokens - requests)
        output = self.replay(
            PackedInputs(
                input_ids=batch.input_ids,
                positions=batch.positions,
                out_cache_loc=batch.out_cache_loc,
                req_pool_indices=pad(batch.req_pool_indices, behind),
                seq_lens=pad(torch.tensor(batch.starts, dtype=torch.int32), behind),
                row_counts=pad(torch.tensor(batch.lengths, dtype=torch.int32), behind),
            ),
            clone=True,  # the drafter may replay graphs of the pool before it reads them
        )
        return ForwardOutput(
            next_token_logits=output.next_token_logits[0, :requests],
            hidden_states=output.hidden_states,
        )

    def _prefill(self, inputs: PackedInputs) -> PromptOutput:
        ends = inputs.row_counts[: self._most_requests].long().cumsum(0)
        output = self._target_step.whole(
            inputs.target_inputs(
                self._most_requests,
                width=len(inputs.input_ids),
                logit_rows=(ends - 1).clamp(min=0),
            )
        )
        return PromptOutput(
            next_token_logits=output.next_token_logits[None], hidden_states=output.hidden_states
        )
