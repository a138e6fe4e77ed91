"""The engine on CUDA: launches without synchronisation, constant memory, a second device."""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager
from types import MethodType

import pytest
import torch

from graphkit.buffers.mailbox import ENTRIES
from graphkit.engine import SamplingParams
from graphkit.engine.schedule import Schedule
from graphkit.models.reference import reference_engine
from graphkit.models.tokenizer import encode

pytestmark = pytest.mark.gpu

TEXTS = "import os\nimport re\nimport ", "def main(argv):\n    ", "class A(B):\n", "    for "
PROMPTS = [encode(text) for text in TEXTS]
SHORT, LONG = SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=60)
DRAFTING = ["NONE", "EAGLE", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM", "DFLASH"]


@pytest.fixture
def make_engine():
    """Creates captured engines that have generated once; closes them afterwards."""
    engines = []

    def make(algorithm="EAGLE", **options):
        sizes = {"max_context_len": 256, "batch_sizes": [2, 4], "max_batch_size": 4}
        options = {"num_steps": 3, **sizes} | options
        engine = reference_engine(algorithm, **{"device": "cuda", **options})
        engines.append(engine)
        engine.capture()
        engine.generate(PROMPTS, SHORT)
        return engine

    yield make
    for engine in engines:
        engine.close()
        assert engine.memory.held_slots == 0


@contextmanager
def no_synchronisation():
    """Raise at any operation that makes the host wait for the device."""
    with warnings.catch_warnings(action="ignore"):  # torch warns once that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def outputs(requests):
    return [request.output_ids for request in requests]


@pytest.fixture
def launches_must_not_wait(monkeypatch):
    """Raise if a launch of v2 makes the host wait."""
    launch = Schedule._enqueue

    def without_waiting(*args):
        with no_synchronisation():
            launch(*args)

    monkeypatch.setattr(Schedule, "_enqueue", without_waiting)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("algorithm", "topk"),
    [(algorithm, topk) for algorithm in DRAFTING for topk in (1, 2)][:-1],  # DFLASH drafts chains
)
def test_a_launch_of_v2_never_waits(
    make_engine, launches_must_not_wait, algorithm, topk, temperature
):
    engine = make_engine(algorithm, topk=topk, generation="v2")
    sampling = SamplingParams(max_new_tokens=12, temperature=temperature)
    assert all(len(ids) == 12 for ids in outputs(engine.generate(PROMPTS, sampling)))
    assert not engine.stats.fallbacks


def test_no_synchronisation_detects_a_wait():
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronisation():
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("generation", ["v2", "v3"])
@pytest.mark.parametrize("algorithm", DRAFTING)
def test_admission_never_waits(make_engine, algorithm, generation):
    """A step waits for reports only: v2 for an event, v3 in plain memory."""
    engine = make_engine(algorithm, generation=generation)
    engine.submit(PROMPTS[0], LONG)
    engine.step()
    for prompt in PROMPTS[1:]:
        engine.submit(prompt, LONG)
        with no_synchronisation():
            engine.step()


def test_a_launch_returns_while_the_device_still_works(make_engine):
    engine = make_engine(generation="v2")
    steps = engine._batching.schedule
    engine.submit(PROMPTS[0], LONG)
    engine.step()
    launch, device_was_idle = steps._enqueue, []

    def behind_a_sleep(_steps, *args):
        torch.cuda._sleep(400_000_000)  # a fifth of a second
        launch(*args)
        device_was_idle.append(torch.cuda.current_stream().query())

    steps._enqueue = MethodType(behind_a_sleep, steps)
    engine.step()
    del steps._enqueue
    assert device_was_idle == [False], "the launch returned only after the device had finished"


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE", "NGRAM"])
def test_steps_keep_no_memory(make_engine, algorithm, generation):
    engine = make_engine(algorithm, topk=2, generation=generation)
    used = []
    # Prompts take one replay of a call, and the tensors that the last replays read stay alive.
    for _ in range(ENTRIES + 4):
        engine.generate(PROMPTS, LONG)
        gc.collect()
        used.append(torch.cuda.memory_allocated())
    assert used[-3:] == used[-1:] * 3


def test_bfloat16_never_falls_back(make_engine):
    engine = make_engine(dtype=torch.bfloat16, topk=2)
    first, again = (outputs(engine.generate(PROMPTS, LONG)) for _ in range(2))
    assert first == again
    assert not engine.stats.fallbacks
    assert engine.stats.accept_length > 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_an_engine_works_on_a_device_other_than_the_current_one(make_engine, generation):
    here = make_engine(generation=generation)
    there = make_engine(generation=generation, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert outputs(there.generate(PROMPTS, LONG)) == outputs(here.generate(PROMPTS, LONG))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_results_are_awaited_on_their_own_device(make_engine):
    """The host waits for the stream that copies the results, not for the current device."""
    engine = make_engine(device="cuda:1")
    expected = outputs(engine.generate(PROMPTS[:1], SHORT))
    request = engine.submit(PROMPTS[0], SHORT)
    while engine.has_work:
        with torch.cuda.device(1):
            torch.cuda._sleep(40_000_000)
        engine.step()
    assert [request.output_ids] == expected
