"""Slots, scan, commit and reset of ``RecurrentStatePool``."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from graphkit.engine.kv import RecurrentStatePool
from graphkit.errors import AttentionError, ConfigError

WIDTH = 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def pool(request):
    shapes = {"sum": (2,), "last": (3, 1)}
    return RecurrentStatePool(5, WIDTH, 2, request.param, shapes=shapes)


def inputs_of(pool, rows, nodes, mask=None):
    return SimpleNamespace(
        req_pool_indices=torch.tensor(rows, device=pool.device),
        batch_size=len(rows),
        num_tokens=len(rows) * nodes,
        lengths=None,
        custom_mask=None if mask is None else mask.to(pool.device),
    )


def add(states, row):
    total = states["sum"] + row
    return {"sum": total, "last": row[:, :1, None].expand(-1, 3, 1)}, total


def scanned(pool, rows, values, mask=None):
    """Scan layer 1 over ``values``, [B, N], and return the outputs, [B, N]."""
    values = torch.tensor(values, dtype=torch.float32, device=pool.device)
    slots = pool.slots(inputs_of(pool, rows, values.shape[1], mask))
    out = pool.scan(1, slots, add, values.flatten()[:, None].expand(-1, 2))
    return out[:, 0].view_as(values).tolist()


def committed(pool, row, layer=1):
    return pool.state(layer, "sum")[row * (WIDTH + 1)].tolist()


def commit(pool, rows, nodes):
    pool.commit(torch.tensor(rows, device=pool.device), torch.tensor(nodes, device=pool.device))


def test_a_chain_continues_from_the_committed_state(pool):
    assert scanned(pool, [2, 3], [[1, 2, 3, 4], [5, 5, 5, 5]]) == [[1, 3, 6, 10], [5, 10, 15, 20]]
    assert committed(pool, 2) == [0, 0], "a step does not change the committed state"
    commit(pool, [2, 3], [1, 3])
    assert (committed(pool, 2), committed(pool, 3)) == ([3, 3], [20, 20])
    assert pool.state(1, "last")[2 * (WIDTH + 1)].flatten().tolist() == [2, 2, 2]
    assert scanned(pool, [3, 2], [[1], [1]]) == [[21], [4]]


def test_a_node_of_a_tree_continues_from_its_parent(pool):
    """Nodes 1 and 2 are children of the root, node 3 a child of node 1."""
    mask = torch.eye(WIDTH, dtype=torch.bool)
    mask[:, 0] = mask[3, 1] = True
    assert scanned(pool, [4], [[1, 10, 100, 1000]], mask[None]) == [[1, 11, 101, 1011]]
    commit(pool, [4], [3])
    assert committed(pool, 4) == [1011, 1011]


def test_a_long_chain_keeps_the_states_after_its_last_nodes(pool):
    assert scanned(pool, [1], [[1, 2, 3, 4, 5, 6]])[0][-1] == 21
    commit(pool, [1], [WIDTH - 2])
    assert committed(pool, 1) == [15, 15], "the state before the last token"
    commit(pool, [1], [WIDTH - 1])
    assert committed(pool, 1) == [21, 21]


def test_pad_rows_keep_the_initial_state(pool):
    scanned(pool, [1, 0, 0], [[1], [2], [3]])
    commit(pool, [1, 0, 0], [0, 0, 0])
    assert (committed(pool, 1), committed(pool, 0)) == ([1, 1], [0, 0])


def test_reset_affects_only_its_rows(pool):
    scanned(pool, [1, 2], [[1], [2]])
    commit(pool, [1, 2], [0, 0])
    pool.reset(torch.tensor([1], device=pool.device))
    assert (committed(pool, 1), committed(pool, 2)) == ([0, 0], [2, 2])


def test_an_empty_batch_changes_nothing(pool):
    before = {name: buffer.clone() for name, buffer in pool.tensors().items()}
    none = torch.zeros(0, dtype=torch.int64, device=pool.device)
    pool.commit(none, none)
    pool.reset(none)
    assert all(torch.equal(buffer, before[name]) for name, buffer in pool.tensors().items())


def test_tensors_are_the_mutable_state_of_every_layer(pool):
    assert sorted(pool.tensors()) == ["last.0", "last.1", "sum.0", "sum.1"]
    states = pool.tensors()["sum.1"]
    assert states.data_ptr() == pool.state(1, "sum").data_ptr()
    assert states.shape == (pool.size + 1, pool.width + 1, *pool.state(1, "sum").shape[1:])


@pytest.mark.parametrize("kind", ["conv", 3, ["sum"]])
def test_a_missing_state_is_refused(pool, kind):
    with pytest.raises(AttentionError, match=rf"no state {re.escape(repr(kind))} in layer 0"):
        pool.state(0, kind)


@pytest.mark.parametrize("layer", [2, -1, "0", None, 1.0, True])
def test_a_missing_layer_is_refused(pool, layer):
    slots = torch.zeros(1, dtype=torch.int64, device=pool.device)
    for call in (
        lambda: pool.state(layer, "sum"),
        lambda: pool.load(layer, slots),
        lambda: pool.store(layer, slots, pool.load(0, slots)),
    ):
        with pytest.raises(AttentionError, match=f"has no layer {layer!r}: it has 2"):
            call()


@pytest.mark.parametrize("states", [{}, {"sum": None}])
def test_states_of_every_kind_are_stored(pool, states):
    slots = torch.zeros(1, dtype=torch.int64, device=pool.device)
    with pytest.raises(AttentionError, match=r"stores states of \['last', 'sum'\], got"):
        pool.store(0, slots, states)


def test_states_are_named(pool):
    slots = torch.zeros(1, dtype=torch.int64, device=pool.device)
    with pytest.raises(ConfigError, match="must be tensors by kind of state, got None") as caught:
        pool.store(0, slots, None)
    assert caught.value.field == "states"


def test_rows_of_different_numbers_are_refused(pool):
    inputs = inputs_of(pool, [1, 2], 2)
    inputs.num_tokens = 3
    with pytest.raises(AttentionError, match="batch of 2 requests has 3 rows: expected the same"):
        pool.slots(inputs)


def test_a_tree_wider_than_the_pool_is_refused(pool):
    mask = torch.ones(1, 5, 5, dtype=torch.bool)
    with pytest.raises(AttentionError, match="at most 4 nodes, the pool's width"):
        pool.slots(inputs_of(pool, [1], 5, mask))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"size": 0}, "size"),
        ({"width": "4"}, "width"),
        ({"layer_num": 0}, "layer_num"),
        ({"shapes": {}}, "shapes"),
        ({"shapes": (4,)}, "shapes"),
        ({"shapes": {"sum": 4}}, "shapes['sum']"),
        ({"shapes": {"sum": (0,)}}, "shapes['sum']"),
        ({"dtypes": {"ssm": torch.float32}}, "dtypes"),
        ({"dtypes": "float32"}, "dtypes"),
        ({"dtypes": {"sum": "float32"}}, "dtypes['sum']"),
        ({"dtypes": {"sum": None}}, "dtypes['sum']"),
        ({"shapes": {"sum": (2,), 3: (2,)}, "dtypes": {}}, "shapes"),
    ],
)
def test_invalid_settings_are_refused(change, field):
    settings = {"size": 2, "width": 4, "layer_num": 1, "shapes": {"sum": (2,)}} | change
    with pytest.raises(ConfigError) as caught:
        RecurrentStatePool(device="cpu", **settings)
    assert caught.value.field == field
