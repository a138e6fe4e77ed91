"""Plans: budgets, costs of a record, the default list beside them, and their file."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from engine_target import engine_target
from graphkit.errors import ConfigError, RecordError
from graphkit.graphs import SizeTable, default_batch_sizes
from graphkit.plan import plan_sizes
from graphkit.plan.costs import measured_costs
from graphkit.records import load_record
from graphkit.views import plan_view


def day(seed):
    """Return a day of steps: two plateaus with bursts, and a slow drift."""
    draw = np.random.default_rng(seed)
    minute = np.arange(24 * 60)
    level = np.where((minute // 240) % 2, 96, 18) + 6 * np.sin(minute / 230)
    level = level + (draw.random(len(minute)) < 0.02) * 60
    live = draw.poisson(np.repeat(level, 20)).clip(0, 160)
    sizes, counts = np.unique(live[live > 0], return_counts=True)
    return dict(zip(sizes.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_a_day_has_at_most_half_of_the_padding_of_the_default(seed):
    live = day(seed)
    plan = plan_sizes(live)
    assert len(plan.chosen.batch_sizes) <= len(default_batch_sizes(max(live)))
    assert plan.default.batch_sizes == default_batch_sizes(max(live))
    assert plan.chosen.padding <= plan.default.padding / 2


def test_costs_are_measured_or_interpolated(capture_record):
    costs = measured_costs(capture_record, "TARGET_VERIFY", 10)
    assert costs.replay_us.tolist() == [100, 100, 120, 140, 160, 220, 280, 340, 400, 460, 520]
    assert costs.memory_bytes is not None
    assert costs.memory_bytes[5] == 1000
    assert costs.largest_bytes is not None
    assert costs.largest_bytes[4] == 40_000
    assert costs.largest_s is not None
    assert costs.largest_s[4] == pytest.approx(1.0)


@pytest.mark.parametrize("numbers", [(4, 4, 8), (0, 4, 8), (8, 4, 1)])
def test_sizes_of_a_record_that_do_not_ascend_are_refused(capture_record, numbers):
    (mode,) = [mode for mode in capture_record.modes if mode.mode == "TARGET_VERIFY"]
    sizes = [replace(size, batch_size=n) for size, n in zip(mode.sizes, numbers, strict=False)]
    record = replace(capture_record, modes=(replace(mode, sizes=tuple(sizes)),))
    with pytest.raises(RecordError, match="expected ascending sizes from 1"):
        measured_costs(record, "TARGET_VERIFY", 10)


def test_a_plan_states_what_both_lists_cost(capture_record):
    live = {1: 10, 3: 30, 8: 10}
    plan = plan_sizes(live, capture_record, mode="TARGET_VERIFY", max_sizes=2)
    assert plan.chosen.batch_sizes == (3, 8)
    assert plan.chosen.padding == pytest.approx(20 / 50)
    assert plan.chosen.step_us == pytest.approx((40 * 140 + 10 * 400) / 50)
    assert plan.chosen.memory_bytes == 81_000
    assert plan.chosen.capture_s == pytest.approx(1.1)
    assert plan.default.batch_sizes == tuple(range(1, 9))
    assert plan.default.padding == 0
    assert plan.budget == {"sizes": 2}


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        ({"max_memory_bytes": 80_500}, (8,)),
        ({"max_memory_bytes": 81_000}, (3, 8)),
        ({"max_capture_s": 1.2}, (1, 3, 8)),
        ({}, (1, 3, 8)),
    ],
    ids=["one size", "two sizes", "seconds", "default"],
)
def test_budgets(capture_record, budget, sizes):
    live = {1: 10, 3: 30, 8: 10}
    plan = plan_sizes(live, only_replays(capture_record), mode="TARGET_VERIFY", **budget)
    assert plan.chosen.batch_sizes == sizes


def test_what_is_faster_without_a_graph_gets_none(capture_record):
    """Replays of TARGET_VERIFY take over 900 us above 16 requests; those of DECODE always lose."""
    plan = plan_sizes({4: 10, 40: 1}, capture_record, mode="TARGET_VERIFY")
    assert plan.chosen.batch_sizes == (4,)
    assert plan.eager_above == 4
    assert plan.chosen.eager_share == pytest.approx(1 / 11)
    plan = plan_sizes({2: 10}, capture_record, mode="DECODE")
    assert plan.chosen.batch_sizes == ()
    assert plan.chosen.eager_share == 1.0


def test_refusals(capture_record):
    with pytest.raises(ConfigError, match="give one budget, not sizes and capture_s"):
        plan_sizes({1: 1}, capture_record, mode="DECODE", max_sizes=1, max_capture_s=1.0)
    with pytest.raises(ConfigError, match="a budget of memory_bytes needs a record"):
        plan_sizes({1: 1}, max_memory_bytes=1e9)
    with pytest.raises(ConfigError, match=r"no list of sizes fits capture_s = 0\.5: the largest"):
        plan_sizes({8: 1}, only_replays(capture_record), mode="TARGET_VERIFY", max_capture_s=0.5)
    with pytest.raises(ConfigError, match="live_sizes is empty"):
        plan_sizes({})
    with pytest.raises(ConfigError, match="sizes must be above 0"):
        plan_sizes({1: 1}, max_sizes=0)
    with pytest.raises(RecordError, match="several captured modes: name one of TARGET_VERIFY, DEC"):
        plan_sizes({1: 1}, capture_record)
    with pytest.raises(RecordError, match="no captured mode DRAFT: name one of"):
        plan_sizes({1: 1}, capture_record, mode="DRAFT")
    with pytest.raises(RecordError, match=r"the record has no captured mode\. Save one with"):
        plan_sizes({1: 1}, replace(capture_record, modes=()))


def only_replays(record):
    """Return a record without times of eager steps."""
    body = json.loads(record.to_json())
    for size in body["modes"][0]["sizes"]:
        size["eager_us"] = None
    return type(record).from_json(json.dumps(body))


def test_a_plan_is_a_file_that_tables_and_runners_take(tmp_path):
    plan = plan_sizes({1: 10, 3: 30, 8: 10}, max_sizes=2)
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    assert load_record(file) == plan
    assert SizeTable(8, str(file)).sizes == plan.chosen.batch_sizes
    assert SizeTable(9, file).sizes == (*plan.chosen.batch_sizes, 9)
    with pytest.raises(ConfigError, match="batch_sizes holds 8, but max_batch_size is 4"):
        SizeTable(4, file)
    file.write_text("{}")
    with pytest.raises(RecordError, match="not a record of graphkit"):
        SizeTable(8, file)


def test_an_engine_takes_a_plan(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(plan_sizes({1: 5, 3: 1}).to_json())
    for given in (str(file), file):
        with engine_target().engine(batch_sizes=given, device="cpu", backend=None) as engine:
            assert engine.runners[0].table.sizes == (1, 3)
    with pytest.raises(RecordError, match="cannot read record"):
        engine_target().engine(batch_sizes="none.json", device="cpu", backend=None)


@pytest.mark.parametrize("width", [60, 120])
def test_the_view_shows_the_list_both_costs_and_the_traffic(width, capture_record):
    console = Console(width=width, record=True, file=io.StringIO())
    live = {1: 10, 3: 30, 8: 10, 40: 2}
    console.print(plan_view(plan_sizes(live, capture_record, mode="TARGET_VERIFY")))
    text = console.export_text()
    assert "--batch-sizes 1,3,8" in text
    assert "Batches above 8 are faster without a graph." in " ".join(text.split())
    assert "above 8" in text
    assert "57.7%" in text


def test_a_budget_of_memory_counts_executables(capture_record):
    (verify, decode) = capture_record.modes
    sizes = tuple(replace(s, executable_bytes=500, eager_us=None) for s in verify.sizes)
    record = replace(capture_record, modes=(replace(verify, sizes=sizes), decode))
    live, mode = {1: 10, 3: 30, 8: 10}, "TARGET_VERIFY"
    plan = plan_sizes(live, record, mode=mode, max_sizes=2)
    assert (plan.chosen.batch_sizes, plan.chosen.memory_bytes) == ((3, 8), 82_000)
    for budget in (81_999, 82_000):
        chosen = plan_sizes(live, record, mode=mode, max_memory_bytes=budget).chosen
        assert (chosen.batch_sizes == (3, 8)) == (budget == 82_000)
