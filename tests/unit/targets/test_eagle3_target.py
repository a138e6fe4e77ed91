"""A capture target whose draft model is an EAGLE-3 head."""

from __future__ import annotations

import pytest

import graphkit as gk
from graphkit.errors import ConfigError
from graphkit.spec import ForwardMode
from small_targets import drafted_llama, llama_target, mtp_chain

DRAFT, EXTEND, VERIFY = (
    ForwardMode.DRAFT, ForwardMode.DRAFT_EXTEND, ForwardMode.TARGET_VERIFY
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    """The head drafts every fifth token of the first 200."""
    return drafted_llama("EAGLE3")


@pytest.fixture(scope="module", params=[1, 2], ids=["chain", "tree"])
def target(model, request):
    return llama_target(model, topk=request.param, has_chain=False)


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
    drafted = target.runner(DRAFT, device="cpu").fall_back(batch).draft_tokens
    assert set(drafted.flatten().tolist()) <= {
        *range(0, 200, 5),
        *batch.topk_index.ravel().tolist(),
    }
    batch = target.batch(VERIFY, 3, 0)
    nothing = {name: rows[:0] for name, rows in vars(batch).items() if rows is not None}
    idle = target.runner(VERIFY, device="cpu").run(type(batch)(**nothing))
    assert idle.hidden_states.shape == (0, 96)


def test_layers_of_a_chain_cannot_read_the_states_of_eagle3(model):
    with pytest.raises(ConfigError, match="chain reads the hidden states of one") as caught:
        model.target(chain=mtp_chain(model))
    assert caught.value.field == "chain"
