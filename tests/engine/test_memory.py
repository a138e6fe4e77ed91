"""KV slots and rows: requests wait for them, do not share them, and free all of them."""

from __future__ import annotations

import pytest

from engine_runs import chain_and_tree, each_generation, finish, outputs
from graphkit.buffers import DraftExtendInputs, DraftInputs, TargetVerifyInputs
from graphkit.engine import EagleDrafter, EngineModel, FinishReason, SamplingParams, request_memory
from graphkit.errors import InputError


def assert_no_shared_slots(engine, requests):
    """No two running requests share a slot, and none uses a slot of the reserved page."""
    table = engine.memory.pool.req_to_token
    running = [request for request in requests if request.row]
    slots = [slot for r in running for slot in table[r.row, : r.num_tokens - 1].tolist()]
    assert len(set(slots)) == len(slots)
    assert min(slots, default=1) >= engine.sizes.page_size
    assert len({request.row for request in running}) == len(running)


@pytest.mark.slow
@chain_and_tree
@each_generation
def test_no_two_requests_share_a_slot(make_engine, task, generation, topk):
    engine = make_engine(topk=topk, generation=generation, max_batch_size=5)
    requests = []
    for prompt, sampling in zip(task.prompts[:20], task.sampling(), strict=False):
        requests.append(engine.submit(prompt, sampling))
        engine.step()
        assert_no_shared_slots(engine, requests)
    while engine.has_work:
        engine.step()
        assert_no_shared_slots(engine, requests)
    assert outputs(requests) == task.expected[:20]


def run_and_count(engine, requests):
    """Run to the end; return the largest number of requests that ran at the same time."""
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, sum(1 for request in requests if request.row))
    return most


@each_generation
def test_requests_beyond_the_batch_wait(make_engine, task, generation):
    engine = make_engine(max_batch_size=3, generation=generation)
    requests = [engine.submit(p, SamplingParams(max_new_tokens=13)) for p in task.prompts[:8]]
    assert run_and_count(engine, requests) == 3
    assert outputs(requests) == task.expected[:8]


@pytest.mark.slow
@each_generation
@pytest.mark.parametrize("page_size", [1, 4])
def test_requests_wait_for_slots_in_the_order_in_which_they_came(
    make_engine, task, generation, page_size
):
    """Two fit at once; the small fourth request must not overtake the third."""
    engine = make_engine(generation=generation, page_size=page_size, kv_tokens=88)
    prompts = [task.prompts[i] for i in (2, 5, 8, 38, 13)]
    expected = [task.expected[i] for i in (2, 5, 8, 38, 13)]
    began = []
    requests = [
        engine.submit(prompt, SamplingParams(max_new_tokens=len(text)))
        for prompt, text in zip(prompts, expected, strict=True)
    ]
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, sum(1 for request in requests if request.row))
        began += [i for i, r in enumerate(requests) if r.output_ids and i not in began]
        assert engine.memory.held_slots <= 88
    assert began == sorted(began)
    assert 1 < most < 5
    assert outputs(requests) == expected


@each_generation
def test_a_request_that_never_fits_is_refused(make_engine, task, generation):
    engine = make_engine(kv_tokens=40, generation=generation)
    most = 40 - (engine.sizes.max_context_len - engine.context_limit) - 8
    fits = engine.submit(task.prompts[1], SamplingParams(max_new_tokens=most))
    with pytest.raises(InputError, match=r"needs 41 KV slots, but the pool has 40\. Reduce"):
        engine.submit(task.prompts[1], SamplingParams(max_new_tokens=most + 1))
    finish(engine)
    assert fits.finish_reason is FinishReason.LENGTH


@each_generation
def test_slots_are_reserved_for_steps_and_not_for_the_limit(
    make_engine, task, monkeypatch, generation
):
    monkeypatch.setattr(request_memory, "_STEPS_AHEAD", 1)
    engine = make_engine(generation=generation, steps_per_launch=2)
    request = engine.submit(task.prompts[1], SamplingParams(max_new_tokens=60))
    while engine.has_work:
        known = request.num_tokens
        engine.step()
        # Two steps, those in flight, and what a step writes ahead.
        most = max(known, 8) + (2 + 3) * engine.max_path + 4
        assert engine.memory.held_slots <= min(most, request.max_tokens + 4)
    assert len(request.output_ids) == 60


@pytest.mark.slow
@each_generation
@pytest.mark.parametrize(("batch_size", "prompt"), [(8, 8), (1, 56)], ids=["empty", "half full"])
def test_the_table_is_rarely_written_while_the_pool_has_room(
    make_engine, generation, batch_size, prompt
):
    """Writing it takes CUDA calls, and a launch is to take one."""
    engine = make_engine(
        generation=generation, steps_per_launch=1, max_batch_size=batch_size, batch_sizes=[1]
    )
    held = []
    engine.submit(range(prompt), SamplingParams(max_new_tokens=1000))
    while engine.has_work:
        engine.step()
        held.append(engine.memory.held_slots)
    assert len(held) > 8
    assert len(set(held[:-1])) <= 2, held  # of the prompt, and of the whole request


