"""DRAFT_EXTEND: the draft model catches up on what verify accepted.

v1 knows the accepted lengths and runs accepted tokens alone, packed. v2 runs all W rows of every
request at a uniform stride, so that nothing has to wait for the lengths.
"""

from __future__ import annotations

from graphkit.buffers import DraftExtendInputBuffers, DraftExtendInputs, Inputs
from graphkit.runners.outputs import DraftExtendOutput, LastRowOutput
from graphkit.runners.runner import Runner
from graphkit.runners.step import Step, rows_of
from graphkit.spec import ForwardMode
from graphkit.spec.tree import top_candidates


class DraftExtendStep(Step[LastRowOutput]):
    """The forward, the last row of each request, and its top-k."""

    def whole(self, inputs: Inputs) -> LastRowOutput:
        """Run the forward and select."""
        assert isinstance(inputs, DraftExtendInputs), "the runner's buffers are those of the mode"
        self.attend(inputs)
        requests, tokens = inputs.batch_size, inputs.num_tokens
        logits, hidden_states = rows_of(
            self.forward(inputs), {"token": tokens, "request": requests}
        )
        last = inputs.last_rows()
        if logits.shape[0] == tokens:
            logits = logits.index_select(0, last)
        if hidden_states is not None and hidden_states.shape[0] == tokens:
            hidden_states = hidden_states.index_select(0, last)
        topk_p, topk_index = top_candidates(logits, self.spec.topk)
        return LastRowOutput(
            next_token_logits=logits,
            hidden_states=hidden_states,
            topk_p=topk_p,
            topk_index=topk_index,
        )


class DraftExtendV2Step(Step[DraftExtendOutput]):
    """The forward alone: which rows to select, and their top-k, is the worker's."""

    def whole(self, inputs: Inputs) -> DraftExtendOutput:
        """Run the forward."""
        self.attend(inputs)
        logits, hidden_states = rows_of(self.forward(inputs), {"token": inputs.num_tokens})
        return DraftExtendOutput(next_token_logits=logits, hidden_states=hidden_states)


class _DraftExtend(Runner[DraftExtendOutput]):
    buffers_type = DraftExtendInputBuffers
    output_type = DraftExtendOutput

    def fields_without_use(self) -> tuple[str, ...]:
        """A standalone draft model is not fed with hidden states."""
        return ("hidden_states",) if self.spec.resolved.is_standalone() else ()


class DraftExtendRunner(_DraftExtend):
    """v1: ``num_accepted_tokens`` rows per request, packed, in a bucket of S + 1 per request.

    Rows that no request owns are pads, also in a batch that fills its captured size. ``forward``
    returns a ``ForwardOutput`` or ``DraftExtendOutput`` with a row per token, or, if it selects by
    ``inputs.last_rows()`` itself, per request. The output has one row per request, with its top-k.
    Arguments as in ``Runner``.
    """

    mode = ForwardMode.DRAFT_EXTEND
    output_type = LastRowOutput
    step_type = DraftExtendStep
    ragged = True


class DraftExtendV2Runner(_DraftExtend):
    """v2: W rows per request at a uniform stride; logits and hidden states of all of them.

    ``forward`` returns a ``ForwardOutput`` or ``DraftExtendOutput`` with a row per token. An
    attention backend that does not support the mode in graphs is no error: ``capture`` then makes
    none, and every batch falls back with that reason counted. Arguments as in ``Runner``.
    """

    mode = ForwardMode.DRAFT_EXTEND_V2
    step_type = DraftExtendV2Step
    may_stay_eager = True
