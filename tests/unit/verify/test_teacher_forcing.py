"""A follower's forwards are noted beside the leader's, and their results replaced by its."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit.runners import Output
from graphkit.targets.lockstep import Lockstep, Meeting

VERIFY, LAYERS = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.MULTI_LAYER_EAGLE


def constant(value, rows=2, **fields):
    return gk.ForwardOutput(next_token_logits=torch.full((rows, 3), value), **fields)


class Script:
    """Returns what it was told to, one after the other."""

    def __init__(self, *outputs):
        self.outputs = list(outputs)

    def __call__(self, inputs):
        return self.outputs.pop(0)


@pytest.fixture
def watch(make_target):
    """``watch(forward)``: the forward under observation, and who observes."""

    def make(forward):
        lockstep = Lockstep()
        return lockstep.watch(make_target(forwards={VERIFY: forward})).forwards[VERIFY], lockstep

    return make


def test_a_forward_that_is_only_watched_does_what_it_did(watch):
    first, second = constant(1.0), object()
    forward, _ = watch(Script(first, second))
    assert forward(None) is first
    assert forward(None) is second


def test_a_chain_stays_a_chain(make_target):
    outputs = [constant(float(i)) for i in range(3)]
    target = make_target(forwards={LAYERS: [Script(output) for output in outputs]})
    chain = Lockstep().watch(target).forwards[LAYERS]
    assert [forward(None) for forward in chain] == outputs


def test_the_target_itself_is_not_changed(make_target):
    target = make_target()
    before = dict(target.forwards)
    watched = Lockstep().watch(target)
    assert target.forwards == before
    assert (watched.name, watched.sample_batch) == (target.name, target.sample_batch)


def test_a_follower_goes_on_with_the_leaders_live_rows(watch):
    led = [constant(1.0, rows=4), constant(2.0, rows=4)]
    made = [constant(1.5), constant(2.5)]
    forward, lockstep = watch(Script(*led, *made))
    with lockstep.lead():
        assert [forward(None) for _ in range(2)] == led
    with lockstep.follow() as meetings:
        gone_on = [forward(inputs) for inputs in ("first", "second")]
    assert [output.next_token_logits.tolist() for output in gone_on] == [
        [[1.0] * 3] * 2, [[2.0] * 3] * 2,
    ]  # fmt: skip
    assert [meeting.inputs for meeting in meetings] == ["first", "second"]
    for meeting, mine, theirs in zip(meetings, made, led, strict=True):
        assert torch.equal(meeting.made["next_token_logits"], mine.next_token_logits)
        assert torch.equal(meeting.led["next_token_logits"], theirs.next_token_logits[:2])


def test_what_the_leader_made_outlives_its_memory(watch):
    """A forward may return the same memory every time."""
    static = constant(1.0)
    forward, lockstep = watch(lambda _inputs: static)
    with lockstep.lead():
        forward(None)
    static.next_token_logits.fill_(5.0)
    with lockstep.follow() as meetings:
        assert forward(None).next_token_logits.unique().tolist() == [1.0]
    assert meetings[0].made["next_token_logits"].unique().tolist() == [5.0]


def test_another_lead_begins_anew(watch):
    forward, lockstep = watch(Script(constant(1.0), constant(2.0), constant(3.0), constant(4.0)))
    for _ in range(2):
        with lockstep.lead():
            forward(None)
    with lockstep.follow():
        assert forward(None).next_token_logits.unique().tolist() == [2.0]
    assert forward(None).next_token_logits.unique().tolist() == [4.0]


@pytest.mark.parametrize("way", ["lead", "follow"])
def test_a_run_that_fails_leaves_nothing_behind(watch, way):
    last = constant(7.0)
    forward, lockstep = watch(Script(constant(1.0), constant(2.0), last))
    with lockstep.lead():
        forward(None)
    with pytest.raises(ZeroDivisionError), getattr(lockstep, way)():
        assert forward(None).next_token_logits.numel() // 0
    assert forward(None) is last


@pytest.mark.parametrize("way", ["lead", "follow"])
def test_what_is_no_output_passes(watch, way):
    """The runner refuses it, in its own words."""
    forward, lockstep = watch(lambda _inputs: 5)
    with getattr(lockstep, way)():
        assert forward(None) == 5


def test_fields_that_one_of_them_lacks_are_told_and_not_made_up(watch):
    hidden = torch.ones(2, 3)
    forward, lockstep = watch(Script(constant(1.0, hidden_states=hidden), constant(2.0)))
    with lockstep.lead():
        forward(None)
    with lockstep.follow() as meetings:
        output = forward(None)
    assert isinstance(output, Output)
    assert output.hidden_states is None
    assert meetings[0].made.keys() == {"next_token_logits"}
    assert meetings[0].led.keys() == {"next_token_logits", "hidden_states"}


@pytest.mark.parametrize("rows_each", [1, 2, 4])
def test_rows_of_one_width_belong_to_their_request(rows_each):
    inputs = gk.TargetVerifyInputs(req_pool_indices=torch.arange(3))
    meeting = Meeting(inputs, {}, {})
    owners = [meeting.owner(row, 3 * rows_each) for row in range(3 * rows_each)]
    assert owners == [request for request in range(3) for _ in range(rows_each)]


def test_packed_rows_belong_to_their_request():
    lengths = torch.tensor([2, 1, 4], dtype=torch.int32)
    inputs = gk.DraftExtendInputs(
        req_pool_indices=torch.arange(3), num_accepted_tokens=lengths, width=4
    )
    meeting = Meeting(inputs, {}, {})
    assert [meeting.owner(row, 7) for row in range(7)] == [0, 0, 1, 2, 2, 2, 2]
    assert [meeting.owner(row, 3) for row in range(3)] == [0, 1, 2], "a row per request"
