"""Random arguments of the slot and window ops, and their models in plain loops.

``CASES[op](draw)`` are valid arguments, ``draw`` a ``Draw``. An output holds ``LEFT``
before the call, which shows entries that must keep their value. An invalid draw puts some indices,
rows and counts out of range, none of which may change anything.
"""

from __future__ import annotations

import torch

from graphkit.ops.accepted_path import compact_accepted_to_front
from graphkit.ops.packed_accepted import (
    create_extend_after_decode_spec_info,
    create_num_accepted_drafts_filter,
    filter_finished_cache_loc,
    get_src_tgt_cache_loc,
    get_target_cache_loc,
)
from graphkit.ops.step_rows import rotate_input_ids

LEFT = -7


class Draw:
    """Numbers for B requests of W rows, with counts in one dtype."""

    def __init__(self, requests, *, seed=0, invalid=False, counts=torch.int32, width=5):
        self.requests, self.invalid = requests, invalid
        self.dtype, self.width = counts, width
        self.random = torch.Generator().manual_seed(seed)

    def integers(self, low, high, *shape):
        """Draw from low to high; if invalid, sometimes up to two beyond either."""
        drawn = torch.randint(low, high + 1, shape, generator=self.random)
        if self.invalid:
            is_invalid = torch.rand(shape, generator=self.random) < 0.3
            drawn += torch.randint(-2, 3, shape, generator=self.random).where(is_invalid, 0)
        return drawn

    def counts(self, low, high):
        return self.integers(low, high, self.requests).to(self.dtype)

    def slots(self, size):
        return torch.randperm(size, generator=self.random) + 1000

    def table(self, context):
        """``req_to_token``, and a row of it for each request."""
        rows = torch.randperm(self.requests + 2, generator=self.random)[: self.requests]
        if self.invalid:
            rows = torch.where(rows % 4 == 3, (rows % 8 - 5) * 10_000, rows)  # out of range
        slots = self.slots((self.requests + 2) * context).view(-1, context)
        return rows, slots.int()

    def accept_index(self):
        """Each request's nodes in order, then -1."""
        nodes = torch.rand(self.requests, self.width, generator=self.random).argsort(1).sort(1)[0]
        columns = max(self.width - 1, 1)
        index = nodes[:, :columns] + torch.arange(self.requests)[:, None] * self.width
        lengths = self.integers(1, columns, self.requests)
        index = torch.where(torch.arange(columns) < lengths[:, None], index, -1)
        return (index * 3 - 9 if self.invalid else index).int()


def left(size):
    return torch.full((max(int(size), 0),), LEFT)


def src_tgt_args(draw):
    drafts = draw.counts(0, draw.width - 1)
    rows = draw.requests * draw.width
    accepted = int((drafts + 1).clamp(min=0).sum())
    index = draw.integers(0, max(rows - 1, 0), accepted).int()
    page = (1, 4, 16)[draw.requests % 3]
    return draw.counts(0, 40), draw.slots(rows), index, drafts, draw.width, page


def target_args(draw):
    drafts, freed = draw.counts(0, draw.width - 1), draw.counts(0, draw.width)
    sizes = (drafts + 1).sum() + 3, freed.sum() - 1 if draw.invalid else freed.sum() + 2
    slots = draw.slots(draw.requests * draw.width)
    return *map(left, sizes), drafts, freed, slots, draw.width


def filter_args(draw):
    drafts = draw.counts(0, draw.width - 1)
    kept = torch.where(draw.integers(0, 1, draw.requests) > 0, drafts + 1, 0).to(draw.dtype)
    return left(kept.sum() + 2), draw.slots(int((drafts + 1).clamp(min=0).sum())), drafts, kept


def compact_args(draw):
    rows = draw.requests * draw.width
    return draw.integers(0, 9, rows, 3).bfloat16(), draw.accept_index(), draw.width


