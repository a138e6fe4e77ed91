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
WITHOUT_A_DEVICE = (
    "nothing", "further streams", "default stream first", "without the default stream",
    "high priority", "replays on the capture stream", "replays on a third stream",
    "instantiated after", "per-thread default stream",
)  # fmt: skip
"""Conditions that need no CUDA call beside those of ``DecodeGraphs`` and of torch's streams."""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("streams")


@pytest.fixture
def finished(bench, monkeypatch):
    """Replace the processes of conditions; returns their names and variables."""
    started = []

    def run(command, *, env, timeout, **_):
        name = command[command.index("--condition") + 1]
        started.append((name, env.get("CUDA_DEVICE_MAX_CONNECTIONS")))
        if name == "memset":
            return SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nOSError: no device")
        if name == "event waits":
            raise subprocess.TimeoutExpired(command, timeout)
        found = {
            "device": "Imaginary H200",
            "nodes": {"tiny": 1000},
            "ms": {"before": {"tiny": 1.0}, "used": {"tiny": 1.25}},
        }
        return SimpleNamespace(returncode=0, stdout=f"a warning\n{json.dumps(found)}\n", stderr="")

    monkeypatch.setattr(bench.subprocess, "run", run)
    monkeypatch.setattr(bench, "driver_version", lambda: "580.1")
    return started


def test_a_report_names_what_was_measured_and_what_failed(bench, finished, tmp_path, capsys):
    out = tmp_path / "streams.json"
    chosen = ["nothing", "memset", "event waits", "at most 8 connections"]
    assert bench.main(["--only", *chosen, "--out", str(out)]) == 1
    assert finished == [*((name, None) for name in chosen[:3]), (chosen[3], "8")]
    report = BenchReport.from_json(out.read_text())
    assert report.environment.device == "Imaginary H200"
    assert {each.name: (each.value, each.unit) for each in report.measures} == {
        f"{name}: {state}: tiny": (ms, "ms")
        for name in ("nothing", "at most 8 connections")
        for state, ms in (("before", 1.0), ("used", 1.25))
    }
    assert report.settings["nodes of tiny"] == 1000
    assert report.settings["failed: memset"] == "OSError: no device"
    assert report.settings["failed: event waits"].startswith("took more than")
    assert "not measured" not in report.settings
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("tiny 1.250 (1.250x)")
    assert lines[2] == "memset: failed: OSError: no device"


def test_the_report_is_written_after_every_condition(bench, finished, tmp_path, monkeypatch):
    out = tmp_path / "streams.json"
    run = bench.subprocess.run

    def interrupted(command, **options):
        if "high priority" in command:
            raise KeyboardInterrupt
        return run(command, **options)

    monkeypatch.setattr(bench.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--only", "nothing", "high priority", "memset", "--out", str(out)])
    report = BenchReport.from_json(out.read_text())
    assert len(report.measures) == 2
    assert report.settings["not measured"] == "high priority, memset"


def test_no_condition_starts_after_the_time(bench, finished, capsys):
    assert bench.main(["--seconds", "-1"]) == 0
    assert not finished
    assert "stopped" in capsys.readouterr().out


class FakeStream:
    """A stream that cannot run anything."""

    def __init__(self, *_, **__):
        pass


@pytest.fixture
def graphs(bench, monkeypatch):
    """Graphs that note on which stream each kernel runs."""
    current, used = [FakeStream()], []

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    for name in ("Stream", "ExternalStream", "default_stream"):
        monkeypatch.setattr(torch.cuda, name, FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    graph = SimpleNamespace(instantiate=lambda: None, upload=lambda: None)
    return SimpleNamespace(
        capture=lambda on=None, warm_up_on=None: used.append(warm_up_on or on or FakeStream()),
        run_kernel=used.append, graphs={"tiny": graph}, used=used, current=current,
    )  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_A_DEVICE)
def test_the_states_of_a_condition_are_distinct(bench, graphs, name):
    states = list(bench.CONDITIONS[name].run(graphs))
    assert len(states) == len(set(states)) >= 2
    assert len(graphs.current) == 1, "the current stream must be restored"


def test_each_state_of_further_streams_uses_new_ones(bench, graphs):
    run = bench.CONDITIONS["further streams"].run(graphs)
    used = {state: len(set(graphs.used)) for state in run}
    assert used == {"before": 1, "one more": 2, "two more": 3, "seven more": 8, "1 s later": 8}
