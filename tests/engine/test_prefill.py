"""Prompts are prefilled together, in packed chunks under one budget of tokens per forward."""

from __future__ import annotations

import pytest
import torch

from engine_runs import each_generation, finish, outputs
from graphkit.engine import FinishReason, SamplingParams
from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.step import Drafter, NgramDrafter, context as step_context
from graphkit.engine.step.request_state import Prefill
from graphkit.errors import ConfigError
from graphkit.spec import ForwardMode

ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "MULTI_LAYER", "NGRAM", "NONE")


class Noting:
    """A forward that notes the tokens that each request has in each prefill, and runs steps."""

    def __init__(self, forward):
        self.forward, self.prefills, self.calls, self.notes_lengths = forward, [], [], True

    def __call__(self, inputs):
        lengths = inputs.lengths
        if (
            lengths is not None and self.notes_lengths and inputs.req_pool_indices.any()
        ):  # not those of the warm-up
            self.prefills.append(lengths.tolist())
        self.calls.append("step" if lengths is None else "prefill")
        return self.forward(inputs)


@pytest.fixture
def noting(make_engine, labelling_forward):
    """``noting(...)``: an engine, and its target's forward."""

    def make(*arguments, **options):
        made = []

        def target(model, attention, *layers):
            made.append(Noting(labelling_forward(model, attention, *layers)))
            return made[0]

        engine = make_engine(*arguments, target=target, **options)
        return engine, made[0]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["EAGLE", "STANDALONE", "NGRAM", "NONE"])
@each_generation
def test_32_short_prompts_take_few_forwards(noting, task, algorithm, generation):
    engine, target = noting(algorithm, generation=generation, max_batch_size=32, batch_sizes=[32])
    prompts = task.prompts[:32]
    assert sum(map(len, prompts)) < 512
    engine.capture()
    target.prefills.clear()
    requests = engine.generate(prompts, SamplingParams(max_new_tokens=1))
    assert [len(lengths) for lengths in target.prefills] == [32]
    assert sorted(target.prefills[0]) == sorted(len(prompt) for prompt in prompts)
    assert outputs(requests) == [text[:1] for text in task.expected[:32]]


@each_generation
def test_a_budget_bounds_the_tokens_of_a_forward(noting, task, generation):
    engine, target = noting(generation=generation, chunked_prefill_size=24)
    requests = engine.generate(task.prompts[:8], SamplingParams(max_new_tokens=9))
    total = sum(map(len, task.prompts[:8]))
    assert max(map(sum, target.prefills)) == 24
    assert sum(map(sum, target.prefills)) == total
    assert len(target.prefills) <= -(-total // 24) + 1
    assert outputs(requests) == [text[:9] for text in task.expected[:8]]


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@each_generation
def test_running_requests_get_a_step_between_chunks(noting, task, plain, generation, captured):
    engine, target = noting(generation=generation, chunked_prefill_size=4, batch_sizes=[8])
    if captured:
        engine.capture()
    first = engine.submit(task.prompts[0], SamplingParams(max_new_tokens=40))
    while not first.output_ids:
        engine.step()
    long = [(7 * i) % 90 for i in range(48)]
    second = engine.submit(long, SamplingParams(max_new_tokens=2))
    target.calls.clear()
    known, without = first.num_tokens, []
    while not second.output_ids and not first.is_finished:
        engine.step()
        without.append(first.num_tokens == known)
        known = first.num_tokens
    # v2 and v3 deliver one step late.
    assert sum(without) <= 2
    if not captured:
        between = "".join(call[0] for call in target.calls).strip("s").split("p")
        assert all(between[1:-1]), "each chunk is followed by a step"
    finish(engine)
    assert second.output_ids == plain([long], [2])[0]
    assert first.output_ids[:13] == task.expected[0][:13]


@each_generation
def test_a_long_prompt_neither_holds_up_short_ones_nor_waits_for_them(noting, task, generation):
    engine, target = noting(generation=generation, chunked_prefill_size=16, max_batch_size=6)
    prompts = [[(3 * i) % 90 for i in range(60)], *(task.prompts[i] for i in (0, 1, 5, 9, 13))]
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_new_tokens=1))
    finish(engine)
    short = sum(map(len, prompts[1:]))
    forwards = -(-short // 8)
    for lengths in target.prefills[: forwards - 1]:
        assert lengths[0] == 8, "half of the budget while short prompts wait"
        assert sum(lengths) == 16
    assert sum(len(lengths) > 1 for lengths in target.prefills) == forwards
    assert {sum(lengths) for lengths in target.prefills[:-1]} == {16}


@each_generation
def test_attention_that_knows_no_packed_rows_gets_one_prompt_at_a_time(
    make_engine, task, generation, monkeypatch
):
    packed = ForwardMode.DRAFT_EXTEND
    supports = SdpaAttention.supports
    monkeypatch.setattr(
        SdpaAttention, "supports", lambda self, mode: mode is not packed and supports(self, mode)
    )
    algorithm = "NGRAM" if generation == "v1" else "EAGLE"  # v1 captures DRAFT_EXTEND itself
    engine = make_engine(algorithm, generation=generation)
    found = engine.generate(task.prompts[:6], SamplingParams(max_new_tokens=9))
    assert outputs(found) == [text[:9] for text in task.expected[:6]]


def test_a_failed_chunk_ends_its_request_alone(make_engine, task, labelling_forward):
    """The failure is in the second chunk; the other prompts of that forward continue."""

    def target(model, attention):
        forward = labelling_forward(model, attention)

        def raising(inputs):
            if inputs.lengths is not None and (inputs.input_ids == 77).any():
                raise ValueError("no such token")
            return forward(inputs)

        return raising

    engine = make_engine("NONE", target=target, chunked_prefill_size=20)
    prompts = [task.prompts[2], [5] * 12 + [77], task.prompts[5], task.prompts[7]]
    assert all(77 not in prompts[index] for index in (0, 2, 3))
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=3)) for prompt in prompts]
    raised = 0
    while engine.has_work:
        try:
            engine.step()
        except ValueError:
            raised += 1
    assert raised == 1
    assert requests[1].finish_reason is FinishReason.FAILED
    for index, number in ((0, 2), (2, 5), (3, 7)):
        assert requests[index].output_ids == task.expected[number][:3]