@pytest.mark.slow
@each_generation
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_closing_in_the_middle_of_work_gives_everything_back(
    make_engine, task, generation, steps, captured
):
    engine = make_engine(max_batch_size=2, generation=generation, batch_sizes=[2])
    if captured:
        engine.capture()
    rows = engine.memory.available_rows
    requests = [engine.submit(p, SamplingParams(max_new_tokens=13)) for p in task.prompts[:4]]
    for _ in range(steps):
        engine.step()
    engine.close()
    assert (engine.memory.held_slots, engine.memory.available_rows) == (0, rows)
    assert not engine.has_work
    for request, text in zip(requests, task.expected, strict=False):
        assert request.output_ids == text[: len(request.output_ids)]
    engine.close()


@each_generation
def test_tokens_generated_before_closing_stay_counted(make_engine, task, generation):
    engine = make_engine(max_batch_size=2, generation=generation)
    requests = [engine.submit(p, SamplingParams(max_new_tokens=30)) for p in task.prompts[:4]]
    for _ in range(3):
        engine.step()
    before = engine.stats
    engine.close()
    assert engine.stats.new_tokens >= before.new_tokens > 0
    assert engine.stats.new_tokens == sum(len(request.output_ids) for request in requests)
    assert engine.stats.accept_length > 1
    assert [request.row for request in requests] == [0] * 4, "they hold no row any more"


class Failing:
    """Wraps a forward; the next call with inputs of the type ``at`` raises, once."""

    def __init__(self, forward):
        self.forward, self.at = forward, None

    def __call__(self, inputs):
        if self.at is type(inputs):
            self.at = None
            raise RuntimeError("the model failed")
        return self.forward(inputs)


@pytest.fixture
def failing(make_engine, labelling_forward):
    """``failing(generation)``: an engine, its target and its draft model, which can fail."""

    def make(generation):
        forwards = {}

        def target(model, attention):
            forwards["target"] = Failing(labelling_forward(model, attention))
            return forwards["target"]

        def drafter(model):
            forwards["draft"] = Failing(model.forward)
            return EagleDrafter(EngineModel(forwards["draft"], model.attention))

        engine = make_engine(generation=generation, target=target, drafter=drafter)
        return engine, forwards["target"], forwards["draft"]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("at", [TargetVerifyInputs, DraftInputs, DraftExtendInputs])
@each_generation
def test_a_failed_step_may_be_repeated(failing, task, generation, at):
    engine, target, draft = failing(generation)
    requests = [engine.submit(p, SamplingParams(max_new_tokens=10)) for p in task.prompts[:3]]
    engine.step()
    engine.step()
    (target if at is TargetVerifyInputs else draft).at = at
    with pytest.raises(RuntimeError, match="the model failed"):
        engine.step()
    finish(engine)
    assert outputs(requests) == [text[:10] for text in task.expected[:3]]


@pytest.mark.slow
@pytest.mark.parametrize("at", [TargetVerifyInputs, DraftInputs, DraftExtendInputs])
@each_generation
@pytest.mark.parametrize("fails", ["step", "prompt"])
def test_every_token_is_returned_once_whatever_fails(failing, task, generation, at, fails):
    """A step may deliver tokens before it fails: the next call returns them."""
    engine, target, draft = failing(generation)
    ten, returned = SamplingParams(max_new_tokens=10), {}
    requests = [engine.submit(p, ten) for p in task.prompts[:2]]
    for turn in range(99):
        if turn == 3:
            (target if at is TargetVerifyInputs else draft).at = at
            if fails == "prompt":
                requests += [engine.submit(p, ten) for p in task.prompts[2:4]]
        try:
            for request, tokens in engine.step():
                returned.setdefault(request, []).extend(tokens)
        except RuntimeError:
            assert turn == 3
    assert not engine.has_work
    # Two prompts share a forward, which fails once: both are prefilled again.
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
    for request, text in zip(requests, task.expected, strict=False):
        assert returned[request] == text[:10]


@pytest.mark.parametrize("at", [TargetVerifyInputs, DraftExtendInputs])
@each_generation
def test_a_failed_prefill_yields_no_wrong_tokens(failing, task, generation, at):
    engine, target, draft = failing(generation)
    first = engine.submit(task.prompts[1], SamplingParams(max_new_tokens=10))
    engine.step()
    (target if at is TargetVerifyInputs else draft).at = at
    second = engine.submit(task.prompts[2], SamplingParams(max_new_tokens=10))
    with pytest.raises(RuntimeError, match="the model failed"):
        engine.step()
    finish(engine)
    assert first.output_ids == task.expected[1][:10]
    assert second.finish_reason is FinishReason.FAILED
    assert (second.output_ids, str(second.error)) == ([], "the model failed")
