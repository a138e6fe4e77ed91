"""finish_step: new tokens, ends and states of requests, against a model in plain Python."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.errors import InputError
from graphkit.ops.loop_layout import Report, RequestEnd
from graphkit.ops.step_state import finish_step

finish_case, finished, scored_case, scored, assert_scored = map(
    runpy.run_path(str(Path(__file__).with_name("loop_cases.py"))).get,
    ("finish_case", "finished", "scored_case", "scored", "assert_scored"),
)
RUNNING, STOP, LENGTH = RequestEnd


@pytest.mark.parametrize("longest", [1, 2, 4, 9])
@pytest.mark.parametrize("stops", [1, 3, 16])
def test_random_requests(longest, stops):
    for seed in range(12):
        width, dtype = longest + seed % 3, (torch.int32, torch.int64)[seed % 2]
        args = finish_case(
            seed % 7, seed=seed, longest=longest, width=width, stops=stops, dtype=dtype
        )
        want = finished(*args)
        report = finish_step(*args)
        assert report.dtype == torch.int32
        assert (report.tolist(), *(each.tolist() for each in args[4:7])) == want


@pytest.mark.parametrize("requests", [0, 1, 6])
def test_counts_and_log_probabilities_of_new_tokens(requests):
    for seed in range(20):
        args = scored_case(requests, seed)
        want = scored(args)
        assert_scored(finish_step(*args), args, want)


def step(tokens, accepted, stops=(), left=100, row=1):
    """Finish a step of one request; return its report's row and the state of all rows."""
    states = (
        torch.tensor([1, 7], dtype=torch.int32), torch.tensor([0, 5]),
        torch.tensor([0, left], dtype=torch.int32),
    )  # fmt: skip
    stop_ids = torch.full((2, 4), -1)
    stop_ids[1, : len(stops)] = torch.tensor(stops, dtype=torch.int64)
    report = finish_step(
        torch.tensor([row]), torch.tensor(tokens), torch.tensor([accepted], dtype=torch.int32),
        stop_ids, *states, len(tokens),
    )  # fmt: skip
    return report[0].tolist(), [each.tolist() for each in states]


@pytest.mark.parametrize(
    ("accepted", "stops", "left", "new", "end"),
    [
        (3, [], 100, 3, RUNNING),
        (1, [], 100, 1, RUNNING),
        (3, [50], 100, 3, RUNNING),
        (3, [10], 100, 1, STOP),  # the first
        (3, [30], 100, 3, STOP),  # the last
        (3, [30, 20], 100, 2, STOP),  # the earlier of two
        (3, [40], 100, 3, RUNNING),  # behind the path
        (3, [30], 2, 2, LENGTH),  # behind the limit
        (3, [20], 2, 2, STOP),  # at the limit
        (3, [], 3, 3, LENGTH),
        (3, [], 2, 2, LENGTH),
        (3, [], 1, 1, LENGTH),
        (3, [], 4, 3, RUNNING),
        (4, [40], 100, 4, STOP),
    ],
)
def test_ends(accepted, stops, left, new, end):
    tokens = [10, 20, 30, 40]
    line, (seq_lens, bonus, remaining) = step(tokens, accepted, stops, left)
    assert line == [1, accepted, new, end, *tokens[:new]] + [-1] * (4 - new)
    assert seq_lens == [1, 7 + accepted]
    assert bonus == [0, tokens[accepted - 1]]
    assert remaining == [0, 0 if end else left - new]


def test_token_0_may_be_a_stop_token_and_padding_stops_nothing():
    assert step([5, 0, 5], 3, [0])[0] == [1, 3, 2, STOP, 5, 0, -1]
    assert step([5, 0, 5], 3)[0] == [1, 3, 3, RUNNING, 5, 0, 5]


@pytest.mark.parametrize("row", [0, 1], ids=["pad", "ended"])
def test_pads_and_ended_requests_report_and_change_nothing(row):
    line, states = step([10, 20], 2, [10], left=0, row=row)
    assert line == [0, 0, 0, RUNNING, -1, -1]
    assert states == [[1, 7], [0, 5], [0, 0]]


def test_several_pads_beside_a_request():
    """Pads share row 0: a write of one must not undo anything of another."""
    args = finish_case(5, seed=0)
    args[0] = torch.tensor([0, 4, 0, 0, 2])
    args[6][:] = 100
    before = [each[0].item() for each in args[4:7]]
    want = finished(*args)
    report = finish_step(*args)
    assert (report.tolist(), *(each.tolist() for each in args[4:7])) == want
    assert report[:, Report.ROW].tolist() == [0, 4, 0, 0, 2]
    assert [each[0].item() for each in args[4:7]] == before


def test_an_empty_batch():
    args = finish_case(0, seed=0)
    assert finish_step(*args).shape == (0, Report.TOKENS + 4)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(3).int(), r"req_pool_indices is \[3\] int32"),
        (1, torch.zeros(0).long(), r"predict is \[0\] int64 .* for 3 requests of W >= 1 tokens"),
        (1, torch.zeros(14).long(), r"predict is \[14\] int64 .* for 3 requests"),
        (2, torch.zeros(2).int(), r"num_accepted_tokens is \[2\] .*\[B\] = \[3\] int32"),
        (6, torch.zeros(12).int()[::2], "remaining has strides"),
        (7, 0, "longest_path is 0, expected at least 1"),
    ],
)
def test_refusals(index, value, message):
    args = finish_case(3, seed=0)
    args[index] = value
    with pytest.raises(InputError, match=message):
        finish_step(*args)


@pytest.mark.parametrize("requests", [0, 3])
def test_tracers_see_the_result(requests):
    overload = torch.ops.graphkit.finish_step.default
    args = finish_case(requests, seed=1)
    for each in (args, scored_case(requests, 1)):
        torch.library.opcheck(overload, each, test_utils=("test_schema", "test_faketensor"))
