"""The capture target of a DFLASH head: its blocks, and the whole step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import graphkit as gk
from graphkit.errors import ConfigError
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.reference.target import model_target
from graphkit.spec import ForwardMode

VERIFY, STEP = ForwardMode.TARGET_VERIFY, ForwardMode.STEP
BLOCK = 6


@pytest.fixture(scope="module")
def target(models):
    torch.manual_seed(5)
    config = replace(models[0].config, num_hidden_layers=2, qk_norm=True)
    head = DFlashHead(
        config, models[0], target_layer_ids=(0,), block_size=BLOCK, mask_token_id=3
    ).requires_grad_(False)
    return model_target(models[0], head, name="tiny", max_batch_size=3)


@pytest.mark.slow
def test_blocks_and_the_step_replay_as_they_run(target):
    record = gk.capture_target(target, device="cpu", batch_sizes=[1, 3])
    assert record.mismatches == ()
    assert [mode.mode for mode in record.modes] == ["TARGET_VERIFY", "STEP"]
    assert record.modes[0].tokens_per_request == BLOCK


def test_the_runner_is_that_of_a_draft_worker(target):
    runner = target.runner(VERIFY, device="cpu")
    assert runner.spec.is_draft_worker
    assert runner.label == "draft TARGET_VERIFY"
    batch = target.batch(VERIFY, 2, 0)
    assert batch.custom_mask.shape == (2, BLOCK, BLOCK)
    assert batch.custom_mask.all()
    rows = batch.positions.reshape(2, BLOCK)
    assert (rows == batch.seq_lens[:, None] + range(BLOCK)).all()


@pytest.mark.slow
def test_audits_find_nothing(target):
    report = gk.audit_target(target, batch_sizes=[1, 3], device="cpu")
    assert report.findings == ()
    loop = [check.text for check in report.checks if check.audit == "loop"]
    assert loop == ["8 steps in one launch: no difference"]


def test_layers_of_a_chain_cannot_read_the_states_of_dflash(models, target):
    head = target.forwards[VERIFY]._head
    with pytest.raises(ConfigError, match="mtp reads the hidden states of one") as caught:
        model_target(models[0], head, models[2], name="tiny")
    assert caught.value.field == "mtp"
