"""Moving tokens between slots, in every pool and on every device: overlaps, pads, refusals."""

from __future__ import annotations

import pytest
import torch

from graphkit.engine.kv import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from graphkit.errors import AttentionError
from graphkit.ops.kv_cache import buffer_table, move_kv
from graphkit.ops.registration import OPS
from launched_kernels import launches
from op_devices import CPU, CUDA, INTERPRETER, by, captured

SLOTS = 80
LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
KINDS = {
    "MHA": (MHATokenToKVPool, {"dtype": torch.bfloat16, "head_num": 8, "head_dim": 128}),
    "odd MHA": (MHATokenToKVPool, {"dtype": torch.float16, "head_num": 3, "head_dim": 5}),
    "large MHA": (MHATokenToKVPool, {"dtype": torch.float32, "head_num": 3, "head_dim": 500}),
    "MLA": (MLATokenToKVPool, {"dtype": torch.bfloat16} | LATENTS),
    "wide MLA": (MLATokenToKVPool, {"dtype": torch.float32} | LATENTS),
    "DSA": (DSATokenToKVPool, {"dtype": torch.bfloat16, "index_head_dim": 128} | LATENTS),
    "odd DSA": (DSATokenToKVPool, {"dtype": torch.float16, "index_head_dim": 7} | LATENTS),
}


@pytest.fixture(params=KINDS)
def make_pool(request):
    """``make_pool(run, layers)``: a pool of 80 slots on the device of a run."""

    def make(run, layers=2):
        kind, sizes = KINDS[request.param]
        return kind(size=SLOTS - 4, page_size=4, layer_num=layers, device=run.torch_device, **sizes)

    return make


def move(run, pool, target, source):
    """Move by the pool, or, in the interpreter, by the launcher of its op."""
    buffers = list(pool.tensors().values())
    if run is INTERPRETER:
        run(move_kv, buffers, buffer_table(buffers), target, source)
    else:
        pool.move_kv_cache(target.to(pool.device), source.to(pool.device))


def _number(pool):
    """Slot s of every buffer holds s plus a number of that buffer."""
    for i, tensor in enumerate(pool.tensors().values()):
        slots = torch.arange(SLOTS, device=tensor.device)
        tensor.copy_(slots.view(-1, *[1] * (tensor.dim() - 1)) + 20 * i)


def _slots(pool):
    """What each slot holds, once per buffer, rows of mixed numbers refused."""
    held = []
    for i, tensor in enumerate(pool.tensors().values()):
        rows = tensor.float().flatten(1) - 20 * i
        assert rows.eq(rows[:, :1]).all()
        held.append(rows[:, 0].tolist())
    return held


def _moved(target, source):
    expected = list(range(SLOTS))
    for slot, held in zip(target, source, strict=True):
        expected[slot] = held
    return expected


def _ints(*slots):
    return torch.tensor(slots, dtype=torch.int64)


@by(CPU, INTERPRETER, CUDA)
@pytest.mark.parametrize(
    ("target", "source"),
    [
        ([2, 3, 4], [1, 2, 3]),
        ([1, 2, 3], [2, 3, 4]),
        ([5, 79], [79, 5]),
        ([7, 6, 10], [3, 3, 3]),
        ([10, 0, 0, 4, 0], [4, 0, 0, 10, 0]),
        ([0, 0], [0, 0]),
        ([9], [9]),
        ([], []),
        (range(1, 80), range(79, 0, -1)),
    ],
    ids=str,
)
def test_sources_are_read_before_targets_are_written(run, make_pool, target, source):
    pool = make_pool(run)
    _number(pool)
    move(run, pool, _ints(*target), _ints(*source))
    assert _slots(pool) == [_moved(target, source)] * len(pool.tensors())


@by(CPU, INTERPRETER, CUDA)
def test_locations_may_have_any_one_shape(run, make_pool):
    pool = make_pool(run)
    _number(pool)
    move(run, pool, _ints(1, 2, 3, 4).view(2, 2).T, _ints(2, 3, 4, 5).view(2, 2).T)
    assert _slots(pool)[0] == _moved([1, 2, 3, 4], [2, 3, 4, 5])


@by(INTERPRETER, CUDA)
def test_slots_outside_move_nothing(run, make_pool):
    pool = make_pool(run)
    _number(pool)
    move(run, pool, _ints(SLOTS, -1, 1, 2, 10**12), _ints(1, 2, -1, SLOTS, 0))
    assert _slots(pool) == [_moved([], [])] * len(pool.tensors())
    move(run, pool, _ints(SLOTS, -1, 1, 2, 10**12), _ints(1, 2, 3, 3, 0))
    assert _slots(pool) == [_moved([1, 2], [3, 3])] * len(pool.tensors())


@pytest.mark.parametrize("layers", [1, 7])
def test_layers_move_by_one_op(make_pool, called_ops, layers):
    pool, target, source = make_pool(CPU, layers), _ints(1, 2), _ints(2, 1)
    with called_ops:
        pool.move_kv_cache(target, source)
    assert called_ops.names == ["graphkit.move_kv.default"]


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [1, 12])
def test_layers_cost_no_launches(make_pool, layers):
    pool, empty = make_pool(CUDA, layers), make_pool(CUDA, 0)
    target, source = _ints(1, 2, 3).cuda(), _ints(2, 3, 4).cuda()
    assert launches(lambda: pool.move_kv_cache(target, source)) == ["move_kv_kernel"] * 2
    assert launches(lambda: pool.move_kv_cache(target[:0], source[:0])) == []
    assert launches(lambda: empty.move_kv_cache(target, source)) == []


def test_nothing_to_move(make_pool, called_ops):
    pool, empty, none, some = make_pool(CPU), make_pool(CPU, 0), _ints(), _ints(1)
    with called_ops:
        pool.move_kv_cache(none, none)
        empty.move_kv_cache(some, some)
    assert called_ops.names == []
    assert empty.tensors() == {}
    with pytest.raises(AttentionError, match="no layer 0: it has 0"):
        empty.get_key_buffer(0)


@by(CPU, CUDA)
def test_a_captured_move_follows_its_locations(run, make_pool):
    pool = make_pool(run)
    target, source = (torch.zeros(6, dtype=torch.int64, device=pool.device) for _ in "ts")
    graph = captured(run, lambda: pool.move_kv_cache(target, source))
    for slots in (([1, 2, 3, 0, 0, 0], [2, 3, 4, 0, 0, 0]), ([9, 8, 7, 6, 5, 4], range(1, 7))):
        _number(pool)
        target.copy_(_ints(*slots[0]))
        source.copy_(_ints(*slots[1]))
        graph.replay()
        assert _slots(pool) == [_moved(*slots)] * len(pool.tensors())


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
    pool = make_pool(CPU)
    for target, source in ((_ints(SLOTS), _ints(1)), (_ints(1), _ints(-1)), (_ints(1), _ints())):
        with pytest.raises(AttentionError, match="move_kv: "):
            pool.move_kv_cache(target, source)
