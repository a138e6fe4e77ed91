"""The accepted path of a verify step, and its result, from which a drafter catches up.

The path of a tree moves to the front of the request's rows and KV slots.

Shape letters: B requests, W nodes of each, P columns of accept_index, V vocabulary, R request rows,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from graphkit.buffers import AcceptedCounts
from graphkit.engine.kv import KVPool
from graphkit.engine.step.packed_rows import PackedRows
from graphkit.engine.step.processors import TargetLogits
from graphkit.engine.step.request_state import RequestState
from graphkit.ops import compact_accepted_to_front
from graphkit.ops.accepted_path import accepted_moves
from graphkit.ops.logits import argmax_rows
from graphkit.ops.rejection import accept_by_rejection
from graphkit.ops.sampling import target_samples
from graphkit.ops.step_rows import extend_rows, first_draft_rows
from graphkit.ops.target_probs import target_probs
from graphkit.ops.verification import accept_tokens


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
        logits: [B * W, V], the target's; ``None`` in results of several steps.
        log_sums: [B * W, parts] float32, sums of them; see ``ops.processors``.
        logit_index: As ``accept_index``, rows of ``logits``, which has the packed rows if a step
            divided its rows among the requests.
    """

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    predict: torch.Tensor
    hidden_states: torch.Tensor | None
    accept_index: torch.Tensor
    counts: AcceptedCounts
    logits: torch.Tensor | None = None
    log_sums: torch.Tensor | None = None
    logit_index: torch.Tensor | None = None

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

    def with_front(
        self, tokens: torch.Tensor, states: torch.Tensor, width: int, req_to_token: torch.Tensor
    ) -> Verified:
        """Return the rows before those of every request, and ``width`` rows of this result.

        Rows that this result lacks are zeros, like rows of rejected drafts.

        Args:
            tokens: ``predict`` of the rows before, [B, F] int64.
            states: Their hidden states, [B, F, H].
            width: Rows per request without them; at least the longest path.
            req_to_token: KV slot of each token, int32 [rows, context].
        """
        requests, hidden_states = len(self.seq_lens), self.hidden_states
        assert hidden_states is not None, "a draft layer reads hidden states"

        def joined(before: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            own = rows.view(requests, -1, *rows.shape[1:])[:, :width]
            behind = own.new_zeros(requests, width - own.shape[1], *own.shape[2:])
            parts = (before, own, behind) if behind.shape[1] else (before, own)
            return torch.cat(parts, 1).flatten(0, 1)

        joint = replace(
            self,
            predict=joined(tokens, self.predict),
            hidden_states=joined(states, hidden_states),
        )
        return joint.moved(-tokens.shape[1], req_to_token)

    def moved(self, by: int, req_to_token: torch.Tensor) -> Verified:
        """Return the result with all rows ``by`` positions further.

        Args:
            by: Positions; rows before position 0 have KV slot 0.
            req_to_token: KV slot of each token, int32 [rows, context].
        """
        rows, seq_lens = self.req_pool_indices, self.seq_lens + by
        width = len(self.predict) // max(len(rows), 1)
        _, slots = first_draft_rows(rows, req_to_token, seq_lens, 1, width)
        return replace(self, seq_lens=seq_lens, out_cache_loc=slots)

    def extend_fields(self, width: int) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the fields of ``DraftExtendInputs``, except ids and hidden states, and last rows.

        Args:
            width: Rows per request of this result.

        Returns:
            The fields, and ``select_index`` of ``MultiLayerDraftExtendInputs``.
        """
        seq_lens, extend_seq_lens, positions, select_index = extend_rows(
            self.seq_lens, self.counts.num_accepted_drafts, width
        )
        fields = {
            "req_pool_indices": self.req_pool_indices,
            "seq_lens": seq_lens,
            "extend_seq_lens": extend_seq_lens,
            "positions": positions,
            "out_cache_loc": self.out_cache_loc,
            "num_accepted_drafts": self.counts.num_accepted_drafts,
            "num_accepted_tokens": self.counts.num_accepted_tokens,
        }
        return fields, select_index


Links = tuple[torch.Tensor, torch.Tensor]
"""``retrieve_next_token`` and ``retrieve_next_sibling``, [B, W] int64 each."""


class AcceptedPath(NamedTuple):
    """Accepted nodes of each request. See ``accept_tokens``.

    Shapes:
        predict: [B * W] int64, the target's token after each accepted node, in the order of the
            path from the first of the request's entries on; 0 behind it.
        accept_index: [B, P] int32, flat rows of the accepted nodes, padded with -1.
        num_accepted_drafts: [B] int32, the bonus token excluded.
        num_accepted_tokens: [B] int32, the bonus token included.
    """

    predict: torch.Tensor
    accept_index: torch.Tensor
    num_accepted_drafts: torch.Tensor
    num_accepted_tokens: torch.Tensor


def accept_greedily(
    candidates: torch.Tensor,
    links: Links,
    logits: TargetLogits,
    longest_path: int,
    packed: PackedRows | None = None,
) -> AcceptedPath:
    """Accept the drafts that equal the target's most probable tokens.

    Args:
        candidates: Token of each node, [B, W] int64.
        links: Links of the trees.
        logits: The target's, of B * W rows, or of the packed ones.
        longest_path: Most tokens of a path, the bonus token included (P).
        packed: The packed rows; ``None`` for the rows of all nodes.
    """
    target_predict = most_probable(logits)
    if packed is not None:
        target_predict = target_predict[packed.row_of]
    return AcceptedPath(*accept_tokens(candidates, *links, target_predict, longest_path))


def most_probable(logits: TargetLogits) -> torch.Tensor:
    """Return the most probable token of each row, [N] int64."""
    tokens = torch.empty(len(logits.logits), dtype=torch.int64, device=logits.logits.device)
    argmax_rows(tokens, logits.logits, processed=logits.processed, is_processed=logits.is_processed)
    return tokens


def accept_sampled(
    candidates: torch.Tensor,
    links: Links,
    logits: TargetLogits,
    longest_path: int,
    packed: PackedRows | None,
    rows: torch.Tensor,
    state: RequestState,
    positions: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
) -> AcceptedPath:
    """Accept drafts so that the tokens follow the target's distribution, for any drafts.

    A draft is accepted if it equals the target's own sample, which depends on the request's seed
    and its position alone (``target_samples``). The text is then the same for all drafts, or
    none. With ``draft_probs``, rejection sampling decides (``ops.rejection``): it accepts more
    drafts, and the text depends on them.

    The first five arguments are those of ``accept_greedily``.

    Shapes:
        rows: [B] int64, request rows. positions: [B * W] int64, of each node.
        draft_probs: [B * W, V], distributions that the drafts were sampled from, or ``None``.
    """
    drawn_rows, width, places = rows, candidates.shape[1], positions.view(candidates.shape)
    if packed is not None:  # each row draws like a request of one node
        drawn_rows, width, places = packed.req_pool_indices, 1, packed.positions[:, None]
    probs = _target_probs(logits, drawn_rows, state, width)
    if packed is not None and draft_probs is not None:
        probs = probs[packed.row_of]
    if draft_probs is None:
        samples = target_samples(probs, drawn_rows, state.seeds, places)
        if packed is not None:
            samples = samples[packed.row_of]
        path = accept_tokens(candidates, *links, samples, longest_path)
    else:
        path = accept_by_rejection(
            candidates, *links, probs, draft_probs, rows, state.seeds, state.seq_lens,
            longest_path,
        )  # fmt: skip
    return AcceptedPath(*path)


def sample_tokens(logits: TargetLogits, rows: torch.Tensor, state: RequestState) -> torch.Tensor:
    """Draw the target's token at each request's root, [B] int64, from logits [B, V]."""
    probs = _target_probs(logits, rows, state, 1)
    return target_samples(probs, rows, state.seeds, state.seq_lens[rows].long()[:, None])


def _target_probs(
    logits: TargetLogits, rows: torch.Tensor, state: RequestState, width: int
) -> torch.Tensor:
    return target_probs(
        logits.logits, rows, state.temperatures, state.top_ks, state.top_ps, state.min_ps, width,
        logits.processed, logits.is_processed,
    )  # fmt: skip


def move_accepted_kv(
    kv_pools: Sequence[KVPool],
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    width: int,
) -> None:
    """Move each request's accepted nodes to the first of its W = ``width`` KV slots.

    A node has the same slot in all pools. For the other arguments, see
    ``finalize_accepted_tree_path``.
    """
    target, source = accepted_moves(accept_index, out_cache_loc, width)
    for kv_pool in kv_pools:
        kv_pool.move_kv_cache(target, source)


def finalize_accepted_tree_path(
    kv_pool: KVPool,
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    predict: torch.Tensor,
    hidden_states: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Move each request's accepted nodes to the first of its W rows and KV slots.

    Needed for trees only: the accepted path of a chain is in place already. Enqueues on the current
    stream; never synchronises.

    Args:
        kv_pool: The target's KV pool; moved in place.
        accept_index: Flat rows of the accepted nodes, padded with -1.
        out_cache_loc: KV slot of each node.
        predict: The target's token after each node.
        hidden_states: The target's, or ``None``.

    Returns:
        ``predict`` and ``hidden_states`` as new tensors in the new order. Rows behind the path are
        undefined.

    Shapes:
        accept_index: [B, S + 1] int32. out_cache_loc: [B * W] int64. predict: [B * W].
        hidden_states: [B * W, H].
    """
    requests, path = accept_index.shape
    width = out_cache_loc.shape[0] // requests if requests else path
    move_accepted_kv((kv_pool,), accept_index, out_cache_loc, width)
    predict = compact_accepted_to_front(predict, accept_index, width)
    if hidden_states is not None:
        hidden_states = compact_accepted_to_front(hidden_states, accept_index, width)
    return predict, hidden_states
