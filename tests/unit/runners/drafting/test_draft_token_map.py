"""DRAFT over a reduced vocabulary: that over the whole one, where no other token is possible."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphkit import ForwardOutput
from graphkit.errors import ConfigError

TOKEN_MAP = torch.tensor([30, 2, 3, 17, 8, 0, 11])


def reduced(model):
    """Return a forward with the logits of the mapped tokens alone."""

    def forward(inputs):
        output = model(inputs)
        return ForwardOutput(
            next_token_logits=output.next_token_logits[:, TOKEN_MAP],
            hidden_states=output.hidden_states,
        )

    return forward


def excluded(model):
    """Return a forward that gives every other token probability 0."""

    def forward(inputs):
        output = model(inputs)
        logits = torch.full_like(output.next_token_logits, -torch.inf)
        logits[:, TOKEN_MAP] = output.next_token_logits[:, TOKEN_MAP]
        return ForwardOutput(next_token_logits=logits, hidden_states=output.hidden_states)

    return forward


@pytest.mark.parametrize("shape", [(4, 1, 5), (2, 1, 3), (3, 2, 6), (3, 3, 12)], ids=str)
def test_trees_have_target_tokens(draft_case, shape):
    case = draft_case(*shape)
    whole = case.runner(excluded(case.model))
    case.sizes = replace(case.sizes, draft_vocab_size=len(TOKEN_MAP))
    runner = case.runner(reduced(case.model), draft_token_map=TOKEN_MAP)
    for seed, requests in enumerate((4, 1, 3)):
        batch = case.batch(requests, seed=seed)
        expected = whole.replay(batch, clone=True).tensors()
        for output in (runner.replay(batch, clone=True), runner.fall_back(batch)):
            for name, rows in output.tensors().items():
                assert torch.equal(rows, expected[name]), name
    unmapped = case.runner(reduced(case.model)).replay(batch)
    assert not torch.equal(unmapped.draft_tokens, expected["draft_tokens"])


@pytest.mark.parametrize(
    ("token_map", "text"),
    [
        (TOKEN_MAP.tolist(), r"is \[30, 2.*expected \[7\] int64 on cpu"),
        (TOKEN_MAP[:6], r"is \[6\] int64 on cpu, expected \[7\].*draft_vocab_size must be"),
        (TOKEN_MAP.int(), r"is \[7\] int32 on cpu, expected \[7\] int64"),
        (TOKEN_MAP.to("meta"), r"is \[7\] int64 on meta"),
        (TOKEN_MAP + 1, "tokens from 1 to 31, expected 0 to 30. Pass target tokens; d2t"),
        (TOKEN_MAP - 1, "tokens from -1 to 29"),
    ],
)
def test_what_is_no_map_is_refused(draft_case, token_map, text):
    case = draft_case(3, 2, 6)
    case.sizes = replace(case.sizes, draft_vocab_size=7)
    with pytest.raises(ConfigError, match=text) as caught:
        case.runner(draft_token_map=token_map)
    assert caught.value.field == "draft_token_map"


def test_the_map_is_a_weight_with_a_name(draft_case):
    case = draft_case(3, 1, 4)
    case.sizes = replace(case.sizes, draft_vocab_size=7)
    runner = case.runner(reduced(case.model), draft_token_map=TOKEN_MAP, capture=False)
    assert runner.memory_names()["weight"] == {"draft_token_map": TOKEN_MAP}
