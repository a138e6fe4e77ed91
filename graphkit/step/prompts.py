"""Validation of prompts."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from graphkit.errors import InputError


def validate_prompt(
    prompt_ids: Sequence[int],
    *,
    vocab_size: int,
    context_limit: int,
    bos_token_id: int | None = None,
) -> tuple[int, ...]:
    """Return the prompt's token ids, or the BOS token for an empty prompt.

    Raises:
        InputError: The prompt is empty without a BOS token, is not a sequence of token ids, or
            leaves no room for a new token within ``context_limit`` tokens.
    """
    try:
        ids = tuple(operator.index(token) for token in prompt_ids)
    except TypeError as error:
        raise _error(
            f"is not a sequence of token ids: {error}", "Pass a sequence of ints."
        ) from error
    if not ids and bos_token_id is not None:
        ids = (bos_token_id,)
    if not ids:
        raise _error("is empty", "Pass at least one token, or give an engine a bos_token_id.")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise _error(
            f"contains token {outside}, but the vocabulary has {vocab_size} tokens",
            f"Use ids from 0 to {vocab_size - 1}.",
        )
    if len(ids) >= context_limit:
        raise _error(
            f"has {len(ids)} tokens, but prompt and output together are limited to {context_limit}",
            "Shorten the prompt, or increase max_context_len.",
        )
    return ids


def _error(fact: str, remedy: str) -> InputError:
    return InputError(f"the prompt {fact}. {remedy}", field="prompt_ids")
