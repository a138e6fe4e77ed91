"""``gk.capture``: what it learns from an example, how its result is called, and what it refuses."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.testing import assert_replay_equivalent

ROWS, WIDTH = 3, 4


@pytest.fixture
def capture():
    """Captures functions, and closes them."""
    captured = []

    def make(fn, example, batch_sizes=(1, 4), **options):
        captured.append(gk.capture(fn, example, batch_sizes=batch_sizes, **options))
        return captured[-1]

    yield make
    for each in captured:
        each.close()


def scaled(x, scale):
    return x * scale[:, None]


def rows(count=ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator), 1 + torch.arange(count).double()


def test_it_is_a_function_and_no_file_of_that_name():
    import graphkit.records.capture
    import graphkit.runners.capture  # noqa: F401

    assert inspect.isfunction(gk.capture)
    assert list(inspect.signature(gk.capture).parameters)[:3] == ["fn", "example", "batch_sizes"]


# Calls.


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_way_of_calling(capture, count):
    captured = capture(scaled, rows())
    x, scale = rows(count, count)
    expected = scaled(x, scale)
    staged = captured.stage(count)
    staged.x[:], staged.scale = x.numpy(), scale
    for got in (
        staged.replay(clone=True), captured(x, scale), captured(x, scale=scale),
        captured(x.numpy(), scale.numpy()), captured.replay(x, scale).clone(),
    ):  # fmt: skip
        assert torch.equal(got, expected)
        assert got.dtype is torch.float64
    assert captured.stats.live_sizes == {count: 5}
    assert_replay_equivalent(captured.runner, [captured.batch(x, scale)])


def test_a_call_returns_its_own_memory_and_a_replay_that_of_the_graph(capture):
    captured = capture(scaled, rows())
    called, replayed = captured(*rows(2, 1)), captured.replay(*rows(2, 1))
    captured(*rows(2, 2))
    assert torch.equal(called, scaled(*rows(2, 1)))
    assert not torch.equal(replayed, scaled(*rows(2, 1)))


def test_a_large_batch_runs_without_a_graph_and_is_counted(capture):
    captured = capture(scaled, rows())
    assert torch.equal(captured(*rows(9)), scaled(*rows(9)))
    assert captured.stats.fallbacks == {"batch too large": 1}
    for refused in (lambda: captured.replay(*rows(9)), lambda: captured.stage(9)):
        with pytest.raises(gk.SizeError, match=r"largest is 4\. Add a size to batch_sizes"):
            refused()


def test_an_empty_batch_returns_no_rows(capture):
    assert capture(scaled, rows())(*rows(0)).shape == (0, WIDTH)


def test_strided_arguments_are_read_right(capture):
    wide, scale = torch.randn(4, 2 * WIDTH), torch.ones(1).expand(4)
    assert torch.equal(capture(scaled, rows())(wide[:, ::2], scale), wide[:, ::2])


def test_a_result_may_be_the_next_argument(capture):
    captured, (x, scale) = capture(scaled, (rows()[0].double(), rows()[1])), rows(2)
    x = x.double()
    chained = x
    for _ in range(3):
        chained = captured.replay(chained, scale)
    assert torch.equal(chained, x * scale[:, None] ** 3)


def test_a_closed_function_refuses_calls(capture):
    captured = capture(scaled, rows())
    captured(*rows())
    captured.close()
    for refused in (
        lambda: captured(*rows()), lambda: captured.replay(*rows()), lambda: captured.stage(1),
        lambda: captured.inspect(4),
    ):  # fmt: skip
        with pytest.raises(gk.ReplayError, match="closed"):
            refused()
    assert captured.stats.replays == 1


def test_the_checks_of_the_capture_are_not_counted(capture):
    captured = capture(scaled, rows())
    assert captured.stats.replays == 0
    record = captured.inspect(4)
    assert captured.stats.replays == 0
    assert record.batch_size == 4
    assert {p.name for n in record.nodes for a in n.arguments for p in a.pointers} >= {"x", "scale"}
    assert [size.batch_size for size in captured.record.modes[0].sizes] == [1, 4]
    assert captured.record.target == "scaled"


# Forms of arguments.


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


# Forms of results.


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


def test_no_gradients_are_recorded(capture):
    weight = torch.ones(WIDTH, requires_grad=True)
    captured = capture(lambda x: x * weight, rows()[0].requires_grad_())
    for count in (2, 9):
        assert not captured(rows(count)[0]).requires_grad


def test_mutable_state_is_restored(capture):
    count = torch.zeros(1)

    def counted(x):
        count.add_(1)
        return x + 0 * count

    captured = capture(counted, rows()[0], mutable_state={"count": count})
    captured.inspect(4)
    assert count.item() == 0
    captured(rows()[0])
    assert count.item() == 1


# Refusals.


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (
            (rows(2)[0][:, :3], rows(2)[1]),
            {},
            r"'x' of scaled has shape \[2, 3\], expected \[batch, 4\]",
        ),
        ((rows(2)[0], rows(3)[1]), {}, r"'scale' of scaled has shape \[3\], expected \[2\]"),
        ((torch.tensor(1.0), rows(3)[1]), {}, r"'x' of scaled has shape \[\]"),
        (([[1.0] * 4], rows(1)[1]), {}, "'x' of scaled is a list"),
        ((rows(2)[0],), {}, "takes x, scale, as in the example, by position or by name"),
        (rows(2), {"scale": rows(2)[1]}, "takes x, scale"),
        ((*rows(2), 1), {}, "takes x, scale"),
        (rows(2), {"other": 1}, "takes x, scale"),
        ((rows(2)[0].int(), rows(2)[1]), {}, "'x' is torch.int32. Pass torch.float32"),
    ],
)
def test_wrong_calls_are_refused_by_argument(capture, args, kwargs, text):
    captured = capture(scaled, rows())
    with pytest.raises(gk.InputError, match=text):
        captured(*args, **kwargs)
    assert torch.equal(captured(*rows()), scaled(*rows()))


def test_keyword_arguments_are_passed_by_name(capture):
    captured = capture(scaled, dict(zip(("x", "scale"), rows(), strict=True)))
    with pytest.raises(gk.InputError, match="by name; this call has 2 by position"):
        captured(*rows())


@pytest.mark.parametrize(
    ("example", "text"),
    [
        ((rows()[0], None), r"'scale' .* is None\. .*functools.partial\(scaled, scale=\.\.\.\)"),
        (rows()[0].numpy(), "'x' .* is a ndarray"),
        ((rows()[0], torch.tensor(2.0)), "'scale' .* has no dimension"),
        ((rows()[0], rows(2)[1]), "it has x 3, scale 2"),
        (rows(0), "at least one"),
        ((), "it has no argument"),
        ({1: rows()[0]}, "names an argument 1"),
        ((rows()[0], rows()[1].to(torch.complex64)), "is torch.complex64"),
        ((rows()[0].to_sparse(), rows()[1]), "is sparse"),
        (rows()[0], "scaled raised an error for 3 rows of the example: .*TypeError"),
    ],
)
def test_wrong_examples_are_refused(example, text):
    with pytest.raises(gk.ConfigError, match=text):
        gk.capture(scaled, example, batch_sizes=[4])


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda x: x.mean(), r"returned a tensor as \[\] for 3 rows"),
        (
            lambda x: {"logits": x, "loss": x.sum(0, keepdim=True)},
            r"returned loss as \[1, 4\] for 3",
        ),
        (lambda x: x.sum(1, keepdim=True).expand(-1, len(x)), "Rows must have one shape"),
        (lambda x: (x, 1), "returned 1 as a int"),
        (lambda x: None, "returned no tensor"),
        (lambda x: (x, x if len(x) > 3 else None), "Return the same tensors for every batch"),
    ],
)
def test_results_without_rows_are_refused(fn, text):
    with pytest.raises(gk.OutputError, match=text):
        gk.capture(fn, rows()[0], batch_sizes=[4])


@pytest.mark.parametrize("fn", [lambda x: x - x.mean(0), lambda x: x.roll(1, 0)])
def test_rows_that_depend_on_others_are_refused(fn):
    with pytest.raises(gk.OutputError, match="padding changes live rows: row 0 of `output` is"):
        gk.capture(fn, rows()[0], batch_sizes=[1, 4])


def test_a_value_that_changes_between_calls_is_refused():
    host = {"calls": 0}

    def fn(x):
        host["calls"] += 1
        return x + host["calls"]

    with pytest.raises(gk.OutputError, match="Results must not depend on values that the host"):
        gk.capture(fn, rows()[0], batch_sizes=[2])


LAYER = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True)


class Pipeline:
    """Holds modules, and is none."""

    def __init__(self, layer):
        self.layer, self.norm = layer, nn.LayerNorm(4).eval()

    def run(self, x):
        return self.norm(self.layer(x))


def call_a_global(x):
    return LAYER(x)


def holders(layer):
    return {
        "module": layer,
        "method": layer.forward,
        "object": Pipeline(layer).run,
        "bound": partial(partial(lambda model, x: model(x), layer)),
        "keyword": partial(lambda x, model: model(x), model=layer),
        "closure": lambda x: layer(x),
        "global": call_a_global,
    }


@pytest.mark.parametrize("holder", holders(LAYER))
def test_a_module_in_training_mode_is_refused(holder):
    with pytest.raises(gk.ConfigError, match="TransformerEncoderLayer is in training mode"):
        gk.capture(holders(LAYER)[holder], torch.zeros(2, 3, 4), batch_sizes=[2])


@pytest.mark.parametrize("holder", holders(LAYER))
def test_weights_are_named_without_a_declaration(capture, monkeypatch, holder):
    layer = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True).eval()
    monkeypatch.setitem(globals(), "LAYER", layer)
    captured = capture(holders(layer)[holder], torch.randn(2, 3, 4))
    names = {p.name for n in captured.inspect(4).nodes for a in n.arguments for p in a.pointers}
    assert any(str(name).endswith("self_attn.in_proj_weight") for name in names), names


def test_a_failed_capture_says_why(capture):
    with pytest.raises(gk.CaptureError, match="host synchronisation in"):
        capture(lambda x: x * x.sum(1).max().item(), rows()[0])


@pytest.mark.parametrize("sizes", [[], [0], 4, ["2"], [2, 2], None])
def test_wrong_batch_sizes_are_refused(sizes):
    with pytest.raises(gk.ConfigError, match="batch_sizes") as caught:
        gk.capture(scaled, rows(), batch_sizes=sizes)
    assert caught.value.field == "batch_sizes"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fn": 3}, "fn must be callable"),
        ({"tolerance": -1}, "tolerance must be"),
        ({"device": "meta"}, "device meta is not supported"),
        ({"backend": gk.RecorderBackend(), "device": "xpu"}, "xpu"),
        ({"example": torch.empty(2, 4, device="meta")}, "is on meta"),
        ({"mutable_state": {"x": 1}}, "mutable_state 'x' is of type int"),
    ],
)
def test_wrong_settings_are_refused(options, text):
    given = {"fn": torch.relu, "example": rows()[0], "batch_sizes": [2]} | options
    with pytest.raises(gk.ConfigError, match=text):
        gk.capture(**given)


@pytest.mark.parametrize("size", [3, 99, "4"])
def test_inspect_refuses_a_size_that_was_not_captured(capture, size):
    with pytest.raises(gk.SizeError, match="was not captured"):
        capture(scaled, rows()).inspect(size)


def test_a_backend_of_its_own_is_used(capture):
    backend = gk.RecorderBackend()
    assert capture(scaled, rows(), backend=backend).runner.backend is backend
    assert np.isclose(capture(scaled, rows(), backend=backend)(*rows())[1, 0], rows()[0][1, 0] * 2)