def test_an_override_that_is_never_called_is_refused(make_engine):
    class Mistaken(NgramDrafter):
        def prefill(self, chunk):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"Mistaken\.prefill is never called"):
        make_engine(drafter=lambda _: Mistaken())


def test_a_drafter_gets_the_chunks_of_each_request(make_engine, task):
    chunks = {}

    class Own(NgramDrafter):
        prefill_batch = Drafter.prefill_batch

        def prefill(self, chunk):
            row = int(chunk.req_pool_indices)
            text, following = chunks.setdefault(row, ([], []))
            assert chunk.start == len(text)
            assert chunk.hidden_states.shape[0] == len(chunk.input_ids)
            columns = self._context_table[row, chunk.start : chunk.start + len(chunk.input_ids)]
            assert torch.equal(columns.long(), chunk.out_cache_loc)
            text += chunk.input_ids.tolist()
            following += chunk.next_ids.tolist()

        def prepare(self, context):
            super().prepare(context)
            self._context_table = context.req_to_token

    engine = make_engine(drafter=lambda _: Own(), chunked_prefill_size=10)
    requests = engine.generate(task.prompts[:3], SamplingParams(max_new_tokens=1))
    found = sorted(tuple(text) for text, _ in chunks.values())
    assert found == sorted(map(tuple, task.prompts[:3]))
    for text, following in chunks.values():
        request = next(each for each in requests if list(each.prompt_ids) == text)
        assert following == [*text[1:], *request.output_ids]


@pytest.mark.slow
@pytest.mark.parametrize("skips", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("algorithm", ["EAGLE", "NONE"])
@each_generation
def test_prompts_replay_graphs_of_their_number_of_tokens(
    noting, task, algorithm, generation, skips, monkeypatch
):
    """Attention decides whether a graph holds one request or several. Others run eagerly."""
    for attention in (SdpaAttention, TritonAttention):
        monkeypatch.setattr(attention, "skips_absent_rows", skips)
    engine, target = noting(
        algorithm, generation=generation, chunked_prefill_size=24, prefill_sizes=[4, 24]
    )
    target.notes_lengths = False
    engine.capture()
    target.calls.clear()
    params = SamplingParams(max_new_tokens=5)
    requests = [*engine.generate(task.prompts[:1], params), *engine.generate(task.prompts, params)]
    expected = [text[:5] for text in (task.expected[0], *task.expected)]
    assert [
        out[: len(text)] for out, text in zip(outputs(requests), expected, strict=True)
    ] == expected
    prompts = engine._spec_step.prompts
    assert set(prompts.stats.replays_by_size) >= ({4, 24} if skips else {4})
    with prompts.without_stats():
        for size in (4, 24):  # as the times of graphs are measured
            assert prompts.replay(prompts.prompts_of_pads(size)).next_token_logits.isfinite().all()
    assert (target.calls.count("prefill") == 0) is skips


def test_prompts_of_a_forward_that_reads_the_host_run_eagerly(noting, task, caplog):
    engine, target = noting("NONE", prefill_sizes=[8, 32])
    engine.capture()  # the forward reads inputs.lengths
    assert "Prompts run without graphs" in caplog.text
    requests = engine.generate(task.prompts[:4], SamplingParams(max_new_tokens=3))
    assert outputs(requests) == [text[:3] for text in task.expected[:4]]
    assert sum(map(sum, target.prefills)) == sum(map(len, task.prompts[:4]))


def test_running_requests_wait_for_512_tokens_by_default(make_engine, monkeypatch):
    """Where no graph of prompts says how long more take, as in engines of several ranks on CUDA."""
    monkeypatch.setattr(step_context, "most_prefill_tokens", lambda options: 2048)
    engine = make_engine("NONE")
    prompt = Prefill(1, SamplingParams(), 1, range(4000))
    for is_anyone_running, count in ((False, 2048), (True, 512)):
        chunks = engine._admission.chunks([prompt], is_anyone_running=is_anyone_running)
        assert [tokens for _, tokens in chunks] == [count]
