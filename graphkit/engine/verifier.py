"""Prefill and verification with the target, and acceptance of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphkit.buffers import AcceptedCounts, TargetVerifyInputs
from graphkit.engine.context import EngineContext, EngineModel
from graphkit.engine.request import Request
from graphkit.engine.sampling import target_distribution
from graphkit.engine.step_tensors import DraftTree, Verified
from graphkit.engine.transfers import to_device
from graphkit.engine.tree_path import finalize_accepted_tree_path
from graphkit.ops import (
    assign_extend_cache_locs,
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
)
from graphkit.runners import DecodeRunner, ForwardOutput, Runner, TargetVerifyRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningBatch:
    """Request rows and temperatures of the running requests, on the device.

    Attributes:
        req_pool_indices: [B] int64, request rows.
        temperatures: [B] float32.
        is_greedy: Whether every temperature is 0.
    """

    req_pool_indices: torch.Tensor
    temperatures: torch.Tensor
    is_greedy: bool

    @classmethod
    def from_requests(cls, requests: Sequence[Request], device: torch.device) -> RunningBatch:
        """Copy rows and temperatures to the device without waiting for it."""
        temperatures = [request.sampling.temperature for request in requests]
        return cls(
            req_pool_indices=to_device([request.row for request in requests], device),
            temperatures=to_device(temperatures, device, torch.float32),
            is_greedy=not any(temperatures),
        )


class Verifier:
    """Runs the target. Every method only enqueues work; none waits for the device.

    Args:
        model: The target.
        context: The engine's.
        max_path: Most tokens that one step can accept, bonus included.
        generator: Source of random numbers for requests with a temperature.
    """

    def __init__(
        self,
        model: EngineModel,
        context: EngineContext,
        max_path: int,
        generator: torch.Generator,
    ) -> None:
        self._model, self._context = model, context
        self._max_path, self._generator = max_path, generator
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

    def verify(
        self, batch: RunningBatch, seq_lens: torch.Tensor, bonus: torch.Tensor, tree: DraftTree
    ) -> Verified:
        """Run the target over the trees and accept a path of each.

        Args:
            batch: The running requests.
            seq_lens: Committed tokens, [B] int32.
            bonus: Token at the root of each tree, [B] int64.
            tree: The draft tokens, checked by ``check_tree``.
        """
        tokens, width = self._tokens(bonus, tree), self._context.verify_width
        slots = torch.empty_like(tokens)
        assign_extend_cache_locs(
            batch.req_pool_indices, self._context.req_to_token, seq_lens, seq_lens + width, slots
        )
        output = self.runner.run(
            TargetVerifyInputs(
                req_pool_indices=batch.req_pool_indices,
                seq_lens=seq_lens,
                input_ids=tokens,
                positions=self._positions(seq_lens, tree),
                out_cache_loc=slots,
                custom_mask=tree.tree_mask if self._is_tree else None,
            )
        )
        predict, accept_index, drafts = self._accept(batch, tokens, tree, output.next_token_logits)
        if self._model.recurrent_state is not None:
            last = accept_index.gather(1, drafts.long()[:, None])[:, 0]
            self._model.recurrent_state.commit(batch.req_pool_indices, last % width)
        hidden_states = output.hidden_states
        if self._is_tree:
            predict, hidden_states = finalize_accepted_tree_path(
                self._model.attention.kv_pool, accept_index, slots, predict, hidden_states
            )
        return Verified(
            req_pool_indices=batch.req_pool_indices,
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

    def _accept(
        self, batch: RunningBatch, tokens: torch.Tensor, tree: DraftTree, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return predict [B * W], accept_index [B, max_path] and accepted drafts [B], int32."""
        requests, width = tree.retrieve_index.shape
        predict = torch.zeros_like(tokens, dtype=torch.int32)
        accept_index = predict.new_empty(requests, self._max_path)
        drafts = predict.new_empty(requests)
        candidates = tokens.view(requests, width)
        links = tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling
        if batch.is_greedy:
            chosen = logits.argmax(-1).view(requests, width)
            verify_tree_greedy(predict, accept_index, drafts, candidates, *links, chosen)
            return predict, accept_index, drafts
        probs = target_distribution(logits, batch.temperatures.repeat_interleave(width))
        target_probs = probs.view(requests, width, -1)
        coins = torch.rand(requests, width + 1, generator=self._generator, device=probs.device)
        tree_speculative_sampling_target_only(
            predict, accept_index, drafts, candidates, *links,
            coins[:, :width].contiguous(), coins[:, width].contiguous(),
            target_probs, torch.zeros_like(target_probs), 1.0, 1.0,
        )  # fmt: skip
        return predict, accept_index, drafts
