"""Counters of an engine: tokens, verify steps, accepted tokens, replays and fallbacks."""

from __future__ import annotations

import pytest

from draft_choices import choices_of
from engine_runs import each_generation, outputs
from graphkit.engine import SamplingParams
from graphkit.engine.attention import PagedAttention
from graphkit.engine.request import VerifySteps
from graphkit.spec import ForwardMode

SHORT = SamplingParams(max_new_tokens=6)


@each_generation
def test_every_run_counts_as_replay_or_as_fallback_with_its_reason(make_engine, task, generation):
    engine = make_engine(generation=generation, batch_sizes=[8])
    modes = {
        "v1": {"TARGET_VERIFY", "DRAFT", "DRAFT_EXTEND"},
        "v2": {"TARGET_VERIFY", "DRAFT", "DRAFT_EXTEND_V2"},
        "v3": {"STEP"},
    }[generation]
    assert engine.stats.fallbacks == {}
    engine.generate(task.prompts[:3], SHORT)
    eager = engine.stats
    assert set(eager.fallbacks) == modes
    assert {reason for reasons in eager.fallbacks.values() for reason in reasons} == {
        "not captured"
    }
    assert set(eager.replays.values()) == {0}
    engine.capture()
    engine.generate(task.prompts[:3], SHORT)
    graphed = engine.stats
    assert graphed.fallbacks == eager.fallbacks
    assert set(graphed.replays) == modes
    # Without a graph, v3 runs one more step after the end of the last request. On CUDA so does a
    # loop that was launched before the host had read that end.
    fewer = {0} if generation != "v3" else {1} if engine.device.type == "cpu" else {0, 1}
    for mode, reasons in eager.fallbacks.items():
        assert reasons["not captured"] - graphed.replays[mode] in fewer


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_attention_without_graphs_of_a_mode_is_a_reason(make_engine, task, monkeypatch, topk):
    supports = PagedAttention.supports
    monkeypatch.setattr(
        PagedAttention,
        "supports",
        lambda attention, mode: (
            mode is not ForwardMode.DRAFT_EXTEND_V2 and supports(attention, mode)
        ),
    )
    engine = make_engine(topk=topk, batch_sizes=[8], generation="v2")
    engine.capture()
    requests = engine.generate(task.prompts[:3], SHORT)
    assert outputs(requests) == [t[:6] for t in task.expected[:3]]
    assert engine.stats.replays["DRAFT_EXTEND_V2"] == 0
    assert engine.stats.fallbacks == {
        "DRAFT_EXTEND_V2": {"attention backend": engine.stats.replays["DRAFT"]}
    }


@each_generation
def test_accept_length_counts_the_bonus_token(make_engine, task, generation):
    plain = make_engine("NONE", generation=generation)
    request = plain.generate(task.prompts[:1], SHORT)[0]
    assert plain.stats.accept_length == request.accept_length == 1.0
    assert plain.stats.num_verifies == request.num_verifies == 5  # the first token is prefill's
    engine = make_engine(generation=generation)
    requests = engine.generate(task.prompts[:9], SHORT)
    verifies = sum(request.num_verifies for request in requests)
    accepted = sum(request.num_accepted_tokens for request in requests)
    stats = engine.stats
    assert (stats.num_verifies, stats.accept_length) == (verifies, accepted / verifies)
    lengths = stats.accepted_lengths
    assert (sum(lengths.values()), sum(n * lengths[n] for n in lengths)) == (verifies, accepted)
    assert list(lengths) == sorted(lengths) != [1], "the draft model errs in some rows, not in all"
    assert set(lengths) <= {1, 2, 3, 4}
    assert plain.stats.accepted_lengths == {1: 5}
    assert stats.new_tokens == sum(len(request.output_ids) for request in requests)
    assert accepted >= stats.new_tokens - len(requests), (
        "all but the first tokens, which prefill generates"
    )


@each_generation
def test_requests_that_still_run_count(make_engine, task, generation):
    engine = make_engine(generation=generation)
    assert engine.stats.accept_length == 0
    request = engine.submit(task.prompts[0])
    for _ in range(4):
        engine.step()
    assert engine.stats.new_tokens == len(request.output_ids) > 0
    assert engine.stats.accept_length == request.accept_length >= 1


class Steps(VerifySteps):
    """Steps with known counts."""

    def __init__(self, accepted, drafted):
        self.accepted_lengths, self.drafted_lengths = accepted, drafted


def test_acceptance_by_position_is_a_share_of_the_steps_that_drafted_there():
    none = Steps({}, {})
    assert (none.acceptance, none.accept_length, none.num_rows) == ((), 0, 0)
    steps = Steps(accepted={1: 4, 2: 3, 4: 1}, drafted={0: 2, 1: 2, 3: 4})
    assert steps.acceptance == (4 / 6, 1 / 4, 1 / 4)
    assert (steps.num_verifies, steps.num_draft_tokens, steps.num_rows) == (8, 14, 22)
    assert (steps.num_accepted_tokens, steps.accept_length) == (14, 14 / 8)


@pytest.mark.slow
@each_generation
def test_the_gain_over_plain_decoding_is_that_of_the_measured_times(
    make_engine, device, task, generation
):
    """With drafts that are right, all steps but a few have the longest length."""
    engine = make_engine(
        "EXACT", num_steps=(0, 3), generation=generation, batch_sizes=[1], max_batch_size=1
    )
    engine.capture()
    assert engine.stats.gain_over_plain == 0
    (request,) = engine.generate(task.prompts[:1], SamplingParams(max_new_tokens=61))
    stats, times = engine.stats, choices_of(engine).times[0].tolist()
    assert stats.acceptance == request.acceptance
    if device == "cuda":  # times follow drift there, and those of a shared GPU vary
        assert stats.gain_over_plain > 0
        return
    assert request.acceptance[0] > 0.9
    gain = stats.accept_length * times[0] / times[1]
    assert stats.gain_over_plain == pytest.approx(gain, rel=0.1)
    assert stats.step_seconds == pytest.approx(stats.num_verifies * times[1] / 1e6, rel=0.15)


@each_generation
def test_one_draft_length_has_no_measured_gain(make_engine, task, generation):
    engine = make_engine(generation=generation)
    engine.generate(task.prompts[:1], SHORT)
    assert (engine.stats.gain_over_plain, engine.stats.plain_seconds) == (0, 0)
