"""Sampling and stopping parameters of a request."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NoReturn

from graphkit.config import is_int, require_int
from graphkit.errors import ConfigError, short_repr

MAX_STOP_IDS = 16
"""Stop tokens of one request."""
MAX_BIASED_IDS = 1024
"""Tokens of one request that have a bias."""
_SEED_BITS = _ID_BITS = 63
_LEAST_FLOAT32, _MOST_FLOAT32 = 2.0**-126, 2.0**128 - 2.0**104
_GOLDEN_RATIO = 0x9E37_79B9_7F4A_7C15
"""2**64 over the golden ratio: its multiples are far apart, and far from the seeds 0, 1, 2, ..."""


class TokenBiases(dict[int, float]):
    """Biases by token id: a dict that cannot change, so that it has a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenBiases, (dict(self),)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("logit_bias of SamplingParams cannot change; use dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = _refuse
    pop = popitem = clear = _refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping parameters of a request.

    The processors ``logit_bias``, ``min_tokens``, ``repetition_penalty``, ``frequency_penalty`` and
    ``presence_penalty`` change the target's logits, in this order, at any temperature. A draft is
    verified with the counts that plain decoding has at its position, so that the text does not
    depend on the drafts. See ``graphkit.ops.processors`` for the formulas, which are those of vLLM.

    The filters ``top_k``, ``top_p`` and ``min_p`` apply to the target's distribution at the
    temperature, in this order, each to the tokens that the one before it kept. The kept tokens
    share all probability in proportion. Tokens of equal probability are kept or dropped together.
    At temperature 0 no filter has an effect. See ``graphkit.ops.target_probs`` for the formulas.

    Attributes:
        max_new_tokens: Most tokens to generate, at least 1.
        temperature: 0 selects the most probable token. Above 0, tokens follow the target's
            distribution with its logits divided by the temperature.
        top_k: Keeps the ``top_k`` most probable tokens; 0 or -1 keeps all, as in vLLM.
        top_p: Keeps the smallest set of most probable tokens whose probabilities reach this sum,
            above 0 and at most 1; 1 keeps all.
        min_p: Keeps the tokens whose probability is at least this share, 0 to 1, of the largest
            one; 0 keeps all.
        stop_token_ids: Tokens that finish the request, 16 at most; stored as a frozenset. The stop
            token is part of the output. Ids of the target's vocabulary: ``submit`` and ``admit``
            refuse others.
        repetition_penalty: Divides positive logits and multiplies negative ones of the tokens that
            prompt and output contain; above 0, 1 has no effect.
        presence_penalty: Subtracted from the logits of the tokens that the output contains, -2 to
            2.
        frequency_penalty: Subtracted as often as the output contains the token, -2 to 2.
        logit_bias: Added to the logits of some tokens, 1,024 at most; finite, or -inf to exclude a
            token. Stored as a dict that cannot change. ``submit`` and ``admit`` refuse ids outside
            the target's vocabulary.
        min_tokens: Stop tokens are excluded until so many tokens are new, 0 to ``max_new_tokens``.
        logprobs: Whether the request gets the log-probability of each of its tokens: log_softmax of
            the target's logits before all of the above and the temperature. A matcher's bitmask
            comes before it.
        seed: Key of the request's random numbers, 0 to 2**63 - 1. The token at a position is the
            target's own sample for the seed and that position. So a seed gives the same text in any
            batch and generation and with any drafter, or none, unless drafts are accepted by
            rejection sampling (``DraftTree.draft_probs``). Each request with ``None`` gets another
            seed: see ``with_seed``.

    Raises:
        ConfigError: A value is out of range; ``field`` names it.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: Collection[int] = frozenset()
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed", "min_tokens"):
            if is_int(value := getattr(self, name)):
                object.__setattr__(self, name, operator.index(value))  # numpy's have no JSON
        require_int("SamplingParams", "max_new_tokens", self.max_new_tokens)
        require_int("SamplingParams", "top_k", self.top_k, least=-1)
        if not 0 <= _number(self.temperature) < math.inf:
            raise ConfigError(
                "SamplingParams.temperature must be a finite number >= 0, got "
                f"{short_repr(self.temperature)}. Use 0 for greedy decoding.",
                field="temperature",
            )
        if not 0 < _number(self.top_p) <= 1:
            raise ConfigError(
                "SamplingParams.top_p must be a number above 0 and at most 1, got "
                f"{short_repr(self.top_p)}. "
                "Use 1 to keep every token.",
                field="top_p",
            )
        if not 0 <= _number(self.min_p) <= 1:
            raise ConfigError(
                f"SamplingParams.min_p must be a number from 0 to 1, got {short_repr(self.min_p)}. "
                "Use 0 to keep every token.",
                field="min_p",
            )
        if self.seed is not None and not _is_seed(self.seed):
            raise ConfigError(
                "SamplingParams.seed must be an int from 0 to 2**63 - 1, got "
                f"{short_repr(self.seed)}.",
                field="seed",
            )
        try:
            tokens = frozenset(operator.index(token) for token in self.stop_token_ids)
        except TypeError as error:
            raise ConfigError(
                "SamplingParams.stop_token_ids must be a collection of token ids, got "
                f"{short_repr(self.stop_token_ids)}. Pass a collection of ints.",
                field="stop_token_ids",
            ) from error
        outside = [token for token in tokens if not 0 <= token < 2**_ID_BITS]
        if outside:
            raise ConfigError(
                f"SamplingParams.stop_token_ids has {outside[0]}, expected token ids from 0 to "
                f"2**{_ID_BITS} - 1.",
                field="stop_token_ids",
            )
        if len(tokens) > MAX_STOP_IDS:
            raise ConfigError(
                f"SamplingParams.stop_token_ids has {len(tokens)} tokens, but the device keeps "
                f"{MAX_STOP_IDS} per request. Pass fewer.",
                field="stop_token_ids",
            )
        object.__setattr__(self, "stop_token_ids", tokens)
        self._check_processors()
        for name in (
            "temperature", "top_p", "min_p",
            "repetition_penalty", "presence_penalty", "frequency_penalty",
        ):  # fmt: skip
            object.__setattr__(self, name, float(getattr(self, name)))

    def _check_processors(self) -> None:
        if not _LEAST_FLOAT32 <= _number(self.repetition_penalty) <= _MOST_FLOAT32:
            raise ConfigError(
                "SamplingParams.repetition_penalty must be a number above 0 that float32 can hold, "
                f"got {short_repr(self.repetition_penalty)}. Use 1 for no penalty.",
                field="repetition_penalty",
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= _number(value := getattr(self, name)) <= 2:
                raise ConfigError(
                    f"SamplingParams.{name} must be a number from -2 to 2, got "
                    f"{short_repr(value)}. Use 0 "
                    "for no penalty.",
                    field=name,
                )
        require_int("SamplingParams", "min_tokens", self.min_tokens, least=0)
        if self.min_tokens > self.max_new_tokens:
            raise ConfigError(
                f"SamplingParams.min_tokens is {self.min_tokens}, but max_new_tokens is "
                f"{self.max_new_tokens}. Reduce min_tokens, or increase max_new_tokens.",
                field="min_tokens",
            )
        if not isinstance(self.logprobs, bool):
            raise ConfigError(
                f"SamplingParams.logprobs must be True or False, got {short_repr(self.logprobs)}.",
                field="logprobs",
            )
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _token_biases(self.logit_bias))

    def with_seed(self, base: int, number: int) -> SamplingParams:
        """Return these parameters if they have a seed, else a copy with the seed of a request.

        Equal arguments give equal seeds, so that a run can be repeated and all ranks agree.

        Args:
            base: Any int, such as the seed of an engine.
            number: Number of the request, from 1 on. Different numbers give different seeds.
        """
        if self.seed is not None:
            return self
        seed = ((base + 1) * _GOLDEN_RATIO + number) % 2**_SEED_BITS
        return replace(self, seed=seed)


def _number(value: object) -> float:
    """Return a real number as a float; NaN for anything else, or if no float can hold it."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.nan


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**_SEED_BITS


def _token_biases(biases: object) -> TokenBiases | None:
    """Return biases by token id, ``None`` for none.

    Raises:
        ConfigError: They are no mapping from token ids to numbers, or too many.
    """
    if not isinstance(biases, Mapping):
        raise ConfigError(
            "SamplingParams.logit_bias must be a mapping from token ids to numbers, got "
            f"{short_repr(biases)}.",
            field="logit_bias",
        )
    for token, bias in biases.items():
        if not is_int(token) or not 0 <= token < 2**_ID_BITS:
            raise ConfigError(
                f"SamplingParams.logit_bias has the key {short_repr(token)}, expected token ids "
                f"from 0 to 2**{_ID_BITS} - 1.",
                field="logit_bias",
            )
        if not _number(bias) <= _MOST_FLOAT32:
            raise ConfigError(
                f"SamplingParams.logit_bias of token {token} is {short_repr(bias)}, expected a "
                "number that float32 can hold, or -inf.",
                field="logit_bias",
            )
    if len(biases) > MAX_BIASED_IDS:
        raise ConfigError(
            f"SamplingParams.logit_bias has {len(biases)} tokens, but the device keeps "
            f"{MAX_BIASED_IDS} per request. Pass fewer.",
            field="logit_bias",
        )
    listed = {operator.index(token): float(bias) for token, bias in biases.items()}
    return TokenBiases(listed) if listed else None
