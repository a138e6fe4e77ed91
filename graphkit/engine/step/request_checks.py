"""Checks of the requests that callers of an engine or a step pass."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from graphkit.engine.step.sampling_params import SamplingParams
from graphkit.errors import InputError, short_repr


class RequestChecks:
    """Checks prompts and parameters, and gives each request a seed.

    Args:
        vocab_size: Tokens of the target's vocabulary.
        context_limit: Most tokens of a prompt and its output together.
        seed: Gives a different seed to each request that has none.
        bos_token_id: Replaces an empty prompt; with ``None``, an empty prompt is an error.

    Attributes:
        vocab_size: As passed.
        context_limit: As passed.
    """

    def __init__(
        self,
        vocab_size: int,
        context_limit: int,
        *,
        seed: int = 0,
        bos_token_id: int | None = None,
    ) -> None:
        self.vocab_size, self.context_limit = vocab_size, context_limit
        self._seed, self._bos, self._checked = seed, bos_token_id, 0

    def check(
        self, prompt_ids: Sequence[int], sampling: SamplingParams | None
    ) -> tuple[tuple[int, ...], SamplingParams]:
        """Return token ids and parameters of a new request, which have a seed.

        Args:
            prompt_ids: Token ids to continue.
            sampling: ``None`` selects the defaults.

        Raises:
            InputError: The prompt is empty without a BOS token, is not a sequence of token ids, or
                leaves no room for a new token. ``sampling`` is not a ``SamplingParams``, or has a
                stop token outside the vocabulary.
        """
        params, ids = self._valid_sampling(sampling), self._valid_prompt(prompt_ids)
        self._checked += 1
        return ids, params.with_seed(self._seed, self._checked)

    def _valid_sampling(self, sampling: object) -> SamplingParams:
        if sampling is None:
            return SamplingParams()
        if not isinstance(sampling, SamplingParams):
            raise InputError(
                f"sampling must be a graphkit.SamplingParams or None, got {short_repr(sampling)}.",
                field="sampling",
            )
        biases = sampling.logit_bias or {}
        for field, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", biases)):
            largest = max(ids, default=0)
            if largest >= self.vocab_size:
                raise InputError(
                    f"SamplingParams.{field} has {largest}, but the vocabulary has "
                    f"{self.vocab_size} tokens. Use ids from 0 to {self.vocab_size - 1}.",
                    field=field,
                )
        excluded = {token for token, bias in biases.items() if bias == -math.inf}
        if sampling.min_tokens:
            excluded.update(sampling.stop_token_ids)
        if len(excluded) == self.vocab_size:
            raise InputError(
                "SamplingParams.logit_bias, with the stop tokens of min_tokens, excludes all "
                f"{self.vocab_size} tokens of the vocabulary. Leave one.",
                field="logit_bias",
            )
        return sampling

    def _valid_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        try:
            ids = tuple(operator.index(token) for token in prompt_ids)
        except TypeError as error:
            raise _prompt_error(
                f"is not a sequence of token ids: {error}", "Pass a sequence of ints."
            ) from error
        if not ids and self._bos is not None:
            ids = (self._bos,)
        if not ids:
            raise _prompt_error(
                "is empty", "Pass at least one token, or give an engine a bos_token_id."
            )
        outside = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise _prompt_error(
                f"contains token {outside}, but the vocabulary has {self.vocab_size} tokens",
                f"Use ids from 0 to {self.vocab_size - 1}.",
            )
        if len(ids) >= self.context_limit:
            raise _prompt_error(
                f"has {len(ids)} tokens, but prompt and output together are limited to "
                f"{self.context_limit}",
                "Shorten the prompt, or increase max_context_len.",
            )
        return ids


def _prompt_error(fact: str, remedy: str) -> InputError:
    return InputError(f"the prompt {fact}. {remedy}", field="prompt_ids")
