"""An exception ends only the request that caused it, and later steps make progress."""

from __future__ import annotations

import pytest
import torch

from engine_runs import each_generation, outputs, submit_all
from graphkit.engine import FinishReason, SamplingParams
from graphkit.errors import ReplayError

with_matchers = pytest.mark.parametrize("generation", ["v1", "v2"])


class MatcherError(Exception):
    pass


class AnyToken:
    """A matcher that allows every token, until a call of its method ``at`` raises."""

    def __init__(self, at=None, calls=0, error=MatcherError):
        self.at, self.left, self.error, self.text = at, calls, error, []

    def _call(self, name):
        if name == self.at:
            self.left -= 1
            if self.left == 0:
                raise self.error("the matcher failed")

    def fill_next_token_bitmask(self, bitmask, index):
        self._call("fill")
        bitmask[index] = -1

    def accept_token(self, token):
        self._call("accept")
        self.text.append(token)
        return True

    def rollback(self, count):
        del self.text[-count:]

    def is_terminated(self):
        return False


def finish(engine, errors=()):
    """Step until nothing is left; returns how many steps raised one of ``errors``."""
    raised = 0
    for _ in range(60):
        if not engine.has_work:
            return raised
        try:
            engine.step()
        except errors:
            raised += 1
    raise AssertionError("the engine has work after 60 steps")


@with_matchers
@pytest.mark.parametrize(("at", "calls"), [("accept", 1), ("accept", 6), ("fill", 2), ("fill", 7)])
def test_a_matcher_that_raises_ends_its_request_alone(make_engine, task, generation, at, calls):
    """Requests before and behind it in the batch receive the tokens of the same step."""
    engine = make_engine(generation=generation, structured_output=True)
    matchers = [None, AnyToken(at, calls), None, AnyToken()]
    requests = [
        engine.submit(prompt, SamplingParams(max_new_tokens=10), matcher=matcher)
        for prompt, matcher in zip(task.prompts, matchers, strict=False)
    ]
    assert finish(engine, MatcherError) == 1
    failed = requests.pop(1)
    assert failed.finish_reason is FinishReason.FAILED
    assert str(failed.error) == "the matcher failed"
    assert failed.output_ids == task.expected[1][: len(failed.output_ids)]
    assert outputs(requests) == [task.expected[i][:10] for i in (0, 2, 3)]
    assert {each.finish_reason for each in requests} == {FinishReason.LENGTH}


@with_matchers
def test_an_interrupted_matcher_ends_its_request_alone(make_engine, task, generation):
    """Whether the call took effect is unknown, so the matcher cannot go on."""
    engine = make_engine(generation=generation, structured_output=True)
    matcher = AnyToken("accept", 3, KeyboardInterrupt)
    requests = [
        engine.submit(prompt, SamplingParams(max_new_tokens=10), matcher=each)
        for prompt, each in zip(task.prompts, [None, matcher, None], strict=False)
    ]
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    assert finish(engine, ReplayError) == 1
    assert requests[1].finish_reason is FinishReason.FAILED
    assert "interrupted in a call of the request's matcher" in str(requests[1].error)
    for i in (0, 2):
        assert requests[i].output_ids == task.expected[i][:10]


@each_generation
def test_a_prompt_whose_prefill_raises_ends_alone(make_engine, task, labelling_forward, generation):
    """Requests whose prompts are in the same forward are prefilled again, one by one."""
    poison = 77

    def target(model, attention):
        forward = labelling_forward(model, attention)

        def raising(inputs):
            if inputs.lengths is not None and (inputs.input_ids == poison).any():
                raise MatcherError("no such token")
            return forward(inputs)

        return raising

    engine = make_engine("NONE", generation=generation, target=target)
    prompts = [task.prompts[0], [5, poison, 6], task.prompts[2]]
    assert poison not in (*prompts[0], *prompts[2])
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=3)) for prompt in prompts]
    with pytest.raises(MatcherError, match="no such token"):
        engine.step()
    assert requests[1].finish_reason is FinishReason.FAILED
    assert (requests[0].num_tokens, requests[2].row) != (0, 0), "the others run"
    finish(engine)
    assert [requests[i].output_ids for i in (0, 2)] == [task.expected[i][:3] for i in (0, 2)]


@each_generation
def test_an_error_before_a_request_has_its_row_ends_no_request(
    make_engine, task, monkeypatch, generation
):
    engine = make_engine(generation=generation)
    requests = submit_all(engine, task.prompts[:3], SamplingParams(max_new_tokens=6))
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.memory), "allocate_row", _no_memory)
        with pytest.raises(MemoryError, match="no memory left"):
            engine.step()
    finish(engine)
    assert outputs(requests) == [task.expected[i][:6] for i in range(3)]


class Interrupted:
    """A forward that is interrupted once, at a given call."""

    def __init__(self, forward, call):
        self.forward, self.left = forward, call

    def __call__(self, inputs):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.forward(inputs)


@each_generation
@pytest.mark.parametrize("call", [1, 2, 5])
def test_an_interrupt_of_generate_aborts_its_requests(
    make_engine, task, labelling_forward, generation, call
):
    engine = make_engine(
        generation=generation,
        target=lambda *model: Interrupted(labelling_forward(*model), call),
    )
    other = engine.submit(task.prompts[3], SamplingParams(max_new_tokens=4))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(task.prompts[:3], SamplingParams(max_new_tokens=10))
    (request,) = engine.generate(task.prompts[4:5], SamplingParams(max_new_tokens=10))
    assert request.output_ids == task.expected[4][:10]
    assert other.output_ids == task.expected[3][:4]
    assert not engine.has_work


@pytest.mark.slow
@each_generation
def test_a_restart_continues_sampled_text(make_engine, task, labelling_forward, generation):
    """The tokens of a seed and a position do not depend on the steps that were lost."""
    params = [
        SamplingParams(max_new_tokens=12, temperature=1.0, seed=i, top_k=20) for i in range(3)
    ]

    def texts(target):
        engine = make_engine(generation=generation, target=target)
        requests = [engine.submit(*each) for each in zip(task.prompts[:3], params, strict=True)]
        interrupts = 0
        while engine.has_work:
            try:
                engine.step()
            except KeyboardInterrupt:
                interrupts += 1
        return outputs(requests), interrupts

    undisturbed, _ = texts(labelling_forward)
    for call in (4, 6):
        found = texts(lambda *model: Interrupted(labelling_forward(*model), call))  # noqa: B023
        assert found == (undisturbed, 1)


@pytest.mark.parametrize("at", ["free_all", "free"])
def test_an_interrupted_close_can_be_repeated(make_engine, task, monkeypatch, at):
    """It is interrupted before rows and slots, or before the rows of the pool, are free."""
    for generation in ("v1", "v2", "v3"):
        engine = make_engine(generation=generation, batch_sizes=[8])
        engine.capture()
        request = engine.submit(task.prompts[0], SamplingParams(max_new_tokens=9))
        engine.step()
        pool = engine.memory.pool
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.memory if at == "free_all" else pool), at, _interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.close()
        engine.close()
        assert {runner.status for runner in engine.runners} == {"closed"}
        assert pool.available == pool.size
        assert request.output_ids == task.expected[0][: len(request.output_ids)]
        assert torch.is_grad_enabled()


def _interrupt(*_):
    raise KeyboardInterrupt


def _no_memory(*_):
    raise MemoryError("no memory left")
