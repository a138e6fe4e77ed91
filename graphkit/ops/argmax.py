"""The most probable token of rows of logits.

Dimensions: N tokens to write, M rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.registration import register_op


def _check_rows(given: Any) -> None:
    """Refuse logits that do not have a row per token, without an index."""
    logits, tokens = given.logits, given.tokens
    if given.index is None and len(logits) != len(tokens):
        raise InputError(
            f"argmax_rows: logits is {describe(logits)}, expected [{len(tokens)}, V], a row per "
            "token. Pass index to select rows.",
            field="logits",
        )


@register_op(mutates_args=("tokens",), check=_check_rows)
def argmax_rows(
    tokens: Annotated[torch.Tensor, "[N] int64, contiguous"],
    logits: Annotated[torch.Tensor, "[M, V >= 1] floating-point"],
    index: Annotated[torch.Tensor | None, "[N] int64"] = None,
    token_map: Annotated[torch.Tensor | None, "[V] int64"] = None,
) -> None:
    """Write the token of the largest value of each row, as ``Tensor.argmax`` does.

    Of equal values the first counts, and NaN is larger than any number.

    Args:
        tokens: Receives the tokens.
        logits: The rows. M is N without ``index``.
        index: Row of each token; by default token n is that of row n. An index outside ``logits``
            is an error on the CPU; on CUDA it counts as the nearest row.
        token_map: Token of each column of ``logits``; by default its number.
    """
    rows = logits if index is None else logits.index_select(0, index)
    best = rows.argmax(-1)
    tokens.copy_(best if token_map is None else token_map[best])
