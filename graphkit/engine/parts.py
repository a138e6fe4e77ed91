"""What passes between the engine, the verifier and a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.attention import PagedAttention
from graphkit.buffers import AcceptedCounts
from graphkit.config import BufferSizes
from graphkit.errors import ConfigError
from graphkit.spec import ForwardMode, FutureMap, SpecConfig


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model as the engine drives it.

    Attributes:
        forward: Takes the inputs of every mode that the engine runs it in (``TargetVerifyInputs``
            for a target, ``DraftInputs`` and ``DraftExtendInputs`` for a draft model) and returns
            a ``ForwardOutput``. A sequence of them for a chain of draft layers.
        attention: The backend that the forward attends with, over the model's own KV pool. All
            models of an engine share one ``ReqToTokenPool``.
    """

    forward: Any
    attention: PagedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What a drafter is given before it starts.

    Attributes:
        spec: How to draft and verify.
        sizes: How large batches and contexts become.
        generation: ``v1`` or ``v2``.
        future_map: Where results wait for the next step, by request row.
        req_to_token: The request pool's table, int32 [rows, context].
        kv_slots: Slots that requests may come to hold in every KV pool.
        device: Where everything lives.
        runner_options: Keyword arguments for every runner.
    """

    spec: SpecConfig
    sizes: BufferSizes
    generation: str
    future_map: FutureMap
    req_to_token: torch.Tensor
    kv_slots: int
    device: torch.device
    runner_options: Mapping[str, Any]

    def check(self, model: EngineModel) -> None:
        """Refuse a draft model whose pools are not beside the target's.

        Raises:
            ConfigError: It has another request pool, or too few slots.
        """
        attention = model.attention
        shares = attention.req_to_token_pool.req_to_token is self.req_to_token
        kv_pool = attention.kv_pool
        if not shares or kv_pool.size < self.kv_slots:
            raise ConfigError(
                f"the draft model's KV pool has {kv_pool.size} slots behind "
                f"{'the same' if shares else 'another'} req_to_token_pool; it needs the target's "
                f"and {self.kv_slots} slots. Make its attention over the target's request pool.",
                field="drafter",
            )

    @property
    def verify_width(self) -> int:
        """Nodes per request in TARGET_VERIFY, as the algorithm says."""
        return self.spec.tokens_per_request(ForwardMode.TARGET_VERIFY)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """The tokens to verify; node 0 of each request is its bonus token. See ``ops.build_tree``.

    Shapes:
        draft_tokens, positions: [B * W] int64. tree_mask: [B, W, W] bool.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, W] int64.
    """

    draft_tokens: torch.Tensor
    positions: torch.Tensor
    tree_mask: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a verify step accepted. Each request's accepted path stands at the front of its W rows.

    Attributes:
        req_pool_indices: [B] int64.
        seq_lens: [B] int32, committed tokens before this step.
        out_cache_loc: [B * W] int64, slots of positions ``seq_lens`` onwards.
        predict: [B * W] int64, the token after each accepted row; others are of no meaning.
        hidden_states: [B * W, H], the target's; ``None`` if it made none.
        counts: [B] each.
    """

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    predict: torch.Tensor
    hidden_states: torch.Tensor | None
    counts: AcceptedCounts

    @property
    def new_seq_lens(self) -> torch.Tensor:
        """[B] int32, committed tokens after this step."""
        result: torch.Tensor = self.seq_lens + self.counts.num_accepted_tokens
        return result

    @property
    def bonus_tokens(self) -> torch.Tensor:
        """[B] int64, the target's own token after each accepted path."""
        predict = self.predict.view(len(self.seq_lens), -1)
        bonus: torch.Tensor = predict.gather(1, self.counts.num_accepted_drafts.long()[:, None])
        return bonus[:, 0]

    def of_requests(self, picked: torch.Tensor) -> Verified:
        """The same of some of the requests, int64 [picked]."""
        requests = len(self.seq_lens)

        def blocks(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(requests, -1, *rows.shape[1:])[picked].flatten(0, 1)

        hidden_states = self.hidden_states
        return Verified(
            req_pool_indices=self.req_pool_indices[picked],
            seq_lens=self.seq_lens[picked],
            out_cache_loc=blocks(self.out_cache_loc),
            predict=blocks(self.predict),
            hidden_states=None if hidden_states is None else blocks(hidden_states),
            counts=AcceptedCounts.from_tokens(self.counts.num_accepted_tokens[picked]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A chunk of a prompt that the target has read.

    Attributes:
        req_pool_indices: [1] int64.
        start: Tokens of the prompt before the chunk.
        input_ids: [C] int64, the chunk's tokens.
        next_ids: [C] int64, the token after each of them.
        out_cache_loc: [C] int64.
        hidden_states: [C, H], the target's; ``None`` if it made none.
        is_last: Whether the prompt ends with it; ``next_ids`` then ends with the first new token.
    """

    req_pool_indices: torch.Tensor
    start: int
    input_ids: torch.Tensor
    next_ids: torch.Tensor
    out_cache_loc: torch.Tensor
    hidden_states: torch.Tensor | None
    is_last: bool
