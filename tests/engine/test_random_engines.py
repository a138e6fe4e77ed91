"""Random engines and loops under random faults lose no token and leak nothing."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest

from exact_sums import exact_sums
from graphkit.ops.loop_layout import LoopEnd
from graphkit.records import BenchReport
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
    assert counts["rows divided among requests"] > RUNS // 3
    assert counts["tokens"] > 20 * RUNS
    assert counts["cut off at a near tie"] < RUNS


BENCH = Path(__file__).parents[2] / "tools" / "bench"
LOOPS = 150
"""``tools/bench/loops.py`` runs 10,000 unless it is given another number."""


def test_random_loops_with_random_readers(device, monkeypatch, tmp_path, capsys):
    """Over chains and trees. Each token is compared with the text of its request."""
    monkeypatch.syspath_prepend(BENCH)
    bench = importlib.import_module("loops")
    monkeypatch.setattr(bench, "BATCH_SIZES", (2, 8))
    out = tmp_path / "loops.json"
    assert bench.main(["--loops", str(LOOPS), "--device", device, "--out", str(out)]) == 0
    report = BenchReport.from_json(out.read_text())
    counts = {measure.name: measure.value for measure in report.measures}
    assert counts["faults"] == 0
    assert counts["loops"] >= LOOPS
    ends = [f"ended by {end.name.lower()}" for end in LoopEnd if end is not LoopEnd.RUNNING]
    assert min(counts[name] for name in ends) > 0
    assert sum(counts[name] for name in ends) == counts["loops"]
    assert min(count for name, count in counts.items() if name.startswith("read: ")) > 0
    assert counts["requests aborted"] > 0
    assert "faults" in capsys.readouterr().out
