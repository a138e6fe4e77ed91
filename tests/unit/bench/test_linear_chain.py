"""``tools/bench/linear_chain.py`` on the CPU: what it measures."""

from __future__ import annotations

import torch

from graphkit.ops.linear import linear
from graphkit.records import BenchReport


def test_the_op_is_measured_beside_torch(bench, tmp_path):
    out = tmp_path / "report.json"
    assert bench.main(["--rounds", "1", "--device", "cpu", "--out", str(out)]) == 0
    report = BenchReport.from_json(out.read_text())
    seen = {(measure.setting, measure.variant) for measure in report.measures}
    assert seen == {
        (f"layer, {rows} rows", variant)
        for rows in bench.ROWS[:2]
        for variant in ("bfloat16", "linear")
    }


def test_every_product_of_a_layer_counts(bench):
    weights = [
        bench.random_inputs(shape, 1, torch.device("cpu"))[0] for shape in bench.SMALL.values()
    ]
    x, called = torch.ones(2, 256, dtype=torch.bfloat16), []

    def multiply(rows, weight):
        called.append(tuple(weight.shape))
        return linear(rows, weight)

    bench.chained([weights, weights], x, multiply)
    assert called == [*bench.SMALL.values()] * 2
