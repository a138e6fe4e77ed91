"""Plain steps among drafted ones: the draft model catches up on several of them at once.

A plain step decodes one token per request. It stores what the draft model needs of that token, and
the draft model processes the tokens of several plain steps in one forward. So a plain step costs
little more than the target's forward, and a later draft starts from a complete KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.buffers import AcceptedCounts
from graphkit.engine.step.acceptance import Verified
from graphkit.engine.step.context import EngineContext
from graphkit.engine.step.drafter import Drafter, NullDrafter
from graphkit.ops.stored_tokens import store_tokens


class PendingCatchUp:
    """Tokens of plain steps that the drafter has yet to process, by request row.

    Args:
        context: Of the longest draft length, whose W rows a catch-up has.
        depth: Tokens of a request that are kept, the last ones. The draft model has no keys and
            values of earlier ones, so that later drafts are accepted less often.

    Attributes:
        count: [rows + 1] int32, tokens of each request since its last catch-up; 0 for pads.
            ``RequestState.behind``.
    """

    def __init__(self, context: EngineContext, depth: int) -> None:
        assert context.state.behind is not None, "the state counts the tokens"
        self.count, self.depth = context.state.behind, depth
        self._req_to_token, self._width = context.req_to_token, context.verify_width
        self._column = torch.arange(self._width, device=context.device)
        self._predict = self._zeros(torch.int64)
        self._hidden_states: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what is stored, [rows + 1, W, ...] by name; hidden states from the first on."""
        hidden = self._hidden_states
        return {"predict": self._predict} | ({} if hidden is None else {"hidden_states": hidden})

    def append(self, verified: Verified) -> None:
        """Store the token of each request of a plain step. Enqueues only."""
        hidden = verified.hidden_states
        if hidden is not None and self._hidden_states is None:
            # The first run is eager, before any capture.
            self._hidden_states = self._zeros(hidden.dtype, *hidden.shape[1:])
        store_tokens(
            verified.req_pool_indices, verified.predict, self._predict, self.count, self.depth,
            hidden, self._hidden_states,
        )  # fmt: skip

    def take(self, verified: Verified) -> Verified:
        """Return the stored tokens of the requests, the step's own included, as one step's result.

        Then none is stored. Enqueues only.

        Args:
            verified: Result of the step, whose tokens were appended.
        """
        rows = verified.req_pool_indices
        count = self.count[rows].clamp(min=1)
        tokens = count.clamp(max=self.depth)
        start = verified.seq_lens + 1 - tokens
        # Token n of a row is at column n % depth. Those behind the last are not read.
        stored = rows[:, None], ((count - tokens)[:, None] + self._column) % self.depth
        columns = (start[:, None] + self._column).clamp(max=self._req_to_token.shape[1] - 1)
        slots = self._req_to_token[rows[:, None], columns.long()].long()
        first = self._width * torch.arange(len(rows), device=rows.device)
        path = torch.where(self._column < tokens[:, None], first[:, None] + self._column, -1)
        hidden = self._hidden_states
        taken = Verified(
            req_pool_indices=rows,
            seq_lens=start,
            out_cache_loc=slots.flatten(),
            predict=self._predict[stored].flatten(),
            hidden_states=None if hidden is None else hidden[stored].flatten(0, 1),
            accept_index=path.int(),
            counts=AcceptedCounts.from_tokens(tokens),
        )
        self.count[rows] = torch.zeros_like(tokens)
        return taken

    def _zeros(self, dtype: torch.dtype, *row: int) -> torch.Tensor:
        return torch.zeros(
            len(self.count), self._width, *row, dtype=dtype, device=self.count.device
        )


class PlainDrafter(NullDrafter):
    """Proposes no drafts in a step of one node, and stores its tokens for a later catch-up.

    Args:
        pending: Receives the tokens.
    """

    def __init__(self, pending: PendingCatchUp) -> None:
        self._pending = pending

    def extend(self, verified: Verified) -> None:
        """Store the tokens."""
        self._pending.append(verified)


class CatchUpDrafter(PlainDrafter):
    """Proposes no drafts, and lets another drafter catch up on all plain steps so far.

    Args:
        pending: Has the tokens of the plain steps before.
        drafter: The drafter of the longest length, whose catch-up has the most rows.
    """

    def __init__(self, pending: PendingCatchUp, drafter: Drafter) -> None:
        super().__init__(pending)
        self._drafter = drafter

    def extend(self, verified: Verified) -> None:
        """See ``Drafter.extend``."""
        self._pending.append(verified)
        self._drafter.extend(self._pending.take(verified))

    def extend_accepted(self, verified: Verified, num_accepted_tokens: Sequence[int]) -> None:
        """See ``Drafter.extend_accepted``. Waits for the device."""
        self._pending.append(verified)
        taken = self._pending.take(verified)
        tokens = taken.counts.num_accepted_tokens.tolist()
        counts = [
            count if is_live else 0
            for count, is_live in zip(tokens, num_accepted_tokens, strict=True)
        ]
        self._drafter.extend_accepted(taken, counts)
