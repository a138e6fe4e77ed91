"""Targets of a small Llama with draft heads: modes, pools, draft workers and the whole step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import graphkit as gk
from declared_modes import MODES
from graphkit.engine.attention import TritonAttention
from graphkit.engine.kv import ReqToTokenPool
from graphkit.errors import ConfigError
from graphkit.models.reference import reference_target
from graphkit.runners.targets import CaptureTarget
from small_targets import STEPS, drafted_llama, llama_target, mtp_chain

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
DRAFT, EXTEND = gk.ForwardMode.DRAFT, gk.ForwardMode.DRAFT_EXTEND
STEP = gk.ForwardMode.STEP
EXTEND_V2, LAYERS = gk.ForwardMode.DRAFT_EXTEND_V2, gk.ForwardMode.MULTI_LAYER_EAGLE


def test_parts_have_pools_of_their_own():
    target = llama_target()
    parts = {name.split(".")[0] for name in target.mutable_state}
    assert parts >= {"draft", "chain"}
    assert {name for name, _ in target.weights.named_children()} == {"target", "draft", "chain"}
    assert {f"chain.0.key.{layer}" for layer in range(STEPS)} < target.mutable_state.keys()
    assert len({tensor.data_ptr() for tensor in target.mutable_state.values()}) == len(
        target.mutable_state
    )
    backends = {id(backend) for backend in target.attention.values()}
    assert len(backends) == 3
    assert target.attention[DRAFT] is target.attention[EXTEND] is target.attention[EXTEND_V2]


def test_a_model_without_draft_models_has_fewer_modes():
    model, plain = drafted_llama(), drafted_llama(None)
    assert set(llama_target(plain, has_chain=False).forwards) == {VERIFY, DECODE}
    with_head = llama_target(model, has_chain=False)
    assert set(with_head.forwards) == {VERIFY, DECODE, DRAFT, EXTEND, EXTEND_V2}
    assert set(llama_target(plain).forwards) == {VERIFY, DECODE, LAYERS}


def test_the_shipped_target_has_every_mode_and_loads_without_a_progress_bar(capfd):
    target = reference_target()
    assert "Loading weights" not in capfd.readouterr().err
    assert set(target.forwards) == set(MODES)
    assert (target.name, list(target.batch_sizes)) == ("reference model", [1, 2, 4, 8])
    wide = reference_target(topk=2, max_batch_size=3, attention=TritonAttention)
    assert (wide.spec.topk, wide.spec.num_draft_tokens) == (2, 8)
    assert (wide.sizes.max_batch_size, wide.batch_sizes) == (3, None)
    kinds = {type(kind) for part in wide.attention.values() for kind in attentions(part)}
    assert kinds == {TritonAttention}


def attentions(attention):
    """Return the backends of the groups of layers, or the backend itself."""
    return getattr(attention, "_groups", [attention])


@pytest.fixture(scope="module")
def eagle3():
    """The head drafts every fifth token of the first 200."""
    return drafted_llama("EAGLE3")


@pytest.fixture(scope="module", params=[1, 2], ids=["chain", "tree"])
def target(eagle3, request):
    return llama_target(eagle3, topk=request.param, has_chain=False)


@pytest.mark.slow
def test_every_mode_and_the_step_replay_as_they_run(target):
    record = gk.capture_target(target, device="cpu", batch_sizes=[3])
    assert record.mismatches == ()
    assert [mode.mode for mode in record.modes] == [mode.name for mode in target.modes]
    assert target.modes[-1] is STEP


def test_batches_have_three_layers_and_target_tokens(target):
    assert target.spec.resolved.is_eagle3()
    assert target.batch(EXTEND, 3, 0).hidden_states.shape[1] == 3 * 32
    batch = target.batch(DRAFT, 3, 0)
    assert batch.hidden_states.shape == (3, 32)
    drafted = target.runner(DRAFT, device="cpu").fall_back(batch).draft_tokens
    assert set(drafted.flatten().tolist()) <= {
        *range(0, 200, 5),
        *batch.topk_index.ravel().tolist(),
    }
    batch = target.batch(VERIFY, 3, 0)
    nothing = {name: rows[:0] for name, rows in vars(batch).items() if rows is not None}
    idle = target.runner(VERIFY, device="cpu").run(type(batch)(**nothing))
    assert idle.hidden_states.shape == (0, 96)


BLOCK, COUNT = 6, 3


@pytest.fixture(scope="module")
def dflash():
    return drafted_llama("DFLASH", target_layer_ids=(0,), block_size=BLOCK, mask_token_id=3)


@pytest.fixture(scope="module")
def worker(dflash):
    """The target of a draft worker, whose TARGET_VERIFY runs the blocks of the head."""
    spec, requests = dflash.spec(), ReqToTokenPool(COUNT, 64, "cpu")
    requests.req_to_token[1:] = 1 + torch.arange(COUNT * 64).view(COUNT, 64)
    run = dflash.draft.engine_model(requests, spec)
    return CaptureTarget(
        name="blocks",
        spec=replace(spec, is_draft_worker=True, num_draft_tokens=BLOCK),
        sizes=dflash.sizes(COUNT, 64, spec),
        forwards={VERIFY: run.forward},
        attention=run.attention,
        weights=dflash.draft.module,
        mutable_state=run.attention.kv_pool.tensors(),
        optional_fields={VERIFY: ("custom_mask",)},
    )


@pytest.mark.slow
def test_blocks_replay_as_they_run(worker):
    record = gk.capture_target(worker, device="cpu", batch_sizes=[1, 3])
    assert record.mismatches == ()
    assert record.modes[0].tokens_per_request == BLOCK


@pytest.mark.slow
def test_the_step_replays_as_it_runs(dflash):
    target = llama_target(dflash, has_chain=False)
    record = gk.capture_target(target, modes=[STEP], device="cpu", batch_sizes=[1, 3])
    assert record.mismatches == ()


def test_the_runner_is_that_of_a_draft_worker(worker):
    runner = worker.runner(VERIFY, device="cpu")
    assert runner.spec.is_draft_worker
    assert runner.label == "draft TARGET_VERIFY"


@pytest.mark.slow
def test_audits_find_nothing(dflash):
    target = llama_target(dflash, has_chain=False)
    report = gk.audit_target(target, batch_sizes=[1, 3], device="cpu")
    assert [found for found in report.findings if found.severity == "error"] == []
    loop = [check.text for check in report.checks if check.audit == "loop"]
    assert loop == ["8 steps in one launch: no difference"]


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_layers_of_a_chain_cannot_read_the_states_of_several_layers(kind, request):
    model = request.getfixturevalue(kind)
    with pytest.raises(ConfigError, match="chain reads the hidden states of one") as caught:
        model.target(chain=mtp_chain(model))
    assert caught.value.field == "chain"
