"""Drafting without a draft model, from earlier matches of the last tokens in the same request.

The text of every request is kept on the device, so that a lookup does not wait for the host.
"""

from __future__ import annotations

from copy import copy

import torch

from graphkit.engine.step.acceptance import Verified
from graphkit.engine.step.context import EngineContext
from graphkit.engine.step.draft_tree import ChainTree, DraftTree
from graphkit.engine.step.drafter import Drafter
from graphkit.engine.step.prefill_batch import PrefillBatch
from graphkit.ops.ngram import append_tokens, ngram_drafts


class NgramDrafter(Drafter):
    """Drafts the tokens that followed the K best earlier matches of a request's last tokens.

    The longest match is best; of equal lengths, the latest. No model runs and no tree is grown: the
    first draft of each match is a child of the bonus token.
    """

    def prepare(self, context: EngineContext) -> None:
        """See ``Drafter.prepare``."""
        self._topk, self._width = context.spec.topk, context.verify_width
        self._text = torch.zeros_like(context.req_to_token, dtype=torch.int64)
        self._tree = ChainTree(
            self._topk, self._width, context.sizes.max_batch_size, context.device
        )

    def at_length(self, context: EngineContext) -> NgramDrafter:
        """See ``Drafter.at_length``. The text of the requests is shared."""
        other = copy(self)
        other.prepare(context)
        other._text = self._text
        return other

    @property
    def max_path(self) -> int:
        """Length of the longest chain, plus the bonus token."""
        return self._tree.max_depth + 1

    def prefill_batch(self, batch: PrefillBatch) -> None:
        """See ``Drafter.prefill_batch``."""
        self._text[batch.row_indices, batch.positions] = batch.input_ids

    def draft(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> DraftTree:
        """See ``Drafter.draft``."""
        drafts = ngram_drafts(
            self._text, req_pool_indices, seq_lens, bonus_tokens, self._topk, self._width
        )
        return self._tree.of(drafts)

    def extend(self, verified: Verified) -> None:
        """Append all W predicted tokens. Those behind the accepted path are never read."""
        append_tokens(
            self._text, verified.req_pool_indices, verified.seq_lens, verified.predict, self._width
        )
