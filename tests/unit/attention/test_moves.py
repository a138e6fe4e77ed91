"""Moving tokens between slots, in every pool: overlaps, pads, refusals, and the recorded op."""

from __future__ import annotations

import pytest
import torch

from graphkit.engine.kv import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from graphkit.errors import AttentionError
from graphkit.graphs import RecorderBackend
from graphkit.ops.kv_cache import buffer_table
from graphkit.ops.registration import OPS

SLOTS = 12


def _mha(layers=3):
    return MHATokenToKVPool(SLOTS - 2, 2, torch.bfloat16, 2, 8, layers, "cpu")


def _mla(layers=3):
    return MLATokenToKVPool(SLOTS - 2, 2, torch.float32, 6, 3, layers, "cpu")


def _dsa(layers=3):
    return DSATokenToKVPool(SLOTS - 2, 2, torch.float16, 6, 3, layers, "cpu", 5)


@pytest.fixture(params=[_mha, _mla, _dsa], ids=["MHA", "MLA", "DSA"])
def make_pool(request):
    return request.param


def _number(pool):
    """Slot s of every buffer holds s plus a number of that buffer."""
    for i, tensor in enumerate(pool.tensors().values()):
        tensor.copy_(torch.arange(SLOTS).view(-1, *[1] * (tensor.dim() - 1)) + 20 * i)


def _slots(pool):
    """What each slot holds, once per buffer, rows of mixed numbers refused."""
    held = []
    for i, tensor in enumerate(pool.tensors().values()):
        rows = tensor.float().flatten(1) - 20 * i
        assert rows.eq(rows[:, :1]).all()
        held.append(rows[:, 0].tolist())
    return held


def _ints(*slots):
    return torch.tensor(slots, dtype=torch.int64)


@pytest.mark.parametrize(
    ("target", "source"),
    [
        ([2, 3, 4], [1, 2, 3]),
        ([1, 2, 3], [2, 3, 4]),
        ([5, 1], [1, 5]),
        ([7, 6, 10], [3, 3, 3]),
        ([10, 0, 0, 4, 0], [4, 0, 0, 10, 0]),
        ([0, 0], [0, 0]),
        ([9], [9]),
    ],
    ids=str,
)
def test_sources_are_read_before_targets_are_written(make_pool, target, source):
    pool = make_pool()
    _number(pool)
    pool.move_kv_cache(_ints(*target), _ints(*source))
    expected = list(range(SLOTS))
    for slot, held in zip(target, source, strict=True):
        expected[slot] = held
    assert _slots(pool) == [expected] * len(pool.tensors())


def test_locations_may_have_any_one_shape(make_pool):
    pool = make_pool()
    _number(pool)
    pool.move_kv_cache(_ints(1, 2, 3, 4).view(2, 2).T, _ints(2, 3, 4, 5).view(2, 2).T)
    assert _slots(pool)[0] == [0, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("layers", [1, 7])
def test_layers_move_by_one_op(make_pool, called_ops, layers):
    pool, target, source = make_pool(layers), _ints(1, 2), _ints(2, 1)
    with called_ops:
        pool.move_kv_cache(target, source)
    assert called_ops.names == ["graphkit.move_kv.default"]


def test_nothing_to_move(make_pool, called_ops):
    pool, empty, none, some = make_pool(), make_pool(0), _ints(), _ints(1)
    with called_ops:
        pool.move_kv_cache(none, none)
        empty.move_kv_cache(some, some)
    assert called_ops.names == []
    assert empty.tensors() == {}
    with pytest.raises(AttentionError, match="no layer 0: it has 0"):
        empty.get_key_buffer(0)


def test_a_recorded_move_follows_its_locations(make_pool):
    pool, target, source = make_pool(), _ints(1, 0), _ints(2, 0)
    _number(pool)
    graph = RecorderBackend().capture(lambda: pool.move_kv_cache(target, source))
    for slots in ((_ints(4, 5), _ints(5, 6)), (_ints(3, 4), _ints(4, 3))):
        _number(pool)
        target.copy_(slots[0])
        source.copy_(slots[1])
        graph.replay()
        expected = list(range(SLOTS))
        for slot, held in zip(*(loc.tolist() for loc in slots), strict=True):
            expected[slot] = held
        assert _slots(pool) == [expected] * len(pool.tensors())


def _args(**changes):
    buffers = [torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.uint8)]
    args = {"buffers": buffers, "table": buffer_table(buffers)}
    return args | {"tgt_loc": _ints(1, 2), "src_loc": _ints(2, 3)} | changes


def test_the_table_names_each_buffer():
    buffers = _args()["buffers"]
    addresses = [buffer.data_ptr() for buffer in buffers]
    assert buffer_table(buffers).tolist() == [[addresses[0], 12, 0], [addresses[1], 2, 12]]


@pytest.mark.slow
def test_tracers_see_the_mutation():
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.graphkit.move_kv.default, (), _args(), test_utils=checks)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tgt_loc": _ints(1, 4)}, "tgt_loc has slot 4, expected slots 0 to 3"),
        ({"src_loc": _ints(-1, 2)}, "src_loc has slot -1"),
        ({"src_loc": _ints(1)}, r"tgt_loc is \[2\] .* src_loc is \[1\]"),
        ({"src_loc": _ints(1, 2).int()}, r"src_loc is \[2\] int32 on cpu, expected .* int64"),
        ({"tgt_loc": _ints(1, 2)[:, None]}, "expected one shape"),
        ({"table": torch.zeros(1, 3, dtype=torch.int64)}, r"table is \[1, 3\]"),
        ({"buffers": [torch.zeros(4, 3), torch.zeros(5, 3)]}, r"a buffer is \[5, 3\]"),
        ({"buffers": [torch.zeros(4, 3), torch.zeros(3, 4).T]}, "expected contiguous buffers"),
        (
            {"table": torch.zeros(2, 3, dtype=torch.int64, device="meta")},
            "on cpu, expected .* on meta",
        ),
    ],
)
def test_the_op_refuses(changes, text):
    args = _args(**changes)
    before = [buffer.clone() for buffer in args["buffers"]]
    with pytest.raises(AttentionError, match=text):
        OPS["move_kv"].run_reference(*args.values())
    assert all(map(torch.equal, args["buffers"], before))


def test_a_pool_refuses_what_does_not_fit(make_pool):
    pool = make_pool()
    for target, source in ((_ints(SLOTS), _ints(1)), (_ints(1), _ints(-1)), (_ints(1), _ints())):
        with pytest.raises(AttentionError, match="move_kv: "):
            pool.move_kv_cache(target, source)
