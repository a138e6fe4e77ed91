"""choose_body: counts of acceptance, and the length with the most expected tokens per time."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.errors import InputError
from graphkit.ops.draft_length import DECAY, IDLE_DECAY, PRIOR, choose_body
from graphkit.ops.stored_tokens import store_tokens

length_case, chosen_body, stored_case = map(
    runpy.run_path(str(Path(__file__).with_name("length_cases.py"))).get,
    ("length_case", "chosen_body", "stored_case"),
)


def test_random_choices_equal_the_enumeration():
    bodies = set()
    for seed in range(400):
        case = length_case(seed)
        counts, body = chosen_body(case)
        choose_body(**case)
        torch.testing.assert_close(case["acceptance"], torch.tensor(counts))
        if body is not None:
            assert case["body"].item() == body, seed
            bodies.add(body)
    assert len(bodies) > 10


def chooser(*, steps, times, is_deferring=False):
    """Return a function of a report, as counts of accepted tokens, and the index of its length."""
    state = {
        "rows": torch.tensor([1]),
        "batch_sizes": torch.tensor([1], dtype=torch.int32),
        "num_steps": torch.tensor(steps, dtype=torch.int32),
        "times": torch.tensor([times], dtype=torch.float32),
        "acceptance": torch.zeros(1, max(steps), 2),
        "body": torch.zeros(1, dtype=torch.int64),
        "behind": torch.zeros(2, dtype=torch.int32) if is_deferring else None,
        "depth": 4,
    }

    def choose(accepted=None, length=0):
        report = None
        if accepted is not None:
            report = torch.tensor([[1, accepted, accepted, 0, -1]], dtype=torch.int32)
        choose_body(**state, report=report, length=length)
        return state["body"].item()

    choose.state = state
    return choose


def test_equal_times_select_the_longest():
    assert chooser(steps=[0, 1, 3], times=[1, 1, 1])() == 2


def test_rejected_drafts_lead_to_plain_steps_and_are_tried_again():
    choose = chooser(steps=[0, 1, 3], times=[1, 1.2, 1.5])
    body, bodies = choose(), []
    for _ in range(3000):
        body = choose(1, body)  # every draft is wrong
        bodies.append(body)
    tries = sum(body > 0 for body in bodies[100:])
    assert 0 < tries < 0.03 * len(bodies), "a try costs a part of a step"
    assert bodies[40:100].count(0) > 50


def test_accepted_drafts_lead_to_long_drafts():
    choose = chooser(steps=[0, 1, 3], times=[1, 1.3, 1.9])
    body = choose()
    for _ in range(50):
        body = choose([1, 2, 4][body], body)
    assert body == 2


@pytest.mark.slow
def test_counts_decay_and_slowly_in_plain_steps():
    choose = chooser(steps=[0, 1, 3], times=[1, 1, 1])
    counts = choose.state["acceptance"]
    counts[:] = 10.0
    choose(2, length=1)
    expected = torch.tensor([[10 * DECAY + 1] * 2, [10 * DECAY] * 2, [10 * DECAY] * 2])
    torch.testing.assert_close(counts[0], expected)
    choose(1, length=0)
    torch.testing.assert_close(counts[0], IDLE_DECAY * expected)
    for _ in range(10_000):
        choose(1, length=0)
    torch.testing.assert_close(counts[0], torch.zeros(3, 2), atol=1e-3, rtol=0)
    assert PRIOR > 0.5, "forgotten positions are tried again"


def test_a_draft_waits_until_no_request_is_behind():
    choose = chooser(steps=[0, 2], times=[1, 1], is_deferring=True)
    behind = choose.state["behind"]
    assert choose() == 1
    behind[1] = 1
    assert choose() == 2, "catches up"
    choose.state["times"][0, 1] = 9
    assert choose() == 0
    behind[1] = 3
    assert choose() == 2, "a fourth token would be behind"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("times", torch.ones(1, 2), r"times is \[1, 2\] float32 on cpu, expected .* = \[1, 3\]"),
        ("acceptance", torch.ones(1, 3, 2).double(), "acceptance is .* float64"),
        ("body", torch.zeros(1).int(), r"body is \[1\] int32"),
        ("depth", 0, "depth is 0, expected at least 1"),
    ],
)
def test_refusals(name, value, message):
    state = chooser(steps=[0, 1, 3], times=[1, 1, 1]).state
    with pytest.raises(InputError, match=message) as caught:
        choose_body(**state | {name: value})
    assert caught.value.field == name


def test_tokens_are_stored_behind_those_of_their_row():
    rows, tokens = torch.tensor([2, 0, 1]), torch.tensor([5, 6, 7, 8, 9, 10])
    stored, count = torch.zeros(3, 4).long(), torch.tensor([0, 1, 2]).int()
    states = torch.arange(6.0)[:, None]
    stored_states = torch.zeros(3, 4, 1)
    for _ in range(2):
        store_tokens(rows, tokens, stored, count, 3, states, stored_states)
    assert count.tolist() == [0, 3, 3], "pads store nothing, and a full row stays full"
    assert stored.tolist() == [[0] * 4, [0, 9, 9, 0], [0, 0, 5, 0]]
    assert stored_states[1].flatten().tolist() == [0, 4, 4, 0]
    with pytest.raises(InputError, match="both of hidden_states and stored_states"):
        store_tokens(rows, tokens, stored, count, 3, states)
    with pytest.raises(InputError, match="the same number of tokens for each of 3"):
        store_tokens(rows, tokens[:4], stored, count, 3)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [("choose_body", list(length_case(3).values())), ("store_tokens", stored_case(1))],
)
def test_tracers_see_the_ops(op, arguments):
    overload = getattr(torch.ops.graphkit, op).default
    torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))
