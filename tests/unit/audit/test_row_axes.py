"""Tests of the readings of a state tensor's rows, and of writes judged by them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphkit.audit.pads.state_writes import WatchedState
from graphkit.audit.row_axes import (
    RowAxis,
    changed_state,
    reserved_rows,
    row_axes,
    rows_of_batch,
    without_reserved_rows,
)
from graphkit.engine.kv import RecurrentStatePool
from graphkit.graphs import StateSnapshot

CPU = torch.device("cpu")
HIDDEN, REQUESTS, PAGES = 6, 8, 9
SLOTS = PAGES * 16


def batch_of(requests, slots):
    """Return a batch of these rows of the request pool and these slots."""
    return SimpleNamespace(
        batch_size=len(requests),
        req_pool_indices=torch.tensor(requests),
        out_cache_loc=torch.tensor(slots),
    )


FULL_BATCH = batch_of(range(1, REQUESTS + 1), range(16, SLOTS))
LAYOUTS = {
    "slots": ((SLOTS, HIDDEN), 1, (20,), (21,)),
    "keys and values of layers": ((2, 3, SLOTS, HIDDEN), 1, (1, 2, 20), (1, 2, 21)),
    "pages": ((PAGES, 16, HIDDEN), 16, (1, 4), (1, 5)),
    "pages of keys and values": ((PAGES, 2, 16, HIDDEN), 16, (1, 1, 4), (5, 1, 4)),
    "requests behind layers": ((3, REQUESTS + 1, 40, 4), 1, (2, 3), (2, 4)),
    "nodes of requests": ((REQUESTS + 1, 5, 40, 4), 1, (3, 2), (4, 2)),
}


@pytest.mark.parametrize(
    ("shape", "page_size", "own", "other"), LAYOUTS.values(), ids=list(LAYOUTS)
)
def test_writes_to_own_rows_are_correct_in_any_layout(shape, page_size, own, other):
    """The batch has request 3 and slot 20; ``other`` is an index of another request."""
    pool, batch = torch.zeros(shape), batch_of([3], [20])
    state = WatchedState(StateSnapshot({"pool": pool}, CPU), page_size, FULL_BATCH)
    pool[own] = 1.0
    state.classify(batch)
    assert state.stray_write(batch) is None
    pool[other] = 2.0
    write = state.stray_write(batch)
    assert (write.name, write.before, write.after) == ("pool", "0", "2")


def test_recurrent_states_belong_to_the_request_of_their_row():
    pool = RecurrentStatePool(REQUESTS, 4, 1, "cpu", shapes={"sum": (HIDDEN,)})
    state = WatchedState(StateSnapshot(pool.tensors(), CPU), 1, FULL_BATCH)
    inputs = SimpleNamespace(
        lengths=None, req_pool_indices=torch.tensor([0, 3, 5]), batch_size=3, num_tokens=3 * 4
    )
    rows = torch.ones(inputs.num_tokens, HIDDEN)
    pool.scan(0, pool.slots(inputs), lambda _states, row: ({"sum": row}, row), rows)
    batch = batch_of([3, 5], [20])
    assert state.stray_write(batch) is None
    pool.commit(torch.tensor([3, 5]), torch.tensor([3, 0]))
    assert state.stray_write(batch) is None
    pool.state(0, "sum")[4 * 5 + 2] = 2.0
    write = state.stray_write(batch)
    assert (write.name, write.row, write.after) == ("sum.0", 4, "2")


def test_a_counter_is_restored_and_not_judged():
    counter = torch.zeros(2)
    start = StateSnapshot({"counter": counter}, CPU)
    state = WatchedState(start, 1, FULL_BATCH)
    counter.fill_(7)
    assert state.stray_write(batch_of([3], [20])) is None
    start.restore()
    assert not counter.any()


def test_state_within_other_state_is_judged_as_a_part_of_it():
    pool = torch.zeros(SLOTS, HIDDEN)
    views = {
        "transposed": pool.t(),
        "half": pool[10:],
        "pool": pool,
        "again": pool[:],
        "none": pool[:0],
    }
    start, batch = StateSnapshot(views, CPU), batch_of([3], [20])
    state = WatchedState(start, 1, FULL_BATCH)
    pool[20] = 1.0
    state.classify(batch)
    state.poison(torch.nan)
    assert pool[0].isnan().all()
    assert not pool[1:].isnan().any()
    assert state.stray_write(batch) is None
    pool[21] = 1.0
    assert state.stray_write(batch).name == "pool"
    start.restore()
    assert not pool.any()


def test_state_behind_other_state_in_one_allocation_is_judged():
    pools, batch = torch.zeros(2, SLOTS, HIDDEN), batch_of([3], [20])
    state = {"keys": pools[0], "values": pools[1]}
    watched = WatchedState(StateSnapshot(state, CPU), 1, FULL_BATCH)
    pools[:, 20] = 1.0
    watched.classify(batch)
    assert watched.stray_write(batch) is None
    pools[1, 21] = 1.0
    assert watched.stray_write(batch).name == "values"


@pytest.mark.parametrize(
    ("shape", "page_size", "index"),
    [
        ((2, 3, SLOTS, HIDDEN), 16, (1, 2, 20)),
        ((REQUESTS + 1, HIDDEN), 16, (3,)),
        ((SLOTS, HIDDEN), 16, (20,)),
        ((2, 3), 1, (0, 1)),
        ((), 1, ()),
    ],
    ids=["layers", "requests", "slots", "no rows", "counter"],
)
def test_changes_of_any_state_are_found(shape, page_size, index):
    """A dimension shorter than a page has no reserved page."""
    state = torch.zeros(shape)
    start = StateSnapshot({"state": state}, CPU)
    state[index] = 1.0
    assert changed_state(start, batch_of([3], [20]), page_size) == ["state"]
    start.restore()
    assert changed_state(start, batch_of([3], [20]), page_size) == []


@pytest.mark.parametrize(
    ("shape", "index"),
    [((2, 3, SLOTS, HIDDEN), (1, 2, 15)), ((REQUESTS + 1, HIDDEN), (0,))],
    ids=["slots", "requests"],
)
def test_changes_of_reserved_rows_are_ignored(shape, index):
    state = torch.zeros(shape)
    start = StateSnapshot({"state": state}, CPU)
    state[index] = 1.0
    assert changed_state(start, batch_of([3], [20]), 16) == []


def test_reserved_rows_are_left_out():
    rows = rows_of_batch(batch_of([3], [20]), 16)
    shapes = [(REQUESTS + 1, HIDDEN), (2, 3, SLOTS, HIDDEN), (PAGES, 16, HIDDEN), ()]
    kept = [without_reserved_rows(torch.zeros(shape), 16, rows).shape for shape in shapes]
    assert kept == [(REQUESTS, HIDDEN), (2, 3, SLOTS - 16, HIDDEN), (PAGES - 1, 16, HIDDEN), ()]


def test_rows_by_batch_index_are_not_reserved():
    rows = rows_of_batch(batch_of([3], [20]), 1)
    assert [axis.kind for axis in row_axes(torch.zeros(2, 3), 1, rows)] == ["batch"]
    assert without_reserved_rows(torch.zeros(2, 3), 1, rows).shape == (2, 3)


def test_a_counter_that_stays_nan_did_not_change():
    counter = torch.tensor(torch.nan)
    start = StateSnapshot({"counter": counter}, CPU)
    assert changed_state(start, batch_of([3], [20]), 1) == []


def test_a_bound_field_has_no_rows():
    batch = batch_of([3], [20])
    batch.out_cache_loc = None
    assert rows_of_batch(batch, 1)["slots"] == [0]


def test_indices_beyond_the_last_row_are_ignored():
    now, before = torch.ones(4, 2), torch.zeros(4, 2)
    allowed = {**reserved_rows(1), "slots": [0, 2, 9]}
    assert RowAxis("slots", 0).stray_rows(now, before, allowed).tolist() == [
        False,
        True,
        False,
        True,
    ]


def test_of_two_dimensions_the_longer_is_read_as_slots_first():
    axes = row_axes(torch.zeros(30, 50, HIDDEN), 1, rows_of_batch(batch_of([3], [20]), 1))
    assert [(axis.kind, axis.dim) for axis in axes[:2]] == [("slots", 1), ("slots", 0)]
