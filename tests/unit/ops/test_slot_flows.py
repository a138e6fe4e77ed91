"""The slot and window ops in whole steps, and their edge cases."""

from __future__ import annotations

import pytest
import torch

from graphkit.ops.accepted_path import compact_accepted_to_front
from graphkit.ops.packed_accepted import (
    create_num_accepted_drafts_filter,
    filter_finished_cache_loc,
    get_src_tgt_cache_loc,
    get_target_cache_loc,
)
from graphkit.ops.step_rows import rotate_input_ids


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
