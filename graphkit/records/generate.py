"""What ``graphkit generate`` made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.environment import Environment
from graphkit.records.json_text import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What became of one prompt.

    Attributes:
        prompt, text: What was given, and what the model made of it; U+FFFD for what is no UTF-8.
        finish_reason: Why it ended.
        tokens: Tokens made, one that ended the text included.
        accept_length: Mean tokens per verify step, bonus included; 0 if there was none.
    """

    prompt: str
    text: str
    finish_reason: str
    tokens: int
    accept_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRecord(Record):
    """What ``graphkit generate`` made, with which settings, and how fast.

    Attributes:
        text: That of the first completion.
        completions: One per prompt, in their order.
        environment, backend: Where; ``cuda`` or ``recorder``.
        algorithm, topk, num_steps, num_draft_tokens, generation: How drafts were made and verified.
        temperature, seed: How tokens were chosen.
        new_tokens: Tokens of all completions.
        seconds: Wall time from the first prompt read to the last token; no loading, no capture.
        tokens_per_second: Their ratio.
        accept_length: Mean tokens per request and verify step, bonus included.
        capture_seconds: Time that all captures took; ``None`` if nothing was captured.
        replays: Graph replays by forward mode.
        fallbacks: Eager runs by forward mode and reason; modes without any are left out.
    """

    KIND: ClassVar[str] = "generate"
    text: str
    completions: tuple[Completion, ...]
    environment: Environment
    backend: str
    algorithm: str
    topk: int
    num_steps: int
    num_draft_tokens: int
    generation: str
    temperature: float
    seed: int
    new_tokens: int
    seconds: float
    tokens_per_second: float
    accept_length: float
    capture_seconds: float | None
    replays: Mapping[str, int]
    fallbacks: Mapping[str, Mapping[str, int]]
