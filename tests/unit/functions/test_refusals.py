"""``gk.capture``: functions, examples, settings and calls that it refuses."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from function_models import rows, scaled


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
        ((rows(2)[0].to_sparse(), rows(2)[1]), {}, "'x' is sparse"),
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
        (
            (rows()[0].to(torch.float8_e4m3fn), rows()[1]),
            r"Pass its bytes, x\.view\(torch\.uint8\)",
        ),
        ((rows()[0][:, :0], rows()[1]), r"shape \[3, 0\], rows without numbers\. Leave it out"),
        ((torch.nested.nested_tensor([*rows()[0]], layout=torch.jagged), rows()[1]), "is a nested"),
        (rows()[0], "scaled raised an error for 3 rows of the example: .*TypeError"),
    ],
)
def test_wrong_examples_are_refused(example, text):
    with pytest.raises(gk.ConfigError, match=text):
        gk.capture(scaled, example, batch_sizes=[4])


def contains_itself(container):
    if isinstance(container, list):
        container.append(container)
    else:
        container[1] = container
    return container


def test_a_function_that_fails_for_one_row_is_refused():
    def fn(x):
        assert len(x) > 1
        return x

    for sizes in ([1, 4], [2, 4]):
        with pytest.raises(gk.ConfigError, match="raised an error for 1 row of the example"):
            gk.capture(fn, rows()[0], batch_sizes=sizes)


def test_an_error_of_an_operation_is_one_of_the_function():
    with pytest.raises(gk.ConfigError, match=r"`.*x\[:, 9\].*` raised IndexError"):
        gk.capture(lambda x: x[:, 9], rows()[0], batch_sizes=[4])
    with pytest.raises(gk.ConfigError, match=r"` raised IndexError: index 5 is out"):
        gk.capture(lambda x: x[torch.tensor([5])], rows()[0], batch_sizes=[4])
    with pytest.raises(gk.CaptureError, match=r"` raised IndexError: index 9 is out"):
        gk.capture(lambda i: rows()[0][i], torch.tensor([1, 2]), batch_sizes=[4], pad_values=9)


def test_a_function_that_fails_for_some_numbers_of_rows_is_refused():
    def fn(x):
        assert len(x) not in (5, 7)
        return x

    with pytest.raises(gk.ConfigError, match="raised an error for 7 rows of the example"):
        gk.capture(fn, rows()[0], batch_sizes=[8])


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
        (lambda x: (x, x[:, :0]), r"returned 1 as \[3, 0\], rows without numbers"),
        (lambda x: x.to(torch.float8_e5m2), "its result as torch.float8_e5m2"),
        (lambda x: x.to_sparse(), "its result as a sparse tensor"),
        (
            lambda x: torch.nested.as_nested_tensor([*x], layout=torch.jagged),
            "its result as a nested tensor",
        ),
        (lambda x: contains_itself([x]), "returned 1 as a list that contains itself"),
        (lambda x: contains_itself({"a": x}), "returned 1 as a dict that contains itself"),
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
