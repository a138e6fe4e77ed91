"""The slot and window ops against plain loops and their references, on every device."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import slot_cases
from graphkit.errors import InputError
from graphkit.graphs.recorder import RecorderBackend
from graphkit.ops.accepted_path import compact_accepted_to_front
from graphkit.ops.kernels import packed_accepted
from graphkit.ops.packed_accepted import (
    create_extend_after_decode_spec_info,
    create_num_accepted_drafts_filter,
    filter_finished_cache_loc,
    get_src_tgt_cache_loc,
    get_target_cache_loc,
)
from graphkit.ops.registration import OPS
from graphkit.ops.step_rows import rotate_input_ids
from op_devices import CPU, CUDA, INTERPRETER, by, by_each
from slot_cases import CASES, Draw

loops_to_a_tensor = pytest.mark.skipif(
    triton.__version__ < "3.7", reason="triton 3.6 with numpy 2.4 cannot interpret such a loop"
)


def listed(args):
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in args]


def copies(args):
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in args]


def tensors(returned, args=()):
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [each for each in (*returned, *args) if isinstance(each, torch.Tensor)]


def assert_as_the_reference(run, op, args):
    """Compare results and written arguments with those on the CPU."""
    ours, theirs = copies(args), copies(args)
    got, want = tensors(run(op, *ours), ours), tensors(op(*theirs), theirs)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("requests", [0, 1, 2, 5, 33])
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_op_matches_its_model(name, requests, width):
    op, make = CASES[name]
    model = getattr(slot_cases, f"{op.__name__}_by_loops")
    for seed, counts in enumerate([torch.int32, torch.int64]):
        args = make(Draw(requests, seed=seed, counts=counts, width=width))
        expected = listed(args)
        made = model(*expected) or ()
        returned = op(*args)
        returned = returned if isinstance(returned, tuple) else (returned,) * len(made)
        assert listed(returned) == list(made)
        assert listed(args) == expected


@loops_to_a_tensor
@by_each("requests", interpreter=[0, 1, 2, 7], cuda=[0, 1, 3, 64, 257, 1025])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("invalid", [False, True], ids=["valid", "out of range"])
@pytest.mark.parametrize("counts", [torch.int32, torch.int64])
def test_kernels_match_the_reference(run, name, requests, invalid, counts):
    op, make = CASES[name]
    widths = (1, 4, 9) if run is CUDA else (5,) if counts == torch.int32 else (1,)
    for width in widths:
        args = make(Draw(requests, seed=width, invalid=invalid, counts=counts, width=width))
        assert_as_the_reference(run, op, args)


@loops_to_a_tensor
@by(INTERPRETER)
@pytest.mark.parametrize(
    "name",
    ["get_target_cache_loc", "filter_finished_cache_loc", "create_extend_after_decode_spec_info",
     "create_num_accepted_drafts_filter"],
)  # fmt: skip
def test_more_requests_than_are_summed_at_once(run, name, monkeypatch):
    monkeypatch.setattr(packed_accepted, "COUNTS", tl.constexpr(4))
    op, make = CASES[name]
    assert_as_the_reference(run, op, make(Draw(11, width=2)))


@loops_to_a_tensor
@by(INTERPRETER)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.int32, torch.complex64])
@pytest.mark.parametrize("row", [(), (3,), (2, 700)])
def test_rows_of_any_dtype_are_compacted(run, dtype, row):
    index = torch.tensor([[0, 2, 3], [5, -1, -1]])
    x = torch.randint(0, 2, (10, *row)).to(dtype)
    got = run(compact_accepted_to_front, x, index, 5)
    assert got.dtype == dtype
    assert torch.equal(got, x[[0, 2, 3, 3, 4, 5, 0, 0, 8, 9]])
    strided = x.repeat_interleave(2, 0)[::2]
    assert torch.equal(run(compact_accepted_to_front, strided, index, 5), got)


@by(CUDA)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("row", [(), (4096,), (3, 5)])
def test_rows_are_compacted_bit_for_bit(run, dtype, row):
    requests, width = 64, 8
    index = torch.rand(requests, width).argsort(1).sort(1)[0][:, :5]
    index = (index + torch.arange(requests)[:, None] * width).int()
    index[::3, 2:] = -1
    x = torch.randn(requests * width, *row).to(dtype)
    if dtype.is_floating_point:
        x[5::7] = torch.nan
    got = run(compact_accepted_to_front, x, index, width)
    expected = compact_accepted_to_front(x, index, width)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@loops_to_a_tensor
@by(INTERPRETER)
@pytest.mark.parametrize("length", [1023, 1024, 1025, 4096])
def test_long_windows_rotate(run, length):
    ids = torch.arange(length + 3)
    window = torch.tensor([1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    args = (*window, torch.tensor([-5]), torch.tensor([length]))
    ours, theirs = ids.clone(), ids.clone()
    run(rotate_input_ids, ours, *args)
    rotate_input_ids(theirs, *args)
    assert torch.equal(ours, theirs)
    assert ours.tolist() == [0, *range(2, length + 1), -5, length + 1, length + 2]


@loops_to_a_tensor
@by(INTERPRETER)
def test_a_window_past_the_end_writes_no_other_memory(run):
    memory = torch.arange(8)
    window = torch.tensor([2]), torch.tensor([5])
    run(rotate_input_ids, memory[:5], *window, torch.tensor([-5]), torch.tensor([5]))
    assert memory.tolist() == [0, 1, 3, 4, 4, 5, 6, 7]


@pytest.mark.gpu
@pytest.mark.parametrize("length", [2, 1024, 1025, 4096])
def test_threads_do_not_overwrite_ids_before_they_are_read(length):
    requests = 200
    start = torch.arange(requests, dtype=torch.int32, device="cuda") * length
    lengths = torch.full_like(start, length)
    tokens = -torch.arange(1, requests + 1, device="cuda")
    ids = torch.arange(requests * length, device="cuda")
    expected = ids.view(requests, length).clone()
    for turn in range(20):
        rotate_input_ids(ids, start, lengths, tokens - turn * 1000, start.long() + length - 1)
        expected = torch.cat([expected[:, 1:], (tokens - turn * 1000)[:, None]], 1)
    assert torch.equal(ids.view(requests, length), expected)


def i32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def test_accepted_tokens_move_to_the_front_and_whole_pages_are_freed():
    width, page = 8, 4
    # Request 0 ends on a page boundary, request 1 two tokens into a page; slots are positions.
    seq_lens, drafts = i32(8, 6), i32(1, 2)
    out = torch.cat([torch.arange(8, 16), torch.arange(106, 114)])
    accept_index = i32(0, 3, 8, 10, 15)
    kv = torch.arange(200) * 10

    source, target, num_free = get_src_tgt_cache_loc(
        seq_lens, out, accept_index, drafts, width, page
    )
    free = torch.zeros(int(num_free.sum()), dtype=torch.int64)
    get_target_cache_loc(target, free, drafts, num_free, out, width)
    kv[target] = kv[source]

    assert num_free.tolist() == [4, 2]
    assert free.tolist() == [12, 13, 14, 15, 112, 113]
    assert target.tolist() == [8, 9, 106, 107, 108]
    assert kv[target].tolist() == [80, 110, 1060, 1080, 1130]

    num_kept = create_num_accepted_drafts_filter(drafts, torch.tensor([1]), seq_lens)
    assert seq_lens.tolist() == [10, 9]
    filter_finished_cache_loc(out, target, drafts, num_kept)
    assert out[:3].tolist() == [106, 107, 108]


@pytest.mark.parametrize("requests", [1, 3])
def test_the_tree_path_becomes_a_chain(requests):
    width, base = 4, torch.arange(requests)[:, None] * 4
    accept_index = torch.tensor([[0, 2, -1]]).repeat(requests, 1)
    accept_index = torch.where(accept_index < 0, -1, accept_index + base).int()
    hidden = torch.arange(requests * width * 2.0).view(-1, 2)
    hidden[1::4], hidden[3::4] = torch.nan, torch.nan
    predict = torch.arange(requests * width, dtype=torch.int32)
    compacted = compact_accepted_to_front(hidden, accept_index, width).view(requests, width, 2)
    assert torch.equal(compacted[:, :2].flatten(0, 1), hidden[::2])
    assert hidden[1::4].isnan().all()
    ids = compact_accepted_to_front(predict, accept_index, width).view(requests, width)
    assert ids[:, :2].flatten().tolist() == predict[::2].tolist()
    assert ids[:, 3].tolist() == predict[3::4].tolist()


@loops_to_a_tensor
@by(CPU, INTERPRETER, CUDA)
def test_a_request_without_accepted_tokens_keeps_its_bonus_token(run):
    positions, bonus = torch.full((5,), -7), torch.full((3,), -7)
    tokens, seq_lens, counts = torch.arange(10, 14), i32(8, 5, 9), i32(2, 0, 2)
    run(create_extend_after_decode_spec_info, tokens, seq_lens, counts, positions, bonus)
    assert positions.tolist() == [6, 7, 7, 8, -7]
    assert bonus.tolist() == [11, -7, 13]


def test_a_window_moves_and_takes_its_token():
    ids = torch.arange(12)
    start, lengths = i32(0, 4, 8, 9), i32(4, 3, 1, 0)
    rotate_input_ids(ids, start, lengths, i32(-1, -2, -3, -4), torch.tensor([3, 5, 8, 9]))
    assert ids.tolist() == [1, 2, 3, -1, 5, -2, 6, 7, -3, 9, 10, 11]


def test_a_pad_leaves_the_first_request_alone():
    ids = torch.arange(6)
    rotate_input_ids(
        ids, i32(0, 3), i32(3, 3), torch.tensor([[7, 8], [9, 9]]), torch.tensor([0, 0])
    )
    assert ids.tolist() == [7, 2, 2, 4, 5, 5]


@pytest.mark.parametrize("name", CASES)
def test_tracers_see_shapes_and_mutations(name):
    op, make = CASES[name]
    for requests in (0, 3):
        args = make(Draw(requests))
        overload = getattr(torch.ops.graphkit, op.__name__).default
        torch.library.opcheck(overload, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", CASES)
def test_a_replay_reads_the_current_values(name):
    op, make = CASES[name]
    args = make(Draw(5, seed=1))
    initial = copies(args)
    backend = RecorderBackend()
    with backend.session():
        graph = backend.capture(lambda: op(*args))
    first = [each.clone() for each in tensors(graph.output, args)]
    for each, before in zip(args, initial, strict=True):
        if isinstance(each, torch.Tensor):
            each.copy_(before)
    for each in tensors(graph.output):
        each.fill_(99)
    graph.replay()
    for one, other in zip(tensors(graph.output, args), first, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("op", "at", "change", "field", "text"),
    [
        (get_target_cache_loc, 0, lambda t: t.repeat(2)[::2], "tgt_cache_loc", "strides"),
        (get_target_cache_loc, 3, lambda t: t.to("meta"), "to_free_num_slots", "on meta"),
        (get_target_cache_loc, 4, lambda t: t[None], "out_cache_loc", r"\[B \* W\] int32"),
        (get_src_tgt_cache_loc, 5, lambda _: -4, "page_size", "page_size is -4"),
        (compact_accepted_to_front, 0, lambda t: t[1:], "x", r"\[14, 3\].*\[15, \.\.\.\]"),
        (compact_accepted_to_front, 0, lambda t: t[0, 0], "x", r"x is \[\]"),
        (compact_accepted_to_front, 0, lambda t: t.to(torch.complex128), "x", "at most 8 bytes"),
        (compact_accepted_to_front, 1, lambda t: t[0], "accept_index", r"\[4\].*\[B, A <= W\]"),
        (compact_accepted_to_front, 1, lambda t: t.repeat(1, 2), "accept_index", r"= \[3, 5\]"),
        (rotate_input_ids, 3, lambda t: t[..., None], "topk_index", r"\[3, 2, 1\]"),
        (rotate_input_ids, 0, lambda t: t.repeat(2)[::2], "input_ids", "strides"),
    ],
)
def test_refusals(op, at, change, field, text):
    make = next(make for each, make in CASES.values() if each is op)
    args = list(make(Draw(3)))
    args[at] = change(args[at])
    with pytest.raises(InputError, match=text) as caught:
        # Through the dispatcher, the fake of a meta tensor would run, which checks nothing.
        OPS[op.__name__].run_reference(*args)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{op.__name__}: ")
