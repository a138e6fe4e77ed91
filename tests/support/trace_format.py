"""A strict reader of the Trace Event Format, which nests slices as Perfetto does."""

from __future__ import annotations

import json
import math
from collections import Counter

KEYS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"},
}
"""Exact keys of metadata and of complete slices."""
LIMIT_US = 2**53 / 1000


def read_trace(text):
    """Return the events as a viewer sorts them.

    Anything that the format forbids, and anything that Perfetto reads as something else than a
    person would, fails an assertion.
    """
    trace = json.loads(text, parse_constant=_refuse)
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        _check(event)
    events = sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0.0))
    _check_names(events)
    _check_nesting(events)
    return events


def ns(event):
    """Return begin and end as Perfetto reads them, truncated to nanoseconds."""
    begin = int(event["ts"] * 1000.0)
    return begin, begin + int(event.get("dur", 0) * 1000.0)


def _refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def _check(event):
    assert set(event) == KEYS[event["ph"]]
    assert isinstance(event["name"], str)
    assert event["name"]
    for key in ("pid", "tid"):  # Perfetto gives thread 0 the number of its process
        assert type(event[key]) is int
        assert 0 < event[key] < 2**32
    for key in {"ts", "dur"} & set(event):
        assert type(event[key]) in (int, float)
        assert math.isfinite(event[key])
        assert 0 <= event[key] < LIMIT_US
    if "cat" in event:
        assert isinstance(event["cat"], str)
        assert event["cat"]
    assert isinstance(event.get("args", {}), dict)


def _check_names(events):
    metadata = [event for event in events if event["ph"] == "M"]
    for event in metadata:
        assert event["name"] in ("process_name", "thread_name")
        assert set(event["args"]) == {"name"}
        assert isinstance(event["args"]["name"], str)
        assert event["args"]["name"]
    processes = Counter(e["pid"] for e in metadata if e["name"] == "process_name")
    tracks = Counter(_track(e) for e in metadata if e["name"] == "thread_name")
    assert set(processes.values()) | set(tracks.values()) <= {1}
    assert {event["pid"] for event in events} == set(processes)
    assert {_track(event) for event in events} == set(tracks)


def _check_nesting(events):
    """The slices of a track must nest."""
    stacks = {}
    for event in events:
        stack = stacks.setdefault(_track(event), [])
        if event["ph"] == "X":
            begin, end = ns(event)
            while stack and ns(stack[-1])[1] <= begin:
                stack.pop()
            assert not stack or end <= ns(stack[-1])[1]
            stack.append(event)


def _track(event):
    return event["pid"], event["tid"]
