"""The line of user code that changes a value."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from torch import nn

from graphkit.audit.changing_lines import changing_lines


class Counters:
    """Values, and functions that change them."""

    def __init__(self):
        self.steps, self.table, self.names = 0, torch.zeros(4), {}
        self.linear = nn.Linear(4, 4)

    def add(self):
        other = 1
        self.steps += other
        return other

    def write(self):
        with torch.no_grad():
            self.table[1:].add_(1)

    def replace(self):
        self.table = torch.zeros(4)
        return self.table

    def equal(self):
        self.steps = int("0")

    def remember(self):
        self.names[len(self.names)] = 1

    def give(self):
        return 5

    def take(self):
        self.steps = self.give()

    def inside(self):
        self.give()
        self.add()
        self.give()

    def in_torch(self):
        nn.init.ones_(self.linear.weight)

    def fail(self):
        self.steps = 2
        raise ValueError("failed")


def line(method, text):
    """Return the source of a line of a method, as records have it."""
    lines, first = inspect.getsourcelines(method)
    at = next(i for i, each in enumerate(lines) if text in each)
    return f"audit/test_changing_lines.py:{first + at} in {method.__name__}"


@pytest.mark.parametrize(
    ("method", "value", "where", "text"),
    [
        ("add", "steps", "add", "+= other"),
        ("write", "table", "write", "add_(1)"),
        ("replace", "table", "replace", "self.table ="),
        ("remember", "names", "remember", "self.names["),
        ("take", "steps", "take", "self.give()"),
        ("inside", "steps", "add", "+= other"),
    ],
)
def test_the_first_line_that_changes_a_value(method, value, where, text):
    counters = Counters()
    run = getattr(counters, method)
    found = changing_lines(run, {value: lambda: getattr(counters, value), "other": lambda: 3})
    assert found == {value: line(getattr(Counters, where), text)}
    run()
    assert changing_lines(counters.give, {value: lambda: getattr(counters, value)}) == {}


def test_a_write_in_a_library_has_the_line_that_calls_it():
    counters = Counters()
    found = changing_lines(counters.in_torch, {"weight": lambda: counters.linear.weight})
    assert found == {"weight": line(Counters.in_torch, "ones_")}


def test_an_equal_number_is_no_change():
    counters = Counters()
    assert changing_lines(counters.equal, {"steps": lambda: counters.steps}) == {}


def test_an_inference_tensor_is_compared_by_identity():
    counters = Counters()
    with torch.inference_mode():
        counters.table = torch.zeros(4)
        found = changing_lines(counters.replace, {"table": lambda: counters.table})
    assert found == {"table": line(Counters.replace, "self.table =")}


def test_the_trace_function_of_the_caller_returns_after_an_error():
    def own(_frame, _event, _argument):
        return None

    counters, before = Counters(), sys.gettrace()
    sys.settrace(own)
    try:
        with pytest.raises(ValueError, match="failed"):
            changing_lines(counters.fail, {"steps": lambda: counters.steps})
        assert sys.gettrace() is own
    finally:
        sys.settrace(before)
