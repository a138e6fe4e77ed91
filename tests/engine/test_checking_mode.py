"""The checking mode inside a step that is captured whole."""

from __future__ import annotations

import pytest
import torch

from engine_runs import outputs, refuses
from graphkit import InputError
from graphkit.engine.step import SpecStepInputs


@pytest.fixture
def engine(make_engine, monkeypatch):
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    engine = make_engine(generation="v3", batch_sizes=[4], max_batch_size=4)
    engine.capture()
    return engine


@pytest.mark.slow
def test_it_captures_steps_and_keeps_their_tokens(engine, task, run_in_waves):
    some = task.first(6)
    assert outputs(run_in_waves(engine, some)) == some.expected
    assert engine.stats.fallbacks == {}


def test_a_capture_accepts_chunks_as_long_as_the_context(make_engine, monkeypatch):
    """A draft model of the same text reads one token more than the chunk has."""
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    engine = make_engine("STANDALONE", batch_sizes=[1], max_batch_size=1, chunked_prefill_size=512)
    engine.capture()
    assert engine.runners[0].status == "captured"


@pytest.mark.parametrize("verb", ["replay", "launch"])
def test_a_wrong_value_inside_a_step_is_reported_by_the_next_call(engine, task, verb):
    (runner,) = engine.runners
    context = runner.spec_step.context
    rows = torch.tensor([1], device=context.device)
    context.req_to_token[1] = torch.arange(1, 97).int()
    runner.admit(1, task.prompts[0])

    def run():
        if verb == "replay":
            assert runner.replay(SpecStepInputs(req_pool_indices=rows)).report is not None
        else:
            list(runner.launch([1], max_steps=1))
        if context.device.type == "cuda":
            torch.cuda.synchronize()

    run()
    hidden_states = context.future_map.resolve("hidden_states", rows)
    context.future_map.stash(rows, {"hidden_states": torch.full_like(hidden_states, float("nan"))})
    run()
    with refuses(InputError, "hidden_states", r"hidden_states.*Expected finite numbers"):
        run()
    run()
