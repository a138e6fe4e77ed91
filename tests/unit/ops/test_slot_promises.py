"""Refusals of the slot ops, their schemas and fakes, and recorded replays."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.errors import InputError
from graphkit.graphs.recorder import RecorderBackend
from graphkit.ops.accepted import fill_bonus_tokens
from graphkit.ops.accepted_path import compact_accepted_to_front
from graphkit.ops.cache_locs import get_src_tgt_cache_loc, get_target_cache_loc
from graphkit.ops.draft_cache_locs import assign_draft_cache_locs
from graphkit.ops.registration import OPS
from graphkit.ops.slot_assignment import (
    assign_draft_cache_locs_contiguous,
    assign_extend_cache_locs,
)
from graphkit.ops.windows import rotate_input_ids

CASES, Draw = map(
    runpy.run_path(str(Path(__file__).with_name("slot_cases.py"))).get, ("CASES", "Draw")
)


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
    initial = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
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


def tensors(returned, args=()):
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [each for each in (*returned, *args) if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize(
    ("op", "at", "change", "field", "text"),
    [
        (fill_bonus_tokens, 0, lambda t: t[:, 1:], "accept_tokens", r"\[3, 3\].* \[3, 4\]"),
        (fill_bonus_tokens, 1, lambda t: t.float(), "num_accepted_tokens", "float32.*int64"),
        (fill_bonus_tokens, 2, lambda t: t[::2], "bonus_tokens", r"\[2\].* \[3\]"),
        (fill_bonus_tokens, 3, lambda _: 0, "stride", "stride is 0, expected at least 1"),
        (get_target_cache_loc, 0, lambda t: t.repeat(2)[::2], "tgt_cache_loc", "strides"),
        (get_target_cache_loc, 3, lambda t: t.to("meta"), "to_free_num_slots", "on meta"),
        (get_target_cache_loc, 4, lambda t: t[None], "out_cache_loc", r"\[B \* W\] int32"),
        (get_src_tgt_cache_loc, 5, lambda _: -4, "page_size", "page_size is -4"),
        (compact_accepted_to_front, 0, lambda t: t[1:], "x", r"\[14, 3\].*\[15, \.\.\.\]"),
        (compact_accepted_to_front, 0, lambda t: t[0, 0], "x", r"x is \[\]"),
        (compact_accepted_to_front, 0, lambda t: t.to(torch.complex128), "x", "at most 8 bytes"),
        (compact_accepted_to_front, 1, lambda t: t[0], "accept_index", r"\[4\].*\[B, A\]"),
        (compact_accepted_to_front, 1, lambda t: t.repeat(1, 2), "accept_index", "8 columns"),
        (assign_extend_cache_locs, 1, lambda t: t[0], "req_to_token", r"\[rows, context\]"),
        (assign_extend_cache_locs, 0, lambda t: t[:2], "start_offset", r"\[B\] = \[2\]"),
        (assign_draft_cache_locs_contiguous, 3, lambda t: t[1:], "out_cache_loc", r"\[27\]"),
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


@pytest.mark.parametrize(
    ("at", "change", "field", "text"),
    [
        (3, lambda _: None, "extend_lens", "extend_lens is None, expected a tensor"),
        (9, lambda _: None, "source_cache_loc", "duplicate_cache_len is None"),
        (9, lambda pairs: pairs + 2, "source_cache_loc", "expected 0 to"),
        (9, lambda _: -1, "source_cache_loc", "is -1"),
        (5, lambda slots: slots[:44], "out_cache_loc", "44 slots, expected at least .* = 45"),
        (7, lambda target: target[1:], "target_cache_loc", r"\[D\]"),
        (1, lambda table: table.mT.contiguous().mT, "req_to_token", "writes in place"),
    ],
)
def test_pages_refuse(at, change, field, text):
    _, make = CASES["assign_draft_cache_locs, pages of 4"]
    args = list(make(Draw(3)))
    args[at] = change(args[at])
    with pytest.raises(InputError, match=text) as caught:
        assign_draft_cache_locs(*args)
    assert caught.value.field == field


def test_without_pages_their_arguments_are_ignored():
    _, make = CASES["assign_draft_cache_locs"]
    args, others = make(Draw(3)), list(make(Draw(3)))
    nothing = torch.empty(0)
    others[3:5], others[6:9] = [nothing] * 2, [nothing] * 3
    assign_draft_cache_locs(*args)
    assign_draft_cache_locs(*others)
    assert torch.equal(args[1], others[1])
    with pytest.raises(InputError, match="out_cache_loc"):
        assign_draft_cache_locs(*args[:5], args[5][1:], *args[6:])
