"""No drafts at all: plain decoding, as the case of a tree that is its root."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.engine.drafter import Drafter
from graphkit.engine.parts import DraftTree, EngineContext, Prefilled, Verified
from graphkit.errors import ConfigError


class RootDrafter(Drafter):
    """Proposes the bonus token alone."""

    def prepare(self, context: EngineContext) -> None:
        """See ``Drafter.prepare``. There is nothing to make."""
        if context.verify_width != 1:
            raise ConfigError(
                f"without a drafter one row per request is verified, but num_draft_tokens "
                f"{context.spec.num_draft_tokens} makes {context.verify_width}. Give the engine a "
                "drafter, or set num_draft_tokens to 1.",
                field="num_draft_tokens",
            )

    @property
    def max_path(self) -> int:
        """The bonus token."""
        return 1

    def prefill(self, chunk: Prefilled) -> None:
        """Nothing to read."""

    def draft(
        self,
        req_pool_indices: torch.Tensor,  # noqa: ARG002
        seq_lens: torch.Tensor,
        bonus_tokens: torch.Tensor,
    ) -> DraftTree:
        """See ``Drafter.draft``."""
        requests = len(seq_lens)
        none = bonus_tokens.new_full((requests, 1), -1)
        return DraftTree(
            draft_tokens=bonus_tokens,
            positions=seq_lens.long(),
            tree_mask=torch.ones_like(none, dtype=torch.bool)[:, :, None],
            retrieve_index=torch.arange(requests, device=none.device)[:, None],
            retrieve_next_token=none,
            retrieve_next_sibling=none,
        )

    def extend(self, verified: Verified) -> None:
        """Nothing to catch up on."""

    def extend_accepted(self, verified: Verified, num_accepted_tokens: Sequence[int]) -> None:
        """Nothing to catch up on."""
