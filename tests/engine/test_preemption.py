"""Requests that the pool cannot hold to their end are preempted, and lose nothing."""

from __future__ import annotations

import pytest

from decaying_target import DecayingForward, recurrent_engine
from engine_runs import each_generation, outputs, submit_all
from graphkit import SdpaAttention, TritonAttention, models
from graphkit.engine import FinishReason, NgramDrafter, SamplingParams
from graphkit.engine.step.verifier import Verifier
from small_models import small_model

LONG = 40


@pytest.fixture(scope="session")
def long_task(task, plain):
    """Prompts and their texts of ``LONG`` tokens."""
    prompts = [task.prompts[i] for i in (1, 3, 4, 6, 7)]
    return prompts, plain(prompts, [LONG] * len(prompts))


def run(engine, prompts, **params):
    """Run all prompts; return their requests and the tokens that steps returned."""
    requests = submit_all(engine, prompts, SamplingParams(max_new_tokens=LONG, **params))
    returned = {request: [] for request in requests}
    for _ in range(2000):
        if not engine.has_work:
            break
        for request, tokens in engine.step():
            returned[request] += tokens
        memory = engine.memory
        rows = [request.row for request in requests if request.row]
        assert len(set(rows)) == len(rows)
        assert memory.held_slots <= memory.total_slots
    assert not engine.has_work
    assert [returned[request] for request in requests] == outputs(requests)
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("attention", [SdpaAttention, TritonAttention])
def test_rows_that_do_not_depend_on_the_batch_run_again_as_prompts(attention, monkeypatch):
    model, repeated = models.load(small_model("llama"), device="cpu", check=False), []
    repeat = Verifier.repeat_steps

    def note(verifier, batch):
        repeated.append(len(batch.positions))
        return repeat(verifier, batch)

    monkeypatch.setattr(Verifier, "repeat_steps", note)
    prompts, texts = [[5, 9, 11], [7] * 9, [30, 2]], []
    for slots in (None, 60):
        engine = model.engine(
            algorithm="NONE", max_batch_size=3, max_context_len=64, attention=attention,
            kv_slots=slots, generation="v1",
        )  # fmt: skip
        with engine:
            texts.append(outputs(run(engine, prompts)))
            assert (engine.stats.preemptions > 0) == (slots is not None)
    assert texts[0] == texts[1]
    assert bool(repeated) == (attention is SdpaAttention)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "topk", "page_size"),
    [("EAGLE", 1, 4), ("EAGLE", 16, 1), ("EAGLE3", 2, 1), ("MULTI_LAYER_EAGLE", 1, 1),
     ("STANDALONE", 1, 1), ("NGRAM", 2, 1)],
)  # fmt: skip
@each_generation
def test_no_text_changes(make_engine, long_task, generation, algorithm, topk, page_size):
    prompts, texts = long_task
    wide = {"num_steps": 2, "num_draft_tokens": 12} if topk == 16 else {}
    slots = 130 if topk == 16 else 100
    engine = make_engine(
        algorithm, topk=topk, generation=generation, page_size=page_size, kv_tokens=slots,
        batch_sizes=[2, 8], steps_per_launch=2, chunked_prefill_size=16, **wide,
    )  # fmt: skip
    engine.capture()
    requests = run(engine, prompts)
    assert engine.stats.preemptions > 0
    assert outputs(requests) == texts
    assert {each.finish_reason for each in requests} == {FinishReason.LENGTH}


@pytest.mark.slow
@each_generation
def test_no_sampled_text_changes(make_engine, long_task, generation):
    prompts, _ = long_task
    params = {"temperature": 0.9, "top_k": 20, "seed": 5}
    roomy = make_engine(generation=generation)
    texts = outputs(run(roomy, prompts, **params))
    assert roomy.stats.preemptions == 0
    small = make_engine(generation=generation, kv_tokens=100, steps_per_launch=2)
    assert outputs(run(small, prompts, **params)) == texts
    assert small.stats.preemptions > 0


