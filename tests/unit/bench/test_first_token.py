"""``tools/bench/first_token.py`` on the CPU: what it measures."""

from __future__ import annotations

import torch


def test_every_length_is_measured_beside_transformers_and_the_bound(bench, monkeypatch):
    monkeypatch.setattr(bench, "LENGTHS", {16: 1.0, 40: 1.05, 10**6: 1.05})
    with torch.no_grad():
        report = bench.report(1, torch.device("cpu"), "tiny")
    times = [(each.setting, each.variant) for each in report.measures if each.name == "time"]
    variants = ("bound", bench.TRANSFORMERS, *(name for name, *_ in bench.VARIANTS))
    assert times == [(f"{n} tokens", variant) for variant in variants for n in (16, 40)]
    bars = {each.setting: each.bar for each in report.measures if each.bar}
    assert bars == {"16 tokens": 1.0, "40 tokens": 1.05}
    assert all(each.value > 0 for each in report.measures)
