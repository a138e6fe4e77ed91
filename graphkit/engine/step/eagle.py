"""Drafting with a draft model: an EAGLE head, or a small language model (STANDALONE).

A draft model has processed one token more than the target, the bonus token. The row of position p
of an EAGLE head takes the token of position p + 1 and the target's hidden state of position p; it
predicts the token of position p + 2 (arXiv 2401.15077, section 3.1). A language model takes every
token at its own position, from the first token of the prompt on, so its cache has one row more.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch

from graphkit.buffers import AcceptedCounts, DraftExtendInputs, DraftInputs
from graphkit.engine.step.acceptance import Verified
from graphkit.engine.step.context import EngineContext
from graphkit.engine.step.draft_tree import ChainTree, DraftSamples, DraftTree
from graphkit.engine.step.drafter import Drafter, check_draft_width, require_hidden_states
from graphkit.engine.step.engine_model import EngineModel
from graphkit.engine.step.prefill_batch import PrefillBatch
from graphkit.errors import ConfigError, OutputError
from graphkit.graphs.devices import to_device
from graphkit.ops import create_extend_after_decode_spec_info
from graphkit.ops.logits import argmax_rows, top_candidates
from graphkit.ops.rows import gather_rows
from graphkit.ops.step_rows import first_draft_rows
from graphkit.runners import (
    DraftExtendOutput,
    DraftExtendRunner,
    DraftExtendV2Runner,
    DraftRunner,
)
from graphkit.runners.draft import DraftStep


class EagleDrafter(Drafter):
    """Drafts with a ``DraftRunner`` and catches up with a draft-extend runner.

    The draft-extend runner is a ``DraftExtendRunner`` in v1, which catches up on the accepted rows,
    and a ``DraftExtendV2Runner`` in v2 and v3, which catches up on all rows.

    Args:
        model: The draft model. Its forward receives ``DraftInputs`` and ``DraftExtendInputs``. In
            EAGLE-3 the hidden states are [T, 3 H], of three target layers, in
            ``DraftExtendInputs``, and [B * K, H], the model's own, in ``DraftInputs``.
    """

    def __init__(self, model: EngineModel) -> None:
        self._model = model

    def prepare(self, context: EngineContext) -> None:
        """See ``Drafter.prepare``."""
        if context.spec.num_steps < 1:
            raise ConfigError(
                "SpecConfig.num_steps is 0, but EagleDrafter needs at least 1 draft step. Set "
                "num_steps to 1 or more, or use no drafter.",
                field="num_steps",
            )
        if context.spec.resolved.is_none() and context.verify_width == 1:
            raise ConfigError(
                f"{context.spec.resolved!r}.is_none() is True: plain decoding, which verifies no "
                "drafts of EagleDrafter. Use no drafter, or the algorithm of its draft model.",
                field="drafter",
            )
        check_draft_width(type(self).__name__, context)
        context.check(self._model)
        self._context, self._spec = context, replace(context.spec, is_draft_worker=True)
        options = {
            **context.runner_options,
            "spec": self._spec,
            "sizes": context.sizes,
            "attention": self._model.attention,
            "draft_token_map": self._model.draft_token_map,
        }
        extend = DraftExtendRunner if context.generation == "v1" else DraftExtendV2Runner
        self._draft: DraftRunner = DraftRunner(self._model.forward, **options)
        self._extend = extend(self._model.forward, **options)
        self.runners = (self._draft, self._extend)
        self._uses_hidden = not self._spec.resolved.is_standalone()
        # Rows that the model has in its cache for the bonus token, which the target has not.
        self._ahead = 0 if self._uses_hidden else 1
        self._is_chain = self._spec.topk == 1
        self._chain = ChainTree.one_chain(context, self._spec.num_draft_tokens)
        # A language model draws its drafts, as the target draws its tokens.
        draws = self._ahead > 0 and self._model.draft_token_map is None
        self._samples = DraftSamples(context) if draws else None
        self._use_samples(is_greedy=False)
        # A chain takes the first candidate, and a tree of samples has it, whatever its probability.
        self._certain = torch.ones(context.sizes.max_batch_size, 1, device=context.device)

    def at_length(self, context: EngineContext) -> EagleDrafter:
        """See ``Drafter.at_length``. The model's KV pool and the future map are shared."""
        other = copy(self)
        other.prepare(context)
        return other

    @property
    def max_path(self) -> int:
        """See ``Drafter.max_path``."""
        return min(self._spec.num_steps + 1, self._spec.num_draft_tokens)

    @property
    def slots_needed(self) -> int:
        """One slot per branch and step, K * S; for STANDALONE, at least W, and the bonus token's.

        A language model catches up on W rows that begin behind the first committed token.
        """
        spec = self._spec
        drafted = spec.topk * spec.num_steps
        return max(drafted, spec.num_draft_tokens) + 1 if self._ahead else drafted

    def prefill_batch(self, batch: PrefillBatch) -> None:
        """See ``Drafter.prefill_batch``."""
        if self._ahead:
            # The first token of a chunk is the last one of the chunk before, and runs again.
            first = batch.input_ids[batch.last_rows + 1 - batch.device_lengths]
            batch = batch.with_front(self._context, first[:, None], moved=self._ahead)
        out = self._extend.fall_back(
            DraftExtendInputs(
                input_ids=batch.next_ids,
                hidden_states=self._hidden_input(batch.hidden_states),
                **batch.extend_fields(),
            )
        )
        # Candidates after a chunk that is not the last one are overwritten by the next chunk.
        rows = batch.req_pool_indices
        index = torch.arange(len(rows), device=rows.device)
        last = None if self._samples is None else batch.positions[batch.last_rows]
        self._store_candidates(rows, out, index, last)

    def draft(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> DraftTree:
        """See ``Drafter.draft``."""
        spec, resolve = self._spec, self._context.future_map.resolve
        if self._context.generation == "v3":  # which captures greedy steps for themselves
            self._use_samples(is_greedy=self.is_greedy)
        rows = seq_lens + self._ahead if self._ahead else seq_lens
        topk_p = self._certain[: len(seq_lens)]
        if not self._is_chain:
            stored = resolve("topk_p", req_pool_indices)
            topk_p = stored if self._samples is None else torch.cat([topk_p, stored[:, 1:]], 1)
        positions, slots = first_draft_rows(
            req_pool_indices, self._context.req_to_token, rows, spec.topk, spec.num_steps
        )
        drafted = self._draft.run(
            DraftInputs(
                req_pool_indices=req_pool_indices,
                seq_lens=rows,
                topk_p=topk_p,
                topk_index=resolve("topk_index", req_pool_indices),
                hidden_states=(
                    resolve("hidden_states", req_pool_indices) if self._uses_hidden else None
                ),
                positions=positions,
                out_cache_loc=slots,
            )
        )
        if self._is_chain:
            return self._chain.of(torch.cat([bonus_tokens[:, None], drafted.draft_tokens], 1))
        return DraftTree.from_candidates(bonus_tokens, drafted.tensors(), seq_lens, spec)

    def extend(self, verified: Verified) -> None:
        """See ``Drafter.extend``."""
        width = self._spec.num_draft_tokens
        verified = self._own_rows(verified.front(width))
        fields, select_index = verified.extend_fields(width)
        out = self._extend.run(
            DraftExtendInputs(
                input_ids=verified.predict,
                hidden_states=self._hidden_input(verified.hidden_states),
                **fields,
            )
        )
        last = verified.new_seq_lens.long() - 1 if self._draws_next else None
        self._store_candidates(verified.req_pool_indices, out, select_index, last)

    def extend_accepted(self, verified: Verified, num_accepted_tokens: Sequence[int]) -> None:
        """See ``Drafter.extend_accepted``."""
        live = [i for i, count in enumerate(num_accepted_tokens) if count]
        if not live:
            return
        width, device = self._context.verify_width, verified.predict.device
        verified = self._own_rows(verified)
        flat = [i * width + j for i in live for j in range(num_accepted_tokens[i])]
        picked, index = to_device(live, device), to_device(flat, device)
        tokens = verified.counts.num_accepted_tokens[picked]
        counts = AcceptedCounts.from_tokens(tokens)
        rows, seq_lens = verified.req_pool_indices[picked], verified.new_seq_lens[picked]
        accepted = verified.predict[index]
        positions, bonus = torch.empty_like(accepted), torch.empty_like(rows)
        create_extend_after_decode_spec_info(accepted, seq_lens, tokens, positions, bonus)
        hidden_states = self._hidden_input(verified.hidden_states)
        out = self._extend.run(
            DraftExtendInputs(
                req_pool_indices=rows,
                seq_lens=seq_lens,
                extend_seq_lens=tokens,
                input_ids=accepted,
                positions=positions,
                out_cache_loc=verified.out_cache_loc[index],
                hidden_states=None if hidden_states is None else hidden_states[index],
                **counts.fields(),
            )
        )
        last = seq_lens.long() - 1 if self._draws_next else None
        self._store_candidates(rows, out, None, last)

    def _own_rows(self, verified: Verified) -> Verified:
        """Return the result with its tokens at their own positions, for STANDALONE."""
        return verified.moved(1, self._context.req_to_token) if self._ahead else verified

    def _use_samples(self, *, is_greedy: bool) -> None:
        """Let the DRAFT runner choose drafts by ``DraftSamples``, if these are no others."""
        step, samples = self._draft.step, self._samples
        assert isinstance(step, DraftStep), "the step of a DraftRunner"
        step.choose = samples
        if samples is not None and is_greedy:
            step.choose = None if self._is_chain else samples.most_probable

    @property
    def _draws_next(self) -> bool:
        """Whether the first drafts of the next step are drawn."""
        return self._samples is not None and not self.is_greedy

    def _hidden_input(self, hidden_states: torch.Tensor | None) -> torch.Tensor | None:
        owner = type(self).__name__
        return require_hidden_states(owner, hidden_states) if self._uses_hidden else None

    def _store_candidates(
        self,
        req_pool_indices: torch.Tensor,
        out: DraftExtendOutput,
        select_index: torch.Tensor | None,
        last_positions: torch.Tensor | None,
    ) -> None:
        """Store the best candidates after each request's last token for the next step.

        DRAFT_EXTEND returns them. DRAFT_EXTEND_V2 returns logits of every row; ``select_index``
        gives each request's last row. ``last_positions``, [B] int64, are their positions;
        ``None`` stores the most probable candidates.
        """
        logits, hidden_states = out.next_token_logits, out.hidden_states
        topk_p, topk_index = out.topk_p, out.topk_index
        token_map = self._model.draft_token_map
        if self._uses_hidden and hidden_states is None:
            raise OutputError(
                "the forward of the draft model returned no hidden_states, which the next draft of "
                f"{self._spec.resolved!r} reads. Return ForwardOutput(hidden_states=...), or use "
                "STANDALONE for a language model."
            )
        if self._samples is not None and last_positions is not None:
            last = logits if select_index is None else gather_rows(logits, select_index)
            topk_p, topk_index = self._samples(last, req_pool_indices, last_positions)
        elif topk_index is None:
            assert select_index is not None, "extend passes the last rows"
            if self._uses_hidden and hidden_states is not None:
                hidden_states = gather_rows(hidden_states, select_index)
            if self._is_chain:
                topk_index = select_index.new_empty(len(select_index), 1)
                argmax_rows(topk_index.view(-1), logits, select_index, token_map)
            else:
                topk_p, topk_index = top_candidates(
                    logits, self._spec.topk, None, select_index, token_map
                )
        stored = {"topk_index": topk_index}
        if not self._is_chain and topk_p is not None:
            stored["topk_p"] = topk_p
        if self._uses_hidden and hidden_states is not None:
            stored["hidden_states"] = hidden_states
        self._context.future_map.stash(req_pool_indices, stored)
