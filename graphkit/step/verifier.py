"""Prefill and verification with the target, and acceptance of draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from graphkit.buffers import AcceptedCounts, TargetVerifyInputs
from graphkit.graphs import scope
from graphkit.ops import assign_extend_cache_locs
from graphkit.runners import DecodeRunner, ForwardOutput, Runner, TargetVerifyRunner
from graphkit.step.acceptance import (
    AcceptedPath,
    accept_greedily,
    accept_sampled,
    sample_tokens,
)
from graphkit.step.context import EngineContext, EngineModel
from graphkit.step.request_state import RequestState
from graphkit.step.step_tensors import DraftTree, Verified
from graphkit.step.tree_path import finalize_accepted_tree_path


class Verifier:
    """Runs the target. Every method only enqueues work; none waits for the device.

    Args:
        model: The target.
        context: Settings and shared state.
        state: State of the requests.
        max_path: Most tokens that one step can accept, bonus included.
    """

    def __init__(
        self,
        model: EngineModel,
        context: EngineContext,
        state: RequestState,
        max_path: int,
    ) -> None:
        self._model, self._context, self._state = model, context, state
        self._max_path = max_path
        self._is_tree = context.spec.topk > 1
        self._node = torch.arange(context.verify_width, device=context.device)
        self._is_root = self._node == 0
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
        states = self._model.recurrent_state
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
        return sample_tokens(logits, **self._draws(req_pool_indices))

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
        with scope("verify"):
            tokens = self._tokens(bonus, tree)
            slots = torch.empty_like(tokens)
            assign_extend_cache_locs(
                rows, self._context.req_to_token, seq_lens, seq_lens + width, slots
            )
            output = self.runner.run(
                TargetVerifyInputs(
                    req_pool_indices=rows,
                    seq_lens=seq_lens,
                    input_ids=tokens,
                    positions=self._positions(seq_lens, tree),
                    out_cache_loc=slots,
                    custom_mask=tree.tree_mask if self._is_tree else None,
                )
            )
        with scope("accept"):
            links = tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling
            candidates = tokens.view(tree.retrieve_index.shape)
            accept: Callable[..., AcceptedPath] = accept_greedily
            if not is_greedy:
                accept = partial(accept_sampled, **self._draws(rows))
            predict, accept_index, drafts = accept(
                candidates, links, output.next_token_logits, self._max_path
            )
            if self._model.recurrent_state is not None:
                last = accept_index.gather(1, drafts.long()[:, None])[:, 0]
                self._model.recurrent_state.commit(rows, last % width)
            hidden_states = output.hidden_states
            if self._is_tree:
                predict, hidden_states = finalize_accepted_tree_path(
                    self._model.attention.kv_pool, accept_index, slots, predict, hidden_states
                )
        return Verified(
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            predict=predict.long(),
            hidden_states=hidden_states,
            accept_index=accept_index,
            counts=AcceptedCounts.from_drafts(drafts),
        )

    def _tokens(self, bonus: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        """Return the tokens with the bonus token at each root, [B * W].

        The host does not see values on a device. Ids outside the vocabulary become valid ones
        there, which the target accepts only if they equal its own tokens.
        """
        drafts = tree.draft_tokens.view_as(tree.retrieve_index)
        drafts = drafts.clamp(0, self._context.sizes.vocab_size - 1)
        return torch.where(self._is_root, bonus[:, None], drafts).flatten()

    def _positions(self, seq_lens: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        """Return the position of each node, [B * W] int64, from its depth."""
        # Every node but the root attends to the root, and counts itself.
        depth = tree.tree_mask[:, :, 1:].sum(2) if self._is_tree else self._node
        return (seq_lens[:, None] + depth).flatten()

    def _draws(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the draws of requests depend on, at their present positions."""
        state = self._state
        return {
            "temperatures": state.temperatures[rows],
            "seeds": state.seeds[rows],
            "positions": state.seq_lens[rows],
        }
