"""The slot and window ops in whole steps, and their edge cases."""

from __future__ import annotations

import pytest
import torch

from graphkit.ops.accepted import create_num_accepted_drafts_filter, fill_bonus_tokens
from graphkit.ops.accepted_path import compact_accepted_to_front, fill_accepted_out_cache_loc
from graphkit.ops.cache_locs import (
    filter_finished_cache_loc,
    get_src_tgt_cache_loc,
    get_target_cache_loc,
)
from graphkit.ops.draft_cache_locs import assign_draft_cache_locs
from graphkit.ops.slot_assignment import (
    assign_draft_cache_locs_contiguous,
    assign_extend_cache_locs,
)
from graphkit.ops.windows import rotate_input_ids


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
    table = torch.randperm(requests * 20).view(requests, 20).int() + 1
    seq_lens, rows = i32(*range(5, 5 + requests)), torch.arange(requests)
    out = torch.zeros(requests * width, dtype=torch.int64)
    assign_extend_cache_locs(rows, table, seq_lens, seq_lens + width, out)
    kv = torch.arange(100)
    expected = kv[out.view(-1, width)[:, [0, 2]]]

    source = torch.zeros(accept_index.numel(), dtype=torch.int64)
    target = torch.zeros_like(source)
    fill_accepted_out_cache_loc(accept_index, out, source)
    assign_extend_cache_locs(rows, table, seq_lens, seq_lens + 2, target)
    kv[target] = kv[source]
    assert kv[0] == 0
    assert torch.equal(kv[out.view(-1, width)[:, :2]], expected)

    hidden = torch.arange(requests * width * 2.0).view(-1, 2)
    hidden[1::4], hidden[3::4] = torch.nan, torch.nan
    predict = torch.arange(requests * width, dtype=torch.int32)
    compacted = compact_accepted_to_front(hidden, accept_index, width).view(requests, width, 2)
    assert torch.equal(compacted[:, :2].flatten(0, 1), hidden[::2])
    assert hidden[1::4].isnan().all()
    ids = compact_accepted_to_front(predict, accept_index, width).view(requests, width)
    assert ids[:, :2].flatten().tolist() == predict[::2].tolist()
    assert ids[:, 3].tolist() == predict[3::4].tolist()


def test_the_stride_of_bonus_tokens_is_that_of_accept_index():
    predict = torch.arange(8, dtype=torch.int32) * 10
    accept_index = torch.tensor([[0, 2, -1], [4, 5, 7]])
    counts, bonus = i32(2, 3), torch.zeros(2, dtype=torch.int64)
    tokens = predict[accept_index]
    for accept_tokens in (tokens, tokens.flatten(), tokens.long().mT.contiguous().mT):
        fill_bonus_tokens(accept_tokens, counts, bonus.zero_(), accept_index.shape[1])
        assert bonus.tolist() == [20, 70]
    assert counts.tolist() == [2, 3]


def test_a_count_outside_the_path_has_no_bonus_token():
    bonus = torch.full((4,), 5)
    fill_bonus_tokens(torch.arange(12), i32(0, -1, 4, 3), bonus, 3)
    assert bonus.tolist() == [5, 5, 5, 11]


def test_branches_with_pages_of_their_own():
    page, topk, steps, seq = 4, 2, 3, 6
    table = torch.zeros(2, 24, dtype=torch.int32)
    table[1, :seq] = torch.arange(40, 46)
    out = torch.arange(60, 74)
    source, target = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    assign_draft_cache_locs(
        torch.tensor([1]), table, i32(seq), i32(14), i32(2), out, source, target, i32(2), 2,
        topk, steps, page,
    )  # fmt: skip
    assert table[1, :20].tolist() == [*range(40, 46), *range(60, 74)]
    assert table[1, 20:].eq(0).all()
    assert table[0].eq(0).all()
    assert source.tolist() == [44, 45]
    assert target.tolist() == table[1, 12:14].tolist() == [66, 67]
    assert out[:6].tolist() == [60, 61, 62, 68, 69, 70]


