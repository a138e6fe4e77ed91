"""Sampling and stopping parameters of a request."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from numbers import Real

from graphkit.config import require_int
from graphkit.errors import ConfigError

_SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping parameters of a request.

    Attributes:
        max_new_tokens: Most tokens to generate, at least 1.
        temperature: 0 selects the most probable token. Above 0, tokens follow the target's
            distribution with its logits divided by the temperature.
        stop_token_ids: Tokens that finish the request; stored as a frozenset. The stop token is
            part of the output.
        seed: Key of the request's random numbers, 0 to 2**63 - 1. Equal seeds give equal tokens in
            any batch and generation. ``None`` takes one from the engine's seed.

    Raises:
        ConfigError: A value is out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    stop_token_ids: Collection[int] = frozenset()
    seed: int | None = None

    def __post_init__(self) -> None:
        require_int("SamplingParams", "max_new_tokens", self.max_new_tokens)
        if not _is_temperature(self.temperature):
            raise ConfigError(
                "SamplingParams.temperature must be a finite number >= 0, got "
                f"{self.temperature!r}. Use 0 for greedy decoding.",
                field="temperature",
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
        object.__setattr__(self, "stop_token_ids", tokens)


def _is_temperature(value: object) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < float("inf")


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**_SEED_BITS
