"""Captures of a device whose kernels keep leftovers of the stack in their structs."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from graphkit.audit import recaptures
from graphkit.audit.canonical_nodes import CanonicalArgument, CanonicalNode
from graphkit.audit.capture_differences import capture_differences, differing_bytes
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


def node(*data, name="kernel", grid="1x1x1"):
    return CanonicalNode(
        name, (("grid", grid),), tuple(CanonicalArgument("", each) for each in data)
    )


def test_a_different_grid_is_a_difference():
    (found,) = capture_differences([node(grid="8x1x1")], [node(grid="16x1x1")], {})
    assert (found.what, found.before, found.after) == ("grid", "8x1x1", "16x1x1")


def test_a_difference_in_a_struct_has_its_offset():
    before, after = bytearray(64), bytearray(64)
    after[20] = 7
    (found,) = capture_differences([node(bytes(before))], [node(bytes(after))], {})
    assert (found.argument, found.offset, found.before, found.after) == (0, 20, "0", "7")


def test_unset_bytes_are_ignored_and_their_neighbours_are_not():
    """A float that torch sets, after three bytes that it leaves unset."""
    first = b"\x01\x00\x00\x00" + np.float32(0.5).tobytes()
    noisy = b"\x01\xa5\xa5\xa5" + np.float32(0.5).tobytes()
    after = b"\x01\x11\x22\x33" + np.float32(0.25).tobytes()
    unset = differing_bytes([node(first)], [node(noisy)])
    assert unset == {(0, 0): {1, 2, 3}}
    assert not list(capture_differences([node(first)], [node(noisy)], unset))
    (found,) = capture_differences([node(first)], [node(after)], unset)
    assert (found.offset, found.before, found.after) == (4, "0.5", "0.25")


@pytest.mark.parametrize(("one", "other"), [(0.5, 0.25), (0.7, 1.4), (1 / 0.7, 1 / 0.9)])
def test_a_double_is_one_number_also_if_one_half_changes(one, other):
    data = [node(np.float64(value).tobytes()) for value in (one, other)]
    (found,) = capture_differences(data[:1], data[1:], {})
    assert (float(found.before), float(found.after)) == pytest.approx((one, other))


def test_a_float_beside_four_unset_bytes_is_one_number():
    data = [node(b"\x03\x7c\x12\xf3" + np.float32(value).tobytes()) for value in (1.0, 0.5)]
    (found,) = capture_differences(data[:1], data[1:], {})
    assert (found.offset, found.before, found.after) == (4, "1", "0.5")


def test_an_eight_byte_int_is_one_number():
    (found,) = capture_differences(
        [node((3).to_bytes(8, "little"))], [node((5 << 32).to_bytes(8, "little"))], {}
    )
    assert found.offset == 0
    assert found.before == "3"
