"""What a forward must return, and the live rows of it that callers get."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graphkit import CaptureError, ForwardOutput, OutputError


@dataclasses.dataclass(kw_only=True, eq=False)
class WithScores(ForwardOutput):
    """A field that no graph of the mode would give back."""

    scores: torch.Tensor | None = None


def test_live_rows_are_views_and_clones_are_not():
    whole = ForwardOutput(next_token_logits=torch.rand(8, 5), hidden_states=torch.rand(8, 3))
    live = whole.live(1, 4)
    assert live.next_token_logits.shape == (4, 5)
    assert live.hidden_states.data_ptr() == whole.hidden_states.data_ptr()
    copy = live.clone()
    whole.hidden_states.zero_()
    assert live.hidden_states.eq(0).all()
    assert copy.hidden_states.gt(0).all()


@pytest.mark.parametrize("way", ["replay", "run_padded"])
def test_callers_own_the_object_that_they_get(runner, make_batch, expect, assert_same, way):
    """Engines write back what they select: ``output.next_token_logits = logits[rows]``."""
    run = getattr(runner, way)
    for seed in range(3):
        batch = make_batch(2, seed=seed)
        output = run(batch)
        assert_same(output, expect(batch))
        output.next_token_logits, output.hidden_states = output.next_token_logits[:1] * 0, None


def test_hidden_states_may_be_absent(make_runner, make_batch, model):
    runner = make_runner(
        lambda inputs: ForwardOutput(next_token_logits=model(inputs).next_token_logits)
    )
    runner.capture()
    for way in (runner.replay, runner.fall_back):
        output = way(make_batch(3))
        assert output.hidden_states is None
        assert list(output.tensors()) == ["next_token_logits"]
        assert output.clone().hidden_states is None


def test_an_output_that_is_an_input_is_read_anew(make_runner, make_batch):
    """A view of the arena has no operation of its own to record."""
    runner = make_runner(lambda i: ForwardOutput(next_token_logits=i.positions.view(-1, 1)))
    runner.capture()
    for seed in range(3):
        batch = make_batch(2, seed=seed)
        got = runner.replay(batch).next_token_logits
        assert got.view(-1).tolist() == batch.positions.tolist()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda out: out.next_token_logits, r"returned a Tensor.*Return graphkit\.ForwardOutput"),
        (lambda out: None, r"returned a NoneType.*Return graphkit\.ForwardOutput"),
        (
            lambda out: ForwardOutput(next_token_logits=out.next_token_logits[1:]),
            r"rows of next_token_logits for (8|16) tokens",
        ),
        (
            lambda out: ForwardOutput(
                next_token_logits=out.next_token_logits,
                hidden_states=out.hidden_states.repeat(2, 1),
            ),
            r"(16|32) rows of hidden_states for (8|16) tokens",
        ),
        (lambda out: ForwardOutput(next_token_logits=None), "next_token_logits"),
        (
            lambda out: WithScores(**vars(out)),
            r"returned a WithScores.*Return graphkit\.ForwardOutput",
        ),
        (lambda out: ForwardOutput(next_token_logits=[1.0] * 8), "next_token_logits"),
        (lambda out: ForwardOutput(next_token_logits=torch.tensor(1.0)), "next_token_logits"),
    ],
    ids=[
        "tensor",
        "nothing",
        "too few",
        "too many",
        "no logits",
        "a field more",
        "a list",
        "a scalar",
    ],
)
def test_a_forward_must_return_its_modes_output(make_runner, make_batch, model, wrong, text):
    runner = make_runner(lambda inputs: wrong(model(inputs)))
    with pytest.raises(OutputError, match=text):
        runner.fall_back(make_batch(2))
    with pytest.raises(OutputError, match=text):
        runner.run(make_batch(2))
    assert runner.stats.fallbacks == {}
    with pytest.raises(CaptureError, match=f"OutputError: .*{text}"):
        runner.capture()
    assert runner.status == "planned"
