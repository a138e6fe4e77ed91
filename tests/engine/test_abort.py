"""Aborted requests keep their tokens, free their memory, and leave the others alone."""

from __future__ import annotations

import pytest

from engine_runs import finish, outputs, refuses
from graphkit.engine import FinishReason, SamplingParams
from graphkit.errors import InputError, ReplayError

LONG = SamplingParams(max_new_tokens=13)
SETTINGS = [("v1", False), ("v1", True), ("v2", False), ("v2", True), ("v3", False), ("v3", True)]


@pytest.fixture(params=SETTINGS, ids=lambda s: f"{s[0]}-{'captured' if s[1] else 'eager'}")
def engine(request, make_engine):
    generation, is_captured = request.param
    engine = make_engine(
        max_batch_size=2, batch_sizes=[2], generation=generation, steps_per_launch=1
    )
    if is_captured:
        engine.capture()
    return engine


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_running_request_keeps_its_tokens_and_the_next_step_frees_its_memory(engine, task):
    first, second = (engine.submit(prompt, LONG) for prompt in task.prompts[:2])
    for _ in range(2):
        engine.step()
    row, tokens = first.row, list(first.output_ids)
    assert 0 < len(tokens) < 13
    engine.abort(first)
    assert (first.finish_reason, first.row) == (FinishReason.ABORTED, row)
    engine.step()
    assert first.row == 0
    assert engine.memory.available_rows == engine.memory.pool.size - 1
    finish(engine)
    assert first.output_ids == tokens == task.expected[0][: len(tokens)]
    assert (second.output_ids, second.finish_reason) == (task.expected[1], FinishReason.LENGTH)
    assert engine.memory.held_slots == 0
    assert engine.stats.new_tokens == len(tokens) + 13


@pytest.mark.parametrize("at", ["drop", "add"])
def test_an_interrupted_abort_of_a_waiting_request_ends_it(engine, task, monkeypatch, at):
    """It is interrupted before the request leaves the queue, or before it is counted."""
    *running, waiting = (engine.submit(prompt, LONG) for prompt in task.prompts[:3])
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(
            type(engine._batching.queue if at == "drop" else engine._batching.tally), at, interrupt
        )
        with pytest.raises(KeyboardInterrupt):
            engine.abort(waiting)
    assert waiting.finish_reason is FinishReason.ABORTED
    engine.abort(waiting)
    finish(engine)
    assert (waiting.output_ids, waiting.row) == ([], 0)
    assert outputs(running) == task.expected[:2]


def test_waiting_requests_take_the_place_of_aborted_ones(engine, task):
    requests = [engine.submit(prompt, LONG) for prompt in task.prompts[:4]]
    for _ in range(2):
        engine.step()
    for request in requests[:2]:
        engine.abort(request)
    engine.step()
    assert [request.row > 0 for request in requests] == [False, False, True, True]
    finish(engine)
    assert outputs(requests[2:]) == task.expected[2:4]
    for request, text in zip(requests[:2], task.expected, strict=False):
        assert request.output_ids == text[: len(request.output_ids)]


def test_a_waiting_request_never_runs(engine, task):
    requests = [engine.submit(prompt, LONG) for prompt in task.prompts[:3]]
    engine.step()
    engine.abort(requests[2])
    finish(engine)
    assert (requests[2].output_ids, requests[2].finish_reason) == ([], FinishReason.ABORTED)
    assert outputs(requests[:2]) == task.expected[:2]


def test_the_only_request_leaves_nothing_to_do(engine, task):
    request = engine.submit(task.prompts[0], LONG)
    engine.step()
    engine.abort(request)
    assert engine.step() == []
    assert not engine.has_work
    assert engine.memory.held_slots == 0


def test_a_loop_ends_for_an_aborted_request(make_engine, task):
    engine = make_engine(max_batch_size=2, batch_sizes=[1, 2], steps_per_launch=64)
    engine.capture()
    first, second = (engine.submit(prompt, LONG) for prompt in task.prompts[:2])
    engine.step()
    engine.abort(first)
    finish(engine)
    assert second.output_ids == task.expected[1]
    (runner,) = engine.runners
    if engine.device.type == "cpu":  # a loop on CUDA may have done all steps before the abort
        steps = runner.stats.replays_by_size[2]
        assert steps == 2, "the step before the abort, and one of the loop"


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_results_of_an_aborted_request_are_never_read(make_engine, task, generation, topk):
    engine = make_engine(max_batch_size=1, topk=topk, generation=generation, debug=True)
    first, second = (engine.submit(prompt, LONG) for prompt in task.prompts[:2])
    engine.step()
    engine.abort(first)
    finish(engine)
    assert second.output_ids == task.expected[1]


def test_a_finished_request_stays_as_it_is(engine, task):
    (request,) = engine.generate(task.prompts[:1], LONG)
    engine.abort(request)
    engine.abort(request)
    assert (request.output_ids, request.finish_reason) == (task.expected[0], FinishReason.LENGTH)


def test_other_objects_and_requests_of_other_engines_are_refused(make_engine, task):
    engine, other = make_engine(), make_engine()
    request = other.submit(task.prompts[0], LONG)
    with refuses(InputError, "request", "another engine"):
        engine.abort(request)
    assert request.finish_reason is None
    for value in (3, None, task.prompts[0]):
        with refuses(InputError, "request", r"abort got .*, expected a Request that"):
            engine.abort(value)
    other.close()
    with pytest.raises(ReplayError, match="it takes no requests and no capture"):
        other.abort(request)


def test_a_finished_request_of_another_engine_is_refused_and_not_counted(make_engine, task):
    engine, other = make_engine(), make_engine()
    requests = [each.generate(task.prompts[:1], LONG)[0] for each in (engine, other)]
    with refuses(InputError, "request", "another engine"):
        engine.abort(requests[1], FinishReason.STOP_STRING)
    assert requests[1].finish_reason is FinishReason.LENGTH
    assert engine.stats.finished == other.stats.finished == {FinishReason.LENGTH: 1}
    with refuses(InputError, "request", "another engine"):
        engine.abort(requests[1])


def test_a_reason_that_changes_before_it_is_counted_is_counted_once(make_engine, task, monkeypatch):
    """A step is interrupted between the end of the request and its count."""

    def interrupt_end(_, requests):
        if requests:
            raise KeyboardInterrupt

    engine = make_engine(generation="v1")
    request = engine.submit(task.prompts[0], SamplingParams(max_new_tokens=1))
    with monkeypatch.context() as patch:
        patch.setattr(type(engine._batching.tally), "end", interrupt_end)
        with pytest.raises(KeyboardInterrupt):
            finish(engine)
    assert request.finish_reason is FinishReason.LENGTH
    engine.abort(request, FinishReason.STOP_STRING)
    finish(engine)
    counts = {reason: count for reason, count in engine.stats.finished.items() if count}
    assert counts == {FinishReason.STOP_STRING: 1}
