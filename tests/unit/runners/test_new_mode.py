"""A forward mode that exists only here: its inputs, its runner and one entry in the registry.

Capture, checks, audits, strategies and targets read everything else from the runner class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import graphkit as gk
from graphkit.audit import audit_target
from graphkit.runners import RUNNERS, Runner
from graphkit.testing import assert_replay_equivalent, batches

VOCAB, WIDTH = 16, 2


class Mode(Enum):
    """Replaces a member of ``ForwardMode``."""

    BLOCK_DRAFT = "block_draft"


@dataclass(kw_only=True, eq=False)
class BlockDraftInputs(gk.Inputs):
    """A block of masked tokens per request, filled in one forward."""

    block_ids: gk.Rows = gk.declare(gk.Axis.REQUEST, torch.int64, "number of the block")


class BlockDraftRunner(Runner[BlockDraftInputs, gk.ForwardOutput]):
    """Two rows per request, for any spec."""

    mode = Mode.BLOCK_DRAFT
    attention_mode = gk.ForwardMode.TARGET_VERIFY
    inputs_type = BlockDraftInputs
    output_type = gk.ForwardOutput

    @classmethod
    def width(cls, spec):
        return WIDTH


SPEC = gk.SpecConfig("EAGLE", 3, 1, 4)
SIZES = gk.BufferSizes(4, 64, 8, VOCAB, torch.float32)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 8)
        self.head = torch.nn.Linear(8, VOCAB, bias=False)

    def forward(self, inputs):
        rows = self.embed(inputs.input_ids) + inputs.positions[:, None]
        rows = rows + (inputs.block_ids + inputs.seq_lens).repeat_interleave(WIDTH)[:, None]
        return gk.ForwardOutput(next_token_logits=self.head(rows))


@pytest.fixture
def mode(monkeypatch):
    monkeypatch.setitem(RUNNERS, Mode.BLOCK_DRAFT, BlockDraftRunner)
    return Mode.BLOCK_DRAFT


def sample(_mode, requests, seed):
    random = np.random.default_rng([requests, seed])
    lens = random.integers(1, 32, requests)
    return BlockDraftInputs(
        req_pool_indices=1 + np.arange(requests),
        seq_lens=lens.astype(np.int32),
        input_ids=random.integers(0, VOCAB, requests * WIDTH),
        positions=(lens[:, None] + np.arange(WIDTH)).ravel(),
        out_cache_loc=1 + np.arange(requests * WIDTH),
        block_ids=random.integers(0, 4, requests),
    )


@pytest.fixture
def target(mode):
    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    return gk.CaptureTarget(
        name="block drafter", spec=SPEC, sizes=SIZES, forwards={mode: model}, sample_batch=sample,
        weights=model, batch_sizes=[2, 4],
    )  # fmt: skip


def test_it_is_captured_and_checked(target):
    record = gk.capture_target(target, device="cpu", inspect=True)
    assert [(m.mode, m.tokens_per_request) for m in record.modes] == [("BLOCK_DRAFT", WIDTH)]
    assert record.mismatches == ()
    assert {graph.mode for graph in record.graphs} == {"BLOCK_DRAFT"}


def test_it_is_audited(target):
    assert not [f for f in audit_target(target, device="cpu").findings if f.severity == "error"]


def test_it_is_drawn(target, mode):
    runner = target.runner(mode, device="cpu")
    runner.capture()
    drawn = batches(mode, SPEC, SIZES)

    @settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None)
    @given(st.data())
    def check(data):
        batch = data.draw(drawn)
        assert batch.positions.shape == (batch.batch_size * WIDTH,)
        assert runner.can_replay(batch)
        assert_replay_equivalent(runner, [batch])

    check()


def test_the_command_takes_its_name(mode, capsys):
    from graphkit.cli import main

    assert main(["capture", "--mode", "no_such_mode", "--device", "cpu"]) == 2
    assert "BLOCK_DRAFT" in capsys.readouterr().err


class LayersRunner(BlockDraftRunner):
    """Takes one forward per draft step, and runs the last one."""

    takes_layers = True

    def __init__(self, forward, **options):
        super().__init__(tuple(forward)[-1], **options)


@pytest.mark.parametrize("chain", [list, torch.nn.ModuleList], ids=["list", "modules"])
def test_a_mode_may_take_layers(target, mode, monkeypatch, chain):
    monkeypatch.setitem(RUNNERS, mode, LayersRunner)
    layers = chain([Model().requires_grad_(False), target.forwards[mode]])
    layered = replace(target, forwards={mode: layers})
    assert gk.capture_target(layered, device="cpu").mismatches == ()


def test_every_layer_of_a_new_mode_can_be_called(target, mode, monkeypatch):
    monkeypatch.setitem(RUNNERS, mode, LayersRunner)
    with pytest.raises(gk.TargetError, match="forward of BLOCK_DRAFT is 5"):
        replace(target, forwards={mode: [Model(), 5]})
