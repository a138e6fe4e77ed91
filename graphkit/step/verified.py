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

    def moved(self, req_to_token: torch.Tensor) -> Verified:
        """Return the result one position further: each token of ``predict`` at its own position.

        Args:
            req_to_token: KV slot of each token, int32 [rows, context].
        """
        seq_lens = self.seq_lens + 1
        width = len(self.predict) // max(len(seq_lens), 1)
        rows = self.req_pool_indices
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
