"""Differences between two captures: only bytes with a meaning count."""

from __future__ import annotations

import numpy as np
import pytest

from graphkit.audit.canonical_nodes import CanonicalArgument, CanonicalNode
from graphkit.audit.capture_differences import capture_differences, differing_bytes


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
