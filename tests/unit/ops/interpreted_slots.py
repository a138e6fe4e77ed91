"""Each slot op's launcher against its torch reference; ``test_interpreted.py`` runs this file.

The interpreter takes milliseconds per program, so blocks are small where a test needs several.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from graphkit.ops.accepted_path import compact_accepted_to_front
from graphkit.ops.kernels import packed_accepted
from graphkit.ops.registration import OPS
from graphkit.ops.step_rows import rotate_input_ids

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py instead"

pytestmark = pytest.mark.skipif(
    triton.__version__ < "3.7", reason="triton 3.6 with numpy 2.4 cannot interpret such a loop"
)
CASES, Draw, LEFT = map(
    runpy.run_path(str(Path(__file__).with_name("slot_cases.py"))).get, ("CASES", "Draw", "LEFT")
)


def launch(op, *args, **options):
    op = OPS[op.__name__]
    return op.launch(op.arguments(*args), **options)


def copies(args):
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in args]


def results(returned, args):
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [each for each in (*returned, *args) if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("invalid", [False, True], ids=["valid", "out of range"])
@pytest.mark.parametrize("requests", [0, 1, 2, 7])
def test_launcher_matches_the_reference(name, requests, invalid):
    op, make = CASES[name]
    for seed, counts in enumerate([torch.int32, torch.int64]):
        args = make(Draw(requests, seed=seed, invalid=invalid, counts=counts, width=(5, 1)[seed]))
        ours, theirs = copies(args), copies(args)
        got = results(launch(op, *ours), ours)
        want = results(op(*theirs), theirs)
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "name",
    ["get_target_cache_loc", "filter_finished_cache_loc", "create_extend_after_decode_spec_info",
     "create_num_accepted_drafts_filter"],
)  # fmt: skip
def test_more_requests_than_are_summed_at_once(name, monkeypatch):
    monkeypatch.setattr(packed_accepted, "COUNTS", tl.constexpr(4))
    op, make = CASES[name]
    args = make(Draw(11, width=2))
    ours, theirs = copies(args), copies(args)
    got = results(launch(op, *ours), ours)
    for one, other in zip(got, results(op(*theirs), theirs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.int32, torch.complex64])
@pytest.mark.parametrize("row", [(), (3,), (2, 700)])
def test_rows_of_any_dtype_are_compacted(dtype, row):
    index = torch.tensor([[0, 2, 3], [5, -1, -1]])
    x = torch.randint(0, 2, (10, *row)).to(dtype)
    got = launch(compact_accepted_to_front, x, index, 5)
    assert got.dtype == dtype
    assert torch.equal(got, x[[0, 2, 3, 3, 4, 5, 0, 0, 8, 9]])
    strided = x.repeat_interleave(2, 0)[::2]
    assert torch.equal(launch(compact_accepted_to_front, strided, index, 5), got)


@pytest.mark.parametrize("length", [1023, 1024, 1025, 4096])
def test_long_windows_rotate(length):
    ids = torch.arange(length + 3)
    window = torch.tensor([1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    args = (*window, torch.tensor([-5]), torch.tensor([length]))
    ours, theirs = ids.clone(), ids.clone()
    launch(rotate_input_ids, ours, *args)
    rotate_input_ids(theirs, *args)
    assert torch.equal(ours, theirs)
    assert ours.tolist() == [0, *range(2, length + 1), -5, length + 1, length + 2]


def test_a_window_past_the_end_writes_no_other_memory():
    memory = torch.arange(8)
    window = torch.tensor([2]), torch.tensor([5])
    launch(rotate_input_ids, memory[:5], *window, torch.tensor([-5]), torch.tensor([5]))
    assert memory.tolist() == [0, 1, 3, 4, 4, 5, 6, 7]
