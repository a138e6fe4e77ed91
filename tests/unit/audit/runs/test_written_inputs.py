"""A forward that writes into its inputs fails every check of a capture, with its line."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

import graphkit as gk
from graphkit.models.reference import reference_target
from graphkit.runners import RUNNERS
from graphkit.runners.comparison import INPUT_WRITTEN
from graphkit.spec import ForwardMode
from graphkit.testing import assert_target_equivalent
from graphkit.views.text.capture import capture_view

MODES = [mode for mode in RUNNERS if mode is not ForwardMode.STEP]


def incrementing(forward):
    """Return a forward, or one for each of several, that increments its positions."""
    if isinstance(forward, (list, tuple)):
        return [incrementing(each) for each in forward]

    def increment(inputs):
        output = forward(inputs)
        inputs.positions.add_(1)
        return output

    return increment


@pytest.fixture(scope="module")
def reference():
    return reference_target(device="cpu", max_batch_size=1)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_captured_forward_that_writes_is_a_mismatch_in_every_mode(reference, mode):
    target = replace(reference, forwards={mode: incrementing(reference.forwards[mode])})
    record = gk.capture_target(target, modes=[mode], device="cpu")
    mismatch = record.mismatches[0]
    assert (mismatch.kind, mismatch.field, mismatch.row) == (INPUT_WRITTEN, "positions", 0)
    assert mismatch.got == mismatch.expected + 1
    assert mismatch.source.endswith("in increment")


def test_the_text_of_a_capture_and_of_the_kit_name_the_line(reference):
    mode = ForwardMode.TARGET_VERIFY
    target = replace(reference, forwards={mode: incrementing(reference.forwards[mode])})
    record = gk.capture_target(target, modes=[mode], device="cpu")
    output = StringIO()
    Console(file=output, width=400).print(capture_view(record))
    printed = output.getvalue()
    assert "the forward writes into its inputs: positions row 0 (request 0) is" in printed
    assert f"made by {record.mismatches[0].module}, runs/test_written_inputs.py:" in printed
    with pytest.raises(AssertionError, match=r"at fault: forward\n(.*\n)*  at: .*in increment$"):
        assert_target_equivalent(target, modes=[mode], device="cpu")
