"""A staged field's rows and its address: the one that was given last counts."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit.buffers import Axis, Rows, declare

WIDTH = 4


@dataclass(kw_only=True, eq=False)
class Scaled(gk.TargetVerifyInputs):
    """Two fields without numpy dtype: one has payload, the graph reads the other by its address."""

    scales: Rows = declare(Axis.REQUEST, torch.bfloat16, "of each request", pad=1)
    hidden: Rows = declare(Axis.TOKEN, torch.bfloat16, "of each row", row=(8,), by_address=True)


@pytest.fixture
def runner():
    def forward(inputs):
        logits = (
            inputs.hidden.float()
            * inputs.scales.float().repeat_interleave(WIDTH, output_size=inputs.num_tokens)[:, None]
        )
        return gk.ForwardOutput(next_token_logits=logits)

    made = gk.TargetVerifyRunner(
        forward,
        spec=gk.SpecConfig("EAGLE", num_steps=3, topk=1, num_draft_tokens=WIDTH),
        sizes=gk.BufferSizes(4, 64, 8, 8, torch.float32),
        device="cpu",
        inputs_type=Scaled,
    )
    made.capture()
    yield made
    made.close()


def test_a_bf16_field_in_the_entry_holds_pads_until_it_is_assigned(runner):
    staged = runner.stage(2)
    with pytest.raises(gk.InputError, match="'scales' has no numpy view"):
        staged.scales  # noqa: B018 - reading is the test
    staged.hidden = torch.ones(2 * WIDTH, 8, dtype=torch.bfloat16)
    assert (staged.replay().next_token_logits == 1).all()
    staged = runner.stage(2)
    staged.hidden = torch.ones(2 * WIDTH, 8, dtype=torch.bfloat16)
    staged.scales = torch.tensor([2, 3], dtype=torch.bfloat16)
    assert staged.replay().next_token_logits[:, 0].tolist() == [2.0] * WIDTH + [3.0] * WIDTH


def test_a_field_by_address_is_due(runner):
    with pytest.raises(gk.InputError, match="'hidden' was not assigned"):
        runner.stage(2).replay()


def test_closing_keeps_the_counts_and_nothing_else(runner):
    staged = runner.stage(2)
    staged.hidden = np.ones((2 * WIDTH, 8), dtype=np.float32)
    staged.replay()
    before = runner.stats
    runner.close()
    assert runner.stats == before
    assert before.replays == 1
