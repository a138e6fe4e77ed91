"""Sampling and stopping parameters of a request."""

from __future__ import annotations

import math
import operator
import sys
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
_TOKEN_IDS = f"token ids from 0 to 2**{_ID_BITS} - 1"
_MOST_FLOAT32 = 2.0**128 - 2.0**104
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
        require_int("SamplingParams", "min_tokens", self.min_tokens, least=0)
        for name, (least, most, expected, remedy) in _NUMBERS.items():
            value = getattr(self, name)
            if not least <= _number(value) <= most:  # also refuses NaN
                raise _error(name, f"must be {expected}, got {short_repr(value)}. {remedy}")
            object.__setattr__(self, name, float(value))
        if self.seed is not None and not (is_int(self.seed) and 0 <= self.seed < 2**_SEED_BITS):
            expected = "an int from 0 to 2**63 - 1"
            raise _error("seed", f"must be {expected}, got {short_repr(self.seed)}.")
        if self.min_tokens > self.max_new_tokens:
            raise _error(
                "min_tokens",
                f"is {self.min_tokens}, but max_new_tokens is {self.max_new_tokens}. Reduce "
                "min_tokens, or increase max_new_tokens.",
            )
        if not isinstance(self.logprobs, bool):
            raise _error("logprobs", f"must be True or False, got {short_repr(self.logprobs)}.")
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        if self.logit_bias is not None:
            biases = _token_biases(self.logit_bias)
            object.__setattr__(self, "logit_bias", biases)
            largest = max((biases or {}).values(), default=0.0)
            if largest / self.repetition_penalty > _MOST_FLOAT32:
                raise _error(
                    "logit_bias",
                    f"has {largest}, which repetition_penalty {self.repetition_penalty} divides: "
                    "float32 cannot hold the result. Reduce the bias.",
                )

    def with_seed(self, base: int, number: int) -> SamplingParams:
        """Return these parameters if they have a seed, else a copy with the seed of a request.

        Equal arguments give equal seeds, so that a run can be repeated and all ranks agree.

        Args:
            base: Any int, such as the seed of an engine.
            number: Number of the request, from 1 on. Different numbers give different seeds.
        """
        if self.seed is not None:
            return self
        # An int of numpy would overflow.
        seed = ((operator.index(base) + 1) * _GOLDEN_RATIO + number) % 2**_SEED_BITS
        return replace(self, seed=seed)


_NO_PENALTY = "Use 0 for no penalty."
_NUMBERS = {
    "temperature": (0.0, sys.float_info.max, "a finite number >= 0", "Use 0 for greedy decoding."),
    "top_p": (
        math.ulp(0.0), 1.0, "a number above 0 and at most 1", "Use 1 to keep every token."
    ),
    "min_p": (0.0, 1.0, "a number from 0 to 1", "Use 0 to keep every token."),
    "repetition_penalty": (
        2.0**-126, _MOST_FLOAT32, "a number above 0 that float32 can hold", "Use 1 for no penalty."
    ),
    "presence_penalty": (-2.0, 2.0, "a number from -2 to 2", _NO_PENALTY),
    "frequency_penalty": (-2.0, 2.0, "a number from -2 to 2", _NO_PENALTY),
}  # fmt: skip
"""Numbers, which are stored as floats: smallest and largest, their description, and a remedy."""


def _error(field: str, fact: str) -> ConfigError:
    return ConfigError(f"SamplingParams.{field} {fact}", field=field)


def _number(value: object) -> float:
    """Return a real number as a float; NaN for anything else, or if no float can hold it."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.nan


def _is_token(value: object) -> bool:
    return is_int(value) and 0 <= value < 2**_ID_BITS


def _stop_ids(ids: object) -> frozenset[int]:
    """Return stop tokens as a set."""
    try:
        tokens = frozenset(operator.index(token) for token in ids)  # type: ignore[attr-defined]
    except TypeError as error:
        expected = "must be a collection of token ids"
        raise _error(
            "stop_token_ids", f"{expected}, got {short_repr(ids)}. Pass a collection of ints."
        ) from error
    for token in tokens:
        if not _is_token(token):
            raise _error("stop_token_ids", f"has {token}, expected {_TOKEN_IDS}.")
    _check_count("stop_token_ids", len(tokens), MAX_STOP_IDS)
    return tokens


def _token_biases(biases: object) -> TokenBiases | None:
    """Return biases by token id, ``None`` for none."""
    if not isinstance(biases, Mapping):
        expected = "must be a mapping from token ids to numbers"
        raise _error("logit_bias", f"{expected}, got {short_repr(biases)}.")
    for token, bias in biases.items():
        if not _is_token(token):
            raise _error("logit_bias", f"has the key {short_repr(token)}, expected {_TOKEN_IDS}.")
        if not _number(bias) <= _MOST_FLOAT32:
            raise _error(
                "logit_bias",
                f"of token {token} is {short_repr(bias)}, expected a number that float32 can hold, "
                "or -inf.",
            )
    _check_count("logit_bias", len(biases), MAX_BIASED_IDS)
    listed = {operator.index(token): float(bias) for token, bias in biases.items()}
    return TokenBiases(listed) if listed else None


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        kept = f"the device keeps {most} per request"
        raise _error(field, f"has {count} tokens, but {kept}. Pass fewer.")
