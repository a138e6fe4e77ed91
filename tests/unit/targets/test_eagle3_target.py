"""A capture target whose draft model is an EAGLE-3 head."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit.errors import ConfigError
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.reference.target import model_target
from graphkit.spec import ForwardMode

DRAFT, EXTEND, VERIFY = (
    ForwardMode.DRAFT, ForwardMode.DRAFT_EXTEND, ForwardMode.TARGET_VERIFY
)  # fmt: skip


@pytest.fixture(scope="module")
def head(models):
    """A random head that drafts every fifth token of the first 200."""
    model, eagle, _ = models
    torch.manual_seed(5)
    head = Eagle3Head(eagle.config, model, aux_layers=(0, 1, 2), draft_vocab_size=40)
    head.d2t.copy_(4 * torch.arange(40))
    return head.requires_grad_(False)


@pytest.fixture(scope="module", params=[1, 2], ids=["chain", "tree"])
def target(models, head, request):
    return model_target(models[0], head, name="tiny", topk=request.param, max_batch_size=3)


@pytest.mark.slow
def test_every_mode_and_the_step_replay_as_they_run(target):
    record = gk.capture_target(target, device="cpu", batch_sizes=[3])
    assert record.mismatches == ()
    assert [mode.mode for mode in record.modes] == [mode.name for mode in target.modes]
    assert target.modes[-1] is ForwardMode.STEP


def test_batches_have_three_layers_and_target_tokens(target):
    assert target.spec.resolved.is_eagle3()
    assert target.batch(EXTEND, 3, 0).hidden_states.shape[1] == 3 * 32
    batch = target.batch(DRAFT, 3, 0)
    assert batch.hidden_states.shape == (3, 32)
    assert set(batch.topk_index.ravel()) <= set(range(0, 200, 5))
    drafted = target.runner(DRAFT, device="cpu").fall_back(batch).draft_tokens
    assert set(drafted.flatten().tolist()) <= set(range(0, 200, 5))
    batch = target.batch(VERIFY, 3, 0)
    nothing = {name: rows[:0] for name, rows in vars(batch).items() if rows is not None}
    idle = target.runner(VERIFY, device="cpu").run(type(batch)(**nothing))
    assert idle.hidden_states.shape == (0, 96)


def test_layers_of_a_chain_cannot_read_the_states_of_eagle3(models, head):
    with pytest.raises(ConfigError, match="mtp reads the hidden states of one") as caught:
        model_target(models[0], head, models[2], name="tiny")
    assert caught.value.field == "mtp"
