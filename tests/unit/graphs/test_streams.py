"""Count of the streams that a process uses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphkit.graphs.streams import streams_in_use

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def owners(monkeypatch):
    """Device and stream of each segment of the allocator; stream 7 of device 1 is current."""
    found = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: SimpleNamespace(device=DEVICE, cuda_stream=7),
    )
    monkeypatch.setattr(
        torch.cuda,
        "memory_snapshot",
        lambda: [{"device": device, "stream": stream} for device, stream in found],
    )
    return found


def test_streams_with_memory_and_the_current_one_are_in_use(owners):
    assert streams_in_use(DEVICE) == {7}
    owners += [(1, 0), (1, 0), (1, 7), (0, 9)]
    assert streams_in_use(DEVICE) == {0, 7}
    assert streams_in_use(torch.device("cuda")) == {0, 7}, "the current device"


def test_a_process_without_cuda_uses_no_stream():
    if torch.cuda.is_initialized():
        pytest.skip("an earlier test has initialised CUDA")
    assert streams_in_use(DEVICE) == frozenset()
