"""Targets of a DFLASH head: the blocks of its draft worker, and the whole step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import graphkit as gk
from graphkit.engine.kv import ReqToTokenPool
from graphkit.errors import ConfigError
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode
from small_targets import drafted_llama, llama_target, mtp_chain

VERIFY, STEP = ForwardMode.TARGET_VERIFY, ForwardMode.STEP
BLOCK, COUNT = 6, 3


@pytest.fixture(scope="module")
def model():
    return drafted_llama("DFLASH", target_layer_ids=(0,), block_size=BLOCK, mask_token_id=3)


@pytest.fixture(scope="module")
def worker(model):
    """The target of a draft worker, whose TARGET_VERIFY runs the blocks of the head."""
    spec, requests = model.spec(), ReqToTokenPool(COUNT, 64, "cpu")
    requests.req_to_token[1:] = 1 + torch.arange(COUNT * 64).view(COUNT, 64)
    run = model.draft.engine_model(requests, spec)
    return CaptureTarget(
        name="blocks",
        spec=replace(spec, is_draft_worker=True, num_draft_tokens=BLOCK),
        sizes=model.sizes(COUNT, 64, spec),
        forwards={VERIFY: run.forward},
        attention=run.attention,
        weights=model.draft.module,
        mutable_state=run.attention.kv_pool.tensors(),
        optional_fields={VERIFY: ("custom_mask",)},
    )


@pytest.mark.slow
def test_blocks_replay_as_they_run(worker):
    record = gk.capture_target(worker, device="cpu", batch_sizes=[1, 3])
    assert record.mismatches == ()
    assert record.modes[0].tokens_per_request == BLOCK


@pytest.mark.slow
def test_the_step_replays_as_it_runs(model):
    target = llama_target(model, has_chain=False)
    record = gk.capture_target(target, modes=[STEP], device="cpu", batch_sizes=[1, 3])
    assert record.mismatches == ()


def test_the_runner_is_that_of_a_draft_worker(worker):
    runner = worker.runner(VERIFY, device="cpu")
    assert runner.spec.is_draft_worker
    assert runner.label == "draft TARGET_VERIFY"


@pytest.mark.slow
def test_audits_find_nothing(model):
    target = llama_target(model, has_chain=False)
    report = gk.audit_target(target, batch_sizes=[1, 3], device="cpu")
    assert [found for found in report.findings if found.severity == "error"] == []
    loop = [check.text for check in report.checks if check.audit == "loop"]
    assert loop == ["8 steps in one launch: no difference"]


def test_layers_of_a_chain_cannot_read_the_states_of_dflash(model):
    with pytest.raises(ConfigError, match="chain reads the hidden states of one") as caught:
        model.target(chain=mtp_chain(model))
    assert caught.value.field == "chain"
