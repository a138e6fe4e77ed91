"""Masks of the tokens that may follow, a bit for each token.

Dimensions: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.registration import register_op

WORD_BITS = 32
"""Tokens of one word of a bitmask."""


def bitmask_words(vocab_size: int) -> int:
    """Return the words of a row of a bitmask."""
    return -(-vocab_size // WORD_BITS)


@register_op(mutates_args=("logits",))
def apply_token_bitmask(
    logits: Annotated[torch.Tensor, "[N, V >= 1] floating-point"],
    bitmask: Annotated[torch.Tensor, "[N, (V + 31) // 32] int32"],
) -> None:
    """Set the logits of tokens that may not follow to -inf, in place.

    Token t may follow if bit ``t % 32`` of word ``t // 32`` of its row is set. This is the layout
    of xgrammar's ``allocate_token_bitmask``. Bits behind the vocabulary do not count. Logits of
    other tokens do not change, NaN included.

    A row without an allowed token becomes -inf throughout: ``argmax_rows`` then returns token 0,
    and ``target_probs`` NaN. The caller must not pass one.

    Args:
        logits: The logits.
        bitmask: Allowed tokens of each row; -1 in every word allows all.
    """
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    allowed = ((bitmask[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(allowed == 0, -torch.inf)
