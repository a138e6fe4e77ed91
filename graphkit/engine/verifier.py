"""The target's side of a step: read prompts, score draft trees, accept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphkit.buffers import AcceptedCounts, TargetVerifyInputs
from graphkit.engine.memory import to_device
from graphkit.engine.parts import DraftTree, EngineContext, EngineModel, Verified
from graphkit.engine.request import Request
from graphkit.engine.sampling import target_distribution
from graphkit.engine.tree_path import finalize_accepted_tree_path
from graphkit.errors import InputError
from graphkit.ops import (
    assign_extend_cache_locs,
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
)
from graphkit.runners import DecodeRunner, ForwardOutput, Runner, TargetVerifyRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The running requests of a step, as the device sees them.

    Shapes:
        req_pool_indices: [B] int64. temperatures: [B] float32.

    Attributes:
        is_greedy: Whether every temperature is 0.
    """

    req_pool_indices: torch.Tensor
    temperatures: torch.Tensor
    is_greedy: bool

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device) -> Batch:
        """Bring what the step must know of the requests to the device."""
        temperatures = [request.sampling.temperature for request in requests]
        return cls(
            req_pool_indices=to_device([request.row for request in requests], device),
            temperatures=to_device(temperatures, device, torch.float32),
            is_greedy=not any(temperatures),
        )


class Verifier:
    """Drives the target. Everything it does is enqueued; it never waits.

    Args:
        model: The target.
        context: The engine's.
        max_path: Most tokens that one step accepts, bonus included.
        generator: Draws for requests with a temperature.
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
        kind = DecodeRunner if context.spec.resolved.is_none() else TargetVerifyRunner
        self.runner: Runner[ForwardOutput] = kind(
            model.forward,
            spec=context.spec,
            sizes=context.sizes,
            attention=model.attention,
            **context.runner_options,
        )

    def read(
        self,
        req_pool_indices: torch.Tensor,
        start: int,
        input_ids: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> ForwardOutput:
        """Read a chunk of one request's prompt, of any length.

        Shapes:
            req_pool_indices: [1] int64. input_ids, out_cache_loc: [C] int64.
        """
        length, device = len(input_ids), input_ids.device
        return self.runner.fall_back(
            TargetVerifyInputs(
                req_pool_indices=req_pool_indices,
                seq_lens=torch.full_like(req_pool_indices, start, dtype=torch.int32),
                input_ids=input_ids,
                positions=start + torch.arange(length, device=device),
                out_cache_loc=out_cache_loc,
            ),
            without=("custom_mask",),
        )

    def verify(self, batch: Batch, seq_lens: torch.Tensor, tree: DraftTree) -> Verified:
        """Score the trees and accept a path of each.

        Shapes:
            seq_lens: [B] int32, committed tokens.
        """
        slots = torch.empty_like(tree.draft_tokens)
        width = self._context.verify_width
        if len(slots) != len(seq_lens) * width:
            raise InputError(
                f"the drafter proposed {len(slots)} nodes for {len(seq_lens)} requests; verify has "
                f"{width} rows for each. Fill the width that the algorithm says.",
                field="draft_tokens",
            )
        assign_extend_cache_locs(
            batch.req_pool_indices, self._context.req_to_token, seq_lens, seq_lens + width, slots
        )
        output = self.runner.run(
            TargetVerifyInputs(
                req_pool_indices=batch.req_pool_indices,
                seq_lens=seq_lens,
                input_ids=tree.draft_tokens,
                positions=tree.positions,
                out_cache_loc=slots,
                custom_mask=tree.tree_mask if self._is_tree else None,
            )
        )
        predict, accept_index, drafts = self._accept(batch, tree, output.next_token_logits)
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
            counts=AcceptedCounts.from_drafts(drafts),
        )

    def _accept(
        self, batch: Batch, tree: DraftTree, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give predicts [B * W], accept_index [B, path] and accepted drafts [B], all int32."""
        requests, width = tree.retrieve_index.shape
        predicts = torch.zeros_like(tree.draft_tokens, dtype=torch.int32)
        accept_index = predicts.new_empty(requests, self._max_path)
        drafts = predicts.new_empty(requests)
        candidates = tree.draft_tokens.view(requests, width)
        links = tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling
        if batch.is_greedy:
            chosen = logits.argmax(-1).view(requests, width)
            verify_tree_greedy(predicts, accept_index, drafts, candidates, *links, chosen)
            return predicts, accept_index, drafts
        probs = target_distribution(logits, batch.temperatures.repeat_interleave(width))
        target_probs = probs.view(requests, width, -1)
        coins = torch.rand(requests, width + 1, generator=self._generator, device=probs.device)
        tree_speculative_sampling_target_only(
            predicts, accept_index, drafts, candidates, *links,
            coins[:, :width].contiguous(), coins[:, width].contiguous(),
            target_probs, torch.zeros_like(target_probs), 1.0, 1.0,
        )  # fmt: skip
        return predicts, accept_index, drafts
