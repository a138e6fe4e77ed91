"""``tools/bench/quantized_linear.py`` on the CPU: what it measures."""

from __future__ import annotations

import torch

from graphkit.ops.quantized_linear import quantized_linear
from graphkit.records import BenchReport


def test_every_format_is_measured_beside_bfloat16(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "resolve_device", lambda _: torch.device("cpu"))
    out = tmp_path / "report.json"
    assert bench.main(["--quick", "--rounds", "1", "--out", str(out)]) == 0
    report = BenchReport.from_json(out.read_text())
    seen = {}
    for measure in report.measures:
        seen.setdefault(measure.setting, {})[measure.variant, measure.name] = measure.value
    assert list(seen) == ["small, 1 rows", "small, 3 rows"]
    for cells in seen.values():
        assert {variant for variant, _ in cells} == {"bfloat16", *bench.KINDS}
        whole, fp8, int4 = (cells[name, "weight"] for name in ("bfloat16", "fp8 channel", "int4"))
        assert int4 < 0.6 * fp8 < 0.4 * whole


def test_variants_compute_the_same_but_for_their_rounding(bench):
    weight, x = bench.random_inputs((192, 256), 3, torch.device("cpu"))
    expected, *results = (
        calls[0]().float() for _, _, calls in bench.variants(weight, x, torch.device("cpu"))
    )
    same, channel, _, int4 = results  # blocks have the scale of an average output
    assert torch.equal(same, expected)
    for got, error in ((channel, 0.04), (int4, 0.15)):
        assert (got - expected).norm() < error * expected.norm()
    blocks = bench.blocks_of_fp8(weight)
    assert quantized_linear(x, blocks.numbers, blocks.scale).shape == (3, 192)
