"""Random engines under random faults give the texts of plain decoding, and leak nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from exact_sums import exact_sums
from random_engines import one_run

pytestmark = pytest.mark.slow
RUNS = 30
"""``tests/support/random_engines.py`` runs 3,000."""


def test_random_engines_under_faults():
    counts = Counter()
    for seed in range(RUNS):
        with exact_sums():
            one_run(seed, counts)
    assert counts["interrupted steps"] > RUNS // 3
    assert counts["failed steps"] > 1
    assert (
        min(counts[kind] for kind in ("with windows", "recurrent", "bfloat16", "preemptions")) > 0
    )
    assert counts["loops that check slots"] > 0
    assert counts["requests with processors"] > RUNS
    assert counts["tokens"] > 20 * RUNS
    assert counts["cut off at a near tie"] < RUNS
