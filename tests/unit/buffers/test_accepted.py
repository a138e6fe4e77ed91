"""The two counts of accepted tokens: made together, never changed in place, never at odds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from graphkit.buffers import AcceptedCounts
from graphkit.errors import InputError

KINDS = {
    "numpy": lambda *counts: np.array(counts, np.int32),
    "torch": lambda *counts: torch.tensor(counts, dtype=torch.int32),
    "int64": lambda *counts: np.array(counts, np.int64),
}


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def pair(counts):
    return counts.num_accepted_drafts.tolist(), counts.num_accepted_tokens.tolist()


def test_tokens_are_drafts_and_the_bonus(make):
    assert pair(AcceptedCounts.from_drafts(make(0, 3, 1))) == ([0, 3, 1], [1, 4, 2])
    assert pair(AcceptedCounts.from_tokens(make(1, 4, 2))) == ([0, 3, 1], [1, 4, 2])
    assert pair(AcceptedCounts(make(0, 3), make(1, 4))) == ([0, 3], [1, 4])
    assert pair(AcceptedCounts.from_drafts(make())) == ([], [])


def test_what_came_is_kept_and_never_changed(make):
    for way in (AcceptedCounts.from_drafts, AcceptedCounts.from_tokens):
        given = make(1, 2)
        counts = way(given)
        assert given.tolist() == [1, 2]
        assert any(rows is given for rows in counts.fields().values())
        both = list(counts.fields().values())
        assert both[0].dtype == both[1].dtype == given.dtype
        both[1][0] = 9
        assert both[0].tolist() in ([1, 2], [0, 1]), "the two share memory"


def test_fields_are_those_of_the_inputs(make):
    counts = AcceptedCounts.from_drafts(make(2))
    assert list(counts.fields()) == ["num_accepted_drafts", "num_accepted_tokens"]
    assert counts.fields()["num_accepted_tokens"] is counts.num_accepted_tokens


def test_the_pair_is_frozen(make):
    counts = AcceptedCounts.from_drafts(make(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        counts.num_accepted_drafts = make(3)


@pytest.mark.parametrize(
    ("drafts", "tokens"),
    [([1, 2], [1, 2]), ([1, 2], [2, 4]), ([2], [1]), ([-1], [0]), ([0, -3], [1, -2])],
    ids=str,
)
def test_a_pair_at_odds_is_refused(make, drafts, tokens):
    with pytest.raises(InputError, match="drafts \\+ 1") as caught:
        AcceptedCounts(make(*drafts), make(*tokens))
    assert caught.value.field == "num_accepted_tokens"
    assert str(drafts) in str(caught.value)
    assert str(tokens) in str(caught.value)


def test_no_token_at_all_is_refused(make):
    """The bonus token is always there."""
    with pytest.raises(InputError, match="num_accepted_drafts \\+ 1"):
        AcceptedCounts.from_tokens(make(1, 0))
    with pytest.raises(InputError, match="num_accepted_drafts \\+ 1"):
        AcceptedCounts.from_drafts(make(-1))


@pytest.mark.parametrize("shapes", [((2,), (3,)), ((2,), (2, 1)), ((1,), (2,))])
def test_two_shapes_are_refused(shapes):
    drafts, tokens = (np.zeros(shape, np.int32) for shape in shapes)
    with pytest.raises(InputError):
        AcceptedCounts(drafts, tokens + 1)


def test_values_on_a_device_are_taken_on_trust():
    """Reading them would wait for the device; a meta tensor has none to read."""
    on_device, on_host = torch.empty(2, dtype=torch.int32, device="meta"), np.array([5, 5])
    for drafts, tokens in [(on_device, on_device), (on_device, on_host), (on_host, on_device)]:
        assert AcceptedCounts(drafts, tokens).fields()["num_accepted_tokens"] is tokens
    assert AcceptedCounts.from_drafts(on_device).num_accepted_tokens.device.type == "meta"


def test_shapes_on_a_device_are_seen_without_waiting():
    drafts, tokens = (torch.empty(n, dtype=torch.int32, device="meta") for n in (2, 3))
    with pytest.raises(InputError):
        AcceptedCounts(drafts, tokens)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_unsigned_counts_do_not_wrap(dtype):
    with pytest.raises(InputError):
        AcceptedCounts.from_tokens(np.array([0], dtype))
    with pytest.raises(InputError):
        AcceptedCounts.from_drafts(np.array([np.iinfo(dtype).max], dtype))


@pytest.mark.parametrize(
    "odd",
    [[1, 2], None, torch.tensor([1, 2]).to_sparse()],
    ids=["list", "nothing", "sparse"],
)
@pytest.mark.parametrize(
    "way",
    [
        AcceptedCounts.from_drafts,
        AcceptedCounts.from_tokens,
        lambda odd: AcceptedCounts(np.array([5, 6]), odd),
    ],
    ids=["from_drafts", "from_tokens", "pair"],
)
def test_what_is_no_array_is_refused_in_our_words(odd, way):
    with pytest.raises(InputError):
        way(odd)
