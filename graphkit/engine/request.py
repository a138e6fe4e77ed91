"""A request: what was asked, and what has come of it so far."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real

from graphkit.config import require_int
from graphkit.errors import ConfigError


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop token"
    LENGTH = "max_new_tokens"
    CONTEXT = "context limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends.

    Attributes:
        max_new_tokens: Most tokens to make.
        temperature: 0 takes the likeliest token; above, tokens follow the target's distribution,
            its logits divided by it.
        stop_token_ids: Tokens that end the request, kept as a frozenset; the one that did is its
            last token.

    Raises:
        ConfigError: A value is out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    stop_token_ids: Collection[int] = frozenset()

    def __post_init__(self) -> None:
        require_int("SamplingParams", "max_new_tokens", self.max_new_tokens)
        if not _is_temperature(self.temperature):
            raise ConfigError(
                "SamplingParams.temperature must be a finite number >= 0, got "
                f"{self.temperature!r}.",
                field="temperature",
            )
        try:
            tokens = frozenset(operator.index(token) for token in self.stop_token_ids)
        except TypeError as error:
            raise ConfigError(
                f"SamplingParams.stop_token_ids must be token ids, got {self.stop_token_ids!r}.",
                field="stop_token_ids",
            ) from error
        object.__setattr__(self, "stop_token_ids", tokens)


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """A request in the engine. Owned by it; callers read.

    Attributes:
        prompt_ids: Tokens to continue.
        sampling: How, and how far.
        limit: Most tokens of prompt and output together.
        output_ids: Tokens made so far; grows as results arrive.
        finish_reason: ``None`` while it runs.
        row: Its row in the request pool while it runs, else 0.
        num_verifies: Verify steps that made tokens for it.
        num_accepted_tokens: Tokens that those steps accepted, bonus tokens included, also those
            behind its end.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    limit: int
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    row: int = 0
    num_verifies: int = 0
    num_accepted_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def most_tokens(self) -> int:
        """Tokens that prompt and output can come to."""
        return min(self.limit, len(self.prompt_ids) + self.sampling.max_new_tokens)

    @property
    def accept_length(self) -> float:
        """Mean tokens per verify step, bonus included; 0 before the first."""
        return self.num_accepted_tokens / self.num_verifies if self.num_verifies else 0.0

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens up to the one that ends the request; returns those appended."""
        taken: list[int] = []
        for token in tokens:
            if self.finish_reason is not None:
                break
            self.output_ids.append(token)
            taken.append(token)
            self.finish_reason = self._reason_after(token)
        return taken

    def _reason_after(self, token: int) -> FinishReason | None:
        if token in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if len(self.output_ids) >= self.sampling.max_new_tokens:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT if self.num_tokens >= self.limit else None


def _is_temperature(value: object) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < float("inf")


def has_ended(request: Request) -> bool:
    """Whether its last token is there."""
    return request.finish_reason is not None