def test_every_branch_reads_a_whole_context_by_pages():
    page, topk, steps, seq_lens = 4, 3, 5, i32(3, 4, 9, 14)
    tails, requests = seq_lens % page, len(seq_lens)
    pages = (tails + steps + page - 1) // page
    extend = topk * pages * page - tails
    table = torch.zeros(requests + 1, 64, dtype=torch.int32)
    slots = torch.arange(1, 400)
    for row, seq in enumerate(seq_lens.tolist(), 1):
        table[row, :seq], slots = slots[:seq].int(), slots[seq:]
    out = slots[: int(extend.sum())].clone()
    source = torch.zeros(int(tails.sum()) * (topk - 1), dtype=torch.int64)
    target = torch.zeros_like(source)
    rows = torch.arange(1, requests + 1)
    assign_draft_cache_locs(
        rows, table, seq_lens, extend, pages, out, source, target, tails.cumsum(0), len(source),
        topk, steps, page,
    )  # fmt: skip

    kv = torch.zeros(400, dtype=torch.int64)
    for row, seq in enumerate(seq_lens.tolist(), 1):
        kv[table[row, :seq]] = 100 * row + torch.arange(seq)
    locs = out[: requests * topk * steps].view(requests, topk, steps)
    assert locs.unique().numel() == locs.numel()
    kv[locs] = -(torch.arange(topk)[:, None] * 10 + torch.arange(steps) + 1)
    kv[target] = kv[source]
    for b, (seq, tail) in enumerate(zip(seq_lens.tolist(), tails.tolist(), strict=True)):
        for k in range(topk):
            begin = seq - tail + k * int(pages[b]) * page
            reads = torch.cat([table[b + 1, : seq - tail], table[b + 1, begin:]])[: seq + steps]
            context = [100 * (b + 1) + position for position in range(seq)]
            assert kv[reads].tolist() == context + [-(k * 10 + s + 1) for s in range(steps)]


def test_draft_slots_are_entered_and_read_back():
    table = torch.zeros(4, 16, dtype=torch.int32)
    rows, seq_lens, slots = torch.tensor([3, 1, 0]), i32(0, 10, 1), torch.arange(1, 19)
    slots[12:] = 0  # a pad
    numbers = (2, 3, 16)
    assign_draft_cache_locs(
        rows, table, seq_lens, *(None,) * 2, slots, *(None,) * 4, 1, 6, 16
    )  # topk is 1: pages do not matter
    read = torch.zeros_like(slots)
    assign_draft_cache_locs_contiguous(rows, table, seq_lens, read, *numbers[:2])
    assert torch.equal(read, slots)
    assert table[0].eq(0).all()


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


def test_many_entries_are_filled_in():
    index = torch.full((70_000,), -1, dtype=torch.int32)
    index[::7] = torch.arange(10_000, dtype=torch.int32)
    filled = torch.zeros(70_000, dtype=torch.int64)
    fill_accepted_out_cache_loc(index, torch.arange(10_000) + 1, filled)
    assert torch.equal(filled[:10_000], torch.arange(10_000) + 1)
    assert filled[10_000:].eq(0).all()


def test_an_index_out_of_range_changes_nothing():
    table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    filled = torch.full((4,), -7)
    fill_accepted_out_cache_loc(i32(9, 1, -5, 0), torch.tensor([50, 51]), filled)
    assert filled.tolist() == [-7, 51, 50, -7]
    out = torch.full((6,), -7)
    assign_draft_cache_locs_contiguous(torch.tensor([5, -1, 1]), table, i32(0, 0, 3), out, 1, 2)
    assert out.tolist() == [-7, -7, -7, -7, 8, -7]
    out = torch.full((4,), -7)
    assign_extend_cache_locs(torch.tensor([0, 1, 1]), table, i32(3, 2, 0), i32(0, 5, 1), out)
    assert out.tolist() == [7, 8, -7, 5]
    before = table.clone()
    none = (None,) * 4
    assign_draft_cache_locs(
        torch.tensor([2, 1]), table, i32(0, 3), None, None, torch.tensor([90, 91, 92, 93]), *none,
        1, 2, 1,
    )  # fmt: skip
    before[1, 3] = 92
    assert torch.equal(table, before)


def test_the_first_cell_of_the_table_is_written_beside_unused_slots():
    table, slots = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([7, 8, 9, 10])
    rows, lengths = torch.tensor([0, 1]), i32(0, 4)
    pages = (i32(2, 2), i32(1, 1), slots, *torch.zeros(2, 2, dtype=torch.int64), i32(0, 0))
    assign_draft_cache_locs(rows, table, lengths, *pages[:2], *pages[2:5], pages[5], 0, 2, 1, 2)
    assert table.tolist() == [[7, 8, 0, 0], [0, 0, 0, 0]]
