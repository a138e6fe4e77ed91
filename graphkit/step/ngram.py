"""Drafting without a draft model, from earlier matches of the last tokens in the same request.

The text of every request is kept on the device, so that a lookup does not wait for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.step.chain_tree import ChainTree
from graphkit.step.context import EngineContext
from graphkit.step.drafter import Drafter
from graphkit.step.step_tensors import DraftTree, Prefilled, Verified

MAX_MATCH = 4
"""Most tokens that a lookup compares. Longer matches rarely change the choice."""


class NgramDrafter(Drafter):
    """Drafts the tokens that followed the K best earlier matches of a request's last tokens.

    The longest match is best; of equal lengths, the latest. No model runs and no tree is grown: the
    first draft of each match is a child of the bonus token.
    """

    def prepare(self, context: EngineContext) -> None:
        """See ``Drafter.prepare``."""
        self._context = context
        rows, self._context_len = context.req_to_token.shape
        self._text = torch.zeros(rows, self._context_len, dtype=torch.int64, device=context.device)
        self._tree = ChainTree(
            context.spec.topk, context.verify_width, context.sizes.max_batch_size, context.device
        )

    @property
    def max_path(self) -> int:
        """Length of the longest chain, plus the bonus token."""
        return self._tree.max_depth + 1

    def prefill(self, chunk: Prefilled) -> None:
        """See ``Drafter.prefill``."""
        columns = chunk.start + torch.arange(len(chunk.input_ids), device=self._context.device)
        self._text[chunk.req_pool_indices, columns] = chunk.input_ids

    def draft(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> DraftTree:
        """See ``Drafter.draft``."""
        last = seq_lens.long()
        self._text[req_pool_indices, last] = bonus_tokens
        text = self._text[req_pool_indices]
        tree = self._tree
        match = self._matches(text, last)[:, tree.chain]
        # The text after a match ends at the last token. Longer drafts repeat it from the match on.
        period = last[:, None] - match
        source = match + 1 + (tree.depth - 1) % period
        source = torch.where(tree.depth == 0, last[:, None], source)
        return tree.of(text.gather(1, source))

    def extend(self, verified: Verified) -> None:
        """Append all W predicted tokens. Those behind the accepted path are never read."""
        predict = verified.predict.view(len(verified.seq_lens), -1)
        steps = torch.arange(predict.shape[1], device=predict.device) + 1
        columns = (verified.seq_lens[:, None] + steps).clamp(max=self._context_len - 1)
        self._text[verified.req_pool_indices[:, None], columns] = predict

    def extend_accepted(self, verified: Verified, num_accepted_tokens: Sequence[int]) -> None:  # noqa: ARG002
        """See ``extend``, which is harmless for requests that have finished."""
        self.extend(verified)

    def _matches(self, text: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the columns at which the K best matches end, [B, K]."""
        columns = torch.arange(text.shape[1], device=text.device)
        is_equal = torch.ones_like(text, dtype=torch.bool)
        length = torch.zeros_like(text)
        for back in range(MAX_MATCH):
            wanted = text.gather(1, (last - back).clamp(min=0)[:, None])
            is_equal = is_equal & (text.roll(back, 1) == wanted)
            is_equal = is_equal & (columns >= back) & (last >= back)[:, None]
            length = length + is_equal
        is_earlier = columns < last[:, None]
        score = torch.where(is_earlier, length * text.shape[1] + columns, -1)
        best = score.topk(min(self._context.spec.topk, text.shape[1]), 1).indices
        return torch.minimum(best, last[:, None] - 1)  # a text of one token has no match