def drafts_filter_args(draw):
    unfinished = draw.integers(0, max(draw.requests - 1, 0), 2 * draw.requests)
    return draw.counts(0, draw.width - 1), unfinished, draw.counts(0, 40)


def spec_info_args(draw):
    tokens = draw.counts(1, draw.width)
    total = int(tokens.clamp(min=0).sum())
    lengths = draw.counts(10, 40)
    positions = left(total + (-1 if draw.invalid else 3))
    return draw.slots(total), lengths, tokens, positions, left(draw.requests)


def rotate_args(draw):
    width = draw.width
    start = torch.arange(draw.requests) * width
    if draw.invalid:  # the first or the last window is partly out of range
        start += (-2, 2)[draw.requests % 2]
    lengths = draw.counts(0, width).clamp(max=width)
    select = draw.integers(0, max(draw.requests * width - 1, 0), draw.requests)
    if not draw.invalid:
        select = torch.where(lengths > 0, start + select % lengths.clamp(min=1), select)
    topk = draw.slots(draw.requests * 2).view(-1, 2)
    return draw.slots(draw.requests * width), start.to(draw.dtype), lengths, topk, select


CASES = {
    "get_src_tgt_cache_loc": (get_src_tgt_cache_loc, src_tgt_args),
    "get_target_cache_loc": (get_target_cache_loc, target_args),
    "filter_finished_cache_loc": (filter_finished_cache_loc, filter_args),
    "compact_accepted_to_front": (compact_accepted_to_front, compact_args),
    "create_num_accepted_drafts_filter": (create_num_accepted_drafts_filter, drafts_filter_args),
    "create_extend_after_decode_spec_info": (create_extend_after_decode_spec_info, spec_info_args),
    "rotate_input_ids": (rotate_input_ids, rotate_args),
}


def get_src_tgt_cache_loc_by_loops(seq_lens, out, index, drafts, width, page):
    free = []
    for seq, accepted in zip(seq_lens, drafts, strict=True):
        needed = seq + accepted + 1
        while needed % page:
            needed += 1
        free.append(max(seq + width - needed, 0))
    return [out[row] for row in index], [0] * len(index), free


def get_target_cache_loc_by_loops(targets, free, drafts, num_free, out, width):
    kept, freed = [], []
    for b, accepted in enumerate(drafts):
        row = out[b * width : (b + 1) * width]
        kept += row[: accepted + 1]
        freed += row[width - num_free[b] :]
    targets[: len(kept)], free[: len(freed)] = kept, freed


def filter_finished_cache_loc_by_loops(out, targets, drafts, kept):
    at, packed = 0, []
    for accepted, taken in zip(drafts, kept, strict=True):
        packed += targets[at : at + taken]
        at += accepted + 1
    out[: len(packed)] = packed


def compact_accepted_to_front_by_loops(x, index, width):
    compacted = list(x)
    for b, path in enumerate(index):
        for column, row in enumerate(path):
            compacted[b * width + column] = x[max(row, 0)]
    return (compacted,)


def create_num_accepted_drafts_filter_by_loops(drafts, unfinished, seq_lens):
    for b, accepted in enumerate(drafts):
        seq_lens[b] += accepted + 1
    return ([accepted + 1 if b in unfinished else 0 for b, accepted in enumerate(drafts)],)


def create_extend_after_decode_spec_info_by_loops(tokens, seq_lens, counts, positions, bonus):
    at = 0
    for b, (seq, count) in enumerate(zip(seq_lens, counts, strict=True)):
        for position in range(seq - count, seq):
            positions[at] = position
            bonus[b] = tokens[at]
            at += 1


def rotate_input_ids_by_loops(ids, start, lengths, topk, select):
    for b, (first, length) in enumerate(zip(start, lengths, strict=True)):
        for place in range(first, first + length - 1):
            ids[place] = ids[place + 1]
        if length > 0:
            ids[select[b]] = topk[b][0]
