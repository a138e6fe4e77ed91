"""Decoding of kernel arguments: pointers by the memory they point to, numbers by their size."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings, strategies as st

from graphkit.graphs.walk import MemoryMap
from graphkit.graphs.walk.arguments import Parameter, decode, number_text

FUZZ = settings(deadline=None, derandomize=True, max_examples=300)
X, Y = torch.zeros(64), torch.zeros(64)
MEMORY = MemoryMap({"input": {"x": X, "y": Y}})
AT_X, AT_Y = X.data_ptr(), Y.data_ptr()


def parameter(*parts, offset=0, name=""):
    """A parameter of (struct format, values...) parts without gaps."""
    data = b"".join(struct.pack(f"<{form}", *values) for form, *values in parts)
    return Parameter(offset, len(data), data, name)


def kind_and_text(*parts):
    argument = decode(parameter(*parts), MEMORY)
    return argument.kind, argument.text


def test_a_pointer_has_the_name_of_its_memory():
    argument = decode(parameter(("Q", AT_X + 8), offset=24, name="source"), MEMORY)
    assert (argument.kind, argument.text, argument.size) == ("pointer", "x+0x8", 8)
    assert (argument.name, argument.offset) == ("source", 24)
    assert [(p.address, p.name, p.offset) for p in argument.pointers] == [(AT_X + 8, "x+0x8", 0)]


def test_a_pointer_has_the_bytes_from_there_to_the_end_of_its_tensor():
    def size(address, *operands):
        (pointer,) = decode(parameter(("Q", address)), MEMORY, operands).pointers
        return pointer.size

    assert size(AT_X) == X.nbytes
    assert size(AT_X + 8) == X.nbytes - 8
    view, other = (AT_X, 16), (AT_Y, 64)
    assert size(AT_X, view, other) == 16, "of a view the operation's own tensor is known"
    assert size(AT_X + 12, other, view) == 4
    assert size(AT_X + 16, view) == X.nbytes - 16, "the view ends before"


def test_memory_without_a_tensor_has_no_size_unless_the_operation_knows_it():
    memory = MemoryMap({}, query_kind=lambda _address: "external")
    address = parameter(("Q", 0x7F0000000100))
    for operands, expected in (((), 0), ([(0x7F0000000000, 0x180)], 0x80)):
        (pointer,) = decode(address, memory, operands).pointers
        assert (pointer.memory, pointer.size) == ("external", expected)


@pytest.mark.parametrize("index", range(5))
def test_a_pointer_is_found_at_every_aligned_offset_of_a_struct(index):
    words = [7] * 5
    words[index] = AT_Y
    argument = decode(parameter(("5Q", *words)), MEMORY)
    assert argument.kind == "struct"
    assert [(p.name, p.offset) for p in argument.pointers] == [("y", 8 * index)]


def test_an_unaligned_address_is_no_pointer():
    argument = decode(parameter(("I", 1), ("Q", AT_X), ("I", 1)), MEMORY)
    assert argument.pointers == ()


def test_a_struct_names_each_pointer_once():
    kind, text = kind_and_text(("4Q", AT_X, AT_Y, AT_X, 3))
    assert kind == "struct"
    assert text.startswith("32 bytes #")
    assert text.endswith(": x, y")


def test_a_short_struct_with_a_pointer_is_shown_by_its_digest():
    kind, text = kind_and_text(("Q", AT_X), ("Q", 3))
    assert (kind, text[:10], text[-3:]) == ("struct", "16 bytes #", ": x")


def test_a_partial_last_word_of_a_struct_is_ignored():
    argument = decode(parameter(("Q", 3), ("Q", AT_X), ("I", 9)), MEMORY)
    assert [(p.name, p.offset) for p in argument.pointers] == [("x", 8)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([("B", 0)], "0"),
        ([("b", -3)], "-3"),
        ([("h", -300)], "-300"),
        ([("i", 880)], "880"),
        ([("i", -1)], "-1"),
        ([("i", 1 << 24)], str(1 << 24)),
        ([("I", 0x80000000)], str(-(1 << 31))),
        ([("IB", 1, 0)], "1"),
        ([("IB", 0, 1)], str(1 << 32)),
        ([("f", 1.0)], "1"),
        ([("f", 1e-6)], "1e-06"),
        ([("f", -0.5)], "-0.5"),
        ([("f", 0.255034864)], "0.255034864"),
        ([("f", math.inf)], "inf"),
        ([("f", -math.inf)], "-inf"),
        ([("f", 3e38)], str(struct.unpack("<i", struct.pack("<f", 3e38))[0])),
        ([("q", 0)], "0"),
        ([("q", -7)], "-7"),
        ([("q", 3_000_000_000)], "3000000000"),
        ([("d", 0.1)], "0.1"),
        ([("d", 1 / 3)], "0.333333333"),
        ([("d", -1e-5)], "-1e-05"),
        ([("d", math.inf)], "inf"),
        ([("d", -math.inf)], "-inf"),
        ([("i", 6), ("i", 4)], "6, 4"),
        ([("i", -1), ("i", 5)], "-1, 5"),
        ([("i", 3), ("f", 0.5)], "3, 0.5"),
        ([("f", 1e-6), ("f", 1.0)], "1e-06, 1"),  # CUDAFunctorOnSelf_add<float>: eps and alpha
    ],
)
def test_a_number_is_shown_in_its_most_probable_type(parts, expected):
    assert kind_and_text(*parts) == ("number", expected)


def test_twelve_bytes_without_an_address_are_three_numbers():
    assert kind_and_text(("ifi", 5, 0.5, -2)) == ("struct", "5, 0.5, -2")
    assert kind_and_text(("3iB", 5, 6, 7, 8)) == ("struct", "5, 6, 7, 8")


def test_a_pair_of_small_ints_is_no_address():
    asked = []
    memory = MemoryMap({}, query_kind=lambda address: asked.append(address) or "host")
    assert decode(parameter(("ii", 64, 128)), memory).text == "64, 128"
    assert asked == []


def test_a_number_beyond_the_address_space_is_no_address():
    memory = MemoryMap({}, query_kind=lambda _address: "host")
    assert decode(parameter(("Q", (1 << 47) - 1)), memory).kind == "pointer"
    assert decode(parameter(("Q", 1 << 47)), memory).kind == "number"


def test_a_parameter_without_data_is_unreadable():
    argument = decode(Parameter(8, 16, None), MEMORY)
    assert (argument.kind, argument.text, argument.pointers) == ("unreadable", "unreadable", ())
    assert (argument.offset, argument.size) == (8, 16)


def digest(*parts):
    return kind_and_text(*parts)[1].split(":")[0]


def test_a_digest_ignores_addresses():
    assert digest(("Q", AT_X), ("4I", 1, 2, 3, 4)) == digest(("Q", AT_Y), ("4I", 1, 2, 3, 4))
    assert digest(("Q", AT_X), ("4I", 1, 2, 3, 4)) != digest(("Q", AT_X), ("4I", 1, 2, 3, 5))


@given(st.binary(max_size=72), st.integers(0, 64), st.sampled_from(["", "host", "external"]))
@FUZZ
def test_any_bytes_are_decoded(data, offset, known):
    argument = decode(
        Parameter(offset, len(data), data), MemoryMap({}, query_kind=lambda _at: known)
    )
    assert argument.text
    assert (argument.offset, argument.size) == (offset, len(data))
    assert argument.kind == "struct" or len(data) <= 8
    for pointer in argument.pointers:
        assert data[pointer.offset : pointer.offset + 8] == pointer.address.to_bytes(8, "little")
        assert pointer.offset % 8 == 0
        assert pointer.memory == known


@given(st.integers(-(1 << 24) + 1, (1 << 24) - 1), st.sampled_from([4, 8]))
@FUZZ
def test_every_small_int_is_shown_as_an_int(value, size):
    is_infinite = size == 4 and value == -(1 << 23)
    expected = "-inf" if is_infinite else str(value)
    assert number_text(value.to_bytes(size, "little", signed=True)) == expected


@given(st.floats(2**-36, 2**36, width=32) | st.floats(-(2**36), -(2**-36), width=32))
@FUZZ
def test_the_text_of_a_float_round_trips(value):
    data = struct.pack("<f", value)
    if abs(int.from_bytes(data, "little", signed=True)) >= 1 << 24:
        assert struct.pack("<f", float(number_text(data))) == data
