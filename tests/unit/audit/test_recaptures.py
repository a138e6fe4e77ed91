"""Captures of a device whose kernels keep leftovers of the stack in their structs."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from graphkit.audit import recaptures
from graphkit.audit.canonical_nodes import CanonicalArgument, CanonicalNode
from graphkit.audit.recaptures import Change, Recaptures
from graphkit.records import Argument, Node

STRUCT = 648
"""Bytes of the struct that torch's kernels take for tensors that are broadcast."""


class Device:
    """A runner of one size, whose captures follow ``value``, beside leftovers at an offset."""

    def __init__(self, offset, leftover):
        self.device, self.group = SimpleNamespace(type="cuda"), None
        self.offset, self.leftover, self.value, self.captures = offset, leftover, 1, 0

    def memory_names(self, _weights):
        return {}

    @contextmanager
    def recapture(self, **_options):
        self.captures += 1
        yield {2: self}

    def nodes(self, *_):
        add = bytearray(STRUCT)
        add[4] = 7
        if self.offset is not None:
            add[self.offset] = self.leftover(self)
        scale = self.value.to_bytes(4, "little")
        return (
            CanonicalNode("at::native::add", (), (CanonicalArgument("", bytes(add)),)),
            CanonicalNode("at::native::mul", (), (CanonicalArgument("", scale),)),
        )

    def records(self, *_, **__):
        argument = Argument(name="", size=STRUCT, kind="struct", text="")
        names = ("add", "mul")
        return SimpleNamespace(
            nodes=[
                Node(index=i, kind="kernel", name=f"at::native::{name}", short_name=name,
                     arguments=(argument,))
                for i, name in enumerate(names)
            ]
        )  # fmt: skip

    @contextmanager
    def with_value(self, value):
        before, self.value = self.value, value
        yield
        self.value = before


@pytest.fixture
def confirmed(monkeypatch):
    """``confirmed(offset, leftover, value)``: names of nodes that differ with another value."""

    def run(offset, leftover, value):
        device = Device(offset, leftover)
        monkeypatch.setattr(recaptures, "canonical_nodes", lambda graph, _names: graph.nodes())
        monkeypatch.setattr(recaptures, "inspect_graph", device.records)
        change = Change(lambda: nullcontext() if value is None else device.with_value(value))
        again = Recaptures(device)
        with again.first_kept():
            baseline = again.baseline()
            found = again.confirmed(baseline, change, again.differences(baseline, change))[2]
        return [baseline.records[2][each.node].short_name for each in found]

    return run


LEFTOVERS = {
    "of any capture": lambda device: device.captures,
    "of the change": lambda device: device.value,
}


@pytest.mark.parametrize("leftover", LEFTOVERS.values(), ids=LEFTOVERS)
@pytest.mark.parametrize("offset", [None, 40, 300, 647])
def test_the_node_that_follows_a_change_is_named_beside_leftovers(confirmed, offset, leftover):
    assert confirmed(offset, leftover, 2) == ["mul"]


@pytest.mark.parametrize("offset", [4, 40, 300])
def test_leftovers_that_change_with_each_capture_follow_no_change(confirmed, offset):
    assert confirmed(offset, LEFTOVERS["of any capture"], None) == []


def test_bytes_that_are_always_set_count(confirmed):
    assert confirmed(8, LEFTOVERS["of the change"], 2) == ["add", "mul"]
