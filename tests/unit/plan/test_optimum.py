"""The chosen list against all lists."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest

from graphkit.errors import ConfigError
from graphkit.plan.costs import SizeCosts, padding_costs
from graphkit.plan.optimum import Resource, best_sizes


def total_us(live, costs, sizes):
    """Return the time of a traffic; infinite if a step can be neither replayed nor run eagerly."""
    total = 0.0
    for size, steps in live.items():
        fits = [each for each in sizes if each >= size]
        if fits:
            total += steps * costs.replay_us[min(fits)]
        else:
            total += np.inf if costs.eager_us is None else steps * costs.eager_us[size]
    return total


def every_list(largest):
    sizes = range(1, largest + 1)
    return chain.from_iterable(combinations(sizes, count) for count in range(largest + 1))


def random_case(seed):
    """Return a traffic, costs that may fall with the size, and a budget."""
    draw = np.random.default_rng(seed)
    largest = int(draw.integers(1, 9))
    chosen = draw.choice(np.arange(1, largest + 1), draw.integers(1, largest + 1), replace=False)
    live = {int(size): int(draw.integers(1, 50)) for size in chosen}
    us = draw.uniform(1, 10, largest + 1) + draw.integers(0, 2) * np.arange(largest + 1)
    eager = draw.uniform(3, 15, largest + 1) if draw.integers(2) else None
    each = draw.uniform(0, 3, largest + 1) if draw.integers(2) else np.ones(largest + 1)
    most = np.maximum(each, each * draw.integers(1, 4))
    return live, SizeCosts("", us, eager), Resource("sizes", draw.uniform(1, 10), each, most)


@pytest.mark.parametrize("block", range(10))
def test_no_list_within_the_budget_takes_less_time(block):
    for seed in range(20 * block, 20 * block + 20):
        live, costs, resource = random_case(seed)
        least = min(
            (total_us(live, costs, sizes) for sizes in every_list(max(live))
             if resource.used(sizes) <= resource.limit), default=np.inf,
        )  # fmt: skip
        if least == np.inf:
            with pytest.raises(ConfigError, match="no list of sizes fits"):
                best_sizes(live, costs, resource)
            continue
        chosen = best_sizes(live, costs, resource)
        assert list(chosen) == sorted(chosen)
        assert resource.used(chosen) <= resource.limit
        assert total_us(live, costs, chosen) == pytest.approx(least), (seed, chosen)


def test_a_size_between_live_ones_is_chosen_if_it_is_faster():
    us = np.array([0.0, 1, 9, 9, 2, 9])
    costs = SizeCosts("", us)
    chosen = best_sizes({1: 5, 3: 5, 5: 1}, costs, Resource("sizes", 3, np.ones(6), np.ones(6)))
    assert chosen == (1, 4, 5)


def test_every_live_size_is_captured_if_the_budget_allows_it():
    live = dict.fromkeys(range(1, 200, 3), 7)
    one = np.ones(200)
    assert best_sizes(live, padding_costs(199), Resource("sizes", 100, one, one)) == tuple(live)


def test_an_uneven_resource_is_used_up_to_its_limit():
    """Real numbers, of which no two lists take the same sum."""
    draw = np.random.default_rng(3)
    live = {size: int(draw.integers(1, 100)) for size in range(1, 65)}
    each = draw.uniform(0.9, 1.1, 65)
    resource = Resource("memory_bytes", 12.0, each, 2 * each)
    chosen = best_sizes(live, padding_costs(64), resource)
    assert 11.5 < resource.used(chosen) <= 12.0
    one = np.ones(65)
    fewer = best_sizes(live, padding_costs(64), Resource("sizes", len(chosen) - 2, one, one))
    costs = padding_costs(64)
    assert total_us(live, costs, chosen) < total_us(live, costs, fewer)
