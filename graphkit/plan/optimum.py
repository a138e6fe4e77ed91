"""The list of captured sizes that takes the least time within a budget.

A live batch is replayed at the smallest captured size that holds it. So the time of a list is a sum
over its neighbours: size c_j takes all live sizes above c_i, the captured size before it, and

    best(j) = min over i < j of best(i) + (W_j - W_i) * replay_us(c_j),

with W_j the number of steps of at most c_j requests. ``best`` holds an entry for each trade of time
for the budgeted resource that no other entry beats, so the result is exact. Entries that cannot
lead to the best list are left out: with a price on the resource, the same recursion without a
budget bounds the time from below (Lagrangian relaxation), and any list within the budget from
above.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphkit.errors import ConfigError
from graphkit.plan.costs import Floats, SizeCosts

_BISECTIONS, _FIRST_PRICE = 50, 1e-3
"""Prices that are tried, the first one as a part of time per resource."""
_ROUNDING = 1e-9
"""Relative rounding of sums and bounds."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A budgeted resource, by captured size, [M + 1].

    Attributes:
        name: Such as ``sizes``.
        limit: Most of it.
        each: What a size below the largest one takes.
        largest: What the largest size takes, at least as much as ``each``.
    """

    name: str
    limit: float
    each: Floats
    largest: Floats

    def used(self, sizes: tuple[int, ...]) -> float:
        """Return what a list takes."""
        return float(self.each[list(sizes[:-1])].sum() + self.largest[sizes[-1]]) if sizes else 0.0


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
    problem = _Problem(live, costs, resource)
    price, bound = problem.priced()
    if not np.isfinite(bound):
        raise ConfigError(
            f"no list of sizes fits {resource.name} = {resource.limit:g}: the largest alone takes "
            f"{resource.largest[max(live)]:g}. Raise the budget.",
            field=resource.name,
        )
    return problem.solved(price, bound)


class _Problem:
    """Sizes that may be captured, and what they take.

    Entry 0 of each array is that of no size.
    """

    def __init__(self, live: Mapping[int, int], costs: SizeCosts, resource: Resource) -> None:
        steps = np.zeros(len(costs.replay_us))
        for size, number in live.items():
            steps[size] = number
        sizes = [0, *_candidates(steps, costs.replay_us, resource)]
        self._sizes, self._limit = sizes, resource.limit * (1 + _ROUNDING)
        self._taken, self._us = np.cumsum(steps)[sizes], costs.replay_us[sizes]
        self._after = _eager_after(steps, costs)[sizes]
        self._each = resource.each[sizes]
        self._more_if_last = resource.largest[sizes] - self._each
        self._more_if_last[0] = 0.0

    def priced(self) -> tuple[float, float]:
        """Return the price with the best lower bound, and the least time of a list that fits."""
        time, used = self._outcome(self._to_go(0.0)[1])
        if used <= self._limit:
            return 0.0, time
        low, high, bound = 0.0, np.inf, np.inf
        price = _FIRST_PRICE * time / used
        for _ in range(_BISECTIONS):
            time, used = self._outcome(self._to_go(price)[1])
            if used > self._limit:
                low = price
            else:
                high, bound = price, min(bound, time)
            price = (low + high) / 2 if np.isfinite(high) else 4 * low
        return price, bound

    def solved(self, price: float, bound: float) -> tuple[int, ...]:
        """Return the best list, given the results of ``priced``."""
        to_go, _ = self._to_go(price)
        most = bound * (1 + _ROUNDING) + price * self._limit * (1 + _ROUNDING)
        # Of all entries so far: used resource, time, index of the size, entry before.
        used, time = np.zeros(1), np.zeros(1)
        index, before = np.zeros(1, dtype=np.int64), np.full(1, -1)
        ends = [(float(self._after[0]), 0.0, 0)]
        for j in range(1, len(self._sizes)):
            new_used = used + self._each[j]
            new_time = time + (self._taken[j] - self._taken[index]) * self._us[j]
            promising = new_time + price * new_used + to_go[j] <= most
            kept = _unbeaten(new_used, new_time, promising & (new_used <= self._limit))
            if not len(kept):
                continue
            ended = new_used[kept] + self._more_if_last[j]
            total = np.where(ended <= self._limit, new_time[kept] + self._after[j], np.inf)
            best = int(np.lexsort((ended, total))[0])
            ends.append((float(total[best]), float(ended[best]), len(used) + best))
            used, time = np.append(used, new_used[kept]), np.append(time, new_time[kept])
            index, before = np.append(index, np.full(len(kept), j)), np.append(before, kept)
        _, _, entry = min(ends)
        chosen = []
        while entry > 0:
            chosen.append(self._sizes[index[entry]])
            entry = int(before[entry])
        return tuple(reversed(chosen))

    def _to_go(self, price: float) -> tuple[Floats, NDArray[np.int64]]:
        """Return the least priced time after each size, and the next size on that way, or 0."""
        count = len(self._sizes)
        to_go = self._after + price * self._more_if_last
        following = np.zeros(count, dtype=np.int64)
        for j in range(count - 2, -1, -1):
            ahead = slice(j + 1, count)
            cost = (self._taken[ahead] - self._taken[j]) * self._us[ahead]
            cost += price * self._each[ahead] + to_go[ahead]
            best = int(cost.argmin())
            if cost[best] < to_go[j]:
                to_go[j], following[j] = cost[best], j + 1 + best
        return to_go, following

    def _outcome(self, following: NDArray[np.int64]) -> tuple[float, float]:
        """Return time and used resource of the list that ``_to_go`` found."""
        time = used = 0.0
        j = 0
        while following[j]:
            k = int(following[j])
            time += (self._taken[k] - self._taken[j]) * self._us[k]
            used += self._each[k]
            j = k
        return float(time + self._after[j]), float(used + self._more_if_last[j])


def _eager_after(steps: Floats, costs: SizeCosts) -> Floats:
    """Return the time of all steps above each size without graphs; infinite if it is unknown."""
    us = steps * costs.eager_us if costs.eager_us is not None else np.where(steps > 0, np.inf, 0.0)
    return np.append(np.cumsum(us[::-1])[::-1][1:], 0.0)


def _candidates(steps: Floats, us: Floats, resource: Resource) -> list[int]:
    """Return the live sizes, and others that cost less than the largest live size below them."""
    chosen, below = [], 0
    for size in range(1, int(np.flatnonzero(steps)[-1]) + 1):
        if steps[size]:
            below = size
        is_cheaper = below > 0 and (
            us[size] < us[below]
            or resource.each[size] < resource.each[below]
            or resource.largest[size] < resource.largest[below]
        )
        if steps[size] or is_cheaper:
            chosen.append(size)
    return chosen


def _unbeaten(used: Floats, time: Floats, allowed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the indices of allowed entries that none beats in both resource and time."""
    order = np.lexsort((time, used))
    order = order[allowed[order]]
    sorted_time = time[order]
    least = np.minimum.accumulate(np.append(np.inf, sorted_time))[:-1]
    return order[sorted_time < least]
