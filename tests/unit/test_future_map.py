"""The map of results from one step to the next, and its debug mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit.errors import GraphkitError, InputError, ReplayError
from graphkit.spec import FutureMap, SpecAlgorithm


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.fixture
def relay():
    return FutureMap(5, 128, 64, "cpu", SpecAlgorithm.EAGLE)


@pytest.fixture
def watched(relay):
    relay.debug = True
    return relay


def test_an_algorithm_creates_a_map_of_its_own():
    made = SpecAlgorithm.EAGLE.create_future_map(4, 128, 64, "cpu")
    assert isinstance(made, FutureMap)
    assert (made.max_running_requests, made.chunked_prefill_size, made.context_len) == (4, 128, 64)
    assert made.algorithm is SpecAlgorithm.EAGLE


@pytest.mark.parametrize("debug", [False, True])
def test_rows_are_found_by_request_in_any_order(relay, debug):
    relay.debug = debug
    p, hidden = torch.rand(3, 2), torch.rand(3, 4).bfloat16()
    relay.stash(rows(5, 1, 3), {"topk_p": p, "hidden": hidden})
    relay.stash(rows(2), {"topk_p": torch.ones(1, 2)})
    assert torch.equal(
        relay.resolve("topk_p", rows(3, 2, 5)), torch.stack([p[2], p[2] * 0 + 1, p[0]])
    )
    assert torch.equal(relay.resolve("hidden", rows(1, 3)), hidden[1:])


def test_what_is_resolved_is_a_copy(relay):
    given = rows(7)
    relay.stash(rows(1), {"tokens": given})
    given += 1
    first = relay.resolve("tokens", rows(1))
    relay.stash(rows(1), {"tokens": rows(9)})
    assert (first.tolist(), relay.resolve("tokens", rows(1)).tolist()) == ([7], [9])


def test_an_unknown_name_lists_the_stashed_ones(relay):
    with pytest.raises(ReplayError, match="no 'tokens': nothing was stashed"):
        relay.resolve("tokens", rows(1))
    relay.stash(rows(1), {"hidden": torch.ones(1, 2), "topk_p": torch.ones(1, 2)})
    with pytest.raises(ReplayError, match="no 'tokens': hidden, topk_p was stashed"):
        relay.resolve("tokens", rows(1))


@pytest.mark.parametrize("debug", [False, True])
def test_empty_batches_do_nothing(relay, debug):
    relay.debug = debug
    relay.stash(rows(), {"tokens": rows(), "hidden": torch.ones(0, 3)})
    assert relay.resolve("hidden", rows()).shape == (0, 3)
    relay.stash(rows(1, 2), {"tokens": rows(7, 8)})
    relay.stash(rows(), {"tokens": rows()})
    assert relay.resolve("tokens", rows()).tolist() == []
    assert relay.resolve("tokens", rows(2, 1)).tolist() == [8, 7]


def test_without_debug_nothing_is_checked(relay):
    relay.stash(rows(1), {"tokens": rows(7)})
    for _ in range(2):
        assert relay.resolve("tokens", rows(1, 4, 0)).tolist() == [7, 0, 0]


def test_a_second_pick_up_names_its_rows(watched):
    watched.stash(rows(1, 2, 3, 4), {"tokens": rows(7, 8, 9, 10)})
    watched.resolve("tokens", rows(3, 1))
    with pytest.raises(ReplayError, match=r"rows \[1, 3\] of 'tokens' were already resolved"):
        watched.resolve("tokens", rows(1, 2, 3, 4))
    assert watched.resolve("tokens", rows(2, 4)).tolist() == [8, 10], "a refusal picks nothing up"


def test_a_pick_up_before_the_stash_names_its_rows(watched):
    watched.stash(rows(1), {"tokens": rows(7)})
    with pytest.raises(ReplayError, match=r"rows \[5\] of 'tokens' .* never stashed"):
        watched.resolve("tokens", rows(1, 5))


def test_each_stash_may_be_picked_up_once(watched):
    for turn in range(3):
        watched.stash(rows(1, 2), {"tokens": rows(turn, turn + 1)})
        assert watched.resolve("tokens", rows(2, 1)).tolist() == [turn + 1, turn]
    with pytest.raises(ReplayError, match=r"\[2\]"):
        watched.resolve("tokens", rows(2))


def test_names_are_picked_up_on_their_own(watched):
    watched.stash(rows(1), {"tokens": rows(7), "lens": rows(3)})
    assert watched.resolve("tokens", rows(1)).tolist() == [7]
    assert watched.resolve("lens", rows(1)).tolist() == [3]


def test_row_0_is_of_pads_and_never_stale(watched):
    watched.stash(rows(1), {"tokens": rows(7)})
    assert watched.resolve("tokens", rows(0, 1, 0)).tolist() == [0, 7, 0]
    assert watched.resolve("tokens", rows(0, 0)).tolist() == [0, 0]
    watched.stash(rows(0, 2, 0), {"tokens": rows(5, 8, 5)})
    assert watched.resolve("tokens", rows(2, 0)).tolist() == [8, 5]


def test_a_row_named_twice_in_one_batch_is_picked_up_twice(watched):
    watched.stash(rows(1, 2), {"tokens": rows(7, 8)})
    with pytest.raises(ReplayError, match=r"\[1\]"):
        watched.resolve("tokens", rows(1, 2, 1))


@pytest.mark.parametrize(
    "results",
    [
        {"hidden": torch.ones(2, 4)},
        {"hidden": torch.ones(1, 3)},
        {"hidden": torch.ones(2, 3).long()},
    ],
    ids=["another width", "too few rows", "another dtype"],
)
def test_rows_that_do_not_fit_are_refused_by_name(relay, results):
    relay.stash(rows(1), {"hidden": torch.ones(1, 3)})
    with pytest.raises(GraphkitError, match="hidden"):
        relay.stash(rows(1, 2), results)


def test_a_first_stash_that_is_refused_leaves_no_trace(relay):
    """A refused result must not set the shape of the buffer."""
    with pytest.raises(GraphkitError, match="hidden"):
        relay.stash(rows(1, 2), {"hidden": torch.ones(3, 9)})
    with pytest.raises(ReplayError, match="nothing was stashed"):
        relay.resolve("hidden", rows(1))
    relay.stash(rows(1, 2), {"hidden": torch.ones(2, 4)})
    assert relay.resolve("hidden", rows(2)).shape == (1, 4)


@pytest.mark.parametrize("row", [6, -1])
def test_rows_that_the_map_does_not_have_are_refused_in_debug(watched, row):
    """On a device they would read memory outside the buffer."""
    watched.stash(rows(1), {"tokens": rows(7)})
    with pytest.raises(GraphkitError, match=str(row)):
        watched.resolve("tokens", rows(1, row))
    with pytest.raises(GraphkitError, match=str(row)):
        watched.stash(rows(row), {"tokens": rows(8)})


@pytest.mark.parametrize("shape", [(), (2,), (1, 3)], ids=str)
def test_a_result_has_a_row_per_request(relay, shape):
    relay.stash(rows(1), {"tokens": rows(7)})
    with pytest.raises(InputError, match=r"result 'tokens' is \(.*\) torch.int64 for 1 requests"):
        relay.stash(rows(1), {"tokens": torch.zeros(shape, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("result", "text"),
    [(torch.tensor(7), r"\(\) .* for 1 req.* expected \(1,\)"), ([7], "list, exp")],
)
def test_a_first_result_without_rows_is_refused(relay, result, text):
    with pytest.raises(InputError, match=f"result 'tokens' is {text}") as caught:
        relay.stash(rows(1), {"tokens": result})
    assert caught.value.field == "tokens"


@pytest.mark.parametrize(
    "indices",
    [
        torch.tensor(1),
        [1],
        1,
        None,
        np.array([1]),
        torch.tensor([1.0]),
        torch.tensor([1j]),
        torch.tensor([1]).int(),
    ],
    ids=str,
)
def test_request_rows_are_an_int64_tensor(relay, indices):
    relay.stash(rows(1), {"tokens": rows(7)})
    for call in (
        lambda: relay.stash(indices, {"tokens": rows(7)}),
        lambda: relay.resolve("tokens", indices),
    ):
        with pytest.raises(InputError, match=r"expected an int64 tensor \[B\]") as caught:
            call()
        assert caught.value.field == "req_pool_indices"


def test_results_without_names_are_refused(relay):
    with pytest.raises(InputError, match="got a list, expected tensors by name") as caught:
        relay.stash(rows(1), [rows(7)])
    assert caught.value.field == "results"
