"""Ranks that capture and replay together on two GPUs, with NCCL inside the graphs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import rank_audits as audits
import rank_commands as commands
import rank_models as models
import rank_plans as plans
import rank_scenarios as scenarios
from rank_processes import PASSED, run_scenarios

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))  # processes import it, too
cases = importlib.import_module("rank_failure_cases")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

SCENARIOS = (
    audits.replay_different_keys,
    audits.replay_different_keys_without_collectives,
    commands.audit_on_all_ranks,
    models.replay_a_split_model,
    models.replay_a_split_model_in_one_shot,
    models.generate_on_all_ranks,
    models.generate_in_one_shot,
    models.loop_in_one_shot,
    models.serve_with_data_parallelism,
    plans.split_every_kind,
    plans.split_with_draft_heads,
    plans.capture_a_split_target,
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
PHASES = ("capture", "agreement", "replay", "replay, same_batch", "eager", "engine step")
FAULTS = ("exception", "killed", "late")
FAILURES = [each for each in cases.CASES if each.phase in PHASES and each.fault in FAULTS]


@pytest.fixture(scope="module")
def outcomes():
    return run_scenarios(SCENARIOS, 2, limit_s=400, backend="nccl")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_two_gpus(scenario, outcomes):
    assert outcomes[scenario.__name__] == [PASSED] * 2


@pytest.mark.sanitized
def test_sums_and_rows_in_one_shot():
    """In processes of its own, since compute-sanitizer would take long for all scenarios."""
    scenario = models.add_and_gather_in_one_shot
    found = run_scenarios((scenario,), 2, limit_s=400, backend="nccl")
    assert found[scenario.__name__] == [PASSED] * 2


@pytest.mark.parametrize("case", FAILURES, ids=lambda each: each.name)
def test_collectives_that_wait_for_a_rank_are_aborted(case):
    """Without the abort, the other rank waits for its device forever."""
    assert not case.problems(cases.run_case(case, 2, limit_s=120, backend="nccl"))
