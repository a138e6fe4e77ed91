"""A drafter that knows the text of each prompt, and errs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.engine import Drafter, DraftTree


class ErringOracle(Drafter):
    """Drafts the expected text with errors, in a chain or with two candidates per depth.

    In a tree the expected token is now the first and now the second candidate of its depth, or
    neither, so that accepted paths end at every node.

    Args:
        texts: Prompts, each with its continuation of ``new`` tokens.
        new: Tokens of each continuation.
        topk: 1 for chains, 2 for trees.
        vocab_size: Upper bound of the token ids.
    """

    def __init__(
        self, texts: Sequence[list[int]], new: int, topk: int, vocab_size: int = 128
    ) -> None:
        self._texts, self._topk, self._vocab_size = {}, topk, vocab_size
        for text in texts:
            self._texts[tuple(text[: len(text) - new])] = text

    @property
    def max_path(self):
        return self._steps + 1

    def prepare(self, context):
        self._width, device = context.verify_width, context.device
        self._steps = (self._width - 1) // self._topk
        self._table = torch.zeros_like(context.req_to_token, dtype=torch.int64)
        self._prompts: dict[int, list[int]] = {}
        self._depths = torch.arange(1, self._steps + 1, device=device)
        # Node 1 + topk * d continues the path; in a tree its sibling is a leaf.
        children, siblings = [1, *([-1] * (self._width - 1))], [-1] * self._width
        mask = torch.eye(self._width, dtype=torch.bool)
        for node in range(1, self._width, self._topk):
            if node + self._topk < self._width:
                children[node] = node + self._topk
            parent = max(node - self._topk, 0)
            mask[node : node + self._topk] |= mask[parent]
            if self._topk > 1:
                siblings[node] = node + 1
        self._links = torch.tensor([children, siblings], device=device)
        self._mask = mask.to(device)
        self.wrong_paths = torch.zeros((), dtype=torch.int64, device=device)

    def prefill(self, chunk):
        row = int(chunk.req_pool_indices)
        known = self._prompts.setdefault(row, []) if chunk.start else []
        self._prompts[row] = known + chunk.input_ids.tolist()
        if chunk.is_last and row:  # row 0 belongs to pads
            text = self._texts[tuple(self._prompts[row])]
            self._table[row, : len(text)] = torch.tensor(text)

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        requests = len(seq_lens)
        place = (seq_lens[:, None] + self._depths).clamp(max=self._table.shape[1] - 1)
        expected = self._table[req_pool_indices].gather(1, place)
        wrong = (expected + 1) % self._vocab_size
        kind = (3 * place + 5 * req_pool_indices[:, None]) % 7
        drafts = torch.where(kind < 4, expected, wrong)
        if self._topk > 1:
            second = torch.where(kind < 4, wrong, torch.where(kind < 6, expected, wrong - 1))
            drafts = torch.stack([drafts, second % self._vocab_size], 2).flatten(1)
        children, siblings = self._links.unbind()
        return DraftTree(
            draft_tokens=torch.cat([bonus_tokens[:, None], drafts], 1).flatten(),
            tree_mask=self._mask.expand(requests, -1, -1).contiguous(),
            retrieve_next_token=children.expand(requests, -1).contiguous(),
            retrieve_next_sibling=siblings.expand(requests, -1).contiguous(),
        )

    def extend(self, verified):
        """Count the paths whose ``accept_index`` does not start at the root and descend.

        On the device, because v3 captures it.
        """
        requests, longest = verified.accept_index.shape
        root = torch.arange(requests, device=self._table.device)[:, None] * self._width
        steps = torch.arange(longest, device=self._table.device)
        is_accepted = steps < verified.counts.num_accepted_tokens[:, None]
        node = torch.where(is_accepted, verified.accept_index - root, self._width)
        is_right = (verified.accept_index >= 0) == is_accepted
        is_right &= node <= self._width
        is_right[:, 0] &= node[:, 0] == 0
        is_right[:, 1:] &= (node.diff() > 0) | ~is_accepted[:, 1:]
        self.wrong_paths += (~is_right).any(1).sum()
