"""Drafting with a chain of draft layers: multi-layer EAGLE."""

from __future__ import annotations

from copy import copy

import torch

from graphkit.buffers import MultiLayerDraftExtendInputs
from graphkit.engine.step.acceptance import Verified
from graphkit.engine.step.context import EngineContext
from graphkit.engine.step.draft_tree import ChainTree, DraftTree
from graphkit.engine.step.drafter import Drafter, check_draft_width, require_hidden_states
from graphkit.engine.step.engine_model import EngineModel
from graphkit.engine.step.prefill_batch import PrefillBatch
from graphkit.graphs.devices import to_device
from graphkit.runners import MultiLayerEagleRunner
from graphkit.runners.draft import TreeGrowth

_TOKENS, _STATES = "last_tokens", "last_hidden_states"
"""Names in the future map of the rows that run again."""


class MultiLayerDrafter(Drafter):
    """Drafts with a ``MultiLayerEagleRunner``: one layer per draft step, and no DRAFT replay.

    Layer i proposes K tokens after the most probable token of layer i - 1. A tree therefore has one
    branch that continues at each depth.

    Of several draft lengths, each drafts with the first layers. All layers catch up on every step
    in the graphs of the longest length, since a longer draft may follow. So a shorter draft saves
    time of the target alone; only plain steps put off the layers.

    The last i rows of layer i come from tokens that layers before it have drafted. Every catch-up
    therefore runs the S - 1 rows before its own again, once their tokens are known.

    Args:
        model: Its ``forward`` is a sequence of forwards, one per layer, that receive
            ``MultiLayerDraftExtendInputs``.
    """

    def __init__(self, model: EngineModel) -> None:
        self._model = model

    def prepare(self, context: EngineContext) -> None:
        """See ``Drafter.prepare``."""
        context.spec.check_draft_steps()
        check_draft_width(type(self).__name__, context)
        context.check(self._model)
        self._context, self._spec = context, context.spec
        self._front = max(context.spec.num_steps - 1, 0)  # rows that run again
        self._layers = MultiLayerEagleRunner(
            self._model.forward,
            spec=context.spec,
            sizes=context.sizes,
            attention=self._model.attention,
            draft_token_map=self._model.draft_token_map,
            num_front_tokens=self._front,
            **context.runner_options,
        )
        self.runners = (self._layers,)
        requests, topk = context.sizes.max_batch_size, context.spec.topk
        self._last_rows = torch.arange(1 - self._front, 1, device=context.device)
        self._others = torch.zeros(requests, topk * (topk - 1), device=context.device)
        self._chain = ChainTree.one_chain(context, context.spec.num_draft_tokens)

    def at_length(self, context: EngineContext) -> MultiLayerDrafter:
        """See ``Drafter.at_length``. The runner and the future map are shared."""
        context.spec.check_draft_steps()
        check_draft_width(type(self).__name__, context)
        other = copy(self)
        other._context, other._spec, other.runners = context, context.spec, ()
        other._chain = ChainTree.one_chain(context, context.spec.num_draft_tokens)
        return other

    @property
    def max_path(self) -> int:
        """See ``Drafter.max_path``."""
        return min(self._spec.num_steps + 1, self._spec.num_draft_tokens)

    def prefill_batch(self, batch: PrefillBatch) -> None:
        """See ``Drafter.prefill_batch``."""
        hidden_states = require_hidden_states(type(self).__name__, batch.hidden_states)
        rows = batch.req_pool_indices
        if self._front:
            new = [place for place, start in enumerate(batch.starts) if start == 0]
            if new:  # no rows are before the first one of a prompt
                tokens = batch.next_ids.new_zeros(len(new), self._front)
                states = hidden_states.new_zeros(*tokens.shape, *hidden_states.shape[1:])
                begun = rows[to_device(new, rows.device)]
                self._context.future_map.stash(begun, {_TOKENS: tokens, _STATES: states})
            batch = batch.with_front(self._context, *self._rows_before(rows))
        inputs = MultiLayerDraftExtendInputs(
            input_ids=batch.next_ids,
            hidden_states=batch.hidden_states,
            select_index=batch.last_rows,
            **batch.extend_fields(),
        )
        self._store(inputs, self._layers.fall_back(inputs).tensors())

    def draft(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> DraftTree:
        """See ``Drafter.draft``."""
        spec, resolve = self._spec, self._context.future_map.resolve
        tokens = resolve("topk_index", req_pool_indices)
        if spec.topk == 1:
            drafts = tokens[:, : spec.num_draft_tokens - 1, 0]
            return self._chain.of(torch.cat([bonus_tokens[:, None], drafts], 1))
        probs = resolve("topk_p", req_pool_indices)
        tree = TreeGrowth(probs[:, 0], tokens[:, 0], spec.num_steps)
        for step in range(1, spec.num_steps):
            # The next layer continues the first branch alone, which is the most probable one.
            branch_probs = torch.cat([probs[:, step], self._others[: len(probs)]], 1)
            branch_tokens = tokens[:, step, None].expand(-1, spec.topk, -1)
            tree.grow(branch_probs.view(-1, spec.topk), branch_tokens.flatten(0, 1))
        names = "parent_list", "top_scores_index", "draft_tokens"
        candidates = dict(zip(names, tree.best(spec.num_draft_tokens), strict=True))
        return DraftTree.from_candidates(bonus_tokens, candidates, seq_lens, spec)

    def extend(self, verified: Verified) -> None:
        """See ``Drafter.extend``."""
        require_hidden_states(type(self).__name__, verified.hidden_states)
        front, total = self._front, self._layers.tokens_per_request
        if front:
            before = self._rows_before(verified.req_pool_indices)
            table = self._context.req_to_token
            verified = verified.with_front(*before, total - front, table)
        else:
            verified = verified.front(total)
        fields, select_index = verified.extend_fields(total)
        if front:
            # Rows before the first position see no key and write to slot 0, as those of pads.
            fields["positions"] = fields["positions"].clamp(min=0)
            select_index = select_index + front
        inputs = MultiLayerDraftExtendInputs(
            input_ids=verified.predict,
            hidden_states=verified.hidden_states,
            select_index=select_index,
            **fields,
        )
        self._store(inputs, self._layers.run(inputs).tensors())

    def _rows_before(self, req_pool_indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and hidden states of the last F rows that ran, [B, F] and [B, F, H]."""
        resolve = self._context.future_map.resolve
        return resolve(_TOKENS, req_pool_indices), resolve(_STATES, req_pool_indices)

    def _store(self, inputs: MultiLayerDraftExtendInputs, output: dict[str, torch.Tensor]) -> None:
        """Store the candidates of each request, and its last rows, for the next step."""
        names = ("topk_index",) if self._spec.topk == 1 else ("topk_p", "topk_index")
        stored = {name: output[name] for name in names}
        if self._front:
            last = inputs.select_index[:, None] + self._last_rows
            stored |= {_TOKENS: inputs.input_ids[last], _STATES: inputs.hidden_states[last]}
        self._context.future_map.stash(inputs.req_pool_indices, stored)
