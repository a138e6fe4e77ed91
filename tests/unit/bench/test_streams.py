"""``tools/bench/streams.py``: its conditions and its report, without a device."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.graphs import RecorderBackend
from graphkit.records import BenchReport


@pytest.fixture
def conditions(bench):
    return importlib.import_module("stream_conditions")


@pytest.fixture
def finished(bench, monkeypatch):
    """Replace the processes of conditions; returns their names."""
    started = []

    def run(command, *, timeout, **_):
        name = command[command.index("--condition") + 1]
        started.append(name)
        if name == "brief context":
            raise subprocess.TimeoutExpired(command, timeout)
        common = {"device": "Imaginary H200", "nodes": {"tiny": 1000}}
        states = [
            {"state": "first", "ms": {"tiny": 1.0}, **common},
            {"state": "used", "ms": {"tiny": 1.25}, **common},
        ]
        fails = name == "other work after"
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
    chosen = ["one stream", "other work after", "brief context", "graphkit"]
    assert bench.main(["--only", *chosen, "--out", str(out)]) == 1
    assert finished == chosen
    report = BenchReport.from_json(out.read_text())
    assert report.environment.device == "Imaginary H200"
    assert {each.name: (each.value, each.unit) for each in report.measures} == {
        "one stream: first: tiny": (1.0, "ms"),
        "one stream: used: tiny": (1.25, "ms"),
        "other work after: first: tiny": (1.0, "ms"),
        "graphkit: first: tiny": (1.0, "ms"),
        "graphkit: used: tiny": (1.25, "ms"),
    }
    assert report.settings["nodes of tiny"] == 1000
    assert report.settings["failed: other work after"] == "OSError: not supported"
    assert report.settings["failed: brief context"].startswith("took more than")
    assert "not measured" not in report.settings
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("tiny 1.250 (1.250x)")
    assert lines[3] == "other work after: failed: OSError: not supported"


def test_the_report_is_written_after_every_condition(bench, finished, tmp_path, monkeypatch):
    out = tmp_path / "streams.json"
    run = bench.subprocess.run

    def interrupted(command, **options):
        if "two streams" in command:
            raise KeyboardInterrupt
        return run(command, **options)

    monkeypatch.setattr(bench.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--only", "one stream", "two streams", "graphkit", "--out", str(out)])
    report = BenchReport.from_json(out.read_text())
    assert len(report.measures) == 2
    assert report.settings["not measured"] == "two streams, graphkit"


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
        self.weight = torch.ones(16, 16)

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
    states, calls = ran("kernel before the warm-up")
    assert states == ["first"]
    assert calls == [("allocate", 1), ("add_", 0), ("warm_up", 1), ("capture", 1), ("replay_ms", 1)]


def test_acts_between_replays_leave_the_stream_of_the_replays(ran):
    states, calls = ran("steps after")
    assert states == [
        "first", "other kernels elsewhere", "small product elsewhere", "products elsewhere",
        "captured again",
    ]  # fmt: skip
    assert calls[-4:] == [("run_products", 3), ("replay_ms", 1), ("capture", 1), ("replay_ms", 1)]


@pytest.mark.parametrize("name", ["graphkit", "graphkit, other warm-ups"])
def test_graphkit_replays_on_the_stream_of_the_eager_steps(ran, monkeypatch, conditions, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for missing in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, missing, None, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    states, calls = ran(name)
    assert states == ["first", "eager steps"]
    calls_of_each = ["allocate", "capture", "replay_ms", "warm_up", "replay_ms"]
    assert calls == [(call, 0) for call in calls_of_each]


def test_each_order_warms_up_before_it_captures_on_a_stream_that_can(conditions):
    steps = (conditions.allocate, conditions.warm_up, conditions.capture)
    for name, condition in {**conditions.ORDERS, **conditions.LATER, **conditions.REPAIRS}.items():
        order = [(stream, steps.index(act)) for stream, act in condition.order if act in steps]
        if name == "torch.cuda.graph":
            assert order == [(conditions.MAIN, 0), (conditions.MAIN, 1)]
            continue
        assert [step for _, step in order] in ([0, 1, 2], [0, 1, 1, 2])
        assert order[-1][0] != conditions.DEFAULT, "CUDA refuses to capture the default stream"


def test_a_runner_graph_warms_up_captures_and_replays_the_step(bench):
    word = torch.zeros(1)
    module = importlib.import_module("graphkit_graphs")
    graph = module.RunnerGraph(lambda: word.add_(1), RecorderBackend())
    before = word.item()
    graph.launch()
    assert word.item() == before + 1
    assert graph.num_nodes > 1, "the step and its refresh"


class Products(TorchDispatchMode):
    """Counts the products by the shape of the weight."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.found[tuple(args[1].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_products_and_other_kernels_are_parts_of_the_layers(bench, monkeypatch):
    module, acts = map(importlib.import_module, ("decode_graphs", "stream_acts"))
    hidden, width = 16, 64
    for name, value in {"HIDDEN": 16, "KV_WIDTH": 8, "FEED_FORWARD": 64}.items():
        monkeypatch.setattr(module, name, value)
    shapes = [(hidden, 2 * hidden), (hidden, hidden), (hidden, 2 * width), (width, hidden)]
    graphs = module.DecodeGraphs()
    weights = [torch.ones(shape) for shape in shapes]
    graphs._layers = [module.Layer(*weights, cache=torch.zeros(module.ROWS, hidden))]
    graphs._x = torch.ones(module.ROWS, hidden)
    found = []
    for run in (module.DecodeGraphs.run_layers, acts.products, acts.other_kernels):
        with Products() as products:
            run(graphs)
        found.append(products.found)
    assert found == [Counter(shapes), Counter(shapes), Counter()]
