"""Sampling and stopping parameters of a request."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from dataclasses import dataclass, replace
from numbers import Real

from graphkit.config import is_int, require_int
from graphkit.errors import ConfigError

MAX_STOP_IDS = 16
"""Stop tokens of one request."""
_SEED_BITS = _ID_BITS = 63
_GOLDEN_RATIO = 0x9E37_79B9_7F4A_7C15
"""2**64 over the golden ratio: its multiples are far apart, and far from the seeds 0, 1, 2, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping parameters of a request.

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

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed"):
            if is_int(value := getattr(self, name)):
                object.__setattr__(self, name, operator.index(value))  # numpy's have no JSON
        require_int("SamplingParams", "max_new_tokens", self.max_new_tokens)
        require_int("SamplingParams", "top_k", self.top_k, least=-1)
        if not 0 <= _number(self.temperature) < math.inf:
            raise ConfigError(
                "SamplingParams.temperature must be a finite number >= 0, got "
                f"{self.temperature!r}. Use 0 for greedy decoding.",
                field="temperature",
            )
        if not 0 < _number(self.top_p) <= 1:
            raise ConfigError(
                f"SamplingParams.top_p must be a number above 0 and at most 1, got {self.top_p!r}. "
                "Use 1 to keep every token.",
                field="top_p",
            )
        if not 0 <= _number(self.min_p) <= 1:
            raise ConfigError(
                f"SamplingParams.min_p must be a number from 0 to 1, got {self.min_p!r}. "
                "Use 0 to keep every token.",
                field="min_p",
            )
        if self.seed is not None and not _is_seed(self.seed):
            raise ConfigError(
                f"SamplingParams.seed must be an int from 0 to 2**63 - 1, got {self.seed!r}.",
                field="seed",
            )
        try:
            tokens = frozenset(operator.index(token) for token in self.stop_token_ids)
        except TypeError as error:
            raise ConfigError(
                "SamplingParams.stop_token_ids must be a collection of token ids, got "
                f"{self.stop_token_ids!r}. Pass a collection of ints.",
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
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, float(getattr(self, name)))

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
