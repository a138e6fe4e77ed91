"""Token bitmasks of draft trees: what each request's matcher allows after each node."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.engine.request import Request
from graphkit.engine.token_matcher import TokenMatcher, fill_row
from graphkit.ops.logits import bitmask_words
from graphkit.step.acceptance import Links


def tree_bitmask(
    requests: Sequence[Request],
    tokens: torch.Tensor,
    links: Links,
    vocab_size: int,
) -> torch.Tensor:
    """Return the tokens that may follow each node. Waits for the trees to arrive on the host.

    Nodes behind a refused draft, or behind the end of the output, allow every token. No accepted
    path reaches the former, and the request ends before the latter. A request whose matcher raises
    an exception fails, and allows every token.

    Args:
        requests: The requests. Their matchers have accepted the tokens of the roots, and are in the
            same state afterwards.
        tokens: Token of each node, [B, W] int64.
        links: Links of the trees.
        vocab_size: Tokens of the target's vocabulary (V).

    Returns:
        [B * W, ceil(V / 32)] int32 on the CPU.
    """
    width = tokens.shape[1]
    bitmask = torch.full((tokens.numel(), bitmask_words(vocab_size)), -1, dtype=torch.int32)
    trees = torch.stack([tokens, *links], 1).tolist()  # one copy
    for request, rows, tree in zip(requests, bitmask.split(width), trees, strict=True):
        if (matcher := request.open_matcher) is not None:
            with request.matching():
                _fill_tree(matcher, rows, tree, vocab_size)
            if request.is_finished:
                rows.fill_(-1)
    return bitmask


def _fill_tree(
    matcher: TokenMatcher, rows: torch.Tensor, tree: Sequence[Sequence[int]], vocab_size: int
) -> None:
    """Walk the tree of a request depth first, and fill the row of each node that is reached."""
    tokens, child, sibling = tree
    unvisited = set(range(1, len(tokens)))  # invalid links may have a cycle

    def fill_from(node: int) -> None:
        fill_row(matcher, rows, node, vocab_size)
        node = child[node]
        while node in unvisited:
            unvisited.remove(node)
            if matcher.accept_token(tokens[node]):
                try:
                    if not matcher.is_terminated():
                        fill_from(node)
                finally:
                    matcher.rollback(1)
            node = sibling[node]

    fill_from(0)
