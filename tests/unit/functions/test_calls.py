"""``gk.capture``: every way of calling what it returns."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

import graphkit as gk
from function_models import rows, scaled
from graphkit.testing import assert_replay_equivalent


def test_it_is_a_function_and_no_file_of_that_name():
    import graphkit.records.capture
    import graphkit.runners.capture  # noqa: F401

    assert inspect.isfunction(gk.capture)
    assert list(inspect.signature(gk.capture).parameters)[:3] == ["fn", "example", "batch_sizes"]


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
    assert capture(scaled, rows())(*rows(0)).shape == (0, 4)


def test_strided_arguments_are_read_right(capture):
    wide, scale = torch.randn(4, 2 * 4), torch.ones(1).expand(4)
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


def test_no_gradients_are_recorded(capture):
    weight = torch.ones(4, requires_grad=True)
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


def test_a_backend_of_its_own_is_used(capture):
    backend = gk.RecorderBackend()
    assert capture(scaled, rows(), backend=backend).runner.backend is backend
    assert np.isclose(capture(scaled, rows(), backend=backend)(*rows())[1, 0], rows()[0][1, 0] * 2)
