"""``tools/bench/sampling.py`` on the CPU: what it measures, and that it compares equal results."""

from __future__ import annotations

import torch

from graphkit.records import BenchReport


def test_torch_computes_the_same(bench):
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(2)) * 3
    ours, theirs = bench.ops(logits), bench.with_torch(logits)
    assert list(ours) == list(theirs)
    for name, act in ours.items():
        torch.testing.assert_close(act(), theirs[name](), rtol=1e-4, atol=1e-8)


def test_every_op_is_measured_at_each_size(bench, tmp_path, capsys):
    out = tmp_path / "sampling.json"
    assert bench.main(["--quick", "--device", "cpu", "--rounds", "1", "--out", str(out)]) == 0
    report = BenchReport.from_json(out.read_text())
    names = list(bench.ops(torch.zeros(1, 500)))
    columns = ("graphkit", "torch", "torch over graphkit")
    expected = [
        (f"500 tokens, {rows} rows", name, column)
        for rows in (1, 4) for name in names for column in columns
    ]  # fmt: skip
    assert [(each.setting, each.variant, each.name) for each in report.measures] == expected
    assert all(measure.value > 0 for measure in report.measures)
    assert "target_probs, top_k 50, top_p 0.9, min_p 0.05" in capsys.readouterr().out
