"""``gk.capture``: what it learns from the arguments and results of an example."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn

import graphkit as gk
from function_models import rows, scaled


@dataclass
class Query:
    """Arguments in a dataclass; the first has the name of a field of graphkit's own."""

    input_ids: torch.Tensor
    width: torch.Tensor


def looked_up(query):
    return query.input_ids * query.width[:, None]


def test_a_dataclass_is_the_only_argument(capture):
    captured = capture(looked_up, Query(torch.arange(6).view(2, 3), torch.tensor([1, 2])))
    query = Query(torch.tensor([[7, 8, 9]]), torch.tensor([3]))
    assert captured(query).tolist() == [[21, 24, 27]]
    staged = captured.stage(1)
    staged.input_ids[:], staged.width[:] = [[1, 2, 3]], 5
    assert staged.replay().tolist() == [[5, 10, 15]]
    with pytest.raises(gk.InputError, match="takes a Query"):
        captured(query.input_ids, query.width)


def test_names_of_graphkits_own_fields_have_no_meaning(capture):
    """The audits replace token ids in pads by the largest one, and seq_lens have limits."""

    def embedded(input_ids, seq_lens, out_cache_loc):
        return nn.functional.one_hot(input_ids + 0 * out_cache_loc, 8) + seq_lens[:, None, None]

    example = {
        "input_ids": torch.tensor([[1, 7], [3, 2], [0, 5]]),
        "seq_lens": torch.tensor([9, 1, 5]),
        "out_cache_loc": torch.tensor([[4, 4], [4, 4], [4, 4]]),
    }
    captured = capture(embedded, example)
    assert torch.equal(captured(**example), embedded(**example))
    assert not gk.audit_target(captured.target, batch_sizes=[4], device="cpu").findings


def test_other_values_are_bound_with_partial(capture):
    captured = capture(partial(scaled, scale=torch.ones(1)), rows()[0])
    assert captured.target.name == "scaled"
    assert torch.equal(captured(rows()[0]), rows()[0])


def test_positional_arguments_without_names(capture):
    captured = capture(torch.add, (torch.ones(2, 3), torch.ones(2, 3)))
    assert captured(torch.ones(1, 3), torch.ones(1, 3)).tolist() == [[2, 2, 2]]


def test_pads_are_numbers_of_the_example(capture):
    """A length of 0 fails, and so does an index of one column in another one."""
    tables = torch.randn(50, 2), torch.randn(3, 2)

    def last(x, lengths, columns):
        x = x.gather(1, lengths[:, None] - 1)
        return x + tables[0][columns[:, 0]] + tables[1][columns[:, 1]]

    x, _ = rows()
    example = x, torch.tensor([2, 4, 1]), torch.tensor([[40, 2], [45, 1], [3, 2]])
    captured = capture(last, example)
    assert torch.equal(captured(*example), last(*example))
    assert [field.pad for field in captured.record.modes[0].buffers[1:]] == [1, 1]


@pytest.mark.parametrize(
    ("example", "pad"),
    [
        ([[-torch.inf, 2.0]], 2),
        ([[torch.nan, torch.inf]], 0),
        ([[True, False]], 0),
        ([[2**60 + 1, 2**61]], 2**60 + 1),
    ],
)
def test_pads_are_finite(capture, example, pad):
    captured = capture(lambda x: x.clone(), torch.tensor(example))
    captured.replay(torch.tensor(example).expand(2, -1))
    assert captured.runner.buffers.view(4).x[2:].tolist() == [[pad, pad]] * 2


class Pair(NamedTuple):
    """Results by name."""

    first: torch.Tensor
    second: tuple[torch.Tensor]


@dataclass
class Parts:
    """A dataclass that leaves a result out."""

    live: torch.Tensor
    missing: torch.Tensor | None = None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: a,
        lambda a, b: (a, [b, None]),
        lambda a, b: Pair(a, (b,)),
        lambda a, b: {"0": a, "rows": b, "a b": a},
        lambda a, b: OrderedDict({"x_0": a, "x": (b,), "x.0": a + 1, 0: b, "0": a}),
        lambda a, b: Parts(live=a),
        lambda a, b: torch.max(torch.stack([a, a + 1], 1), 1),
    ],
    ids=["tensor", "nested", "named tuple", "dict", "clash", "dataclass", "torch.return_types"],
)
def test_results_have_the_structure_of_the_function(capture, wrap):
    def fn(x):
        assert not torch.is_grad_enabled()
        return wrap(x + 1, (x > 0).sum(1))

    captured, x = capture(fn, rows()[0]), rows(2, 5)[0]
    with torch.no_grad():
        got, expected = captured(x), fn(x)
    assert type(got) is type(expected)
    assert repr(got) == repr(expected)


def test_a_long_example_is_not_run_at_once(capture):
    """It may not fit."""
    counts = []

    def fn(x):
        counts.append(len(x))
        return x + 1

    capture(fn, torch.randn(100, 2))
    assert max(counts) == 5
