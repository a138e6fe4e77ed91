"""Host memory whose addresses may appear in kernel arguments."""

from __future__ import annotations

import ctypes
import sys

import pytest

from graphkit.graphs.host_memory import HostMemory, fill_stack


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's memory")
def test_the_heap_is_host_memory():
    buffer = ctypes.create_string_buffer(1 << 22)  # large enough for its own mapping
    memory = HostMemory()
    assert id(buffer) in memory
    assert ctypes.addressof(buffer) in memory


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's memory")
def test_code_of_libraries_is_host_memory():
    memory = HostMemory()
    code = ctypes.cast(ctypes.PyDLL(None).getpid, ctypes.c_void_p).value
    assert code in memory
    assert 0 not in memory
    assert (1 << 64) - 1 not in memory


def test_files_mapped_below_4_gib_are_left_out(monkeypatch):
    """Sizes and counts look like addresses there. The heap is kept."""
    lines = "00400000-00800000 r-xp 0 08:01 77 /bin/x\n01000000-01800000 rw-p 0 00:00 0 [heap]\n"
    monkeypatch.setattr("pathlib.Path.read_text", lambda _path: lines)
    memory = HostMemory()
    assert 0x500000 not in memory
    assert 0x1234567 in memory


@pytest.mark.parametrize("byte", [0, 0xA5, 0xFF])
def test_filling_the_stack_does_not_affect_the_caller(byte):
    before = [1, "two", 3.0]
    for _ in range(100):
        fill_stack(byte)
    assert before == [1, "two", 3.0]
