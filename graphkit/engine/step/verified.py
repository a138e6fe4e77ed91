"""Result of a verify step, from which a drafter catches up.

Shape letters: B requests, W nodes per request in TARGET_VERIFY, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from graphkit.buffers import AcceptedCounts
from graphkit.ops.step_rows import extend_rows, first_draft_rows


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
