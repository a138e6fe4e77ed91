"""The example of a declared field: its rows reach the graph, and pad rows get the pad value."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit.audit import audit_target

EXAMPLE = Path(__file__).parents[2] / "tools" / "examples" / "declared_field.py"
VERIFY = gk.ForwardMode.TARGET_VERIFY


@pytest.fixture(scope="module")
def target():
    return runpy.run_path(str(EXAMPLE))["target"]()


def test_replays_read_the_temperatures_of_their_batch(target):
    with target.runner(VERIFY, batch_sizes=[4], device="cpu") as runner:
        runner.capture()
        batch = target.sample_batch(VERIFY, 3, seed=0)
        logits = {}
        for temperature in (1.0, 2.0):
            batch.temperatures = np.full(3, temperature, np.float32)
            logits[temperature] = runner.replay(batch).next_token_logits.clone()
        assert torch.allclose(logits[1.0], 2 * logits[2.0])
        assert runner.buffers.view(4).temperatures.tolist() == [2.0, 2.0, 2.0, 1.0]


@pytest.mark.slow
def test_the_mode_has_no_finding(target):
    sizes = [target.sizes.max_batch_size]
    report = audit_target(target, modes=[VERIFY], batch_sizes=sizes, device="cpu")
    assert [finding.text for finding in report.findings if finding.mode == VERIFY.name] == []
