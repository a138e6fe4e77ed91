"""Plain decoding, as speculative decoding whose trees consist of the bonus token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.errors import ConfigError
from graphkit.step.chain_tree import ChainTree
from graphkit.step.context import EngineContext
from graphkit.step.drafter import Drafter
from graphkit.step.step_tensors import DraftTree, PrefillChunk, Verified


class NullDrafter(Drafter):
    """Proposes no drafts: every tree is its bonus token."""

    def prepare(self, context: EngineContext) -> None:
        """Check that verify has one row per request. See ``Drafter.prepare``."""
        if context.verify_width != 1:
            raise ConfigError(
                f"SpeculativeEngine has no drafter, but num_draft_tokens is "
                f"{context.spec.num_draft_tokens}, which verifies {context.verify_width} rows per "
                "request. Pass a drafter, or set num_draft_tokens to 1.",
                field="num_draft_tokens",
            )
        self._tree = ChainTree(1, 1, context.sizes.max_batch_size, context.device)

    @property
    def max_path(self) -> int:
        """One: the bonus token."""
        return 1

    def prefill(self, chunk: PrefillChunk) -> None:
        """Do nothing."""

    def draft(
        self,
        req_pool_indices: torch.Tensor,  # noqa: ARG002
        seq_lens: torch.Tensor,  # noqa: ARG002
        bonus_tokens: torch.Tensor,
    ) -> DraftTree:
        """Return trees of one node, the bonus token."""
        return self._tree.of(bonus_tokens[:, None])

    def extend(self, verified: Verified) -> None:
        """Do nothing."""

    def extend_accepted(self, verified: Verified, num_accepted_tokens: Sequence[int]) -> None:
        """Do nothing."""
