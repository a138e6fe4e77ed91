"""The equivalence kit on the whole step of a target's engine."""

from __future__ import annotations

import pytest

import graphkit as gk
from engine_target import ROWS, Counting, engine_target
from graphkit.testing import assert_target_equivalent

MODULE = """
from engine_target import Counting, engine_target
target = engine_target({options})
"""


@pytest.fixture
def run_step(pytester, run_pytest):
    """Return ``run_step(options, *args)``: the tests of an engine target of the options."""

    def run(options, *args):
        pytester.makepyfile(steps=MODULE.format(options=options))
        return run_pytest(
            "lambda rows: rows", "--graphkit", "steps:target", "--graphkit-device", "cpu", *args
        )

    return run


def test_replays_and_loops_of_a_right_step_pass_at_every_size(run_step):
    result = run_step("", "-v")
    result.assert_outcomes(passed=4)
    ids = [line.split(" ")[0] for line in result.outlines if line.startswith("steps:target::")]
    assert sorted(ids) == [
        f"steps:target::STEP::{name}[{size}]"
        for name in ("equivalence", "loop")
        for size in (1, ROWS)
    ]


def test_a_value_that_the_graph_keeps_fails_both_properties(run_step):
    result = run_step("drafter=Counting", "-k", "STEP and 3")
    assert result.parseoutcomes()["failed"] == 2
    result.stdout.fnmatch_lines_random([
        "STEP: the replay of * live request* at captured size 3 is wrong: the graph differs *",
        "  where: report, row *",
        "frozen value: STEP: After step * of a launch, *",
    ])  # fmt: skip


def test_a_target_is_equivalent_only_if_its_step_is():
    assert_target_equivalent(engine_target(), modes=[gk.ForwardMode.STEP], device="cpu")
    with pytest.raises(AssertionError, match=r"STEP: the replay of .* is wrong"):
        assert_target_equivalent(engine_target(drafter=Counting), device="cpu")
