"""Profiled events are grouped into launches by correlation id and sorted by start."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from graphkit.graphs.walk import timing
from graphkit.graphs.walk.timing import profile_launches

GRID = (4, 1, 1)


class Event:
    """An event of the profiler."""

    def __init__(self, name, correlation, start, duration, on=DeviceType.CUDA, metadata=None):
        self.facts = (name, correlation, start, duration, on)
        self.metadata = metadata

    def name(self):
        return self.facts[0]

    def correlation_id(self):
        return self.facts[1]

    def start_ns(self):
        return self.facts[2]

    def duration_ns(self):
        return self.facts[3]

    def device_type(self):
        return self.facts[4]

    def metadata_json(self):
        return json.dumps({"grid": [4, 1, 1]})[1:-1] if self.metadata is None else self.metadata


@pytest.fixture
def profiled(monkeypatch):
    """``profiled(events)``: sets the events that the profiler reports."""
    events = []

    class Profile:
        def __init__(self, **_):
            kineto = SimpleNamespace(events=lambda: events)
            self.profiler = SimpleNamespace(kineto_results=kineto)

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

    monkeypatch.setattr(timing, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return events.extend


def test_events_are_grouped_by_launch_and_sorted_by_start(profiled):
    profiled([
        Event("b", 2, 40, 5), Event("a", 1, 10, 5), Event("b", 1, 20, 5), Event("a", 2, 30, 5),
        Event("cudaGraphLaunch", 1, 1, 5, on=DeviceType.CPU), Event("empty", 1, 15, 0),
    ])  # fmt: skip
    replays = []
    found = profile_launches(lambda: replays.append(1))
    assert [[(s.name, s.start, s.grid) for s in each] for each in found] == [
        [("a", 10, GRID), ("b", 20, GRID)], [("a", 30, GRID), ("b", 40, GRID)],
    ]  # fmt: skip
    assert len(replays) == timing.REPLAYS + 1


@pytest.mark.parametrize("metadata", ["", "no json", '"stream": 7'])
def test_a_span_may_have_no_grid(profiled, metadata):
    profiled([Event("a", 1, 10, 5, metadata=metadata)])
    assert profile_launches(lambda: None)[0][0].grid == ()


def test_unprofiled_replays_are_timed_one_behind_the_other(monkeypatch):
    calls = []

    class Event:
        """An event that counts the calls before it."""

        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(calls)
            calls.append("record")

        def synchronize(self):
            calls.append("synchronize")

        def elapsed_time(self, end):
            return (end.at - self.at) * self.at / 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    found = timing.unprofiled_us(lambda: calls.append("replay"))
    count = timing.UNPROFILED_REPLAYS
    assert calls == [*["replay", "record"] * (count + 1), "synchronize"]
    assert found == pytest.approx(2 * count), "the median of 2 * (1, 3, 5, ...)"
