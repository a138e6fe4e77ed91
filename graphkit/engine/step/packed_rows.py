"""Packed rows of the target: those of a request follow those of the one before.

The rows are those of prompts, or of verify steps that divide their rows among the requests. A graph
has a number of rows, whatever requests they belong to.

Shape letters: B requests, W nodes of each, T rows, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from graphkit.buffers import Axis, Rows, StepInputs, TargetVerifyInputs, declare
from graphkit.engine.step.context import EngineContext
from graphkit.runners import ForwardOutput, Output, Runner, StepRunner, declare_output


class PackedRows(NamedTuple):
    """The first nodes of each chain, packed; see ``ops.step_rows.pack_rows``.

    Shapes:
        lengths: [B] int32, packed nodes of each request.
        nodes: [T] int64, node of each row, -1 for pads.
        req_pool_indices, tokens, positions, slots: [T] int64, those of each row.
        row_of: [B * W] int64, row of each node.
        next_token: [B, W] int64, links of the packed nodes.
    """

    lengths: torch.Tensor
    nodes: torch.Tensor
    req_pool_indices: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    row_of: torch.Tensor
    next_token: torch.Tensor


@dataclass(kw_only=True, eq=False)
class PackedInputs(StepInputs):
    """Packed rows of requests. Every field has an entry per row, T of them.

    Those of the requests come first in the fields of requests, and zeros follow them.

    Shapes:
        input_ids, positions, out_cache_loc: [T] int64. req_pool_indices: [T] int64.
        seq_lens, row_counts: [T] int32. token_bitmask: [T, ceil(V / 32)] int32.
    """

    input_ids: Rows = declare(Axis.REQUEST, torch.int64, "token ids")
    positions: Rows = declare(Axis.REQUEST, torch.int64, "position of each token in its request")
    out_cache_loc: Rows = declare(Axis.REQUEST, torch.int64, "KV slot that each token writes")
    req_pool_indices: Rows = declare(Axis.REQUEST, torch.int64, "rows of the requests, then 0")
    seq_lens: Rows = declare(Axis.REQUEST, torch.int32, "tokens before those rows, then 0")
    row_counts: Rows = declare(Axis.REQUEST, torch.int32, "rows of each request, then 0")
    token_bitmask: Rows = declare(
        Axis.REQUEST,
        torch.int32,
        "tokens that may follow, a bit for each token of the vocabulary",
        pad=-1,  # every token
        row=("M",),
        optional=True,
        by_address=True,
    )

    def target_inputs(self, most_requests: int, **fields: Any) -> TargetVerifyInputs:
        """Return the inputs of the target's forward over the rows of all requests.

        Args:
            most_requests: Most requests. Those without rows are included.
            **fields: Further fields.
        """
        requests = min(len(self.input_ids), most_requests)
        return TargetVerifyInputs(
            req_pool_indices=self.req_pool_indices[:requests],
            seq_lens=self.seq_lens[:requests],
            input_ids=self.input_ids,
            positions=self.positions,
            out_cache_loc=self.out_cache_loc,
            lengths=self.row_counts[:requests],
            **fields,
        )


@dataclass(kw_only=True, eq=False)
class PackedOutput(Output):
    """Output of the target for packed rows.

    Shapes:
        next_token_logits: [T, V]. hidden_states: [T, D], if the target returns them.
    """

    next_token_logits: torch.Tensor = declare_output(Axis.REQUEST, row=None)
    hidden_states: torch.Tensor | None = declare_output(Axis.REQUEST, row=None, optional=True)


class PackedVerifyRunner(StepRunner[PackedInputs, PackedOutput]):
    """Replays the target's forward over the packed rows of verify steps.

    Args:
        target: Runner of the target, whose forward and attention run.
        context: Settings of the engine.
        row_counts: Numbers of rows to capture.
    """

    def __init__(
        self,
        target: Runner[TargetVerifyInputs, ForwardOutput],
        context: EngineContext,
        row_counts: Sequence[int],
    ) -> None:
        self._target_step, self._verify_width = target.step, context.verify_width
        self._most_requests = context.sizes.max_batch_size
        self._has_bitmask = context.options.structured_output
        super().__init__(
            self._verify,
            inputs=PackedInputs,
            output=PackedOutput,
            sizes=replace(context.sizes, max_batch_size=max(row_counts)),
            tokens_per_request=1,
            optional_fields=("token_bitmask",) if self._has_bitmask else (),
            **{**context.runner_options, "batch_sizes": row_counts},
        )

    @property
    def label(self) -> str:
        """What the runner runs."""
        return "TARGET_VERIFY"

    def _verify(self, inputs: PackedInputs) -> PackedOutput:
        output = self._target_step.whole(
            inputs.target_inputs(
                self._most_requests, token_bitmask=inputs.token_bitmask,
                width=self._verify_width, packs_nodes=True,
            )
        )  # fmt: skip
        return PackedOutput(
            next_token_logits=output.next_token_logits, hidden_states=output.hidden_states
        )
