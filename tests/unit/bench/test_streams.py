"""``tools/bench/streams.py``: its conditions and its report, without a device."""

from __future__ import annotations

import importlib
import json
import subprocess
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphkit.records import BenchReport

BENCH = Path(__file__).parents[3] / "tools" / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("streams")


@pytest.fixture
def conditions(bench):
    return importlib.import_module("stream_conditions")


@pytest.fixture
def finished(bench, monkeypatch):
    """Replace the processes of conditions; returns their names and variables."""
    started = []

    def run(command, *, env, timeout, **_):
        name = command[command.index("--condition") + 1]
        started.append((name, env.get("CUDA_MODULE_LOADING")))
        if name == "brief context":
            raise subprocess.TimeoutExpired(command, timeout)
        common = {"device": "Imaginary H200", "nodes": {"tiny": 1000}}
        states = [
            {"state": "first", "ms": {"tiny": 1.0}, **common},
            {"state": "used", "ms": {"tiny": 1.25}, **common},
        ]
        fails = name == "green context"
        lines = [json.dumps(each) for each in (states[:1] if fails else states)]
        return SimpleNamespace(
            returncode=int(fails),
            stdout="\n".join(["a warning", *lines]),
            stderr="Traceback\nOSError: not supported" if fails else "",
        )

    monkeypatch.setattr(bench.subprocess, "run", run)
    monkeypatch.setattr(bench, "driver_version", lambda: "580.1")
    return started


def test_a_report_names_what_was_measured_and_what_failed(bench, finished, tmp_path, capsys):
    out = tmp_path / "streams.json"
    chosen = ["one stream", "green context", "brief context", "modules loaded at once"]
    assert bench.main(["--only", *chosen, "--out", str(out)]) == 1
    assert finished == [*((name, None) for name in chosen[:3]), (chosen[3], "EAGER")]
    report = BenchReport.from_json(out.read_text())
    assert report.environment.device == "Imaginary H200"
    assert {each.name: (each.value, each.unit) for each in report.measures} == {
        "one stream: first: tiny": (1.0, "ms"),
        "one stream: used: tiny": (1.25, "ms"),
        "green context: first: tiny": (1.0, "ms"),
        "modules loaded at once: first: tiny": (1.0, "ms"),
        "modules loaded at once: used: tiny": (1.25, "ms"),
    }
    assert report.settings["nodes of tiny"] == 1000
    assert report.settings["failed: green context"] == "OSError: not supported"
    assert report.settings["failed: brief context"].startswith("took more than")
    assert "not measured" not in report.settings
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("tiny 1.250 (1.250x)")
    assert lines[3] == "green context: failed: OSError: not supported"


def test_the_report_is_written_after_every_condition(bench, finished, tmp_path, monkeypatch):
    out = tmp_path / "streams.json"
    run = bench.subprocess.run

    def interrupted(command, **options):
        if "two streams" in command:
            raise KeyboardInterrupt
        return run(command, **options)

    monkeypatch.setattr(bench.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--only", "one stream", "two streams", "green context", "--out", str(out)])
    report = BenchReport.from_json(out.read_text())
    assert len(report.measures) == 2
    assert report.settings["not measured"] == "two streams, green context"


def test_no_condition_starts_after_the_time(bench, finished, capsys):
    assert bench.main(["--seconds", "-1"]) == 0
    assert not finished
    assert "stopped" in capsys.readouterr().out


class FakeStream:
    """A stream that cannot run anything."""

    current = None

    def __init__(self, *_, **__):
        pass


class FakeGraphs:
    """Notes the methods that are called, those of ``word`` included, and their streams."""

    def __init__(self):
        self.graphs = {"tiny": SimpleNamespace(num_nodes=1000)}
        self.ran = []

    def __getattr__(self, name):
        def method(*_):
            self.ran.append((name, FakeStream.current))
            return {"tiny": 1.0}

        return self if name == "word" else method


@pytest.fixture
def ran(conditions, monkeypatch):
    """Replace graphs and streams. Returns what a condition ran, and numbers its streams."""

    @contextmanager
    def on(stream):
        before, FakeStream.current = FakeStream.current, stream
        yield
        FakeStream.current = before

    default = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: default)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Imaginary H200")

    def run(name):
        graphs = FakeGraphs()
        monkeypatch.setattr(conditions, "DecodeGraphs", lambda: graphs)
        states = [found["state"] for found in conditions.measured(name, 1)]
        numbers = {default: 0}
        calls = [(call, numbers.setdefault(stream, len(numbers))) for call, stream in graphs.ran]
        return states, calls

    return run


def test_an_order_runs_each_act_on_its_stream(ran):
    states, calls = ran("kernel before the capture")
    assert states == ["first"]
    assert calls == [("allocate", 1), ("warm_up", 1), ("add_", 0), ("capture", 1), ("replay_ms", 1)]


def test_acts_between_replays_leave_the_stream_of_the_replays(ran):
    states, calls = ran("steps after")
    assert states == ["first", "steps elsewhere", "captured again"]
    assert calls[3:] == [
        ("replay_ms", 1), ("warm_up", 2), ("replay_ms", 1), ("capture", 1), ("replay_ms", 1)
    ]  # fmt: skip


def test_each_order_warms_up_before_it_captures_on_a_stream_that_can(conditions):
    steps = (conditions.allocate, conditions.warm_up, conditions.capture)
    for name, condition in conditions.CONDITIONS.items():
        order = [(stream, steps.index(act)) for stream, act in condition.order if act in steps]
        if name == "torch.cuda.graph":
            assert order == [(conditions.MAIN, 0), (conditions.MAIN, 1)]
            continue
        assert [step for _, step in order] in ([0, 1, 2], [0, 1, 1, 2])
        assert order[-1][0] != conditions.DEFAULT, "CUDA refuses to capture the default stream"
