"""A CaptureTarget passes each mode its own settings."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import graphkit as gk
from declared_modes import MODES, every_mode
from graphkit.buffers import Axis, Rows, declare
from graphkit.errors import ConfigError, TargetError
from graphkit.runners import RUNNERS
from no_metadata import NoMetadata

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
DRAFT, EXTEND_V2 = gk.ForwardMode.DRAFT, gk.ForwardMode.DRAFT_EXTEND_V2
LAYERS = gk.ForwardMode.MULTI_LAYER_EAGLE
"""Modes whose inputs and outputs are fixed."""


@dataclass(kw_only=True, eq=False)
class WithTemperature(gk.DraftExtendInputs):
    temperature: Rows = declare(Axis.REQUEST, torch.float32, "of the sampler", pad=1)


def test_every_mode_but_idle_has_a_runner():
    assert set(RUNNERS) == set(gk.ForwardMode) - {gk.ForwardMode.IDLE}
    assert all(runner.mode is mode for mode, runner in RUNNERS.items())


@every_mode
def test_every_mode_gets_its_runner(make_target, mode):
    target = make_target(modes=MODES)
    runner = target.runner(mode, device="cpu")
    assert type(runner) is RUNNERS[mode]
    assert (runner.spec, runner.sizes) == (target.spec, target.sizes)
    assert list(runner.table) == [2, 4]
    assert list(target.runner(mode, device="cpu", batch_sizes=[1]).table) == [1, 4]


@every_mode
def test_one_attention_backend_serves_all_modes(make_target, mode):
    attention = NoMetadata()
    runner = make_target(modes=MODES, attention=attention).runner(mode, device="cpu")
    assert runner.attention is attention


def test_every_mode_may_have_an_attention_backend_of_its_own(make_target):
    backends = {VERIFY: NoMetadata(), DRAFT: NoMetadata()}
    target = make_target(modes=MODES, attention=backends)
    for mode in MODES:
        assert target.runner(mode, device="cpu").attention is backends.get(mode)


def test_optional_fields_may_be_those_of_a_mode(make_target):
    optional = {VERIFY: ["input_embeds"], LAYERS: ["temperatures"], DECODE: []}
    target = make_target(modes=MODES, topk=2, optional_fields=optional)

    def fields(mode):
        return {layout.name for layout in target.runner(mode, device="cpu").buffers.layouts}

    assert "input_embeds" in fields(VERIFY)
    assert "custom_mask" not in fields(VERIFY), "listed fields replace the implied ones"
    assert "temperatures" in fields(LAYERS)
    assert "mrope_positions" not in fields(DRAFT)
    implied = make_target(modes=[VERIFY], topk=2).runner(VERIFY, device="cpu")
    assert implied.buffers.view(1).custom_mask is not None


def test_an_optional_field_for_all_modes_must_be_one_of_all(make_target):
    target = make_target(modes=[VERIFY, DRAFT], optional_fields=["mrope_positions"])
    for mode in (VERIFY, DRAFT):
        assert target.runner(mode, device="cpu").buffers.view(1).mrope_positions is not None
    with pytest.raises(ConfigError, match="optional_fields names 'custom_mask'"):
        make_target(modes=[DRAFT], optional_fields=["custom_mask"]).runner(DRAFT, device="cpu")


def test_further_fields_may_be_those_of_a_mode(make_target):
    target = make_target(modes=MODES, inputs_type={EXTEND_V2: WithTemperature})
    assert target.runner(EXTEND_V2, device="cpu").buffers.inputs is WithTemperature
    assert target.runner(VERIFY, device="cpu").buffers.inputs is gk.TargetVerifyInputs


def test_a_chain_needs_a_forward_per_step(make_target):
    forward = make_target().forwards[VERIFY]
    for forwards in (forward, [forward] * 2):
        with pytest.raises(ConfigError, match=r"MultiLayerEagleRunner got (2 forwards|a Tiny) for"):
            make_target(forwards={LAYERS: forwards}).runner(LAYERS, device="cpu")


def test_an_error_of_sample_batch_is_an_error_of_the_target(make_target):
    target = make_target(sample_batch=lambda mode, batch_size, seed: [][seed])
    text = (
        r"sample_batch\(TARGET_VERIFY, 2, 7\) failed: .*test_target.py:.* raised IndexError: list "
    )
    with pytest.raises(TargetError, match=text) as caught:
        target.batch(VERIFY, 2, 7)
    assert isinstance(caught.value.__cause__, IndexError)


@every_mode
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_a_target_without_sample_batch_draws_batches(make_target, mode, topk):
    target = make_target(modes=(mode,), topk=topk, sample_batch=None, batch_sizes=[2, 4])
    batch, same = (target.batch(mode, 3, 5) for _ in range(2))
    assert batch.batch_size == 3
    assert batch.seq_lens.tolist() == same.seq_lens.tolist()
    assert gk.capture_target(target, device="cpu").mismatches == ()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: 1, "is of type int. Declare tensors"),
        (lambda: torch.zeros(1).expand(4), "is expanded: its rows share memory"),
        (lambda: torch.inference_mode()(torch.zeros)(4), "was created under torch.inference_mode"),
    ],
)
def test_state_that_cannot_be_restored_is_refused(make_target, make, why):
    with pytest.raises(ConfigError, match=f"state 'cache' {why}"):
        make_target(mutable_state={"cache": make()}).runner(VERIFY, device="cpu")


def test_state_with_an_expanded_dimension_of_one_row_can_be_restored(make_target):
    state = torch.zeros(4).as_strided((1, 4), (0, 1))
    with make_target(mutable_state={"cache": state}).runner(VERIFY, device="cpu") as runner:
        assert runner.mutable_state["cache"] is state
