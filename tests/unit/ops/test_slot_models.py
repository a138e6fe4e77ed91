"""Every slot and window op on the CPU against plain loops."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

CASES, Draw = map(
    runpy.run_path(str(Path(__file__).with_name("slot_cases.py"))).get, ("CASES", "Draw")
)


def get_src_tgt_cache_loc(seq_lens, out, index, drafts, width, page):
    free = []
    for seq, accepted in zip(seq_lens, drafts, strict=True):
        needed = seq + accepted + 1
        while needed % page:
            needed += 1
        free.append(max(seq + width - needed, 0))
    return [out[row] for row in index], [0] * len(index), free


def get_target_cache_loc(targets, free, drafts, num_free, out, width):
    kept, freed = [], []
    for b, accepted in enumerate(drafts):
        row = out[b * width : (b + 1) * width]
        kept += row[: accepted + 1]
        freed += row[width - num_free[b] :]
    targets[: len(kept)], free[: len(freed)] = kept, freed


def filter_finished_cache_loc(out, targets, drafts, kept):
    at, packed = 0, []
    for accepted, taken in zip(drafts, kept, strict=True):
        packed += targets[at : at + taken]
        at += accepted + 1
    out[: len(packed)] = packed


def compact_accepted_to_front(x, index, width):
    compacted = list(x)
    for b, path in enumerate(index):
        for column, row in enumerate(path):
            compacted[b * width + column] = x[max(row, 0)]
    return (compacted,)


def create_num_accepted_drafts_filter(drafts, unfinished, seq_lens):
    for b, accepted in enumerate(drafts):
        seq_lens[b] += accepted + 1
    return ([accepted + 1 if b in unfinished else 0 for b, accepted in enumerate(drafts)],)


def create_extend_after_decode_spec_info(tokens, seq_lens, counts, positions, bonus):
    at = 0
    for b, (seq, count) in enumerate(zip(seq_lens, counts, strict=True)):
        for position in range(seq - count, seq):
            positions[at] = position
            bonus[b] = tokens[at]
            at += 1


def rotate_input_ids(ids, start, lengths, topk, select):
    for b, (first, length) in enumerate(zip(start, lengths, strict=True)):
        for place in range(first, first + length - 1):
            ids[place] = ids[place + 1]
        if length > 0:
            ids[select[b]] = topk[b][0]


def listed(args):
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in args]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("requests", [0, 1, 2, 5, 33])
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_op_matches_its_model(name, requests, width):
    op, make = CASES[name]
    model = globals()[op.__name__]
    for seed, counts in enumerate([torch.int32, torch.int64]):
        args = make(Draw(requests, seed=seed, counts=counts, width=width))
        expected = listed(args)
        made = model(*expected) or ()
        returned = op(*args)
        returned = returned if isinstance(returned, tuple) else (returned,) * len(made)
        assert listed(returned) == list(made)
        assert listed(args) == expected
