"""The slot and window ops on CUDA against their torch references, eager and in captured graphs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.ops.accepted_path import compact_accepted_to_front
from graphkit.ops.step_rows import rotate_input_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES, Draw = map(
    runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ops" / "slot_cases.py")).get,
    ("CASES", "Draw"),
)


def on_device(args):
    return [each.cuda() if isinstance(each, torch.Tensor) else each for each in args]


def tensors(returned, args):
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [each for each in (*returned, *args) if isinstance(each, torch.Tensor)]


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("invalid", [False, True], ids=["valid", "out of range"])
@pytest.mark.parametrize("requests", [0, 1, 3, 64, 257, 1025])
@pytest.mark.parametrize("counts", [torch.int32, torch.int64])
def test_op_matches_the_reference(name, requests, invalid, counts):
    op, make = CASES[name]
    for width in (1, 4, 9):
        args = make(Draw(requests, seed=width, invalid=invalid, counts=counts, width=width))
        ours = on_device(args)
        got = tensors(op(*ours), ours)
        assert_same(got, tensors(op(*args), args))


@pytest.mark.parametrize("name", CASES)
def test_a_graph_replays_on_new_values(name):
    op, make = CASES[name]
    first, second = (make(Draw(8, seed=seed)) for seed in (0, 1))
    fits = [
        not isinstance(one, torch.Tensor) or one.shape == other.shape
        for one, other in zip(first, second, strict=True)
    ]
    second = second if all(fits) else make(Draw(8, seed=0))
    ours = on_device(first)
    op(*on_device(first))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        returned = op(*ours)
    for _ in range(2):
        for each, new in zip(ours, second, strict=True):
            if isinstance(each, torch.Tensor):
                each.copy_(new)
        graph.replay()
        again = [each.clone() if isinstance(each, torch.Tensor) else each for each in second]
        assert_same(tensors(returned, ours), tensors(op(*again), again))


@pytest.mark.parametrize("name", CASES)
def test_launches(name):
    op, make = CASES[name]
    args = on_device(make(Draw(8)))
    op(*args)
    torch.cuda.synchronize()
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
        op(*args)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert len([each for each in kernels if each.endswith("_kernel")]) == 1
    assert not [each for each in kernels if each.startswith("Memcpy")]


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


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("row", [(), (4096,), (3, 5)])
def test_rows_are_compacted_bit_for_bit(dtype, row):
    requests, width = 64, 8
    index = torch.rand(requests, width).argsort(1).sort(1)[0][:, :5]
    index = (index + torch.arange(requests)[:, None] * width).int()
    index[::3, 2:] = -1
    x = torch.randn(requests * width, *row).to(dtype)
    if dtype.is_floating_point:
        x[5::7] = torch.nan
    got = compact_accepted_to_front(x.cuda(), index.cuda(), width).cpu()
    expected = compact_accepted_to_front(x, index, width)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
