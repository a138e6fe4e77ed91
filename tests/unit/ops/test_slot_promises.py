"""Refusals of the slot ops, their schemas and fakes, and recorded replays."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.errors import InputError
from graphkit.graphs.recorder import RecorderBackend
from graphkit.ops.accepted_path import compact_accepted_to_front
from graphkit.ops.packed_accepted import get_src_tgt_cache_loc, get_target_cache_loc
from graphkit.ops.registration import OPS
from graphkit.ops.step_rows import rotate_input_ids

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
