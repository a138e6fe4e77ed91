"""What a forward must return, and the live rows of it that callers get."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graphkit import CaptureError, ForwardOutput, OutputError
from graphkit.runners.output_fields import OutputCheck


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
    runner = make_runner(
        lambda i: ForwardOutput(
            next_token_logits=torch.zeros(i.num_tokens, 32), hidden_states=i.input_embeds
        ),
        optional_fields=["input_embeds"],
    )
    runner.capture()
    for seed in range(3):
        embeds = torch.rand(8, 8, generator=torch.Generator().manual_seed(seed))
        got = runner.replay(make_batch(2, seed=seed, input_embeds=embeds)).hidden_states
        assert torch.equal(got, embeds)


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


@pytest.mark.parametrize(
    ("field", "change", "text"),
    [
        (
            "next_token_logits",
            lambda rows: rows.repeat(1, 2),
            r"as \[(8|16), 64\] torch.float32, expected \[(8|16), 32\] floating-point: Buf",
        ),
        ("next_token_logits", lambda rows: rows[:, :, None], r"as \[(8|16), 32, 1\]"),
        ("next_token_logits", lambda rows: rows[:, 0], r"as \[(8|16)\] .* expected \[(8|16), 32\]"),
        ("next_token_logits", lambda rows: rows.long(), r"torch.int64, expected .* floating-point"),
        ("hidden_states", lambda rows: rows[:, :7], r"hidden_size is 8"),
        ("hidden_states", lambda rows: rows > 0, r"torch.bool, expected .* floating-point"),
    ],
)
def test_rows_of_an_output_are_those_of_the_sizes(
    make_runner, make_batch, model, field, change, text
):
    def wrong(inputs):
        output = model(inputs)
        setattr(output, field, change(getattr(output, field)))
        return output

    runner = make_runner(wrong)
    with pytest.raises(OutputError, match=rf"forward \S*wrong returned {field} as "):
        runner.fall_back(make_batch(2))
    with pytest.raises(OutputError, match=text):
        runner.run(make_batch(2))
    with pytest.raises(CaptureError, match=f"OutputError: .*{text}"):
        runner.capture()


def test_logits_may_be_of_another_floating_point_dtype(make_runner, make_batch, model):
    """Many models compute their logits in float32, whatever their dtype is."""

    def double(inputs):
        output = model(inputs)
        output.next_token_logits = output.next_token_logits.double()
        return output

    runner = make_runner(double)
    runner.capture()
    assert runner.replay(make_batch(2)).next_token_logits.dtype is torch.float64


def test_replays_do_not_check_the_output(runner, make_batch, monkeypatch):
    monkeypatch.setattr(OutputCheck, "check_field", None)
    runner.replay(make_batch(2))
    runner.stage(2).replay()
