"""``tools/bench/step.py`` on the recorder: what it reports, and that it stops in time."""

from __future__ import annotations

import importlib
import json
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphkit.cli.benchmarks import Variant
from graphkit.engine.step import SpecStepRunner
from graphkit.models import reference
from graphkit.models.reference import reference_engine
from graphkit.records import BenchReport
from small_targets import drafted_llama

BENCH = Path(__file__).parents[3] / "tools" / "bench"
LOOP = 2


@pytest.fixture(scope="module")
def modules():
    """The bench with few variants, short rounds, and a target of one layer."""

    @cache
    def load_one_layer(*arguments, **options):
        return drafted_llama(layers=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        step, engines = map(importlib.import_module, ("step", "step_engines"))
        patch.setattr(reference, "reference_model", load_one_layer)
        patch.setattr(engines, "reference_engine", partial(reference_engine, num_steps=1))
        patch.setattr(engines, "WARM_UP_STEPS", 2 * LOOP)
        patch.setattr(engines, "CONTEXT", 128)
        for name in ("v1", "loop of 4", "loop of 16"):
            patch.delitem(engines.VARIANTS, name)
        patch.setitem(engines.VARIANTS, "loop of 64", Variant("loop of 64", "v3", LOOP))
        yield SimpleNamespace(step=step, engines=engines)


@pytest.fixture(scope="module")
def measured(modules, tmp_path_factory):
    """The report of a run, its exit code, and the loads and launches in their order."""
    events, out = [], tmp_path_factory.mktemp("step") / "step.json"
    launch = SpecStepRunner.launch

    @contextmanager
    def load(count):
        events.append(f"{count} processes")
        yield
        events.append("idle")

    def launched(*arguments, **options):
        events.append(options["max_steps"])
        return launch(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules.step, "busy_processes", load)
        patch.setattr(modules.step.os, "cpu_count", lambda: 3)
        patch.setattr(SpecStepRunner, "launch", launched)
        arguments = "--device cpu --batch-sizes 2 --topk 1 --steps 2 --rounds 1 --skip-rivals --out"
        code = modules.step.main([*arguments.split(), str(out)])
    return BenchReport.from_json(out.read_text()), code, events


@pytest.mark.slow
def test_every_variant_is_measured_idle_and_loaded(measured, modules):
    report, code, _ = measured
    assert code == 0
    values = {measure.name: measure.value for measure in report.measures}
    whats = ("time per step", "p50", "p99", "tokens", "host", "GPU busy")
    for name in modules.engines.VARIANTS:
        assert all(values[f"chain, 2, {name}: {what}"] >= 0 for what in whats)
        assert values[f"chain, 2, {name}, loaded: time per step"] > 0
        assert values[f"chain, 2, {name}: requests with other tokens than v2"] == 0
    parts = [values[f"chain, 2, loop of 64: host, {part}"] for part in ("launch", "reading")]
    assert values["chain, 2, loop of 64: host"] == sum(parts)
    assert values["chain, 2, bare step"] > 0


@pytest.mark.slow
def test_own_nodes_are_those_outside_of_the_models(measured):
    report, _, _ = measured
    values = {measure.name: measure.value for measure in report.measures}
    own, prefix = values["chain, 2: own nodes"], "chain, 2: own nodes, "
    phases = {name.removeprefix(prefix) for name in values if name.startswith(prefix)}
    assert phases >= {"draft", "verify", "accept", "extend"}
    assert sum(values[prefix + phase] for phase in phases) == own
    assert 0 < own < values["chain, 2: nodes"] / 2


def test_the_bars_are_those_of_the_design(measured):
    report, _, _ = measured
    bars = {measure.name: measure.bar for measure in report.measures if measure.bar is not None}
    assert bars == {
        "chain, 2: own nodes": 40,
        "chain, 2, loop of 64, loaded over idle": 1.2,
        "chain, 2, loop of 64, host per step": 2.0,
    }, "the bars over v2 are for batches of 1 and 8"


def test_the_variants_take_turns_before_and_under_load(measured):
    _, _, events = measured
    start = events.index("6 processes")
    assert events[:start].count(LOOP) > 12, "host times and a round"
    loaded = events[start + 1 : -1]
    assert set(loaded) == {1, LOOP}
    assert loaded == sorted(loaded), "one variant after the other"
    assert events[-1] == "idle"


@pytest.fixture
def no_engines(modules, monkeypatch):
    """Replace the measurement of a setting; returns the settings."""
    measured = []

    def measure(results, *, setting, **_):
        measured.append(str(setting))
        if setting.topk == 4:
            raise RuntimeError("no memory\nat all")
        results.add(str(setting), 1.0, "ms")

    monkeypatch.setattr(modules.step, "measure_setting", measure)
    return measured


def test_a_failed_section_is_named_and_the_others_are_measured(modules, no_engines, tmp_path):
    out = tmp_path / "step.json"
    arguments = ["--device", "cpu", "--batch-sizes", "1", "8", "--skip-rivals", "--out", str(out)]
    assert modules.step.main(arguments) == 1
    assert no_engines == ["chain, 1", "tree of topk 4, 1", "chain, 8", "tree of topk 4, 8"]
    report = BenchReport.from_json(out.read_text())
    assert [measure.name for measure in report.measures] == ["chain, 1", "chain, 8"]
    assert report.settings["failed: tree of topk 4, 8"] == "RuntimeError: no memory"


def test_no_section_starts_after_the_time(modules, no_engines, tmp_path, capsys):
    out = tmp_path / "step.json"
    assert modules.step.main(["--device", "cpu", "--seconds", "-1", "--out", str(out)]) == 0
    assert not no_engines
    assert BenchReport.from_json(out.read_text()).settings["not measured from"] == "chain, 1"
    assert "stopped" in capsys.readouterr().out


@pytest.mark.parametrize("ends", ["itself", "with an error", "too late"])
def test_transformers_runs_in_another_process(modules, no_engines, tmp_path, monkeypatch, ends):
    class Process:
        returncode = 0 if ends == "itself" else 1
        killed = False

        def __init__(self, command, **_):
            assert command[1:] == [str(BENCH / "transformers_generate.py"), "--device", "cpu"]

        def communicate(self, timeout=None):
            if ends == "too late" and timeout is not None:
                raise modules.step.subprocess.TimeoutExpired("python", timeout)
            line = json.dumps({"name": "dynamic cache", "tokens per second": 20.0})
            return f"a warning\n{line}\n", "a warning\nOSError: no" * (ends == "with an error")

        def kill(self):
            Process.killed = True

    monkeypatch.setattr(modules.step.subprocess, "Popen", Process)
    out = tmp_path / "step.json"
    code = modules.step.main(
        ["--device", "cpu", "--batch-sizes", "1", "--topk", "1", "--out", str(out)]
    )
    report = BenchReport.from_json(out.read_text())
    speeds = {each.name: each.value for each in report.measures if each.unit == "tokens/s"}
    assert speeds == {"one request, transformers, dynamic cache: tokens": 20.0}
    failed = report.settings.get("failed: transformers", "")
    assert {"itself": failed == "", "with an error": failed.endswith("OSError: no"),
            "too late": "stopped after" in failed}[ends]  # fmt: skip
    assert code == Process.returncode
    assert Process.killed is (ends == "too late")


def test_calls_are_counted_per_step(modules, monkeypatch):
    @contextmanager
    def engine(*_):
        yield SimpleNamespace(cuda_calls={16: {"cudaGraphLaunch": 0.5, "cudaMemcpyAsync": 2}}.get)

    monkeypatch.setattr(modules.step, "measured_engine", engine)
    results = modules.step.Results(torch.device("cpu"), {})
    modules.step.count_calls(results, setting=modules.engines.Setting(1, 1), steps=16)
    values = {measure.name: measure.value for measure in results.measures}
    assert values["chain, 1, v2: CUDA calls"] == 2.5
    assert values["chain, 1, v2: cudaGraphLaunch"] == 0.5


def test_busy_processes_end_with_the_block(modules, monkeypatch):
    busy, started = importlib.import_module("busy_processes"), []
    popen = busy.subprocess.Popen

    def noted(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(busy.subprocess, "Popen", noted)
    with busy.busy_processes(1):
        assert [process.poll() for process in started] == [None]
    assert [process.returncode for process in started] == [-9]
