"""Result of ``graphkit generate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from graphkit.records.record import Count, Duration, Environment, Integer, Real, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The completion of one prompt.

    Attributes:
        prompt, text: The prompt and the generated text; U+FFFD replaces bytes that are not UTF-8.
        finish_reason: Why generation ended.
        tokens: Number of generated tokens, a final stop token included.
        accept_length: Mean tokens per verify step, bonus included; 0 without verify steps.
        token_ids: The generated tokens.
        rows: Rows that the verify steps computed, drafts and bonus tokens.
        acceptance: Share of the drafts at each position that were accepted.
        logprobs: Log-probabilities of the generated tokens, if the prompt asks for them.
    """

    prompt: str
    text: str
    finish_reason: str
    tokens: Count
    accept_length: Real
    token_ids: tuple[Count, ...] = ()
    rows: Count = 0
    acceptance: tuple[Real, ...] = ()
    logprobs: tuple[Real, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRecord(Record):
    """Completions, settings and speed of ``graphkit generate``.

    Attributes:
        text: Text of the first completion.
        completions: One per prompt, in order.
        environment, backend: Where it ran; ``cuda`` or ``recorder``.
        algorithm, topk, num_steps, num_draft_tokens, generation: Settings of speculation.
        temperature, seed, top_k, top_p, min_p: Settings of sampling.
        repetition_penalty, presence_penalty, frequency_penalty, min_tokens: Processors of logits.
        is_chat: Whether each prompt was a user message of a chat.
        new_tokens: Number of tokens of all completions.
        seconds: Wall time from the first prompt to the last token, without loading and capture.
        tokens_per_second: ``new_tokens / seconds``.
        accept_length: Mean tokens per request and verify step, bonus included.
        capture_seconds: Time of all captures; ``None`` if nothing was captured.
        replays: Graph replays by forward mode.
        fallbacks: Eager runs by forward mode and reason.
        accepted_lengths: Verify steps by the number of tokens that they accepted, bonus included.
        drafted_lengths: Verify steps by the number of drafts that they verified.
        acceptance: Share of the drafts at each position that were accepted, over all completions.
        gain_over_plain: Speed of the steps over plain decoding, measured; 0 if it is not.
    """

    KIND: ClassVar[str] = "generate"
    text: str
    completions: tuple[Completion, ...]
    environment: Environment
    backend: str
    algorithm: str
    topk: Count
    num_steps: Count
    num_draft_tokens: Count
    generation: str
    temperature: Real
    seed: Count
    new_tokens: Count
    seconds: Duration
    tokens_per_second: Duration
    accept_length: Real
    capture_seconds: Duration | None
    replays: Mapping[str, Count]
    fallbacks: Mapping[str, Mapping[str, Count]]
    accepted_lengths: Mapping[Count, Count] = field(default_factory=dict)
    drafted_lengths: Mapping[Count, Count] = field(default_factory=dict)
    acceptance: tuple[Real, ...] = ()
    gain_over_plain: Real = 0.0
    top_k: Integer = 0
    top_p: Real = 1.0
    min_p: Real = 0.0
    is_chat: bool = False
    repetition_penalty: Real = 1.0
    presence_penalty: Real = 0.0
    frequency_penalty: Real = 0.0
    min_tokens: Count = 0
