"""Matchers of structured output, such as xgrammar's: they return the tokens that may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.config import WORD_BITS, bitmask_words
from graphkit.errors import InputError, short_repr


@runtime_checkable
class TokenMatcher(Protocol):
    """Follows the output of one request, and says what tokens a grammar allows next.

    ``xgrammar.GrammarMatcher`` is one. The engine calls the methods on the host, between drafting
    and verifying. Each request needs a matcher of its own, which it uses until it has finished.
    """

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int, /) -> Any:
        """Write the allowed tokens into row ``index``, a bit for each token.

        Called while the matcher has not terminated. At least one token must be allowed, or the
        request ends with ``FinishReason.REFUSED``. The result is not read.

        Shapes:
            bitmask: [rows, ceil(V / 32)] int32 on the CPU, as ``ops.apply_token_bitmask`` reads it.
        """

    def accept_token(self, token: int, /) -> bool:
        """Advance by one token if it is allowed, and return whether it is."""
        ...

    def rollback(self, count: int, /) -> None:
        """Take back the last ``count`` tokens, including one that completed the output."""

    def is_terminated(self) -> bool:
        """Return whether the output is complete, so that the request ends."""
        ...


def check_matcher(matcher: object, vocab_size: int) -> None:
    """Check that a new request can use a matcher.

    Raises:
        InputError: It lacks a method, has terminated, cannot fill a bitmask of this vocabulary, or
            allows no token.
    """
    if not isinstance(matcher, TokenMatcher):
        raise InputError(
            f"matcher must be a graphkit.engine.TokenMatcher, got {short_repr(matcher)}. Pass an "
            "xgrammar.GrammarMatcher, or an object with its methods.",
            field="matcher",
        )
    if matcher.is_terminated():
        raise InputError(
            "the matcher has terminated: no token may follow. Pass one in its first state.",
            field="matcher",
        )
    bitmask = torch.zeros(1, bitmask_words(vocab_size), dtype=torch.int32)
    try:
        matcher.fill_next_token_bitmask(bitmask, 0)
    except Exception as error:
        raise InputError(
            f"the matcher cannot fill a bitmask of {vocab_size} tokens, [1, {bitmask.shape[1]}] "
            f"int32: {error}. Create its grammar for BufferSizes.vocab_size tokens.",
            field="matcher",
        ) from error
    if not _allowed(bitmask.numpy()[0], vocab_size).any():
        raise InputError(
            f"the matcher allows none of the {vocab_size} tokens at the start of the output. "
            "Create its grammar for the vocabulary of the target.",
            field="matcher",
        )


def root_bitmask(matcher: TokenMatcher, vocab_size: int) -> torch.Tensor:
    """Return the tokens that may follow now, [1, ceil(V / 32)] int32 on the CPU."""
    bitmask = torch.full((1, bitmask_words(vocab_size)), -1, dtype=torch.int32)
    fill_row(matcher, bitmask, 0, vocab_size)
    return bitmask


def fill_row(matcher: TokenMatcher, bitmask: torch.Tensor, index: int, vocab_size: int) -> None:
    """Fill a row of a bitmask.

    A row without a token would make probabilities NaN. It allows every token instead. The matcher
    then refuses the token that is chosen, and the request ends.
    """
    matcher.fill_next_token_bitmask(bitmask, index)
    row = bitmask.numpy()[index]
    if not _allowed(row, vocab_size).any():
        row[:] = -1


def fill_tree(
    matcher: TokenMatcher, rows: torch.Tensor, tree: Sequence[Sequence[int]], vocab_size: int
) -> None:
    """Fill a row of a bitmask for each node of a draft tree that the matcher accepts.

    Args:
        matcher: It has accepted the token of the root, and is in the same state afterwards.
        rows: [W, ceil(V / 32)] int32 on the CPU.
        tree: Token, first child and next sibling of each node.
        vocab_size: Tokens of the target's vocabulary (V).
    """
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


def _allowed(row: NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """Clear the bits behind the vocabulary, and return the row."""
    if rest := vocab_size % WORD_BITS:
        row[-1] &= (1 << rest) - 1
    return row
