"""choose_body: counts of acceptance, and the length with the most expected tokens per time."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.errors import InputError
from graphkit.ops.draft_length import DECAY, IDLE_DECAY, PRIOR, choose_body

length_case, chosen_body = map(
    runpy.run_path(str(Path(__file__).with_name("length_cases.py"))).get,
    ("length_case", "chosen_body"),
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


def test_counts_decay_slowly_where_nothing_is_drafted():
    choose = chooser(steps=[0, 1, 3], times=[1, 1, 1])
    counts = choose.state["acceptance"]
    counts[:] = 10.0
    choose(2, length=1)
    expected = torch.tensor([[10 * DECAY + 1] * 2, [10 * IDLE_DECAY] * 2, [10 * IDLE_DECAY] * 2])
    torch.testing.assert_close(counts[0], expected)
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


def test_tracers_see_the_op():
    arguments = list(length_case(3).values())
    overload = torch.ops.graphkit.choose_body.default
    torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))
