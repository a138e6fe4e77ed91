"""Tensors that the engine and its drafter exchange: prompt chunks, draft trees, accepted tokens.

Shape letters: B requests, W nodes per request in TARGET_VERIFY, C prompt tokens, H hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphkit.buffers import AcceptedCounts, TargetVerifyInputs
from graphkit.graphs import scope
from graphkit.ops import build_tree
from graphkit.spec import SpecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """Draft tokens of one step, linked to one tree per request.

    Node 0 of each request is the root, which holds the bonus token. The engine sets its token, so
    that a drafter may leave any token id there. The engine also computes all positions: those of a
    chain are consecutive, and those of a tree are ``seq_lens`` plus the depth in ``tree_mask``.

    With ``topk == 1`` the trees are chains: node i follows node i - 1, and ``tree_mask`` is not
    read. In a tree, the mask and the links must describe the same ancestors; the nodes behind the
    root may be in any order. The verifier reads the tensors within the same step; a drafter may
    reuse their memory in its next ``draft``.

    A draft is accepted if it equals the target's own token: its most probable one at temperature 0,
    else its sample for the request's seed and the position. So drafts may be chosen in any way, and
    the text of a request is the same with all drafters.

    A drafter that samples its drafts may pass ``draft_probs``, the distributions that it sampled
    from. Drafts are then accepted by rejection sampling, which accepts more of them. Tokens still
    follow the target's distribution if the drafts were sampled as
    ``ops.rejection.accept_by_rejection`` says, with the numbers of ``EngineContext.draft_samples``.
    But which tokens a seed gives depends on the drafter, the tree and the draft length then. At
    temperature 0 they have no effect.

    Shapes:
        draft_tokens: [B * W] int64.
        tree_mask: [B, W, W] bool; entry [b, i, j] is set if node i attends to node j, which is i
            itself or an ancestor.
        retrieve_next_token: [B, W] int64, first child of each node, -1 if it has none.
        retrieve_next_sibling: [B, W] int64, next child of the same parent, -1 if there is none.
        draft_probs: [B * W, V] float32 or ``None``, the distribution that the children of each node
            were sampled from. Rows of nodes without children do not count.
    """

    draft_tokens: torch.Tensor
    tree_mask: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_probs: torch.Tensor | None = None

    @classmethod
    def from_candidates(
        cls,
        bonus_tokens: torch.Tensor,
        candidates: Mapping[str, torch.Tensor],
        seq_lens: torch.Tensor,
        spec: SpecConfig,
    ) -> DraftTree:
        """Link the selected candidates of each request with ``ops.build_tree``.

        Args:
            bonus_tokens: [B] int64, the roots.
            candidates: ``parent_list``, ``top_scores_index`` and ``draft_tokens``, as in
                ``DraftOutput``.
            seq_lens: [B] int32, committed tokens.
            spec: Gives S, K and W.
        """
        with scope("build"):
            mask, _, _, next_token, next_sibling, tokens = build_tree(
                bonus_tokens,
                candidates["parent_list"],
                candidates["top_scores_index"],
                candidates["draft_tokens"],
                seq_lens,
                spec.num_steps,
                spec.topk,
                spec.num_draft_tokens,
            )
        return cls(
            draft_tokens=tokens,
            tree_mask=mask,
            retrieve_next_token=next_token,
            retrieve_next_sibling=next_sibling,
        )


class ChainTree:
    """A tree of fixed shape: K chains that start at the root, with lengths as equal as W allows.

    Waits for the device when it is created, and never again.

    Args:
        topk: Number of chains (K).
        width: Number of nodes, the root included (W).
        max_batch_size: Most requests of a batch (M).
        device: The device of the tensors.
        drafted: Nodes that drafts can occupy, the root included; the others hold token 0 and are
            linked to none, so that they are never accepted. ``None`` selects all.

    Attributes:
        max_depth: Depth of the longest chain.
    """

    def __init__(
        self,
        topk: int,
        width: int,
        max_batch_size: int,
        device: torch.device,
        *,
        drafted: int | None = None,
    ) -> None:
        linked = width if drafted is None else drafted
        chain = [(node - 1) % topk for node in range(1, width)]
        depth = [(node - 1) // topk + 1 for node in range(1, width)]
        child = [node + topk if node + topk < linked else -1 for node in range(1, width)]
        sibling = [node + 1 if node < min(topk, linked - 1) else -1 for node in range(1, width)]
        self.max_depth = max(depth[: linked - 1], default=0)
        chain_of, depth_of = to_device([0, *chain], device), to_device([0, *depth], device)
        mask = (chain_of[:, None] == chain_of) & (depth_of[:, None] >= depth_of)
        mask[:, 0] = True
        next_token = to_device([1 if linked > 1 else -1, *child], device)
        next_sibling = to_device([-1, *sibling], device)
        self._masks = mask.repeat(max_batch_size, 1, 1)
        self._next_tokens = next_token.repeat(max_batch_size, 1)
        self._next_siblings = next_sibling.repeat(max_batch_size, 1)
        self._undrafted = torch.zeros(max_batch_size, width - linked, dtype=torch.int64).to(device)

    def of(self, draft_tokens: torch.Tensor) -> DraftTree:
        """Return the trees of some tokens. Enqueues nothing if drafts can occupy all nodes.

        Args:
            draft_tokens: Token of each node that drafts can occupy, [B, W] int64 if these are all;
                that of the root is not read.
        """
        requests = len(draft_tokens)
        if self._undrafted.shape[1]:
            draft_tokens = torch.cat([draft_tokens, self._undrafted[:requests]], 1)
        return DraftTree(
            draft_tokens=draft_tokens.flatten(),
            tree_mask=self._masks[:requests],
            retrieve_next_token=self._next_tokens[:requests],
            retrieve_next_sibling=self._next_siblings[:requests],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Result of a verify step. Each request's accepted path occupies the first of its W rows.

    Valid until the next step: ``hidden_states`` may alias the output of the captured graph, which
    the next replay overwrites.

    Attributes:
        req_pool_indices: [B] int64, request rows.
        seq_lens: [B] int32, committed tokens before this step.
        out_cache_loc: [B * W] int64, KV slots of the positions from ``seq_lens`` on.
        predict: [B * W] int64, the target's token after each accepted row; undefined in rows behind
            the accepted path.
        hidden_states: [B * W, H], the target's; ``None`` if its forward returns none.
        accept_index: [B, longest path] int32, flat row ``b * W + i`` that each accepted node had in
            the forward, before the path was moved to the front; padded with -1.
        counts: Accepted drafts and tokens, [B] int32 each.
    """

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    predict: torch.Tensor
    hidden_states: torch.Tensor | None
    accept_index: torch.Tensor
    counts: AcceptedCounts

    @property
    def new_seq_lens(self) -> torch.Tensor:
        """Committed tokens after this step, [B] int32."""
        result: torch.Tensor = self.seq_lens + self.counts.num_accepted_tokens
        return result

    def front(self, width: int) -> Verified:
        """Return the first rows of every request, copied unless these are all.

        Args:
            width: Rows per request to keep; at least the longest path.
        """
        batch_size = len(self.seq_lens)
        if len(self.predict) == batch_size * width:
            return self

        def first_rows(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(batch_size, -1, *rows.shape[1:])[:, :width].flatten(0, 1)

        return replace(
            self,
            out_cache_loc=first_rows(self.out_cache_loc),
            predict=first_rows(self.predict),
            hidden_states=None if self.hidden_states is None else first_rows(self.hidden_states),
        )

    def with_rows(self, width: int, req_to_token: torch.Tensor) -> Verified:
        """Return ``width`` rows of every request: its first rows, or all of them and zeros.

        The added rows have the next KV slots of the request, like rows of rejected drafts.

        Args:
            width: Rows per request; at least the longest path.
            req_to_token: KV slot of each token, int32 [rows, context].
        """
        batch_size = len(self.seq_lens)
        more = width - len(self.predict) // batch_size
        if more <= 0:
            return self.front(width)

        def padded(rows: torch.Tensor) -> torch.Tensor:
            rows = rows.view(batch_size, -1, *rows.shape[1:])
            behind = rows.new_zeros(batch_size, more, *rows.shape[2:])
            return torch.cat([rows, behind], 1).flatten(0, 1)

        columns = torch.arange(width, device=self.seq_lens.device)
        places = (self.seq_lens[:, None] + columns).clamp(max=req_to_token.shape[1] - 1)
        slots = req_to_token[self.req_pool_indices[:, None], places.long()]
        slots[:, :-more] = self.out_cache_loc.view(batch_size, -1)
        return replace(
            self,
            out_cache_loc=slots.long().flatten(),
            predict=padded(self.predict),
            hidden_states=None if self.hidden_states is None else padded(self.hidden_states),
        )

    def select(self, requests: torch.Tensor) -> Verified:
        """Return the result of some requests, copied.

        Args:
            requests: Indices into the batch, int64 [selected].
        """
        batch_size = len(self.seq_lens)

        def selected(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(batch_size, -1, *rows.shape[1:])[requests].flatten(0, 1)

        # Flat rows count from the first request of the selection.
        width = len(self.predict) // batch_size
        index = self.accept_index[requests]
        moved = width * (torch.arange(len(requests), device=requests.device) - requests)
        return Verified(
            req_pool_indices=self.req_pool_indices[requests],
            seq_lens=self.seq_lens[requests],
            out_cache_loc=selected(self.out_cache_loc),
            predict=selected(self.predict),
            hidden_states=None if self.hidden_states is None else selected(self.hidden_states),
            accept_index=torch.where(index < 0, index, index + moved[:, None]).int(),
            counts=AcceptedCounts.from_tokens(self.counts.num_accepted_tokens[requests]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """A chunk of one request's prompt that the target has prefilled.

    Attributes:
        req_pool_indices: [1] int64, the request row.
        start: Position of the chunk's first token.
        input_ids: [C] int64, the chunk's tokens.
        next_ids: [C] int64, the token after each of them.
        out_cache_loc: [C] int64, their KV slots.
        hidden_states: [C, H], the target's; ``None`` if its forward returns none.
        is_last: Whether the chunk ends the prompt. ``next_ids`` then ends with the first new token.
    """

    req_pool_indices: torch.Tensor
    start: int
    input_ids: torch.Tensor
    next_ids: torch.Tensor
    out_cache_loc: torch.Tensor
    hidden_states: torch.Tensor | None
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBatch:
    """Chunks of the prompts of several requests that the target has prefilled in one forward.

    Rows are packed: the C rows of a request follow those of the request before it, T in total. Each
    request has one chunk.

    Attributes:
        req_pool_indices: [B] int64, request rows.
        starts: Position of the first token of each chunk, on the host.
        lengths: Tokens of each chunk (C), on the host.
        are_last: Whether each chunk ends its prompt. Its ``next_ids`` then end with the first new
            token.
        device_lengths: [B] int32, ``lengths`` on the device.
        row_indices: [T] int64, request row of each token.
        positions: [T] int64.
        input_ids: [T] int64.
        next_ids: [T] int64, the token after each of them.
        out_cache_loc: [T] int64, their KV slots.
        hidden_states: [T, H], the target's; ``None`` if its forward returns none.
    """

    req_pool_indices: torch.Tensor
    starts: Sequence[int]
    lengths: Sequence[int]
    are_last: Sequence[bool]
    device_lengths: torch.Tensor
    row_indices: torch.Tensor
    positions: torch.Tensor
    input_ids: torch.Tensor
    next_ids: torch.Tensor
    out_cache_loc: torch.Tensor
    hidden_states: torch.Tensor | None

    @property
    def last_rows(self) -> torch.Tensor:
        """Row of the last token of each chunk, [B] int64."""
        return self.device_lengths.cumsum(0) - 1

    def target_inputs(self) -> TargetVerifyInputs:
        """Return the inputs of the target's forward."""
        return TargetVerifyInputs(
            req_pool_indices=self.req_pool_indices,
            seq_lens=(self.positions[self.last_rows] + 1).int() - self.device_lengths,
            input_ids=self.input_ids,
            positions=self.positions,
            out_cache_loc=self.out_cache_loc,
            lengths=self.device_lengths,
            width=max(self.lengths),
        )

    def extend_fields(self) -> dict[str, Any]:
        """Return the fields of ``DraftExtendInputs``, except token ids and hidden states."""
        return {
            "req_pool_indices": self.req_pool_indices,
            "seq_lens": (self.positions[self.last_rows] + 1).int(),
            "extend_seq_lens": self.device_lengths,
            "positions": self.positions,
            "out_cache_loc": self.out_cache_loc,
            "lengths": self.device_lengths,
            "width": max(self.lengths),
            **AcceptedCounts.from_tokens(self.device_lengths).fields(),
        }

    def chunks(self) -> Iterator[PrefillChunk]:
        """Yield the chunk of each request, as views."""
        end = 0
        for place, (start, length, is_last) in enumerate(
            zip(self.starts, self.lengths, self.are_last, strict=True)
        ):
            rows, end = slice(end, end + length), end + length
            hidden_states = self.hidden_states
            yield PrefillChunk(
                req_pool_indices=self.req_pool_indices[place : place + 1],
                start=start,
                input_ids=self.input_ids[rows],
                next_ids=self.next_ids[rows],
                out_cache_loc=self.out_cache_loc[rows],
                hidden_states=None if hidden_states is None else hidden_states[rows],
                is_last=is_last,
            )


def to_device(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy host numbers to the device without waiting for it."""
    return copied_to(device, torch.tensor(values, dtype=dtype))


def copied_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a CPU tensor to the device without waiting for it; return it as it is if it is there."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
