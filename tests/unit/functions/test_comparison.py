"""After a capture, rows of the example are replayed and compared with the function."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit.graphs import is_capturing
from graphkit.runners.comparison import Rounding, StepComparison


def writes_its_argument(rows):
    rows.add_(1)
    return rows * 2


def differs_while_it_is_captured(rows):
    return rows * (3 if is_capturing() else 2)


def follows_the_number_of_rows(rows):
    return rows * rows.shape[0]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (writes_its_argument, "the forward writes into its inputs"),
        (differs_while_it_is_captured, "the graph differs from the same padded path without it"),
        (follows_the_number_of_rows, "padding changes live rows"),
    ],
)
def test_a_function_that_differs_is_refused(function, kind):
    with pytest.raises(gk.OutputError, match=f"{function.__name__}: {kind}: row 0 of "):
        gk.capture(function, torch.arange(1.0, 7).view(3, 2), batch_sizes=[1, 4], device="cpu")


def test_a_sum_in_changing_order_is_no_difference(monkeypatch):
    """Repeated padded runs show how much a step rounds; a replay may differ as they do."""
    example = torch.ones(3, 2)
    with gk.capture(torch.neg, example, batch_sizes=[4], device="cpu") as captured:
        runner, batch = captured.runner, captured.batch(example)
        comparison = StepComparison(runner, batch, 4, Rounding(torch.float32))
        assert comparison.first_mismatch() is None
        run_padded, noise = runner.run_padded, iter((1, 3, 0, 2, 1, 0, 0, 0))

        def noisy(*args, **kwargs):
            output = run_padded(*args, **kwargs).clone()
            for rows in output.tensors().values():
                rows += next(noise) * 2**-24
            return output

        monkeypatch.setattr(runner, "run_padded", noisy)
        assert comparison.first_mismatch() is None
        noise = iter((1,) * 8)  # every run differs from the replay in the same way
        mismatch = comparison.first_mismatch()
        assert mismatch.kind == "the graph differs from the same padded path without it"
