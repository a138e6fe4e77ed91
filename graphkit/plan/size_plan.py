"""The plan of a traffic: the best list of sizes within a budget, beside the default list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from graphkit.errors import ConfigError
from graphkit.graphs import default_batch_sizes
from graphkit.plan.costs import SizeCosts, measured_costs, padding_costs
from graphkit.plan.optimum import Resource, best_sizes
from graphkit.records import CaptureRecord, PlanRecord, SizeListCost

_PARTS = 300
"""Parts of a budget of bytes or seconds: enough for a time within 1 % of the least one, which
``tests/unit/plan/test_optimum.py`` checks."""


def plan_sizes(
    live_sizes: Mapping[int, int],
    record: CaptureRecord | None = None,
    *,
    mode: str = "",
    max_sizes: int | None = None,
    max_memory_bytes: float | None = None,
    max_capture_s: float | None = None,
) -> PlanRecord:
    """Choose the sizes to capture that take the least GPU time within one budget.

    With a budget of sizes, no list takes less time. With a budget of bytes or seconds, the time is
    within 1 % of the least one. Without a record, the list with the least padding is chosen.

    Args:
        live_sizes: Steps by number of live requests, from 1; see ``read_traffic``.
        record: Record of ``graphkit capture``, whose times, memory and capture times are used.
            Values of sizes that it does not have are interpolated.
        mode: Mode of the record; empty takes the only one.
        max_sizes: Most sizes. Without any budget, as many as the default list has.
        max_memory_bytes: Most memory of the graphs. Needs a record.
        max_capture_s: Most seconds of capture. Needs a record.

    Raises:
        ConfigError: Several budgets are given, one needs a record, or no list fits.
        RecordError: The record has no times of the mode.
    """
    if not live_sizes:
        raise ConfigError("live_sizes is empty: give the steps of a traffic.", field="live_sizes")
    largest = max(live_sizes)
    costs = padding_costs(largest) if record is None else measured_costs(record, mode, largest)
    default = default_batch_sizes(largest)
    resource = _resource(costs, len(default), max_sizes, max_memory_bytes, max_capture_s)
    chosen = best_sizes(live_sizes, costs, resource)
    is_cut = bool(chosen) and chosen[-1] < largest
    return PlanRecord(
        live_sizes=dict(live_sizes),
        mode=costs.mode,
        budget={resource.name: resource.limit},
        chosen=_cost(chosen, live_sizes, costs),
        default=_cost(default, live_sizes, costs),
        eager_above=chosen[-1] if is_cut else 0,
    )


def _resource(
    costs: SizeCosts,
    default_count: int,
    max_sizes: int | None,
    max_memory_bytes: float | None,
    max_capture_s: float | None,
) -> Resource:
    budgets = {"sizes": max_sizes, "memory_bytes": max_memory_bytes, "capture_s": max_capture_s}
    limits = {name: limit for name, limit in budgets.items() if limit is not None}
    if len(limits) > 1:
        raise ConfigError(f"give one budget, not {' and '.join(limits)}.", field=list(limits)[1])
    name, limit = next(iter(limits.items()), ("sizes", default_count))
    one = np.ones(len(costs.replay_us))
    smaller, largest = {
        "sizes": (one, one),
        "memory_bytes": (costs.memory_bytes, costs.largest_bytes),
        "capture_s": (costs.capture_s, costs.largest_s),
    }[name]
    if smaller is None or largest is None:
        raise ConfigError(f"a budget of {name} needs a record of the graphs.", field=name)
    if not limit > 0:
        raise ConfigError(f"{name} must be above 0, got {limit}.", field=name)
    part = 1.0 if name == "sizes" else limit / _PARTS
    return Resource(name, float(limit), part, smaller, np.maximum(smaller, largest))


def _cost(sizes: Sequence[int], live_sizes: Mapping[int, int], costs: SizeCosts) -> SizeListCost:
    """Return what a list costs."""
    table = np.array(sizes, dtype=np.int64)
    live = np.array(list(live_sizes), dtype=np.int64)
    steps = np.array(list(live_sizes.values()), dtype=np.float64)
    is_replayed = live <= (table[-1] if len(table) else 0)
    fitted = table[np.searchsorted(table, live[is_replayed])]
    replayed, total = steps[is_replayed], steps.sum()
    us = (replayed * costs.replay_us[fitted]).sum()
    if costs.eager_us is not None:
        us += (steps[~is_replayed] * costs.eager_us[live[~is_replayed]]).sum()
    pads = (replayed * (fitted - live[is_replayed])).sum()

    def used(smaller: np.ndarray | None, largest: np.ndarray | None) -> float | None:
        if smaller is None or largest is None or not len(table):
            return None
        return float(smaller[table[:-1]].sum() + largest[table[-1]])

    memory = used(costs.memory_bytes, costs.largest_bytes)
    return SizeListCost(
        batch_sizes=tuple(table.tolist()),
        padding=float(pads / replayed.sum()) if replayed.sum() else 0.0,
        step_us=float(us / total) if costs.mode else None,
        eager_share=float(steps[~is_replayed].sum() / total),
        memory_bytes=None if memory is None else round(memory),
        capture_s=used(costs.capture_s, costs.largest_s),
    )
