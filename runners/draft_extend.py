"""DRAFT_EXTEND: the draft model catches up on the tokens that verify accepted.

v1 knows the accepted lengths and runs only the accepted tokens, packed. v2 runs all W rows of every
request at a uniform stride, so it does not wait for the lengths.
"""

from __future__ import annotations

from typing import Any

import torch

from graphkit.buffers import DraftExtendInputs
from graphkit.ops.logits import top_candidates
from graphkit.runners.outputs import DraftExtendOutput, LastRowOutput
from graphkit.runners.runner import Runner
from graphkit.runners.step import Step, rows_at
from graphkit.spec import ForwardMode


class DraftExtendStep(Step[LastRowOutput]):
    """Runs the forward, and computes the top-k of the last row of each request."""

    def whole(self, inputs: DraftExtendInputs) -> LastRowOutput:
        """Run the forward and select the last rows."""
        logits, hidden_states = _last_rows(self, inputs)
        topk_p, topk_index = top_candidates(logits, self.spec.topk, token_map=self.draft_token_map)
        return LastRowOutput(
            next_token_logits=logits,
            hidden_states=hidden_states,
            topk_p=topk_p,
            topk_index=topk_index,
        )


class DraftExtendV2Step(Step[DraftExtendOutput]):
    """Runs the forward. The worker selects the rows and computes their top-k."""

    def whole(self, inputs: DraftExtendInputs) -> DraftExtendOutput:
        """Run the forward. Of a prefill, the output has the last row of each request."""
        if inputs.lengths is not None:
            logits, hidden_states = _last_rows(self, inputs)
            return DraftExtendOutput(next_token_logits=logits, hidden_states=hidden_states)
        self.attend(inputs)
        logits, hidden_states = self.draft_rows(self.forward(inputs), {"token": inputs.num_tokens})
        return DraftExtendOutput(next_token_logits=logits, hidden_states=hidden_states)


def _last_rows(
    step: Step[Any], inputs: DraftExtendInputs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the forward over packed rows; return logits and hidden states of each last row."""
    step.attend(inputs)
    requests, tokens = inputs.batch_size, inputs.num_tokens
    logits, hidden_states = step.draft_rows(
        step.forward(inputs), {"token": tokens, "request": requests}
    )
    last = inputs.last_rows()
    logits = rows_at(last, tokens, logits)
    if hidden_states is not None:
        hidden_states = rows_at(last, tokens, hidden_states)
    return logits, hidden_states


class _DraftExtend(Runner[DraftExtendInputs, DraftExtendOutput]):
    appends_rows = False
    inputs_type = DraftExtendInputs
    output_type = DraftExtendOutput

    def unused_fields(self) -> tuple[str, ...]:
        """Return the hidden states if the draft model is standalone."""
        return ("hidden_states",) if self.spec.resolved.is_standalone() else ()


class DraftExtendRunner(_DraftExtend):
    """Runs v1: ``num_accepted_tokens`` rows per request, packed, in a bucket of S + 1 per request.

    Rows behind the packed ones are pads, even in a batch that fills its captured size. ``forward``
    returns a ``ForwardOutput`` or ``DraftExtendOutput`` with one row per token, or one row per
    request if it selects ``inputs.last_rows()`` itself. The output has one row per request, with
    its top-k, which are target tokens also with a ``draft_token_map``. See ``Runner`` for the
    arguments.
    """

    mode = ForwardMode.DRAFT_EXTEND
    output_type = LastRowOutput
    step_type = DraftExtendStep
    ragged = True


class DraftExtendV2Runner(_DraftExtend):
    """Runs v2: W rows per request at a uniform stride, with logits and hidden states of all rows.

    ``forward`` returns a ``ForwardOutput`` or ``DraftExtendOutput`` with one row per token. Of a
    prefill, whose rows are packed, it may return one row per request as in v1. If the attention
    backend does not support the mode, ``capture`` captures nothing, and every batch falls back with
    that reason counted. The worker that chooses tokens maps them by ``draft_token_map``. See
    ``Runner`` for the arguments.
    """

    mode = ForwardMode.DRAFT_EXTEND_V2
    step_type = DraftExtendV2Step
    may_stay_eager = True
