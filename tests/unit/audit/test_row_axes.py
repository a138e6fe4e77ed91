"""What a state tensor's rows stand for is told by its shape and by what a batch names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphkit.audit.moment import Moment
from graphkit.audit.pads.state import WatchedState
from graphkit.audit.row_axes import (
    RowAxis,
    reserved_rows,
    row_axes,
    rows_of_batch,
    without_reserved_rows,
)

HIDDEN, REQUESTS, PAGES = 6, 8, 9
SLOTS = PAGES * 16


def batch_of(requests, slots):
    """A batch of these rows of the request pool and these slots."""
    return SimpleNamespace(
        batch_size=len(requests),
        req_pool_indices=torch.tensor(requests),
        out_cache_loc=torch.tensor(slots),
    )


WHOLE = batch_of(range(1, REQUESTS + 1), range(16, SLOTS))
LAYOUTS = {
    "slots": ((SLOTS, HIDDEN), 1, (20,), (21,)),
    "keys and values of layers": ((2, 3, SLOTS, HIDDEN), 1, (1, 2, 20), (1, 2, 21)),
    "pages": ((PAGES, 16, HIDDEN), 16, (1, 4), (1, 5)),
    "pages of keys and values": ((PAGES, 2, 16, HIDDEN), 16, (1, 1, 4), (5, 1, 4)),
    "requests behind layers": ((3, REQUESTS + 1, 40, 4), 1, (2, 3), (2, 4)),
}


@pytest.mark.parametrize(
    ("shape", "page_size", "own", "strange"), LAYOUTS.values(), ids=list(LAYOUTS)
)
def test_a_write_to_rows_of_its_own_is_right_in_any_layout(shape, page_size, own, strange):
    """Of a batch of request 3 with slot 20; ``strange`` is a place of somebody else."""
    pool, batch = torch.zeros(shape), batch_of([3], [20])
    state = WatchedState({"pool": pool}, page_size, WHOLE)
    pool[own] = 1.0
    state.learn(batch)
    assert state.stray_write(batch) is None
    pool[strange] = 2.0
    write = state.stray_write(batch)
    assert (write.name, write.before, write.after) == ("pool", "0", "2")


def test_a_counter_is_put_back_and_not_judged():
    counter = torch.zeros(2)
    state = WatchedState({"counter": counter}, 1, WHOLE)
    counter.fill_(7)
    assert state.stray_write(batch_of([3], [20])) is None
    state.restore()
    assert not counter.any()


def test_state_within_other_state_is_looked_at_as_a_part_of_it():
    pool = torch.zeros(SLOTS, HIDDEN)
    views = {
        "turned": pool.t(),
        "half": pool[10:],
        "pool": pool,
        "again": pool[:],
        "none": pool[:0],
    }
    state, batch = WatchedState(views, 1, WHOLE), batch_of([3], [20])
    pool[20] = 1.0
    state.learn(batch)
    state.poison(torch.nan)
    assert pool[0].isnan().all()
    assert not pool[1:].isnan().any()
    assert state.stray_write(batch) is None
    pool[21] = 1.0
    assert state.stray_write(batch).name == "pool"
    state.restore()
    assert not pool.any()


@pytest.mark.parametrize(
    ("shape", "page_size", "place"),
    [
        ((2, 3, SLOTS, HIDDEN), 16, (1, 2, 20)),
        ((REQUESTS + 1, HIDDEN), 16, (3,)),
        ((SLOTS, HIDDEN), 16, (20,)),
        ((2, 3), 1, (0, 1)),
        ((), 1, ()),
    ],
    ids=["layers", "requests", "slots", "nothing that counts", "counter"],
)
def test_a_moment_sees_changes_of_any_state(shape, page_size, place):
    """Fewer rows than a page has slots are no page of nobody's."""
    state = torch.zeros(shape)
    moment = Moment({"state": state}, torch.device("cpu"), page_size)
    state[place] = 1.0
    assert moment.changed(batch_of([3], [20])) == ["state"]
    moment.put_back()
    assert moment.changed(batch_of([3], [20])) == []


@pytest.mark.parametrize(
    ("shape", "place"),
    [((2, 3, SLOTS, HIDDEN), (1, 2, 15)), ((REQUESTS + 1, HIDDEN), (0,))],
    ids=["slots", "requests"],
)
def test_a_moment_passes_over_what_is_nobodys(shape, place):
    state = torch.zeros(shape)
    moment = Moment({"state": state}, torch.device("cpu"), page_size=16)
    state[place] = 1.0
    assert moment.changed(batch_of([3], [20])) == []


def test_the_dummys_rows_are_left_out_of_a_sum():
    named = rows_of_batch(batch_of([3], [20]), 16)
    shapes = [(REQUESTS + 1, HIDDEN), (2, 3, SLOTS, HIDDEN), (PAGES, 16, HIDDEN), ()]
    kept = [without_reserved_rows(torch.zeros(shape), 16, named).shape for shape in shapes]
    assert kept == [(REQUESTS, HIDDEN), (2, 3, SLOTS - 16, HIDDEN), (PAGES - 1, 16, HIDDEN), ()]


def test_places_in_a_batch_are_nobodys_only_by_their_batch():
    named = rows_of_batch(batch_of([3], [20]), 1)
    assert [way.kind for way in row_axes(torch.zeros(2, 3), 1, named)] == ["batch"]
    assert without_reserved_rows(torch.zeros(2, 3), 1, named).shape == (2, 3)


def test_a_counter_that_stays_nan_did_not_change():
    counter = torch.tensor(torch.nan)
    moment = Moment({"counter": counter}, torch.device("cpu"), page_size=1)
    assert moment.changed(batch_of([3], [20])) == []


def test_a_bound_field_names_nothing():
    batch = batch_of([3], [20])
    batch.out_cache_loc = None
    assert rows_of_batch(batch, 1)["slots"] == [0]


def test_names_beyond_the_last_row_are_passed_over():
    now, before = torch.ones(4, 2), torch.zeros(4, 2)
    named = {**reserved_rows(1), "slots": [0, 2, 9]}
    assert RowAxis("slots", 0).stray_rows(now, before, named).tolist() == [False, True, False, True]


def test_the_dimension_that_counts_slots_is_longer_than_what_comes_before():
    ways = row_axes(torch.zeros(30, 50, HIDDEN), 1, rows_of_batch(batch_of([3], [20]), 1))
    assert [(way.kind, way.dim) for way in ways[:2]] == [("slots", 1), ("slots", 0)]