@pytest.mark.slow
@each_generation
def test_the_latest_admitted_is_preempted_first_and_runs_again_first(
    make_engine, long_task, generation
):
    prompts, texts = long_task
    engine = make_engine(generation=generation, kv_tokens=90, steps_per_launch=1)
    requests = [engine.submit(each, SamplingParams(max_new_tokens=LONG)) for each in prompts]
    order = []
    while engine.has_work:
        before = [request for request in requests if request.row]
        engine.step()
        for request in before:
            is_preempted = not request.row and not request.is_finished
            later = requests[requests.index(request) + 1 :]
            assert not (is_preempted and any(each.row for each in later if each in before))
        order += [r for r in requests if r.is_finished and r not in order]
    assert order[0] is requests[0]
    assert requests[0].num_admissions == 1, "the oldest request always makes progress"
    assert max(each.num_admissions for each in requests) > 1
    assert outputs(requests) == texts


@each_generation
def test_requests_with_small_limits_are_never_preempted(make_engine, task, generation):
    """What all admitted requests can ever need fits, or there is room for many steps."""
    engine = make_engine(generation=generation, kv_tokens=100)
    prompts = task.prompts[:8]
    requests = engine.generate(prompts, SamplingParams(max_new_tokens=9))
    assert engine.stats.preemptions == 0
    assert outputs(requests) == [text[:9] for text in task.expected[:8]]


@each_generation
def test_more_requests_run_at_once_than_their_limits_allow(make_engine, long_task, generation):
    """Three limits of 40 tokens do not fit, but three requests that stop early do."""
    prompts, texts = long_task
    stops = {text[6] for text in texts}
    engine = make_engine(generation=generation, kv_tokens=100, steps_per_launch=2)
    sampling = SamplingParams(max_new_tokens=LONG, stop_token_ids=frozenset(stops))
    requests = [engine.submit(each, sampling) for each in prompts]
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, sum(bool(each.row) for each in requests))
    assert most >= 3
    for request, text in zip(requests, texts, strict=True):
        end = next(i for i, token in enumerate(text) if token in stops) + 1
        assert request.output_ids == text[:end]


@pytest.mark.slow
@each_generation
def test_an_aborted_request_that_was_preempted_keeps_its_tokens(make_engine, long_task, generation):
    prompts, texts = long_task
    engine = make_engine(generation=generation, kv_tokens=90, steps_per_launch=1)
    requests = [engine.submit(each, SamplingParams(max_new_tokens=LONG)) for each in prompts]
    aborted = None
    while engine.has_work:
        engine.step()
        if aborted is None:
            aborted = next(
                (r for r in requests if r.output_ids and not r.row and not r.is_finished), None
            )
            if aborted is not None:
                engine.abort(aborted)
    assert aborted is not None
    for request, text in zip(requests, texts, strict=True):
        assert request.output_ids == text[: len(request.output_ids)]
        assert request is aborted or len(request.output_ids) == LONG
    assert engine.stats.new_tokens == sum(len(each.output_ids) for each in requests)


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 2])
@each_generation
def test_recurrent_states_begin_again(generation, topk):
    forward = DecayingForward("cpu", 4 if topk == 1 else 7)
    prompts = [[5, 9, 13], [7, 1], [2, 100, 4, 50, 3], [11]]
    with recurrent_engine(
        forward, NgramDrafter(), topk, generation=generation, slots=110, steps_per_launch=2,
        chunked_prefill_size=4,
    ) as engine:  # fmt: skip
        engine.capture()
        requests = run(engine, prompts)
        assert engine.stats.preemptions > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_ids == forward.plain(prompt, LONG)


@pytest.mark.slow
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
@each_generation
def test_the_checking_mode_accepts_slots_that_are_used_again(
    make_engine, long_task, monkeypatch, generation, is_captured
):
    """After preemptions, aborts and ends, rows still contain the slots of others."""
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    prompts, texts = long_task
    engine = make_engine(generation=generation, kv_tokens=90, steps_per_launch=2, batch_sizes=[4])
    if is_captured:
        engine.capture()
    aborted = engine.submit(prompts[0], SamplingParams(max_new_tokens=LONG))
    engine.step()
    engine.abort(aborted)
    assert outputs(run(engine, prompts)) == texts
    assert engine.stats.preemptions > 0
