"""Streams that a process uses, what is logged of them, and the context that makes replays fast."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from graphkit.errors import DeviceError
from graphkit.graphs import streams
from graphkit.graphs.streams import note_eager_step, restore_fast_replays, streams_in_use

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
        lambda *_, **__: [{"device": device, "stream": stream} for device, stream in found],
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


@pytest.fixture
def driver(monkeypatch):
    """Bindings that note their calls; ``errors`` has the code of a call, by name."""
    calls, errors = [], {}

    def noting(name, *results):
        def call(*args):
            calls.append((name, *args))
            return (errors.get(name, 0), *results)

        return call

    fake = SimpleNamespace(
        calls=calls,
        errors=errors,
        cuDeviceGet=noting("cuDeviceGet", "handle"),
        cuCtxCreate=noting("cuCtxCreate", "context"),
        cuCtxPopCurrent=noting("cuCtxPopCurrent", "context"),
        cuCtxDestroy=noting("cuCtxDestroy"),
    )
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=fake, runtime=fake))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("idle", device)))
    current = SimpleNamespace(device=DEVICE)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current)
    return fake


def test_a_context_is_created_and_destroyed(driver):
    restore_fast_replays(DEVICE)
    assert driver.calls == [
        ("idle", DEVICE),
        ("cuDeviceGet", 1),
        ("cuCtxCreate", None, 0, "handle"),
        ("cuCtxPopCurrent",),
        ("cuCtxDestroy", "context"),
    ]


def test_a_refused_context_changes_nothing(driver):
    driver.errors["cuCtxCreate"] = 2
    restore_fast_replays(DEVICE)
    assert driver.calls[-1] == ("cuCtxCreate", None, 0, "handle")


def test_a_context_that_stays_is_an_error(driver):
    driver.errors["cuCtxDestroy"] = 201
    with pytest.raises(DeviceError, match="failed with 201"):
        restore_fast_replays(DEVICE)


def test_a_cpu_has_no_contexts(driver):
    restore_fast_replays(torch.device("cpu"))
    assert not driver.calls


@pytest.fixture
def current(monkeypatch):
    """The current stream of device 1, whose handle a test sets."""
    stream = SimpleNamespace(device=DEVICE, cuda_stream=0, is_capturing=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.is_capturing)
    monkeypatch.setattr(streams, "_first_streams", {})
    return stream


def test_a_step_without_a_graph_on_a_second_stream_is_logged_once(current, caplog):
    for handle in (0, 0):
        current.cuda_stream = handle
        note_eager_step(DEVICE)
    assert not caplog.records
    for handle in (7, 0, 9):
        current.cuda_stream = handle
        note_eager_step(DEVICE)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("graphkit.graphs.streams", logging.WARNING)
    assert "a second stream of cuda:1" in record.getMessage()


def test_the_capture_stream_runs_no_step(current, caplog):
    note_eager_step(DEVICE)
    current.cuda_stream, current.is_capturing = 7, True
    note_eager_step(DEVICE)
    assert not caplog.records


def test_steps_of_a_cpu_run_on_no_stream(current, caplog):
    note_eager_step(torch.device("cpu"))
    assert not caplog.records
    assert not streams._first_streams
