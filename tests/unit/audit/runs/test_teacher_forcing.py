"""Teacher forcing records the forwards of one run and forces their results on the next."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import graphkit as gk
from graphkit.audit.runs.teacher_forcing import ForwardPair, TeacherForcing
from graphkit.runners import Output


def constant(value, rows=2, **fields):
    return gk.ForwardOutput(next_token_logits=torch.full((rows, 3), value), **fields)


class Script:
    """Returns prepared outputs one after the other."""

    def __init__(self, *outputs):
        self.outputs = list(outputs)

    def __call__(self, inputs):
        return self.outputs.pop(0)


class Step:
    """Has the part of a step that teacher forcing uses."""

    def __init__(self, forward):
        self.forward = forward

    @contextmanager
    def wrapped(self, wrapper):
        forward, self.forward = self.forward, wrapper(self.forward)
        try:
            yield
        finally:
            self.forward = forward


@pytest.fixture
def make_step():
    """Return ``make_step(forward)``: a step, and teacher forcing for it."""

    def make(forward):
        step = Step(forward)
        return step, TeacherForcing(step)

    return make


def test_outside_of_blocks_a_step_is_not_affected(make_step):
    script = Script(constant(1.0), constant(2.0))
    step, forcing = make_step(script)
    with forcing.record():
        step.forward(None)
    assert step.forward is script


def test_each_forward_of_a_sequence_is_recorded(make_step):
    outputs = [constant(float(i)) for i in range(3)]
    step, forcing = make_step(tuple(Script(output, output) for output in outputs))
    with forcing.record():
        assert [forward(None) for forward in step.forward] == outputs
    with forcing.force() as pairs:
        for forward in step.forward:
            forward(None)
    assert [float(pair.recorded["next_token_logits"][0, 0]) for pair in pairs] == [0, 1, 2]


def test_a_forced_run_continues_with_the_recorded_live_rows(make_step):
    recorded = [constant(1.0, rows=4), constant(2.0, rows=4)]
    own = [constant(1.5), constant(2.5)]
    step, forcing = make_step(Script(*recorded, *own))
    with forcing.record():
        assert [step.forward(None) for _ in range(2)] == recorded
    with forcing.force() as pairs:
        outputs = [step.forward(inputs) for inputs in ("first", "second")]
    assert [output.next_token_logits.tolist() for output in outputs] == [
        [[1.0] * 3] * 2, [[2.0] * 3] * 2,
    ]  # fmt: skip
    assert [pair.inputs for pair in pairs] == ["first", "second"]
    for pair, mine, theirs in zip(pairs, own, recorded, strict=True):
        assert torch.equal(pair.own["next_token_logits"], mine.next_token_logits)
        assert torch.equal(pair.recorded["next_token_logits"], theirs.next_token_logits[:2])


def test_recorded_results_are_copies(make_step):
    """A forward may return the same memory every time."""
    static = constant(1.0)
    step, forcing = make_step(lambda _inputs: static)
    with forcing.record():
        step.forward(None)
    static.next_token_logits.fill_(5.0)
    with forcing.force() as pairs:
        assert step.forward(None).next_token_logits.unique().tolist() == [1.0]
    assert pairs[0].own["next_token_logits"].unique().tolist() == [5.0]


def test_a_new_recording_replaces_the_last_one(make_step):
    outputs = [constant(float(i)) for i in range(1, 5)]
    step, forcing = make_step(Script(*outputs))
    for _ in range(2):
        with forcing.record():
            step.forward(None)
    with forcing.force():
        assert step.forward(None).next_token_logits.unique().tolist() == [2.0]
    assert step.forward(None).next_token_logits.unique().tolist() == [4.0]


@pytest.mark.parametrize("block", ["record", "force"])
def test_a_run_that_fails_leaves_the_step_unchanged(make_step, block):
    script = Script(constant(1.0), constant(2.0))
    step, forcing = make_step(script)
    with forcing.record():
        step.forward(None)
    with pytest.raises(ZeroDivisionError), getattr(forcing, block)():
        assert step.forward(None).next_token_logits.numel() // 0
    assert step.forward is script


@pytest.mark.parametrize("block", ["record", "force"])
def test_a_result_that_is_no_output_passes(make_step, block):
    """The runner refuses it."""
    step, forcing = make_step(lambda _inputs: 5)
    with getattr(forcing, block)():
        assert step.forward(None) == 5


def test_missing_fields_are_reported_and_not_invented(make_step):
    hidden = torch.ones(2, 3)
    step, forcing = make_step(Script(constant(1.0, hidden_states=hidden), constant(2.0)))
    with forcing.record():
        step.forward(None)
    with forcing.force() as pairs:
        output = step.forward(None)
    assert isinstance(output, Output)
    assert output.hidden_states is None
    assert pairs[0].own.keys() == {"next_token_logits"}
    assert pairs[0].recorded.keys() == {"next_token_logits", "hidden_states"}


@pytest.mark.parametrize("rows_each", [1, 2, 4])
def test_rows_of_one_width_belong_to_their_request(rows_each):
    inputs = gk.TargetVerifyInputs(req_pool_indices=torch.arange(3))
    pair = ForwardPair(inputs, {}, {})
    owners = [pair.owner(row, 3 * rows_each) for row in range(3 * rows_each)]
    assert owners == [request for request in range(3) for _ in range(rows_each)]


def test_packed_rows_belong_to_their_request():
    lengths = torch.tensor([2, 1, 4], dtype=torch.int32)
    inputs = gk.DraftExtendInputs(
        req_pool_indices=torch.arange(3), num_accepted_tokens=lengths, width=4
    )
    pair = ForwardPair(inputs, {}, {})
    assert [pair.owner(row, 7) for row in range(7)] == [0, 0, 1, 2, 2, 2, 2]
    assert [pair.owner(row, 3) for row in range(3)] == [0, 1, 2], "a row per request"
