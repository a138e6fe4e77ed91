"""What of the host's memory may show in a kernel's arguments."""

from __future__ import annotations

import ctypes
import sys

import pytest

from graphkit.graphs.host_memory import HostMemory, fill_stack


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's memory")
def test_the_heap_and_the_stack_are_the_hosts():
    buffer = ctypes.create_string_buffer(1 << 22)  # large enough for a mapping of its own
    memory = HostMemory()
    assert memory.holds(id(buffer))
    assert memory.holds(ctypes.addressof(buffer))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's memory")
def test_code_and_what_nobody_mapped_are_not():
    memory = HostMemory()
    code = ctypes.cast(ctypes.PyDLL(None).getpid, ctypes.c_void_p).value
    assert not memory.holds(code)
    assert not memory.holds(0)
    assert not memory.holds((1 << 64) - 1)


@pytest.mark.parametrize("byte", [0, 0xA5, 0xFF])
def test_filling_the_stack_leaves_the_caller_alone(byte):
    before = [1, "two", 3.0]
    for _ in range(100):
        fill_stack(byte)
    assert before == [1, "two", 3.0]
