"""The list of captured sizes that takes the least time within a budget.

A live batch is replayed at the smallest captured size that holds it. So the time of a list is a sum
over its neighbours: a size c takes all live sizes above the captured size b before it, in
``(W_c - W_b) * replay_us(c)``, where W_c is the number of steps of at most c requests.

Lists grow by one larger size at a time. Of the lists that end with one size and use equally many
parts of the budget, only the fastest can grow further. A part is one size, so that the best number
of sizes is exact; for bytes and seconds it is 1 / 300 of the budget, and the time is within 1 % of
the least one (``tests/unit/plan/test_optimum.py`` compares it with all lists).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graphkit.errors import ConfigError
from graphkit.plan.costs import Floats, SizeCosts

_ROUNDING = 1e-9
"""Relative rounding of a sum."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A budgeted resource, by captured size, [M + 1].

    Attributes:
        name: Such as ``sizes``.
        limit: Most of it.
        part: Lists of the same largest size that use equally many of it compete.
        smaller: What a size below the largest one takes.
        largest: What the largest size takes, at least as much as ``smaller``.
    """

    name: str
    limit: float
    part: float
    smaller: Floats
    largest: Floats


def best_sizes(live: Mapping[int, int], costs: SizeCosts, resource: Resource) -> tuple[int, ...]:
    """Return the sizes to capture, ascending; none if every step is faster without a graph.

    Batches above the largest of them run without a graph, where that takes less time.

    Args:
        live: Steps by number of live requests, at most M.
        costs: Costs of the sizes up to M.
        resource: The budget.

    Raises:
        ConfigError: Not even one size fits the budget, and there are no times without graphs.
    """
    steps = np.zeros(len(costs.replay_us))
    steps[list(live)] = list(live.values())
    sizes = _candidates(steps, costs.replay_us, resource)
    steps_up_to, replay_us = np.cumsum(steps)[sizes], costs.replay_us[sizes]
    eager_above = _eager_above(steps, costs)[sizes]
    smaller, largest = resource.smaller[sizes], resource.largest[sizes]
    limit = resource.limit * (1 + _ROUNDING)

    # The fastest list by parts of the budget and last size, what it uses, and the list before it.
    num_parts = int(min(limit, smaller.sum() * (1 + _ROUNDING)) / resource.part) + 1
    shape = (num_parts, len(sizes))
    time, used = np.full(shape, np.inf), np.zeros(shape)
    before = np.zeros((*shape, 2), dtype=np.int64)
    time[0, 0] = 0.0
    least, best = eager_above[0], (0, 0)
    for j in range(1, len(sizes)):
        longer = time[:, :j] + (steps_up_to[j] - steps_up_to[:j]) * replay_us[j]
        last, new_time = longer.argmin(axis=1), longer.min(axis=1)
        rows = np.argsort(new_time)[::-1]  # of lists with equally many parts, the fastest stays
        new_used = used[rows, last[rows]] + smaller[j]
        rows, new_used = rows[new_used <= limit], new_used[new_used <= limit]
        parts = (new_used / resource.part).astype(np.int64)
        time[parts, j], used[parts, j] = new_time[rows], new_used
        before[parts, j] = np.stack([rows, last[rows]], axis=1)
        fits = used[:, j] - smaller[j] + largest[j] <= limit
        total = np.where(fits, time[:, j], np.inf) + eager_above[j]
        if total.min() < least:
            least, best = total.min(), (int(total.argmin()), j)
    if not np.isfinite(least):
        raise ConfigError(
            f"no list of sizes fits {resource.name} = {resource.limit:g}: the largest alone takes "
            f"{resource.largest[max(live)]:g}. Raise the budget.",
            field=resource.name,
        )
    found = []
    while best[1]:
        found.append(sizes[best[1]])
        best = tuple(before[best])
    return tuple(reversed(found))


def _eager_above(steps: Floats, costs: SizeCosts) -> Floats:
    """Return the time of all steps above each size without graphs; infinite if it is unknown."""
    us = steps * costs.eager_us if costs.eager_us is not None else np.where(steps > 0, np.inf, 0.0)
    return np.append(np.cumsum(us[::-1])[::-1][1:], 0.0)


def _candidates(steps: Floats, us: Floats, resource: Resource) -> list[int]:
    """Return 0, the live sizes, and others that cost less than the live size below them."""
    chosen, below = [0], 0
    for size in range(1, int(np.flatnonzero(steps)[-1]) + 1):
        if steps[size]:
            below = size
        is_cheaper = below > 0 and (
            us[size] < us[below]
            or resource.smaller[size] < resource.smaller[below]
            or resource.largest[size] < resource.largest[below]
        )
        if steps[size] or is_cheaper:
            chosen.append(size)
    return chosen
