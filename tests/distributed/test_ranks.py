"""Ranks that capture and replay together, as processes with gloo and the recorder."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import rank_audits as audits
import rank_commands as commands
import rank_models as models
import rank_plans as plans
import rank_scenarios as scenarios
from rank_processes import DIED, PASSED, run_scenarios

pytestmark = pytest.mark.slow

OF_TWO = (
    audits.replay_different_keys,
    audits.replay_different_keys_without_collectives,
    scenarios.agree_on_random_steps,
    scenarios.agree_on_staged_batches,
    scenarios.refuse_a_batch,
    scenarios.compare_attention,
    scenarios.fall_back_together,
    scenarios.run_different_modes,
    scenarios.check_the_same_batch,
    scenarios.capture_every_mode,
    scenarios.compile_kernels_of_one_rank,
    scenarios.step_together,
    scenarios.preempt_and_adapt_together,
    scenarios.choose_lengths_by_the_same_times,
    scenarios.estimate_together,
    models.split_every_head,
    models.run_random_parts,
    models.replay_a_split_model,
    models.refuse_one_shot,
    plans.split_every_kind,
    plans.split_model_objects,
    plans.split_quantised_folders,
    plans.split_scales_of_keys,
    plans.split_with_draft_heads,
    plans.split_with_mtp_layers,
    plans.capture_a_split_target,
    plans.refuse_plans,
    plans.keep_replacements_on_all_ranks,
    plans.run_commands_of_a_folder,
    models.generate_on_all_ranks,
    models.loop_on_all_ranks,
    models.find_ranks_that_diverge,
    models.make_the_same_calls,
    models.serve_with_data_parallelism,
    models.serve_from_a_thread_of_rank_0,
    models.end_with_an_error_of_rank_0,
    commands.run_commands,
    commands.refuse_commands,
    commands.refuse_ranks_whose_graphs_differ,
    commands.name_the_rank_that_failed,
    commands.audit_on_all_ranks,
    commands.measure_agreement,
    scenarios.disagree_on_settings,
    scenarios.fail_a_capture,
    scenarios.fail_outside_the_forward,
    scenarios.close_in_the_wrong_order,
    scenarios.close_after_unequal_replays,
    scenarios.close_too_early,
    scenarios.leave_with_an_error,
    scenarios.leave_without_a_collective,
    scenarios.drop_a_result_after_a_failure,
)
WAITING = (
    scenarios.capture_without_a_rank,
    scenarios.fail_before_a_collective,
    scenarios.arrive_late_without_an_agreement,
    scenarios.arrive_late_after_an_agreement,
    scenarios.idle_without_an_agreement,
    scenarios.die_during_capture,
)
"""Scenarios of two ranks that wait for a time limit."""
OF_FOUR = (
    models.split_every_head,
    scenarios.agree_on_random_steps,
    scenarios.refuse_a_batch,
    scenarios.disagree_on_settings,
    scenarios.fail_a_capture,
    scenarios.leave_with_an_error,
    scenarios.die_between_replays,
)


@pytest.fixture(scope="module")
def outcomes():
    """Outcomes by number of ranks and scenario.

    Three sets of processes run at once, since ranks without partners only wait.
    """
    sets = ((2, OF_TWO), (2, WAITING), (4, OF_FOUR))
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda each: run_scenarios(each[1], each[0], limit_s=600), sets)
        of_two, waiting, of_four = found
    return {2: of_two | waiting, 4: of_four}


def expected(scenario, size):
    ranks = [PASSED] * size
    if scenario.__name__.startswith("die"):
        ranks[1] = DIED
    return ranks


@pytest.mark.parametrize("scenario", OF_TWO + WAITING, ids=lambda each: each.__name__)
def test_two_ranks(scenario, outcomes):
    assert outcomes[2][scenario.__name__] == expected(scenario, 2)


@pytest.mark.parametrize("scenario", OF_FOUR, ids=lambda each: each.__name__)
def test_four_ranks(scenario, outcomes):
    assert outcomes[4][scenario.__name__] == expected(scenario, 4)
