"""Kernels by either kind of handle, and both forms of their arguments."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from graphkit.graphs.walk.kernels import Kernel, TritonKernels

LAYOUT = ((0, 8), (8, 4), (12, 1), (16, 12))
PARTS = (bytes(range(8)), b"abcd", b"\x7f", b"twelve bytes")
SYMBOL = "_ZN12_GLOBAL__N_15plainEi"


def kernel_of(driver, *layout, **facts):
    handle = driver.function(SYMBOL, *layout, **facts)
    handles = (0, handle) if facts.get("as_kernel") else (handle, 0)
    return Kernel(driver, *handles, TritonKernels())


def values(parameters):
    return [(each.offset, each.size, each.data) for each in parameters]


EXPECTED = [(*place, data) for place, data in zip(LAYOUT, PARTS, strict=True)]


@pytest.mark.parametrize("as_kernel", [False, True])
def test_a_kernel_is_read_by_either_handle(driver, as_kernel):
    kernel = kernel_of(driver, *LAYOUT, registers=40, shared=128, as_kernel=as_kernel)
    assert kernel.name == "(anonymous namespace)::plain(int)"
    assert kernel.parameter_layout == list(LAYOUT)
    assert (kernel.registers, kernel.static_shared_bytes) == (40, 128)


def test_arguments_are_read_from_an_array_of_pointers(driver):
    pointers = driver.parameters(*PARTS)
    assert values(kernel_of(driver, *LAYOUT).parameters(pointers, 0)) == EXPECTED


@pytest.mark.parametrize("tags", [(1, 2), (2, 1)])
def test_arguments_are_read_from_one_buffer(driver, tags):
    buffer = struct.pack("<8s4sc3x12s", *PARTS)
    extra = driver.extra(buffer, tags=tags)
    assert values(kernel_of(driver, *LAYOUT).parameters(0, extra)) == EXPECTED


def test_an_array_of_pointers_takes_precedence_over_a_buffer(driver):
    pointers, extra = driver.parameters(*PARTS), driver.extra(bytes(28))
    assert values(kernel_of(driver, *LAYOUT).parameters(pointers, extra)) == EXPECTED


def test_missing_arguments_have_no_data(driver):
    kernel = kernel_of(driver, *LAYOUT)
    nothing = [(*place, None) for place in LAYOUT]
    assert values(kernel.parameters(0, 0)) == nothing
    assert values(kernel.parameters(0, driver.extra(b"", tags=()))) == nothing
    assert values(kernel.parameters(0, driver.extra(b"12345678", tags=(1,)))) == nothing
    assert values(kernel.parameters(driver.parameters(*PARTS[:3], None), 0)) == [
        *EXPECTED[:3], (16, 12, None),
    ]  # fmt: skip


def test_a_short_buffer_gives_the_arguments_it_contains(driver):
    extra = driver.extra(struct.pack("<8s4sc", *PARTS[:3]))
    assert values(kernel_of(driver, *LAYOUT).parameters(0, extra)) == [
        *EXPECTED[:3], (16, 12, None),
    ]  # fmt: skip


def test_a_kernel_may_have_no_parameters(driver):
    kernel = kernel_of(driver)
    assert kernel.parameter_layout == []
    assert values(kernel.parameters(driver.parameters(), 0)) == []


def test_the_driver_is_queried_once_per_property(driver):
    kernel = kernel_of(driver, *LAYOUT)
    first = (kernel.name, kernel.parameter_layout, kernel.registers, kernel.static_shared_bytes)
    driver.functions.clear()
    assert (
        kernel.name,
        kernel.parameter_layout,
        kernel.registers,
        kernel.static_shared_bytes,
    ) == first


class CompiledKernel:
    """What is read of a kernel that Triton has loaded."""

    function = 0xFACE

    def __init__(self, **types):
        names = SimpleNamespace(arg_names=[*types, "BLOCK"])
        self.src = SimpleNamespace(signature=types, constants={}, fn=names)


def test_a_descriptor_is_followed_by_shape_and_strides():
    kernel = CompiledKernel(
        out="*fp32", x="tensordesc<u8[2, 128],NVMMASharedLayout(rank=2)>", n="i32"
    )
    expected = ["out", "x", "x.shape[0]", "x.shape[1]", "x.strides[0]", "x.strides[1]", "n"]
    names = TritonKernels().parameter_names(kernel.function, "described", len(expected) + 2)
    assert [*names] == [*expected, "global_scratch", "profile_scratch"]
    others = TritonKernels().parameter_names(kernel.function, "described", len(expected) - 1)
    assert [*others] == [""] * 6  # not as expected: no name is better than a wrong one
