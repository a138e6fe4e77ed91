"""``tools/bench/adaptive.py`` on the recorder: adaptive drafts keep up, by counted work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphkit.records import BenchReport


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8, 64])
@pytest.mark.parametrize("chance", [0.05, 0.5, 0.95])
def test_adaptive_drafts_keep_up_with_the_best_length(bench, batch_size, chance):
    cpu = torch.device("cpu")
    rates, drafted = bench.Bench(bench.SHAPES["cpu"], cpu).rates(batch_size, chance, 1)
    adaptive = rates.pop(bench.ADAPTIVE)
    assert adaptive >= 0.97 * max(rates.values()), (adaptive, rates, drafted)
    assert adaptive >= 0.97 * rates[bench.PLAIN], (adaptive, rates, drafted)


def test_the_report_names_every_variant(bench, tmp_path, monkeypatch):
    small = replace(bench.SHAPES["cpu"], target_layers=20, draft_layers=2, tokens={2: 12})
    monkeypatch.setitem(bench.SHAPES, "cpu", small)
    monkeypatch.setattr(bench, "BATCH_SIZES", (2,))
    monkeypatch.setattr(bench, "CHANCES", (0.5,))
    out = tmp_path / "adaptive.json"
    assert bench.main(["--device", "cpu", "--out", str(out)]) in (0, 1)
    found = BenchReport.from_json(out.read_text()).measures
    assert {each.variant for each in found if each.name == "speed"} == {
        "plain", "1 drafts", "3 drafts", "5 drafts", "adaptive",
    }  # fmt: skip
    assert sum(each.bar is not None for each in found) == 2
