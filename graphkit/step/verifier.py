"""Prefill and verification with the target, and acceptance of draft tokens."""

from __future__ import annotations

import torch

from graphkit.buffers import AcceptedCounts, TargetVerifyInputs
from graphkit.graphs import scope
from graphkit.ops import compact_accepted_to_front
from graphkit.ops.target_rows import verify_rows
from graphkit.runners import DecodeRunner, ForwardOutput, Runner, TargetVerifyRunner
from graphkit.step.acceptance import Draws, accept_greedily, accept_sampled, sample_tokens
from graphkit.step.context import EngineContext, EngineModel
from graphkit.step.request_state import RequestState
from graphkit.step.step_tensors import DraftTree, Verified
from graphkit.step.tree_path import move_accepted_kv


class Verifier:
    """Runs the target. Every method only enqueues work; none waits for the device.

    Args:
        model: The target.
        context: Settings and shared state.
        state: State of the requests.
        max_path: Most tokens that one step can accept, bonus included.

    Attributes:
        runner: Runs the target's forward.
        recurrent_state: States of the target's linear-attention or Mamba layers, or ``None``.
    """

    def __init__(
        self,
        model: EngineModel,
        context: EngineContext,
        state: RequestState,
        max_path: int,
    ) -> None:
        self._context, self._state, self._max_path = context, state, max_path
        self._kv_pool, self.recurrent_state = model.attention.kv_pool, model.recurrent_state
        self._is_tree = context.spec.topk > 1
        runner = DecodeRunner if context.spec.resolved.is_none() else TargetVerifyRunner
        self.runner: Runner[TargetVerifyInputs, ForwardOutput] = runner(
            model.forward,
            spec=context.spec,
            sizes=context.sizes,
            attention=model.attention,
            **context.runner_options,
        )

    def prefill(
        self,
        req_pool_indices: torch.Tensor,
        start: int,
        input_ids: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> ForwardOutput:
        """Run the target eagerly over a chunk of one request's prompt.

        Args:
            req_pool_indices: The request row, [1] int64.
            start: Position of the chunk's first token.
            input_ids: The chunk's tokens, [C] int64.
            out_cache_loc: Their KV slots, [C] int64.
        """
        length, device = len(input_ids), input_ids.device
        states = self.recurrent_state
        if states is not None and start == 0:
            states.reset(req_pool_indices)
        output = self.runner.fall_back(
            TargetVerifyInputs(
                req_pool_indices=req_pool_indices,
                seq_lens=torch.full_like(req_pool_indices, start, dtype=torch.int32),
                input_ids=input_ids,
                positions=start + torch.arange(length, device=device),
                out_cache_loc=out_cache_loc,
            ),
            without=("custom_mask",),
        )
        if states is not None:
            # Every token of a prompt is accepted; the pool has the states after the last W.
            last = min(length, states.width) - 1
            states.commit(req_pool_indices, torch.full_like(req_pool_indices, last))
        return output

    def first_token(
        self, req_pool_indices: torch.Tensor, logits: torch.Tensor, *, is_greedy: bool
    ) -> torch.Tensor:
        """Return the token after a prompt, [1] int64, from its last logits, [1, V]."""
        if is_greedy:
            return logits.argmax(-1)
        return sample_tokens(logits, self._draws(req_pool_indices))

    def verify(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        bonus: torch.Tensor,
        tree: DraftTree,
        *,
        is_greedy: bool,
    ) -> Verified:
        """Run the target over the trees and accept a path of each.

        Args:
            req_pool_indices: Request rows, [B] int64.
            seq_lens: Committed tokens, [B] int32.
            bonus: Token at the root of each tree, [B] int64.
            tree: The draft tokens, checked by ``check_tree``.
            is_greedy: Whether every temperature is 0.
        """
        rows, width = req_pool_indices, self._context.verify_width
        mask = tree.tree_mask.contiguous() if self._is_tree else None  # may be expanded
        with scope("build"):
            # The host does not see values on a device. The op makes ids outside the vocabulary
            # valid there; the target accepts them only if they equal its own tokens.
            tokens, positions, slots = verify_rows(
                rows, self._context.req_to_token, seq_lens, bonus, tree.draft_tokens, mask,
                width, self._context.sizes.vocab_size,
            )  # fmt: skip
        with scope("verify"):
            output = self.runner.run(
                TargetVerifyInputs(
                    req_pool_indices=rows,
                    seq_lens=seq_lens,
                    input_ids=tokens,
                    positions=positions,
                    out_cache_loc=slots,
                    custom_mask=mask,
                )
            )
        with scope("accept"):
            links = tree.retrieve_next_token, tree.retrieve_next_sibling
            given = tokens.view(-1, width), links, output.next_token_logits, self._max_path
            path = (
                accept_greedily(*given)
                if is_greedy
                else accept_sampled(*given, self._draws(rows), tree.draft_probs)
            )
            accept_index, drafts = path.accept_index, path.num_accepted_drafts
            if self.recurrent_state is not None:
                last = accept_index.gather(1, drafts.long()[:, None])[:, 0]
                self.recurrent_state.commit(rows, last % width)
            hidden_states = output.hidden_states
            if self._is_tree:
                move_accepted_kv(self._kv_pool, accept_index, slots, width)
                if hidden_states is not None:
                    hidden_states = compact_accepted_to_front(hidden_states, accept_index, width)
        return Verified(
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            predict=path.predict,
            hidden_states=hidden_states,
            accept_index=accept_index,
            counts=AcceptedCounts(drafts, path.num_accepted_tokens),
        )

    def _draws(self, rows: torch.Tensor) -> Draws:
        """Return what the draws of requests depend on, at their present positions."""
        state = self._state
        return Draws(
            rows, state.temperatures, state.top_ks, state.top_ps, state.min_ps, state.seeds,
            state.seq_lens,
        )  # fmt: skip
