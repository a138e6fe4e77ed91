"""``gk.capture`` of models of torch and transformers: equal to eager, and without a finding."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from function_models import MODELS, called
from graphkit.testing import assert_replay_equivalent, assert_target_equivalent


@pytest.fixture(scope="module", params=MODELS)
def model_and_example(request):
    torch.manual_seed(0)
    return MODELS[request.param]("cpu")


@pytest.fixture(scope="module")
def captured(model_and_example):
    with gk.capture(*model_and_example, batch_sizes=[1, 4]) as captured:
        yield captured


@pytest.mark.parametrize("rows", [[1], [2, 0], [0, 1, 2], [2, 2, 1, 0], [0, 1, 2] * 2])
def test_a_call_equals_the_model(captured, model_and_example, rows):
    model, example = model_and_example
    expected, before = called(model, example, rows), captured.stats
    torch.testing.assert_close(called(captured, example, rows), expected)
    if len(rows) <= 4:
        torch.testing.assert_close(called(captured.replay, example, rows), expected)
        assert captured.stats.replays == before.replays + 2
    else:
        assert captured.stats.fallbacks["batch too large"] == 1


def test_the_kit_and_the_audits_find_nothing(captured, model_and_example):
    _, example = model_and_example
    assert_replay_equivalent(captured.runner, [called(captured.batch, example, [2, 0, 1])])
    assert_target_equivalent(captured.target, device="cpu")
    found = gk.audit_target(captured.target, batch_sizes=[4], device="cpu").findings
    assert not [each for each in found if each.severity != "note"]  # constants of the architecture
