"""The chosen list, compared with all lists."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest

from graphkit.errors import ConfigError
from graphkit.plan.costs import SizeCosts, padding_costs
from graphkit.plan.optimum import Resource, best_sizes
from graphkit.plan.size_plan import _PARTS


def total_us(live, costs, sizes):
    """Return the time of a traffic; infinite if a step can be neither replayed nor run eagerly."""
    total = 0.0
    for size, steps in live.items():
        fits = [captured for captured in sizes if captured >= size]
        if fits:
            total += steps * costs.replay_us[min(fits)]
        else:
            total += np.inf if costs.eager_us is None else steps * costs.eager_us[size]
    return total


def every_list(largest):
    sizes = range(1, largest + 1)
    return chain.from_iterable(combinations(sizes, count) for count in range(largest + 1))


def used(resource, sizes):
    return resource.smaller[list(sizes[:-1])].sum() + resource.largest[sizes[-1]] if sizes else 0.0


def sizes_budget(most, largest):
    one = np.ones(largest + 1)
    return Resource("sizes", most, 1.0, one, one)


def memory_budget(limit, smaller, largest):
    return Resource("memory_bytes", limit, limit / _PARTS, smaller, largest)


def random_case(seed):
    """Return a traffic, costs that may fall with the size, and a budget."""
    draw = np.random.default_rng(seed)
    largest = int(draw.integers(1, 9))
    chosen = draw.choice(np.arange(1, largest + 1), draw.integers(1, largest + 1), replace=False)
    live = {int(size): int(draw.integers(1, 50)) for size in chosen}
    us = draw.uniform(1, 10, largest + 1) + draw.integers(0, 2) * np.arange(largest + 1)
    eager = draw.uniform(3, 15, largest + 1) if draw.integers(2) else None
    resource = sizes_budget(int(draw.integers(1, 5)), largest)
    if draw.integers(2):
        smaller = draw.uniform(0, 3, largest + 1)
        resource = memory_budget(draw.uniform(1, 10), smaller, smaller * draw.integers(1, 4))
    return live, SizeCosts("", us, eager), resource


@pytest.mark.parametrize("block", range(10))
def test_the_list_is_within_1_percent_of_the_least_time_of_all_lists(block):
    for seed in range(40 * block, 40 * block + 40):
        live, costs, resource = random_case(seed)
        least = min(
            (total_us(live, costs, sizes) for sizes in every_list(max(live))
             if used(resource, sizes) <= resource.limit), default=np.inf,
        )  # fmt: skip
        if least == np.inf:
            with pytest.raises(ConfigError, match="no list of sizes fits"):
                best_sizes(live, costs, resource)
            continue
        chosen = best_sizes(live, costs, resource)
        assert list(chosen) == sorted(chosen)
        assert used(resource, chosen) <= resource.limit
        tolerance = 1e-9 if resource.name == "sizes" else 0.01
        assert total_us(live, costs, chosen) <= least * (1 + tolerance), (seed, chosen)


def test_a_size_between_live_ones_is_chosen_if_it_is_faster():
    costs = SizeCosts("", np.array([0.0, 1, 9, 9, 2, 9]))
    assert best_sizes({1: 5, 3: 5, 5: 1}, costs, sizes_budget(3, 5)) == (1, 4, 5)


def test_every_live_size_is_captured_if_the_budget_allows_it():
    live = dict.fromkeys(range(1, 200, 3), 7)
    assert best_sizes(live, padding_costs(199), sizes_budget(100, 199)) == tuple(live)


def test_a_size_that_takes_the_whole_budget_fits():
    for limit in (0.1, 1 / 3, 7e8 + 1):
        resource = memory_budget(limit, np.full(4, limit / 9), np.full(4, limit))
        assert best_sizes({3: 1}, padding_costs(3), resource) == (3,)


def test_an_uneven_resource_is_used_up_to_its_limit():
    """Real numbers, of which no two lists take the same sum."""
    draw = np.random.default_rng(3)
    live = {size: int(draw.integers(1, 100)) for size in range(1, 65)}
    smaller = draw.uniform(0.9, 1.1, 65)
    resource = memory_budget(12.0, smaller, 2 * smaller)
    chosen = best_sizes(live, padding_costs(64), resource)
    assert 11.5 < used(resource, chosen) <= 12.0
    costs = padding_costs(64)
    fewer = best_sizes(live, costs, sizes_budget(len(chosen) - 2, 64))
    assert total_us(live, costs, chosen) < total_us(live, costs, fewer)
