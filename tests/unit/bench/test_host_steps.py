"""The host's time and the CUDA calls of steps, which ``tools/bench/step.py`` measures."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from graphkit.cli.benchmarks import MeasuredEngine, Steps, Variant, pieces
from graphkit.engine.step import SpecStepRunner
from graphkit.models import random_model

BENCH = Path(__file__).parents[3] / "tools" / "bench"
LOOP = Variant("loop of 3", "v3", 3)


@pytest.fixture(scope="module")
def host_steps():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("host_steps")


@pytest.fixture(scope="module")
def models():
    return random_model("tiny", "EAGLE", device="cpu")


@pytest.fixture
def measured(models, host_steps):
    """Return ``measured(variant)``, which opens an engine for two requests."""
    with ExitStack() as stack:

        def opened(variant: Variant, *, context: int = 64) -> MeasuredEngine:
            engine = models.engine(
                num_steps=1, max_batch_size=2, batch_sizes=[2],
                max_context_len=context, generation=variant.generation,
                steps_per_launch=variant.steps_per_launch,
            )  # fmt: skip
            stack.enter_context(engine)
            return host_steps.HostMeasuredEngine(engine, variant, pieces(range(64), 2, 5), 6)

        yield opened


def test_host_time_of_a_loop_is_that_of_launch_and_reading(measured, monkeypatch, host_steps):
    monkeypatch.setattr(host_steps, "_MIN_LAUNCHES", 2)
    engine = measured(LOOP)
    host = engine.host_us(3)
    assert host["host"] == host["host, launch"] + host["host, reading"]


@pytest.mark.parametrize("variant", [Variant("v2", "v2"), LOOP])
def test_host_time_is_the_least_of_all_calls(measured, monkeypatch, variant, host_steps):
    monkeypatch.setattr(host_steps, "_MIN_LAUNCHES", 2)
    engine = measured(variant)
    first = engine.host_us(3)
    engine.run(2, Steps())
    second = engine.host_us(3)
    assert all(0 < second[part] <= us for part, us in first.items())


def test_requests_start_again_before_their_context_ends(measured, monkeypatch, host_steps):
    """Nine steps per start: a start of twelve would need a larger context."""
    monkeypatch.setattr(host_steps, "_MIN_LAUNCHES", 2)
    engine, events = measured(LOOP), []
    launch, restart = SpecStepRunner.launch, MeasuredEngine._restart

    def launched(*args, **options):
        events.append("launch")
        return launch(*args, **options)

    def restarted(engine):
        with monkeypatch.context() as patch:
            patch.setattr(SpecStepRunner, "launch", launch)  # the warm-up is not measured
            restart(engine)
        events.append("start")

    monkeypatch.setattr(SpecStepRunner, "launch", launched)
    monkeypatch.setattr(MeasuredEngine, "_restart", restarted)
    engine.host_us(3, launches=5)
    assert host_steps.host_time_steps(3, 3) == 9
    assert events == ["start", *["launch"] * 3, "start", *["launch"] * 2]


def test_calls_are_those_of_a_step(measured, monkeypatch, host_steps):
    def counted(act, runs):
        for _ in range(runs):
            act(None)
        return {"cudaGraphLaunch": 2.0, "cudaMemcpyAsync": 12.0}

    monkeypatch.setattr(host_steps, "counted_calls", counted)
    engine = measured(LOOP)
    before = engine._requests[0].num_verifies
    calls = engine.cuda_calls(4)
    steps = (engine._requests[0].num_verifies - before) / 2
    assert steps >= 6
    assert calls == {"cudaGraphLaunch": 2 / steps, "cudaMemcpyAsync": 12 / steps}


def test_waits_for_events_are_counted(monkeypatch, host_steps):
    clock = iter([1.0, 3.0, 10.0, 15.0])
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: None)
    wait = torch.cuda.Event.synchronize
    monkeypatch.setattr(host_steps.time, "thread_time", lambda: next(clock))
    with host_steps.waits() as seconds:
        torch.cuda.Event.synchronize("one")
        torch.cuda.Event.synchronize("another")
    assert seconds == [2.0, 5.0]
    assert torch.cuda.Event.synchronize is wait
