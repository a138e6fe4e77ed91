"""Requests and their output."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from graphkit.engine.step import SamplingParams
from graphkit.engine.step.output_ring import logprobs_of
from graphkit.engine.token_matcher import TokenMatcher
from graphkit.errors import ReplayError
from graphkit.ops.loop_layout import Report


class FinishReason(Enum):
    """Reason for which a request finished.

    ``STOP`` is a token of ``stop_token_ids``, or the end of the request's grammar. ``REFUSED``
    means that the grammar allows no token of the vocabulary, although it has not ended. ``FAILED``
    means that the request's prefill or matcher raised an exception, which is in ``error``. The
    caller ends a request with ``STOP_STRING``, ``DEADLINE`` or ``ABORTED``; see
    ``SpeculativeEngine.abort``.
    """

    STOP = "stop token"
    STOP_STRING = "stop string"
    LENGTH = "max_new_tokens"
    CONTEXT = "context limit"
    DEADLINE = "deadline"
    ABORTED = "aborted"
    REFUSED = "no token allowed"
    FAILED = "error"


class VerifySteps:
    """What verify steps drafted and accepted, of a request or of all.

    Attributes:
        accepted_lengths: Verify steps by the number of tokens that they accepted, the bonus token
            included.
        drafted_lengths: The same steps by the number of drafts that they verified.
    """

    __slots__ = ()
    accepted_lengths: Mapping[int, int]
    drafted_lengths: Mapping[int, int]

    @property
    def num_verifies(self) -> int:
        """Verify steps that generated tokens, counted once per request that took part."""
        return sum(self.accepted_lengths.values())

    @property
    def num_rows(self) -> int:
        """Rows that these steps verified: their drafts and the bonus tokens."""
        return self.num_draft_tokens + self.num_verifies

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that these steps verified."""
        return sum(drafts * count for drafts, count in self.drafted_lengths.items())

    @property
    def num_accepted_tokens(self) -> int:
        """Tokens that these steps accepted, bonus tokens included."""
        return sum(length * count for length, count in self.accepted_lengths.items())

    @property
    def accept_length(self) -> float:
        """Mean accepted tokens per verify step, bonus included; 0 before the first step."""
        return self.num_accepted_tokens / self.num_verifies if self.num_verifies else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of the steps with a draft at a position that accepted it, by position from 0.

        A step of N drafts has them at N positions, also those of a tree.
        """
        longest = max(self.accepted_lengths, default=1)
        positions = range(max(longest - 1, 0))
        drafted = [sum(n for d, n in self.drafted_lengths.items() if d > p) for p in positions]
        accepted = [
            sum(n for length, n in self.accepted_lengths.items() if length > p + 1)
            for p in positions
        ]
        return tuple(a / d for a, d in zip(accepted, drafted, strict=True))


NewTokens = list[tuple["Request", list[int]]]
"""New tokens of each request, in order."""


@dataclass(eq=False, slots=True, kw_only=True, weakref_slot=True)
class Request(VerifySteps):
    """A request and its output so far.

    ``SpeculativeEngine.submit`` creates it; the engine alone changes it, in ``step`` and ``abort``.

    Attributes:
        prompt_ids: Tokens to continue.
        sampling: Sampling and stopping parameters.
        context_limit: Most tokens of prompt and output together.
        matcher: Constrains the output; ``None`` allows every token. It has accepted ``output_ids``.
        output_ids: Tokens generated so far, without the prompt.
        logprobs: Log-probability of each of ``output_ids`` under the target's own distribution;
            empty unless ``SamplingParams.logprobs`` is set.
        finish_reason: ``None`` until the request has finished.
        row: Row in the request pool while the request is admitted, else 0.
        num_admissions: Times that the request was admitted. Each after the first follows a
            preemption, for want of KV slots, or an interrupted step.
        error: Exception that ended the request, with ``FinishReason.FAILED``; else ``None``.
        num_returned: Tokens of ``output_ids`` that ``step`` has returned.
        is_matching: Whether calls of the matcher are in progress. Its state is unknown if they were
            interrupted.
        accepted_lengths: Verify steps that generated tokens for the request, by the number of
            tokens that they accepted, the bonus token included. Counts tokens behind the end of the
            request too.
        drafted_lengths: The same steps by the number of drafts that they verified.
        submitted_at: ``time.monotonic()`` of the submission, in seconds.
        admitted_at: The same of the first admission; ``None`` while the request waits.
        first_token_at: The same of the ``step`` that returned the first token.
        last_token_at: The same of the ``step`` that returned the latest tokens.
        finished_at: The same of the ``step`` that returned after the end of the request.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    context_limit: int
    matcher: TokenMatcher | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    row: int = 0
    num_admissions: int = 0
    error: Exception | None = None
    num_returned: int = 0
    is_matching: bool = False
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    drafted_lengths: Counter[int] = field(default_factory=Counter)
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_tokens(self) -> int:
        """Most tokens that prompt and output can reach."""
        return min(self.context_limit, len(self.prompt_ids) + self.sampling.max_new_tokens)

    @property
    def tokens_left(self) -> int:
        """Most tokens that the request can still generate; 0 if it has finished."""
        return 0 if self.is_finished else self.max_tokens - self.num_tokens

    @property
    def open_matcher(self) -> TokenMatcher | None:
        """The matcher while the request goes on, else ``None``."""
        return None if self.is_finished else self.matcher

    @property
    def is_finished(self) -> bool:
        """Whether the request has its last token."""
        return self.finish_reason is not None

    def receive(self, row: Sequence[int]) -> None:
        """Append the new tokens of a report's row up to the one that finishes the request.

        Does nothing if the request has finished: a step that was launched before its end was known
        reports further tokens. If the matcher raises an exception, the request fails.

        Args:
            row: See ``graphkit.ops.loop_layout.Report``.
        """
        if self.finish_reason is not None:
            return
        if row[Report.DRAFTS] >= 0:  # a step, not a prefill
            self.accepted_lengths[row[Report.ACCEPTED]] += 1
            self.drafted_lengths[row[Report.DRAFTS]] += 1
        tokens = row[Report.TOKENS : Report.TOKENS + row[Report.NEW]]
        if self.sampling.logprobs:
            del self.logprobs[len(self.output_ids) :]  # of a call that was interrupted
            self.logprobs += logprobs_of(row)
        if self.matcher is None:
            self._append(tokens)
        else:
            with self.matching():
                self._append(tokens)
        del self.logprobs[len(self.output_ids) :]

    @contextmanager
    def matching(self) -> Iterator[None]:
        """Call the matcher in a block. An exception of the matcher fails the request."""
        self.is_matching = True
        try:
            yield
        except Exception as error:
            self.fail(error)
        self.is_matching = False

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.error, self.finish_reason = error, FinishReason.FAILED

    def resume(self) -> None:
        """Bring the request into a state from which it can go on after an interrupted step."""
        self.row = 0
        del self.logprobs[len(self.output_ids) :]  # of tokens that an interrupt has kept out
        if self.matcher is not None and self.is_matching and not self.is_finished:
            self.fail(
                ReplayError(
                    "a step was interrupted in a call of the request's matcher, whose state is "
                    "unknown now. Submit the request again with a new matcher."
                )
            )
        elif self.output_ids and not self.is_finished:
            self.finish_reason = self._finish_reason_after(self.output_ids[-1])

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.is_finished:
                break
            if self.matcher is not None and not self.matcher.accept_token(token):
                self.finish_reason = self.finish_reason or FinishReason.REFUSED
                break
            self.output_ids.append(token)
            reason = self._finish_reason_after(token)
            self.finish_reason = self.finish_reason or reason  # a matcher may abort its request

    def _finish_reason_after(self, token: int) -> FinishReason | None:
        is_matched = self.matcher is not None and self.matcher.is_terminated()
        if is_matched or token in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if len(self.output_ids) >= self.sampling.max_new_tokens:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT if self.num_tokens >= self.context_limit else None
