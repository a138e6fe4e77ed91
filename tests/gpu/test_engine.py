"""The engine on CUDA: launches that wait for nothing, memory that stays, a second device."""

from __future__ import annotations

import gc
import time
import warnings
from contextlib import contextmanager
from types import MethodType

import pytest
import torch

from graphkit.engine import SamplingParams
from graphkit.engine.generations import Overlapped
from graphkit.reference import encode, reference_engine

pytestmark = pytest.mark.gpu

TEXTS = "import os\nimport re\nimport ", "def main(argv):\n    ", "class A(B):\n", "    for "
PROMPTS = [encode(text) for text in TEXTS]
SHORT, LONG = SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=60)
DRAFTING = ["NONE", "EAGLE", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM"]


@pytest.fixture
def make_engine():
    """Captured engines, which have run once; closed afterwards."""
    made = []

    def make(algorithm="EAGLE", **options):
        options = {"max_context_len": 256, "batch_sizes": [2, 4], "max_batch_size": 4} | options
        engine = reference_engine(algorithm, **{"device": "cuda", **options})
        made.append(engine)
        engine.capture()
        engine.generate(PROMPTS, SHORT)
        return engine

    yield make
    for engine in made:
        engine.close()
        assert engine.memory.held_slots == 0


@contextmanager
def no_waiting():
    """Any operation that makes the host wait for the device raises."""
    with warnings.catch_warnings(action="ignore"):  # "a prototype feature", once per process
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def outputs(requests):
    return [request.output_ids for request in requests]


@pytest.fixture
def watched(monkeypatch):
    """v2's launches must not wait."""
    launch = Overlapped._launch

    def without_waiting(*args):
        with no_waiting():
            launch(*args)

    monkeypatch.setattr(Overlapped, "_launch", without_waiting)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", DRAFTING)
def test_a_launch_of_v2_never_waits(make_engine, watched, algorithm, topk, temperature):
    engine = make_engine(algorithm, topk=topk)
    sampling = SamplingParams(max_new_tokens=12, temperature=temperature)
    assert all(len(ids) == 12 for ids in outputs(engine.generate(PROMPTS, sampling)))
    assert not engine.stats.fallbacks


def test_the_watch_sees_a_wait():
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("algorithm", DRAFTING)
def test_joining_never_waits_either(make_engine, algorithm):
    """A step of v2 waits for nothing but the results of the one before."""
    engine = make_engine(algorithm)
    engine.submit(PROMPTS[0], LONG)
    engine.step()
    for prompt in PROMPTS[1:]:
        engine.submit(prompt, LONG)
        with no_waiting():
            engine.step()


def test_a_launch_returns_while_the_device_still_works(make_engine):
    engine = make_engine()
    steps = engine._steps
    engine.submit(PROMPTS[0], LONG)
    engine.step()
    launch, seen = steps._launch, []

    def behind_a_sleep(_steps, *args):
        torch.cuda._sleep(400_000_000)  # a fifth of a second
        began = time.perf_counter()
        launch(*args)
        seen.append((time.perf_counter() - began, torch.cuda.current_stream().query()))

    steps._launch = MethodType(behind_a_sleep, steps)
    engine.step()
    del steps._launch
    ((seconds, idle),) = seen
    assert not idle, "the launch is over, the device is not"
    assert seconds < 0.1


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE", "NGRAM"])
def test_steps_keep_no_memory(make_engine, algorithm, generation):
    engine = make_engine(algorithm, topk=2, generation=generation)
    used = []
    for _ in range(4):
        engine.generate(PROMPTS, LONG)
        gc.collect()
        used.append(torch.cuda.memory_allocated())
    assert used[1:] == used[1:2] * 3


def test_bfloat16_runs_in_graphs_alone(make_engine):
    engine = make_engine(dtype=torch.bfloat16, topk=2)
    first, again = (outputs(engine.generate(PROMPTS, LONG)) for _ in range(2))
    assert first == again
    assert not engine.stats.fallbacks
    assert engine.stats.accept_length > 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_an_engine_works_beside_the_current_device(make_engine, generation):
    here = make_engine(generation=generation)
    there = make_engine(generation=generation, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert outputs(there.generate(PROMPTS, LONG)) == outputs(here.generate(PROMPTS, LONG))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_results_are_awaited_on_their_own_device(make_engine):
    """The host waits for the stream that copies them, not for the current device's."""
    engine = make_engine(device="cuda:1")
    expected = outputs(engine.generate(PROMPTS[:1], SHORT))
    request = engine.submit(PROMPTS[0], SHORT)
    while engine.has_work:
        with torch.cuda.device(1):
            torch.cuda._sleep(40_000_000)
        engine.step()
    assert [request.output_ids] == expected
