"""Drafting without a draft model: what followed the last few tokens earlier in the same text.

The text so far lies on the device, so that a lookup needs no host round trip.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.engine.drafter import Drafter
from graphkit.engine.memory import to_device
from graphkit.engine.parts import DraftTree, EngineContext, Prefilled, Verified

LONGEST_MATCH = 4
"""Tokens that are compared at most; more hardly ever change the choice."""


class Forest:
    """Trees of one fixed shape: K chains that begin at the root, as even as W allows.

    Args:
        topk: Chains (K).
        width: Nodes, the root included (W).
        device: Where the tensors live.

    Attributes:
        chain, depth: [W] int64, of each node; the root has depth 0.
        mask: [W, W] bool.
        next_token, next_sibling: [W] int64.
    """

    def __init__(self, topk: int, width: int, device: torch.device) -> None:
        chains = [(node - 1) % topk for node in range(1, width)]
        depths = [(node - 1) // topk + 1 for node in range(1, width)]
        follows = [node + topk if node + topk < width else -1 for node in range(1, width)]
        beside = [node + 1 if node < min(topk, width - 1) else -1 for node in range(1, width)]
        self.chain = to_device([0, *chains], device)
        self.depth = to_device([0, *depths], device)
        self.next_token = to_device([1 if width > 1 else -1, *follows], device)
        self.next_sibling = to_device([-1, *beside], device)
        same_chain = self.chain[:, None] == self.chain
        is_above = self.depth[:, None] >= self.depth
        self.mask = (same_chain & is_above) | (self.depth == 0)
        self.mask[0, 1:] = False
        self.deepest = max(depths, default=0)


class NgramDrafter(Drafter):
    """Looks the last tokens up in the request's own text; tries the K longest, latest matches."""

    def prepare(self, context: EngineContext) -> None:
        """See ``Drafter.prepare``."""
        self._context = context
        rows, self._context_len = context.req_to_token.shape
        self._text = torch.zeros(rows, self._context_len, dtype=torch.int64, device=context.device)
        self._forest = Forest(context.spec.topk, context.verify_width, context.device)

    @property
    def max_path(self) -> int:
        """The deepest chain and the bonus token."""
        return self._forest.deepest + 1

    def prefill(self, chunk: Prefilled) -> None:
        """See ``Drafter.prefill``."""
        places = chunk.start + torch.arange(len(chunk.input_ids), device=self._context.device)
        self._text[chunk.req_pool_indices, places] = chunk.input_ids

    def draft(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> DraftTree:
        """See ``Drafter.draft``."""
        last = seq_lens.long()
        self._text[req_pool_indices, last] = bonus_tokens
        text = self._text[req_pool_indices]
        forest, requests = self._forest, len(last)
        width = len(forest.depth)
        found = self._matches(text, last)[:, forest.chain]
        # What follows a match may run into the present: it then goes on from where it began.
        period = last[:, None] - found
        place = found + 1 + (forest.depth - 1) % period
        place = torch.where(forest.depth == 0, last[:, None], place)
        node_ids = torch.arange(requests * width, device=text.device).view(requests, width)
        return DraftTree(
            draft_tokens=text.gather(1, place).flatten(),
            positions=(last[:, None] + forest.depth).flatten(),
            tree_mask=forest.mask.expand(requests, -1, -1).contiguous(),
            retrieve_index=node_ids,
            retrieve_next_token=forest.next_token.expand(requests, -1).contiguous(),
            retrieve_next_sibling=forest.next_sibling.expand(requests, -1).contiguous(),
        )

    def extend(self, verified: Verified) -> None:
        """Append what was accepted. What is written behind it is overwritten before it is read."""
        requests = len(verified.seq_lens)
        predict = verified.predict.view(requests, -1)
        steps = torch.arange(predict.shape[1], device=predict.device) + 1
        places = (verified.seq_lens[:, None] + steps).clamp(max=self._context_len - 1)
        self._text[verified.req_pool_indices[:, None], places] = predict

    def extend_accepted(self, verified: Verified, num_accepted_tokens: Sequence[int]) -> None:  # noqa: ARG002
        """As ``extend``; requests that have ended do not mind."""
        self.extend(verified)

    def _matches(self, text: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Places of the K best matches, [B, K]: where an earlier copy of the last tokens ends."""
        places = torch.arange(text.shape[1], device=text.device)
        is_equal = torch.ones_like(text, dtype=torch.bool)
        length = torch.zeros_like(text)
        for back in range(LONGEST_MATCH):
            wanted = text.gather(1, (last - back).clamp(min=0)[:, None])
            is_equal = is_equal & (text.roll(back, 1) == wanted)
            is_equal = is_equal & (places >= back) & (last >= back)[:, None]
            length = length + is_equal
        is_earlier = places < last[:, None]
        score = torch.where(is_earlier, length * text.shape[1] + places, -1)
        best = score.topk(min(self._context.spec.topk, text.shape[1]), 1).indices
        return torch.minimum(best, last[:, None] - 1)  # a text without a past has no match at all
