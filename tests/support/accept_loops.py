"""Accept lengths of plain loops: drafts are computed from the whole text, without a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from causal_attention import causal_attend, run_head
from graphkit.engine import SamplingParams, SpeculativeEngine


def accept_lengths(
    draft_after: Callable[[list[int]], Sequence[int]], text: list[int], prompt: int, new: int
) -> list[int]:
    """Return the accepted tokens of each step until ``new`` tokens are generated.

    Args:
        draft_after: Returns the drafts after a text that ends with the bonus token.
        text: The greedy text, with the tokens that the last step accepts behind its end.
        prompt: Tokens of the prompt.
        new: Tokens to generate. The first one comes with the prompt.
    """
    known, lengths = 1, []
    while known < new:
        drafts, rest = draft_after(text[: prompt + known]), text[prompt + known :]
        agree = [draft == token for draft, token in zip(drafts, rest, strict=False)]
        lengths.append([*agree, False].index(False) + 1)
        known += lengths[-1]
    return lengths


def head_drafts(
    head: Any, features: torch.Tensor, text: list[int], drafts: int, token_map: Any = None
) -> list[int]:
    """Return the drafts of an EAGLE or EAGLE-3 head from the target's hidden states, [T, F]."""
    hidden = features[: len(text) - 1]
    if hasattr(head, "midlayer"):
        hidden = head.fc(hidden)
    for _ in range(drafts):
        ids, rows = torch.tensor(text[1:]), len(text) - 1
        out = run_head(head, ids, hidden, torch.arange(rows), causal_attend(1, rows))
        best = head.logits(out[-1:])[0].argmax()
        text = [*text, int(best if token_map is None else token_map[best])]
        hidden = torch.cat([hidden, out[-1:]])
    return text[-drafts:]


def check_engine(
    engine: SpeculativeEngine, prompts: Sequence[Sequence[int]], new: int, expected: list[list[int]]
) -> None:
    """Check the accept lengths of an engine, in the order of its steps unless it is v3.

    A launch of v3 has several steps.
    """
    is_ordered = engine.generation != "v3"
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=new)) for prompt in prompts]
    found: list[list[int]] = [[] for _ in requests]
    while engine.has_work:
        before = [Counter(request.accepted_lengths) for request in requests]
        engine.step()
        for lengths, request, old in zip(found, requests, before, strict=True):
            lengths += (request.accepted_lengths - old).elements()
    if not is_ordered:
        found, expected = ([sorted(each) for each in lists] for lists in (found, expected))
    assert found == expected, (engine.generation, found, expected)
