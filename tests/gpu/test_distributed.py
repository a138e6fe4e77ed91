"""Ranks that capture and replay together on two GPUs, with NCCL inside the graphs."""

from __future__ import annotations

import pytest
import torch

import rank_commands as commands
import rank_models as models
import rank_scenarios as scenarios
from rank_processes import PASSED, run_scenarios

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

SCENARIOS = (
    commands.audit_on_all_ranks,
    models.replay_a_split_model,
    models.replay_a_split_model_in_one_shot,
    models.generate_on_all_ranks,
    models.generate_in_one_shot,
    models.loop_in_one_shot,
    models.serve_with_data_parallelism,
    scenarios.agree_on_random_steps,
    scenarios.agree_on_staged_batches,
    scenarios.refuse_a_batch,
    scenarios.fall_back_together,
    scenarios.run_different_modes,
    scenarios.check_the_same_batch,
    scenarios.disagree_on_settings,
    scenarios.fail_outside_the_forward,
    scenarios.close_after_unequal_replays,
    scenarios.close_too_early,
    scenarios.leave_with_an_error,
    scenarios.capture_without_a_rank,
    scenarios.fail_a_capture,
    scenarios.fail_before_a_collective,
)
"""The last ones leave collectives without partners, which NCCL may not survive."""


@pytest.fixture(scope="module")
def outcomes():
    return run_scenarios(SCENARIOS, 2, limit_s=400, backend="nccl")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_two_gpus(scenario, outcomes):
    assert outcomes[scenario.__name__] == [PASSED] * 2
